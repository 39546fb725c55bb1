"""Short runs with one bad step, and what they leave behind."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from zdtrain import Trainer
from zdtrain.device.lagging import LaggingRuntime
from zdtrain.drain import Drain
from zdtrain.monitors import NonFinite, Threshold
from zdtrain.optim import SimpleAdam

BATCH = 4
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "max_epochs": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "capture": "off",
}
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "fused SGD momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "SimpleAdam": lambda p: SimpleAdam(p, lr=0.01),
    "SimpleAdam foreach": lambda p: SimpleAdam(p, lr=0.01, implementation="foreach"),
}
# What is wrong with the bad batch: the loss is large, the loss is NaN, or the gradient is and the loss is not.
BAD = {"large": (1000.0, 1.0), "nan": (float("nan"), 1.0), "nan gradient": (0.0, 0.0)}

CAUSES = {
    "large": lambda then: Threshold("train_loss", above=100.0, then=then),
    "nan": lambda then: NonFinite("loss", then=then),
    "nan gradient": lambda then: NonFinite("grad_norm", then=then),
}
"""Monitors that notice what is wrong."""
OPTIMIZERS_AND_CAUSES = [
    *((optimizer, "nan") for optimizer in OPTIMIZERS),
    *((optimizer, cause) for optimizer in ("SGD", "SimpleAdam") for cause in ("large", "nan gradient")),
]


class Net(pl.LightningModule):
    """A regression whose loss, or whose gradient alone, a batch can spoil."""

    def __init__(self, optimizer: str = "SGD", scheduler: bool = True) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
        self.optimizer, self.scheduler = optimizer, scheduler

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, extra, scale = batch
        weights = self.net[0].weight.sum()
        # at scale 0 the root is 0 and its derivative is not
        loss = (self.net(x) - y).square().mean() + extra.mean() + 0.001 * (weights * scale.mean()).abs().sqrt()
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("first", x[0, 0], on_step=True, on_epoch=False)
        self.log("largest", x.max(), on_step=False, on_epoch=True, reduce_fx="max")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", (self.net(batch[0]) - batch[1]).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.optimizer](self.parameters())
        if not self.scheduler:
            return optimizer
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Ended(pl.Callback):
    """Notes the batches that ended."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append(batch_idx)


class OneRowAtATime(pl.Callback):
    """Sends every row by itself, so that with a device that answers late the host is as late as it may be."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if trainer._monitoring is not None:
            trainer._monitoring.rows.stream.chunk_rows = 1


def loader(batches: int, bad: dict[int, str] | None = None, without: tuple[int, ...] = ()) -> DataLoader[Any]:
    """Batches of fixed data, some spoiled, some left out."""
    generator = torch.Generator().manual_seed(3)
    n = batches * BATCH
    x, y = torch.randn(n, 4, generator=generator), torch.randn(n, 1, generator=generator)
    extra, scale = torch.zeros(n, 1), torch.ones(n, 1)
    for index, kind in (bad or {}).items():
        extra[index * BATCH : (index + 1) * BATCH], scale[index * BATCH : (index + 1) * BATCH] = BAD[kind]
    kept = [i for i in range(n) if i // BATCH not in without]
    return DataLoader(TensorDataset(x[kept], y[kept], extra[kept], scale[kept]), batch_size=BATCH)


def make_trainer(*, lag: int | None = None, **options: Any) -> Trainer:
    """Make a Trainer; with `lag` its device answers only after so many questions."""
    trainer = Trainer(**{**QUIET, **options})
    if lag is not None:
        trainer.drain = trainer._connector.drain = Drain(lambda: LaggingRuntime(lag=lag))
    return trainer


def run(
    module: pl.LightningModule,
    batches: DataLoader[Any],
    *,
    lag: int | None = None,
    ckpt_path: Any = None,
    **options: Any,
) -> Trainer:
    """Train from a fixed start."""
    torch.manual_seed(5)
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    ended = Ended()
    trainer = make_trainer(lag=lag, **{**options, "callbacks": [*options.get("callbacks", []), ended]})
    trainer.ended = ended.batches  # type: ignore[attr-defined]
    trainer.fit(module, batches, ckpt_path=ckpt_path)
    return trainer


def left_behind(trainer: Trainer) -> dict[str, Any]:
    """Return weights, buffers, optimizer state, schedule and counts."""
    return {
        "weights": dict(trainer.lightning_module.state_dict()),
        "optimizer": trainer.optimizers[0].state_dict(),
        "schedule": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "steps": trainer.global_step,
        "counts": trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.state_dict(),
        "batches": trainer.fit_loop.epoch_loop.batch_progress.state_dict(),
        "updates": trainer.fit_loop.epoch_loop.scheduler_progress.state_dict(),
        "epoch": {k: v for k, v in trainer.callback_metrics.items() if k in ("train_loss_epoch", "largest")},
    }


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Return where two results differ in any bit."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        same = one.dtype == other.dtype and torch.equal(one.nan_to_num(nan=1.5e30), other.nan_to_num(nan=1.5e30))
        return [] if same else [f"{where}: {one} != {other}"]
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return [f"{where}: keys {list(one)} != {list(other)}"]
        return [line for key in one for line in differences(one[key], other[key], f"{where}[{key!r}]")]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            return [f"{where}: {len(one)} != {len(other)} items"]
        return [
            line for i, pair in enumerate(zip(one, other, strict=True)) for line in differences(*pair, f"{where}[{i}]")
        ]
    return [] if one == other else [f"{where}: {one!r} != {other!r}"]
