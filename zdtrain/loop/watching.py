"""What a Trainer needs for monitors and averaged weights: a `Monitoring` per fit, and their share of checkpoints."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from zdtrain.config import NONFINITE_IN_ROW, TrainerOptions
from zdtrain.drain import Drain
from zdtrain.loop.monitoring import Monitoring
from zdtrain.monitor.average import WeightAverage
from zdtrain.monitor.base import Monitor
from zdtrain.monitor.conditions import NonFinite
from zdtrain.monitor.functions import as_monitors
from zdtrain.monitor.statistics import Statistics
from zdtrain.records.recorder import RunRecorder
from zdtrain.scalars import DeviceScalars

AVERAGE_KEY = "ema_state_dict"


class CanMonitor:
    """Gives a Trainer monitors and averaged weights."""

    options: TrainerOptions
    drain: Drain
    recorder: RunRecorder | None
    ema: WeightAverage | None = None
    """The averaged weights of the last fit, with `ema_decay`: ``with trainer.ema.applied(): trainer.validate(...)``."""
    monitors: list[Monitor]
    """The monitors; their thresholds can be assigned to at any time."""
    statistics: dict[str, Statistics]
    """Running statistics on the device, by metric."""
    _scalars: DeviceScalars | None
    _monitoring: Monitoring | None = None
    _rows_unwatched: Any = None  # what takes the rows of steps that nobody watches
    _num_skipped: int = 0  # of the last fit
    _monitor_state: "MonitorState | None" = None

    @property
    def skipped_steps(self) -> int:
        """Steps of this fit, or of the last one, whose update a monitor held back, as far as the host has heard.

        It has heard of all of them when it validates, saves a checkpoint and ends.
        """
        return self._num_skipped if self._monitoring is None else self._monitoring.num_skipped

    def _take_monitors(self, options: TrainerOptions) -> None:
        given = as_monitors(options.monitors)
        self.monitors = [item for item in given if isinstance(item, Monitor)]
        self.statistics = {item.metric: item for item in given if isinstance(item, Statistics)}
        if options.nonfinite == "skip":
            self.monitors.append(NonFinite(then="skip", stop_after=NONFINITE_IN_ROW))
        elif options.nonfinite == "stop":
            self.monitors.append(NonFinite(then="stop"))
        if not self.monitors and options.max_lag_steps != TrainerOptions.max_lag_steps:
            rank_zero_info(
                f"trainer.max_lag_steps={options.max_lag_steps} has no effect without monitors; leave it out."
            )
        if given or self.monitors or options.ema_decay is not None:
            self._monitor_state = MonitorState(validates=options.ema_validation)
            self.callbacks.insert(0, self._monitor_state)  # type: ignore[attr-defined]

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Watch the training steps of the body."""
        if not self.training or self._monitor_state is None:  # type: ignore[attr-defined]
            yield
            return
        trainer: Any = self
        self._rows_unwatched = trainer._connector.rows
        self.ema = None
        if self.options.ema_decay is not None:
            self.ema = WeightAverage(trainer.lightning_module, self.options.ema_decay)
            self.ema.load_state_dict(self._monitor_state.averaged)
        scalars = dict(trainer.scalars.named_buffers()) if self._scalars is not None else {}
        self._monitoring = Monitoring(
            trainer,
            self.monitors,
            statistics=list(self.statistics.values()),
            average=self.ema,
            scalars=scalars,
            drain=self.drain,
            consumers=[] if self.recorder is None else [self.recorder],
            max_lag_steps=self.options.max_lag_steps,
            record=None if self.recorder is None else self.recorder.record_event,
        )
        self._monitoring.load_state_dict(self._monitor_state.take_loaded())
        self.watch(self._monitoring)
        try:
            yield
        finally:
            try:
                self._monitoring.settle(flush=True)
            finally:
                self._leave()

    def watch(self, monitoring: Monitoring | None) -> None:
        """Let `monitoring` watch the steps that follow; nobody where it is None."""
        trainer: Any = self
        trainer.fit_loop.epoch_loop.monitoring = trainer._connector.monitoring = monitoring
        rows = None if monitoring is None else monitoring.rows
        trainer._connector.rows = rows or self._rows_unwatched

    def _leave(self) -> None:
        monitoring, self._monitoring = self._monitoring, None
        assert monitoring is not None
        assert self._monitor_state is not None
        self._monitor_state.known = monitoring.state_dict()
        self.watch(None)
        monitoring.close()
        self._num_skipped = monitoring.num_skipped
        if self.ema is not None:
            self.ema.restore()
        if self.recorder is not None:
            self.recorder.summarize(
                skipped_steps=monitoring.num_skipped,
                stopped_by=monitoring.stopped_by,
                monitor_lag_steps=monitoring.lag_steps,
            )

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint of the last good step; see `lightning.pytorch.Trainer.save_checkpoint`."""
        if self._monitoring is not None:
            self._monitoring.settle_now()
        if self.recorder is not None:  # a run that is killed goes on from here: its rows up to here are on disk first
            self._connector.flush()  # type: ignore[attr-defined]
            self.recorder.flush(below=_own_step(self))
        super().save_checkpoint(*args, **kwargs)  # type: ignore[misc]


class MonitorState(Callback):
    """Puts what monitors did and the averaged weights into checkpoints, and validates with those weights on request.

    Args:
        validates: Validate with the averaged weights.
    """

    def __init__(self, *, validates: bool) -> None:
        self._validates = validates
        self.averaged: dict[str, Tensor] = {}  # of the checkpoint that a run goes on from
        self._loaded: dict[str, Any] = {}  # what monitors did and knew, of the same checkpoint
        self.known: dict[str, Any] = {}  # the same of the last fit, for a checkpoint that is saved after it
        self._reported = False
        self._trainer: Any = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:  # noqa: ARG002
        """Take note of the Trainer, whose monitors the state is about."""
        self._trainer = trainer

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Record the epoch's statistics; report monitors whose metric the first epoch did not log."""
        watched: Any = trainer
        recorder = watched.recorder
        if not self._reported:
            self._reported = True
            watched._monitoring.report_unknown_metrics()
        watched._monitoring.end_epoch(
            trainer.current_epoch, None if recorder is None else recorder.record_epoch_statistics
        )

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Put the averaged weights in place, where a fit validates."""
        if self._validates and not trainer.sanity_checking and trainer.state.fn == "fit":
            trainer.ema.apply()  # type: ignore[attr-defined]

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Put the trained weights back, before checkpoints are saved."""
        if trainer.state.fn == "fit" and trainer.ema is not None:  # type: ignore[attr-defined]
            trainer.ema.restore()  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        """Return what monitors did and know so far."""
        monitoring: Monitoring | None = self._trainer._monitoring if self._trainer is not None else None
        return self.known if monitoring is None else monitoring.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep what monitors did and knew until training starts."""
        self._loaded = state_dict
        if state_dict.get("skipped_steps"):
            rank_zero_info(f"monitors skipped {state_dict['skipped_steps']} steps before this checkpoint")

    def take_loaded(self) -> dict[str, Any]:
        """Return what the checkpoint that a run goes on from knows, once."""
        loaded, self._loaded = self._loaded, {}
        return loaded

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:  # noqa: ARG002
        """Add the averaged weights, as a state dict of the module."""
        if trainer.ema is not None:  # type: ignore[attr-defined]
            checkpoint[AVERAGE_KEY] = trainer.ema.state_dict()  # type: ignore[attr-defined]

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:  # noqa: ARG002
        """Keep the averaged weights until training starts."""
        self.averaged = checkpoint.get(AVERAGE_KEY, {})


def _own_step(trainer: Any) -> int:
    """Return the step that a checkpoint saved now ends with, as loggers count; at most one before it."""
    stepped = trainer.fit_loop.epoch_loop._batches_that_stepped  # without this step until its batch is through
    counted: int = trainer.global_step  # with this step; else where a batch steps several optimizers, or none
    return counted - 1 if counted in (stepped, stepped + 1) else stepped - 1
