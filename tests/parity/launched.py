"""What each process of a launcher runs: stock Lightning, then zdtrain, and a note of where they differ.

python -m tests.parity.launched FOLDER
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

import zdtrain
from tests.parity.harness import QUIET, Net, loader
from zdtrain.monitors import NonFinite

PROCESSES = 2


class Launched(Net):
    """Logs over all processes; its 24 samples give each process 12."""

    samples = 24

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def train_dataloader(self) -> Any:
        return loader(self.samples, 4)

    val_dataloader = train_dataloader


def fitted(make: Any, **options: Any) -> pl.Trainer:
    """Fit from the same start with a Trainer of two processes."""
    pl.seed_everything(1)
    quiet = {**QUIET, "logger": False, "devices": PROCESSES, "strategy": "ddp"}
    trainer = make(**{**quiet, **options})
    trainer.fit(Launched())
    return trainer


def differences(make_options: Any, folder: Path) -> dict[str, Any]:
    """Fit with both Trainers; return what is different between them, and what was said of ours."""
    stock = fitted(pl.Trainer, **make_options())
    watch = {"monitors": [NonFinite(then="skip")], "records": str(folder / "runs")}
    ours = fitted(zdtrain.Trainer, **watch, **make_options())
    left = [{**t.lightning_module.state_dict(), **t.callback_metrics} for t in (stock, ours)]
    return {
        "different": [name for name in left[0] if not torch.equal(left[0][name], left[1][name])],
        "names": [sorted(names) for names in left],
        "fallbacks": list(map(str, ours.fit_loop.epoch_loop.fallbacks)),  # type: ignore[attr-defined]
        "world_size": ours.world_size,
        "rank": ours.global_rank,
    }


def leave(folder: Path, make_options: Any = dict) -> None:
    """Leave what is different in ``<rank>.json``."""
    warnings.simplefilter("ignore")
    found = differences(make_options, folder)
    (folder / f"{found['rank']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    leave(Path(sys.argv[1]))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()  # else gloo's threads may abort the process as it ends
