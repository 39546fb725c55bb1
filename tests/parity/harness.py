"""Run the same training with stock Lightning's Trainer and with zdtrain's, and compare all that is left of it."""

import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, Timer
from lightning.pytorch.loggers import CSVLogger, Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import zdtrain
from zdtrain.quiet import quiet

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "max_epochs": 2,
    "log_every_n_steps": 2,
    "num_sanity_val_steps": 0,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run leaves behind."""

    result: Any
    """What `fit`, `validate`, ... returned."""
    error: str | None
    """Type and text of the exception that ended the run."""
    weights: dict[str, Tensor]
    """Parameters and buffers."""
    optimizers: list[dict[str, Any]]
    """State of the optimizers."""
    metrics: dict[str, list[tuple[str, Any]]]
    """Items of callback_metrics, logged_metrics and progress_bar_metrics, in their order."""
    rows: dict[str, str]
    """Text of every CSV file."""
    calls: list[tuple[str, Any]]
    """Calls that a `MemoryLogger` got."""
    checkpoints: dict[str, Any]
    """Content of every checkpoint by its path."""
    loops: dict[str, Any]
    """State of the fit loop."""
    progress: tuple[int, int, bool]
    """global_step, current_epoch, should_stop."""
    callbacks: list[Any]
    """State of the callbacks."""
    seen: list[Any]
    """What module and callbacks noted, in order."""
    random: Tensor
    """State of the random number generator."""


class Net(pl.LightningModule):
    """A small regression with a buffer, random numbers and uneven batches; writes what it notes to `seen`."""

    samples, batch_size, lr = 18, 4, 0.1

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 1))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.lr)

    def train_dataloader(self) -> Any:
        return loader(self.samples, self.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return loader(10, 4)


def loader(samples: int = 18, batch_size: int = 4, *, shuffle: bool = False) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(samples)
    x, y = torch.randn(samples, 4, generator=generator), torch.randn(samples, 1, generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size, shuffle=shuffle)


class MemoryLogger(Logger):
    """Keeps its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any]] = []

    name = "memory"
    version = 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.calls.append(("log_metrics", (dict(metrics), step)))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.calls.append(("log_hyperparams", dict(params)))


class MetricSpy(Callback):
    """Notes all metrics at every hook at which a callback may look."""

    HOOKS = (
        "on_train_batch_start",
        "on_before_optimizer_step",
        "on_train_batch_end",
        "on_train_epoch_end",
        "on_validation_start",
        "on_validation_batch_end",
        "on_validation_end",
        "on_fit_end",
        "on_exception",
    )

    def _look(self, hook: str, trainer: pl.Trainer, module: Net) -> None:
        module.seen.append((hook, metrics_of(trainer)))


def _spied(hook: str) -> Callable[..., None]:
    def look(self: MetricSpy, trainer: pl.Trainer, module: Net, *args: Any, **kwargs: Any) -> None:
        self._look(hook, trainer, module)

    return look


for _hook in MetricSpy.HOOKS:
    setattr(MetricSpy, _hook, _spied(_hook))


def metrics_of(trainer: pl.Trainer) -> dict[str, list[tuple[str, Any]]]:
    kinds = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
    return {kind: [(k, copy_of(v)) for k, v in getattr(trainer, kind).items()] for kind in kinds}


def copy_of(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def fit(trainer: pl.Trainer, module: pl.LightningModule) -> Any:
    return trainer.fit(module)


def run(
    make_trainer: Callable[..., pl.Trainer],
    folder: Path,
    module: Callable[[], Net],
    *,
    do: Callable[[pl.Trainer, Any], Any] = fit,
    callbacks: Callable[[], list[Callback]] = list,
    loggers: Callable[[Path], Any] = lambda folder: CSVLogger(folder, name="csv", version=0),
    spy: bool = False,
    **options: Any,
) -> tuple[Outcome, pl.Trainer]:
    """Train in `folder` from a fixed start."""
    torch.manual_seed(7)
    model = module()
    error = result = None
    with quiet():
        trainer = make_trainer(
            **{
                **QUIET,
                "default_root_dir": folder,
                "callbacks": [*callbacks(), *([MetricSpy()] if spy else [])],
                "logger": loggers(folder),
                **options,
            }
        )
        torch.manual_seed(11)
        try:
            result = do(trainer, model)
        except (Exception, SystemExit) as exception:
            error = f"{type(exception).__name__}: {exception}"
    outcome = Outcome(
        result=result,
        error=error,
        weights=dict(model.state_dict()),
        optimizers=[optimizer.state_dict() for optimizer in trainer.optimizers],
        metrics=metrics_of(trainer),
        rows={str(f.relative_to(folder)): f.read_text() for f in sorted(folder.rglob("*.csv"))},
        calls=[call for logger in trainer.loggers if isinstance(logger, MemoryLogger) for call in logger.calls],
        checkpoints={str(f.relative_to(folder)): content(f) for f in sorted(folder.rglob("*.ckpt"))},
        loops=trainer.fit_loop.state_dict(),
        progress=(trainer.global_step, trainer.current_epoch, trainer.should_stop),
        callbacks=[(type(c).__name__, c.state_dict()) for c in trainer.callbacks if not isinstance(c, Timer)],
        seen=getattr(model, "seen", []),
        random=torch.get_rng_state(),
    )
    return outcome, trainer


def content(checkpoint: Path) -> dict[str, Any]:
    loaded = torch.load(checkpoint, weights_only=False)
    loaded["callbacks"] = {k: v for k, v in loaded.get("callbacks", {}).items() if k != "Timer"}
    return loaded


def assert_parity(
    folder: Path,
    module: Callable[[], Net],
    *,
    fallbacks: tuple[str, ...] = (),
    lightning_quirks: bool = False,
    **options: Any,
) -> Outcome:
    """Train with both Trainers, compare, and return what zdtrain's left.

    Args:
        folder: An empty folder.
        module: Makes the module.
        fallbacks: Codes of the reasons for which zdtrain is to leave the work to Lightning's own loop.
        lightning_quirks: Option of zdtrain's Trainer.
        **options: Those of `run`.
    """
    place = folder / "run"  # the same for both: checkpoints hold paths
    place.mkdir()
    stock, _ = run(pl.Trainer, place, module, **options)
    shutil.rmtree(place)
    place.mkdir()

    def make_ours(**kwargs: Any) -> zdtrain.Trainer:
        return zdtrain.Trainer(lightning_quirks=lightning_quirks, **kwargs)

    ours, trainer = run(make_ours, place, module, **options)
    found = list(differences(stock, ours))
    assert not found, "\n".join(found[:20])
    assert tuple(reason.code for reason in trainer.fit_loop.epoch_loop.fallbacks) == fallbacks
    return ours


def differences(stock: Any, ours: Any, where: str = "") -> Iterator[str]:
    """Yield where two values differ: in type, dtype, shape, order or any bit of a number."""
    if isinstance(stock, Outcome):
        for field in fields(stock):
            yield from differences(getattr(stock, field.name), getattr(ours, field.name), field.name)
    elif type(stock) is not type(ours):
        yield f"{where}: {stock!r} is a {type(stock).__name__}, {ours!r} a {type(ours).__name__}"
    elif isinstance(stock, Tensor):
        if (stock.dtype, stock.shape) != (ours.dtype, ours.shape) or not torch.equal(
            stock.nan_to_num(nan=1.5e30) if stock.is_floating_point() else stock,
            ours.nan_to_num(nan=1.5e30) if ours.is_floating_point() else ours,
        ):
            yield f"{where}: {stock!r} != {ours!r}"
        elif stock.requires_grad != ours.requires_grad:
            yield f"{where}: requires_grad {stock.requires_grad} != {ours.requires_grad}"
    elif isinstance(stock, Mapping):
        if list(stock) != list(ours):
            yield f"{where}: keys {list(stock)} != {list(ours)}"
        for key in stock.keys() & ours.keys():
            yield from differences(stock[key], ours[key], f"{where}[{key!r}]")
    elif isinstance(stock, (list, tuple)):
        if len(stock) != len(ours):
            yield f"{where}: {len(stock)} != {len(ours)} items: {stock!r:.600} != {ours!r:.600}"
        for i, (one, other) in enumerate(zip(stock, ours, strict=False)):
            yield from differences(one, other, f"{where}[{i}]")
    elif stock != ours and not (isinstance(stock, float) and math.isnan(stock) and math.isnan(ours)):
        yield f"{where}: {stock!r} != {ours!r}"
