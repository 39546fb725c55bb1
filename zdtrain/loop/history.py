"""What the host counts per step, kept so that steps can be taken back that turn out not to have counted."""

from collections import deque
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor

from zdtrain.errors import FallbackReason
from zdtrain.loop.rates import RatesByCount, copied, reason_for_late_schedule
from zdtrain.step.results import MetricSlot


@dataclass(kw_only=True, slots=True)
class Mark:
    """The host's state before a step."""

    step: int
    """Number of the step."""
    counters: list[dict[str, Any]]
    """Fields of Lightning's progress counters."""
    scheduled: int
    """Updates of the learning rate so far."""
    weights: list[Any]
    """Batch sizes that logged means were weighted with so far, of each slot that there was."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The learning rate's state after so many updates."""

    schedulers: list[dict[str, Any]]
    """State of the schedulers that follow steps."""
    groups: list[dict[str, Any]]
    """Options of the optimizer's parameter groups: numbers, and copies of tensors."""


class History:
    """Marks the host's state before every step, and goes back to one.

    Args:
        trainer: The Trainer, with its module attached.
        late: Where the host hears of skipped steps later: whether a step's update is held back, shape=(), bool, and
            how many steps the host may be behind.
    """

    def __init__(self, trainer: Trainer, late: tuple[Tensor, int] | None = None) -> None:
        self._trainer = trainer
        loop = self._loop = trainer.fit_loop.epoch_loop
        optimizer = loop.automatic_optimization.optim_progress.optimizer
        batches, schedulers = loop.batch_progress, loop.scheduler_progress
        trackers = (batches, optimizer.step, optimizer.zero_grad, schedulers)
        self._trackers = [counter for tracker in trackers for counter in (tracker.current, tracker.total)]
        self._fields = [vars(counter) for counter in self._trackers]
        self._updates = vars(schedulers.total)
        self._slots: list[dict[str, Any]] = []  # attributes of each, past nn.Module's machinery; new ones come last
        self._num_results = -1
        self._schedulers = [c.scheduler for c in trainer.lr_scheduler_configs if c.interval == "step"]
        self._marks: deque[Mark] = deque()
        self._heard = -1  # marks up to here are forgotten
        self._schedules: dict[int, Schedule] = {}  # by number of updates
        self.rates: RatesByCount | None = None
        if late is not None and self._schedulers:
            hold, max_lag_steps = late
            size = (max_lag_steps + 2) * len(self._schedulers)
            self.rates = RatesByCount(trainer.optimizers[0], hold, size)

    @property
    def _scheduled(self) -> int:
        return self._loop.scheduler_progress.total.completed

    def start(self) -> None:
        """Begin, or go on, with all steps known to have counted."""
        self._schedules.clear()
        if self._marks:  # what is counted so far is no step's share
            self._marks[-1].scheduled = self._scheduled
        if self.rates is not None:
            self.rates.start(self._scheduled)

    def reason_for_late_schedule(self) -> FallbackReason | None:
        """Return why the schedule follows a skipped step late; None where it does not."""
        return None if self.rates is None else reason_for_late_schedule(self._trainer.optimizers[0], self._schedulers)

    def mark(self) -> None:
        """Keep the state before the step that follows."""
        mark = Mark(
            step=self._loop._batches_that_stepped,
            counters=[fields.copy() for fields in self._fields],
            scheduled=self._updates["completed"],
            weights=self._weights(),
        )
        if self._marks and self._marks[-1].step == mark.step:  # an epoch ended before the step began
            self._marks.pop()
        self._marks.append(mark)
        if self._schedulers and mark.scheduled not in self._schedules:
            states = [scheduler.state_dict() for scheduler in self._schedulers]
            self._schedules[mark.scheduled] = Schedule(schedulers=states, groups=self._groups())

    def _weights(self) -> list[Any]:
        results = self._loop._results
        if len(results) != self._num_results:
            self._num_results = len(results)
            self._slots = [metric.__dict__ for metric in results.values() if isinstance(metric, MetricSlot)]
        return [slot["weight"] for slot in self._slots]

    def _groups(self) -> list[dict[str, Any]]:
        kept: Any = float | int | tuple
        if self.rates is None:  # it takes care of tensors
            kept |= Tensor
        groups = self._trainer.optimizers[0].param_groups
        return [
            {name: copied(value) for name, value in group.items() if isinstance(value, kept) and name != "params"}
            for group in groups
        ]

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
        for counter, fields in zip(self._trackers, mark.counters, strict=True):
            vars(counter).update(fields)
        self._loop._batches_that_stepped = mark.step
        self._loop.batch_progress.is_last_batch = False
        self._write_weights(mark.weights)
        self._write_schedule(mark.scheduled)

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
            for fields in other.counters[-2:]:
                fields.update({name: count - updates for name, count in fields.items()})
        self._write_weights([weight - part for weight, part in zip_longest(now, share, fillvalue=0)])
        for counter in self._trackers[-2:]:
            counter.ready -= updates
            counter.completed -= updates
        if updates:
            self._write_schedule(self._scheduled)

    def _index(self, step: int) -> int:
        return next(index for index, mark in enumerate(self._marks) if mark.step == step)

    def _write_weights(self, weights: list[Any]) -> None:
        self._weights()  # gets to know new slots, whose weight was 0
        known = [*weights, *[0] * (len(self._slots) - len(weights))]
        for slot, weight in zip(self._slots, known, strict=True):
            slot["weight"], slot["_computed"] = weight, None

    def _write_schedule(self, updates: int) -> None:
        """Return schedulers and parameter groups to where they were after so many updates."""
        schedule = self._schedules.get(updates)
        if schedule is None:  # nothing follows steps
            return
        for scheduler, state in zip(self._schedulers, schedule.schedulers, strict=True):
            scheduler.load_state_dict(state)
        for group, options in zip(self._trainer.optimizers[0].param_groups, schedule.groups, strict=False):
            for name, value in options.items():
                if isinstance(value, Tensor) and isinstance(group[name], Tensor):
                    group[name].copy_(value)
                else:
                    group[name] = value
