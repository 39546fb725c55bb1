"""Install a wheel into an empty folder and train with it, from outside the checkout: `wheel_check.py WHEEL`."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM = """
import sys
from importlib.metadata import version
from importlib.resources import files

import torch
from lightning.pytorch.demos.boring_classes import BoringModel

import zdtrain

site, root = sys.argv[1], str(files("zdtrain"))
assert root.startswith(site), f"zdtrain was imported from {root}, not from the wheel in {site}"
assert files("zdtrain").joinpath("py.typed").is_file(), "the wheel lacks py.typed"
assert version("zdtrain") == zdtrain.__version__, f"{version('zdtrain')} != {zdtrain.__version__}"

model = BoringModel()
before = model.layer.weight.detach().clone()
trainer = zdtrain.Trainer(
    accelerator="cpu",
    max_epochs=1,
    limit_train_batches=4,
    limit_val_batches=2,
    logger=False,
    enable_checkpointing=False,
    enable_model_summary=False,
    enable_progress_bar=False,
)
trainer.fit(model)
assert trainer.global_step == 4, trainer.global_step
assert not torch.equal(before, model.layer.weight), "four steps left the weights as they were"
print(f"wheel: zdtrain {zdtrain.__version__} trained {trainer.global_step} steps")
"""


def main(wheel: Path) -> None:
    """Install `wheel` and run a short fit and the command line from it."""
    with tempfile.TemporaryDirectory() as folder:
        site, work = Path(folder, "site").resolve(), Path(folder, "work")
        work.mkdir()
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--target", str(site), str(wheel.resolve())], check=True)
        environment = {**os.environ, "PYTHONPATH": str(site)}  # searched before the checkout's editable install
        for command in (["-c", PROGRAM, str(site)], ["-m", "zdtrain", "--help"]):
            subprocess.run([sys.executable, *command], check=True, cwd=work, env=environment)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
