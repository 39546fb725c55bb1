"""When several training steps may run as one: what keeps them apart, and how far it is to whoever has to look."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.loops.fetchers import _DataFetcher
from torch import Tensor

from zdtrain.capture.captured import CapturedStep
from zdtrain.capture.obstacles import HOOKS_OUTSIDE
from zdtrain.capture.program import RecordedPart
from zdtrain.capture.watch import reason_at
from zdtrain.errors import FallbackReason
from zdtrain.loop.ahead import reasons_against
from zdtrain.loop.feed import Feed
from zdtrain.loop.schedule import ScheduleAhead
from zdtrain.marks import is_marked
from zdtrain.source.definitions import method_location
from zdtrain.source.location import NOWHERE
from zdtrain.step.hooks import callback_hook, overrides
from zdtrain.step.profiled import is_profiled

OPTION = "steps_per_replay"
CODE = "steps-per-replay"
_LOOKS = 3  # reads of an epoch, before any block of the first one
# Callbacks whose hooks around a step only read counters, options and logged values, or are given a boundary.
_READERS: tuple[type[Callback], ...] = (
    DeviceStatsMonitor,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
)
_READING = frozenset(getattr(kind, name) for kind in _READERS for name in HOOKS_OUTSIDE)


def reasons_against_several(trainer: Any, fetcher: _DataFetcher, step: Any) -> Iterator[FallbackReason]:
    """Yield what keeps several steps of this epoch from running as one.

    Args:
        trainer: The Trainer, with its module attached.
        fetcher: The epoch's data fetcher.
        step: What runs a step.
    """
    if type(step) is not CapturedStep:
        if not trainer.lightning_module.automatic_optimization:
            yield _reason("the module optimizes by hand")
        elif is_profiled(trainer):
            yield _reason("a profiler times the parts of each step")
        else:
            yield _reason("steps are not captured; set capture=")
        return
    yield from reasons_against(trainer, fetcher, OPTION)
    yield from _reasons_in_hooks(trainer)
    count, window = trainer.options.steps_per_replay, trainer.accumulate_grad_batches
    if count % window:
        yield _reason(f"{count} batches are no multiple of the {window} of an accumulation window")
    if not step._inside:
        yield _reason("the optimizer steps outside the program (see optimizer-outside)")
    elif step._guard is not None and step._guard.holds and any(part.counts_on_host for part in step._inside):
        name = type(trainer.optimizers[0]).__name__
        what = f"{name} takes numbers that follow its updates, which monitors may hold back"
        yield _reason(f"{what}; SimpleAdam does not, nor does fused=True with capture='graph'")
    if step._scaling is not None:
        yield _reason("16-mixed precision scales the loss anew in every step")
    if step._zeroes_its_own_way:
        yield _reason("zero_grad is overridden")
    if not isinstance(trainer.val_check_batch, int) and trainer.fit_loop.epoch_loop._should_check_val_epoch():
        yield _reason("validation is due by the clock, or after an unknown number of batches")
    yield from _reasons_in_schedules(trainer)


def _reasons_in_hooks(trainer: Any) -> Iterator[FallbackReason]:
    module, monitoring = trainer.lightning_module, trainer.fit_loop.epoch_loop.monitoring
    for name in HOOKS_OUTSIDE:
        owners = [c for c in trainer.callbacks if callback_hook(c, name) is not None and not only_reads(c, name)]
        if overrides(module, name, LightningModule) and not is_marked(getattr(module, name)):
            owners.append(module)
        for owner in owners:
            what = (
                f"{type(owner).__name__}.{name} may read or change what is ahead on the device; see zdtrain.only_reads"
            )
            yield reason_at(method_location(owner, name), CODE, f"{OPTION}= has no effect here: {what}")
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback._train_time_interval is not None:
            yield _reason("ModelCheckpoint(train_time_interval=) saves by the clock, between any two steps")
        elif not isinstance(callback, ModelCheckpoint) and monitoring is not None:
            yield _reason(f"{type(callback).__name__} may save between any two steps, where monitors may hold one back")


def _reasons_in_schedules(trainer: Any) -> Iterator[FallbackReason]:
    by_step = [config for config in trainer.lr_scheduler_configs if config.interval == "step"]
    if not by_step:
        return
    module = trainer.lightning_module
    if any(config.reduce_on_plateau for config in by_step):
        yield _reason("a plateau scheduler looks at every step")
    if overrides(module, "lr_scheduler_step", LightningModule):
        place = method_location(module, "lr_scheduler_step")
        yield reason_at(place, CODE, f"{OPTION}= has no effect here: lr_scheduler_step is overridden")
    if trainer.fit_loop.epoch_loop.monitoring is not None:
        what = "with monitors, a learning rate that follows steps has to be a schedule on the device (zdtrain.optim)"
        yield _reason(what)


def _reason(what: str) -> FallbackReason:
    return reason_at(NOWHERE, CODE, f"{OPTION}= has no effect here: {what}")


def only_reads(callback: Callback, name: str) -> bool:
    """Return whether a callback's hook only reads what stays right in a block of steps."""
    if name in callback.__dict__:
        return is_marked(callback.__dict__[name])
    hook: Callable[..., Any] = getattr(type(callback), name)
    return hook in _READING or is_marked(hook) or type(callback).__module__.startswith("zdtrain.")


class StepsAhead:
    """What the loop knows of the steps to come; see `zdtrain.capture.several.Surroundings`.

    Args:
        trainer: The Trainer.
        feed: The epoch's feed.
        step: The step.
    """

    def __init__(self, trainer: Any, feed: Feed, step: CapturedStep) -> None:
        self._trainer: Any = trainer
        self._loop = trainer.fit_loop.epoch_loop
        self._step = step
        self._feed = feed
        feed.look_for_draws(_LOOKS)
        self._validates = self._loop._should_check_val_epoch()
        self._checkpoints = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
        self._schedulers = [config for config in trainer.lr_scheduler_configs if config.interval == "step"]

    def room(self, batch_idx: int) -> int:
        """Return how many batches may run from this one on before anybody has to look."""
        trainer, loop = self._trainer, self._loop
        if self._feed.draws or self._step.session.loader_draws:
            self._step.session.loader_draws = True  # for all epochs to come: those begin with a block
            what = "reading a batch draws from the generator that steps draw from, so it can't be read ahead of them"
            loop.say(_reason(what))
            return 0
        if trainer.should_stop or trainer.received_sigterm or loop._skip_next_val:
            return 0
        room: int = trainer.num_training_batches - batch_idx
        window = trainer.accumulate_grad_batches
        if self._validates:
            every = trainer.val_check_batch
            progress = loop.batch_progress.current if trainer.check_val_every_n_epoch else loop.batch_progress.total
            room = min(room, every - (progress.ready - 1) % every)
        if loop.max_steps != -1:
            room = min(room, (loop.max_steps - loop.global_step) * window)
        for callback in self._checkpoints:
            every = callback._every_n_train_steps
            if every >= 1:
                room = min(room, (every - loop.global_step % every) * window)
        return room

    def peek(self, count: int) -> list[Any]:
        """Return the next batches; fewer where the epoch ends."""
        return self._feed.peek(count)

    def shown(self) -> list[Tensor]:
        """Return the tensors that the host may look at after a step."""
        monitoring = self._loop.monitoring
        listener = None if monitoring is None else monitoring.listener
        cells = [bank._values for bank in self._loop.results.banks if bank.size]
        return [*cells, *([] if listener is None else listener.parts())]

    def key(self) -> Hashable:
        """Return what else a program for several steps holds by value."""
        nobody = self._step._hooks.nobody
        return (self._trainer.counters_on_device, len(self._loop.results.banks), "on_train_batch_end" in nobody)

    def counters(self) -> dict[str, Tensor]:
        """Return what `between` counts in, by name."""
        if not self._trainer.counters_on_device:
            return {}
        return {"global_step on the device": self._trainer.scalars["global_step"]}

    def between(self, index: int) -> None:
        """Do on the device what the loop does between two steps: take out what is held back, count."""
        if (index + 1) % self._trainer.accumulate_grad_batches:
            return
        guard = self._loop.guard
        if guard is not None:
            guard.end_step()
        if self._trainer.counters_on_device and index + 1 < self._trainer.options.steps_per_replay:
            self._trainer.scalars["global_step"].add_(1)

    def ahead(self, batch_idx: int, parts: Sequence[RecordedPart]) -> ScheduleAhead | None:
        """Step the schedulers that follow steps ahead, and compute the numbers of updates; None without either."""
        inside = self._step._inside
        if not self._schedulers and not any(part.counts_on_host for part in inside):
            return None
        count = self._trainer.options.steps_per_replay
        return ScheduleAhead(self._trainer, self._schedulers, inside, parts, batch_idx, count)
