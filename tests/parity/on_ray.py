"""Starts the processes of `launched.py` on a Ray cluster of this machine; needs ray, `pip install 'ray[train]'`.

python -m tests.parity.on_ray FOLDER
"""

import sys
from pathlib import Path
from typing import Any

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment
from ray.train.torch import TorchTrainer

from tests.parity.launched import PROCESSES, leave


def make_options() -> dict[str, Any]:
    """Return what a Trainer in a worker of Ray Train needs."""
    return {"devices": "auto", "strategy": RayDDPStrategy(), "plugins": [RayLightningEnvironment()]}


def train(config: dict[str, str]) -> None:
    """Run in every worker."""
    leave(Path(config["folder"]), make_options)


def main(folder: Path) -> None:
    """Start the workers and wait for them."""
    ray.init(num_cpus=PROCESSES, include_dashboard=False)
    TorchTrainer(
        train,
        train_loop_config={"folder": str(folder)},
        scaling_config=ScalingConfig(num_workers=PROCESSES, use_gpu=False),
        run_config=RunConfig(name="launched", storage_path=str(folder / "ray")),
    ).fit()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
