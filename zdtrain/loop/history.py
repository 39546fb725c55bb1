"""What the host counts per step, kept so that steps can be taken back that turn out not to have counted."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from operator import itemgetter
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor
from torch.optim import Optimizer

from zdtrain.errors import FallbackReason
from zdtrain.loop.options import Options, options_of
from zdtrain.loop.rates import RatesByCount, reason_for_late_schedule, reason_for_several_schedules
from zdtrain.step.results import MetricSlot

STEPS = ("last_epoch", "_step_count")  # what torch's schedulers count
_weight = itemgetter("weight")


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The learning rate's state at some time."""

    schedulers: list[dict[str, Any]]
    """State of the schedulers."""
    options: list[Options]
    """Options of the parameter groups of each optimizer."""


@dataclass(kw_only=True, slots=True)
class Mark:
    """The host's state before a step."""

    step: int
    """Number of the step."""
    counters: list[dict[str, Any]]
    """Fields of Lightning's progress counters, those of the schedulers last."""
    scheduled: int
    """Updates of the learning rate so far."""
    schedule: Schedule | None
    """Its state; None where the number of updates says it."""
    rates: Tensor | None = None
    """What its tensors held, shape=(tensors,), where the number of updates does not say it any more."""
    weights: list[Any]
    """Batch sizes that logged means were weighted with so far, of each slot that there was."""


class History:
    """Marks the host's state before every step, and goes back to one.

    Args:
        trainer: The Trainer, with its module attached.
        at_once: The host has heard of every step before the next one starts.
        late: Where the host hears of skipped steps later: whether a step's update is held back, shape=(), bool, and
            how many steps the host may be behind.
    """

    def __init__(self, trainer: Trainer, *, at_once: bool, late: tuple[Tensor, int] | None = None) -> None:
        self._trainer = trainer
        self._strategy = trainer.strategy
        loop = self._loop = trainer.fit_loop.epoch_loop
        optimizer = loop.automatic_optimization.optim_progress.optimizer
        batches, schedulers = loop.batch_progress, loop.scheduler_progress
        automatic = trainer.lightning_module.automatic_optimization  # else the module steps its schedulers itself
        by_hand = loop.manual_optimization.optim_step_progress
        trackers = (batches, *((optimizer.step, optimizer.zero_grad) if automatic else (by_hand,)), schedulers)
        self._counters = [vars(counter) for tracker in trackers for counter in (tracker.current, tracker.total)]
        self._updates = vars(schedulers.total)
        self._slots: list[dict[str, Any]] = []  # attributes of each, past nn.Module's machinery; new ones come last
        self._num_results = -1
        configs = trainer.lr_scheduler_configs
        self._schedulers = [config.scheduler for config in configs]
        following = [c for c in configs if automatic and c.interval == "step" and not c.reduce_on_plateau]
        self._hears_at_once = at_once
        self._marks: deque[Mark] = deque()  # of steps that may have to be taken back
        self._heard = -1  # marks up to here are forgotten
        self._read: list[Options] = []  # the options when they were read last, by optimizer
        self._fixed: Schedule | None = None  # made last; the next one where nothing moves
        self._left: Options | None = None  # when the schedule moved last, and how often it had
        self._left_scheduled = 0
        self._schedules: dict[int, Schedule] = {}  # by number of updates, where they may be taken back
        self.rates: RatesByCount | None = None
        self.reason: FallbackReason | None = None
        """Why the schedule costs exactness or time on a device that answers late; None where it does not."""
        if late is not None and following:
            self._follow_late(following, *late)

    def _follow_late(self, configs: list[Any], hold: Tensor, max_lag_steps: int) -> None:
        if len({config.frequency for config in configs}) > 1:
            self.reason = reason_for_several_schedules()
            return
        self.reason = reason_for_late_schedule(self._optimizer, [config.scheduler for config in configs])
        self.rates = RatesByCount(self._optimizer, hold, (max_lag_steps + 2) * len(configs))

    @property
    def _optimizer(self) -> Optimizer:
        return self._trainer.optimizers[0]

    @property
    def _scheduled(self) -> int:
        return self._loop.scheduler_progress.total.completed

    def start(self) -> None:
        """Begin, or go on, with all steps known to have counted."""
        if self._marks:  # what is counted so far is no step's share
            self._marks[-1].scheduled = self._scheduled
        if self.rates is not None:
            if self._marks:
                self._marks[-1].schedule = self._schedules.get(self._scheduled)
                self._marks[-1].rates = self.rates.counted()
            self._schedules.clear()
            self.rates.start(self._scheduled)
            self._leave()

    def mark(self) -> None:
        """Keep the state before the step that follows."""
        mark = Mark(
            step=self._loop._batches_that_stepped,
            counters=list(map(dict.copy, self._counters)),
            scheduled=self._updates["completed"],
            schedule=self._schedule() if self.rates is None else None,
            weights=self._weights(),
        )
        if self._hears_at_once:
            self._marks.clear()
        elif self._marks and self._marks[-1].step == mark.step:  # an epoch ended before the step began
            self._marks.pop()
        self._marks.append(mark)

    def _schedule(self) -> Schedule:
        optimizers, read = self._strategy._optimizers, self._read
        if len(read) != len(optimizers) or not all(map(Options.are_those_of, read, optimizers)):
            known = zip_longest(optimizers, read[: len(optimizers)])
            self._read = [options_of(o, options, with_copies=self.rates is None) for o, options in known]
            self._fixed = None
        if self._fixed is None or self._schedulers:
            states = [scheduler.state_dict() for scheduler in self._schedulers]
            self._fixed = Schedule(schedulers=states, options=self._read)
        return self._fixed

    def _leave(self) -> None:
        schedule = self._schedules[self._scheduled] = self._schedule()
        self._left, self._left_scheduled = schedule.options[0], self._scheduled

    @property
    def is_as_left(self) -> bool:
        """Whether nobody else wrote an option of the optimizer since the schedule moved."""
        left = self._left
        return left is not None and left.are_those_of(self._optimizer) and self._scheduled == self._left_scheduled

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Let the schedulers that follow steps move in the body, where `rates` keeps up with them."""
        assert self.rates is not None
        with self.rates.moving(self._loop.scheduler_progress.total):
            yield
        self._leave()

    def _weights(self) -> list[Any]:
        results = self._loop._results
        if len(results) != self._num_results:
            self._num_results = len(results)
            self._slots = [metric.__dict__ for metric in results.values() if isinstance(metric, MetricSlot)]
        return list(map(_weight, self._slots))

    def trim(self, heard: int) -> None:
        """Forget what no step behind `heard` may need."""
        if heard == self._heard:
            return
        self._heard, marks = heard, self._marks
        while len(marks) > 1 and marks[1].step <= heard:
            marks.popleft()
        if marks and len(self._schedules) > 2 * len(marks) + 8:
            least = marks[0].scheduled - 1
            self._schedules = {count: state for count, state in self._schedules.items() if count >= least}

    def rewind(self, step: int) -> None:
        """Return to the state before `step`."""
        mark = self._marks[self._index(step)]
        for fields, before in zip(self._counters, mark.counters, strict=True):
            fields.update(before)
        self._loop._batches_that_stepped = mark.step
        self._loop.batch_progress.is_last_batch = False
        self._write_weights(mark.weights)
        schedule = mark.schedule or self._schedules[mark.scheduled]
        for scheduler, state in zip(self._schedulers, schedule.schedulers, strict=True):
            scheduler.load_state_dict(state)
        for optimizer, options in zip(self._trainer.optimizers, schedule.options, strict=True):
            options.put_back(optimizer)
        if self.rates is not None:
            self.rates.show(mark.rates)

    def forget(self, step: int) -> None:
        """Take the share of a skipped step out of what the host counts: logged means and the learning rate's progress.

        The step itself stays counted. What was taken out is not taken out again.
        """
        index = self._index(step)
        mark, later = self._marks[index], list(self._marks)[index + 1 :]
        now = self._weights()
        after = later[0].weights if later else now
        share = [weight - before for weight, before in zip_longest(after, mark.weights, fillvalue=0)]
        updates = (later[0].scheduled if later else self._scheduled) - mark.scheduled
        for other in later:
            other.scheduled -= updates
            other.weights = [weight - part for weight, part in zip_longest(other.weights, share, fillvalue=0)]
            _take_from(other.counters[-2:], updates)
        self._write_weights([weight - part for weight, part in zip_longest(now, share, fillvalue=0)])
        _take_from(self._counters[-2:], updates)
        if updates:
            self._return_schedule(updates)

    def _index(self, step: int) -> int:
        return next(index for index, mark in enumerate(self._marks) if mark.step == step)

    def _write_weights(self, weights: list[Any]) -> None:
        self._weights()  # gets to know new slots, whose weight was 0
        known = [*weights, *[0] * (len(self._slots) - len(weights))]
        for slot, weight in zip(self._slots, known, strict=True):
            slot["weight"], slot["_computed"] = weight, None

    def _return_schedule(self, updates: int) -> None:
        """Return schedulers and numbers to where they were so many updates ago, but for what others wrote since."""
        assert self._left is not None
        left, then = self._schedules[self._left_scheduled], self._schedules[self._left_scheduled - updates]
        for scheduler, before, state in zip(self._schedulers, left.schedulers, then.schedulers, strict=True):
            own = scheduler.state_dict()
            if any(own.get(name) != before.get(name) for name in STEPS):  # somebody stepped it
                state = {**own, **{name: own[name] - before[name] + state[name] for name in STEPS if name in own}}
            scheduler.load_state_dict(state)
        self._left = then.options[0].put_back_numbers(self._optimizer, self._left)
        self._left_scheduled -= updates


def _take_from(counters: list[dict[str, Any]], count: int) -> None:
    for fields in counters:
        fields.update({name: value - count for name, value in fields.items()})
