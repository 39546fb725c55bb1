"""What a training step does for its monitors: judge the step's values, and hold its update back where one says so."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from zdtrain.errors import ConfigError
from zdtrain.monitor.average import WeightAverage
from zdtrain.monitor.base import Monitor
from zdtrain.monitor.by_hand import BatchMask, UpdatesByHand
from zdtrain.monitor.conditions import NonFinite
from zdtrain.monitor.gate import StepGates, Timing
from zdtrain.monitor.gradients import Gradients, ToGather
from zdtrain.monitor.masking import Copies, Mask, mask_for
from zdtrain.monitor.panels import Conditions
from zdtrain.monitor.shared import SharedVerdicts
from zdtrain.monitor.statistics import Statistics
from zdtrain.monitor.values import Known, SeenValues, StepValues
from zdtrain.optim.clipping import EPS
from zdtrain.ring import look_at
from zdtrain.slots import IDENTITY, SlotBank

_ORDER = ("stop", "skip", "clip")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One column of `StepGuard.acted`."""

    monitor: Monitor
    """Whose condition it is."""
    action: str
    """``"stop"``, ``"skip"`` or ``"clip"``."""
    timing: Timing
    """When the condition leads to the action."""
    reason: str
    """What the event says."""


class StepGuard:
    """Evaluates monitors inside the step, by tensor operations on fixed addresses that may be captured with it.

    A step calls, in this order: `prepare`, outside of what is captured; `begin_window` before the first forward pass of
    an accumulation window, `observe` after each but the last, `begin_update` before ``optimizer.step``, `judge` between
    backward and the update, `after_update` behind it, `end_step` when its logged values are folded into the epoch.
    A batch of a module that optimizes by hand is a step: `prepare_by_hand`, `begin_window`, `begin_update`, then
    ``training_step``, `judge_by_hand`, `after_update`, `end_step`.

    Args:
        monitors: Those that act inside the step.
        device: The training device.
        logged: Returns what the step logged by name, now.
        scalars: The run's scalars that belong into a row, by name.
        module: The LightningModule.
        banks: Where logged values are; the list may grow.
        statistics: What to keep of the step's values.
        average: Weights to average, if any.
        norm: Measure the gradient norm.
        visible: The host may look at tensors for nothing, and nothing of a step is recorded to be run again: it judges
            the step itself, which costs less than the operations that would.
        several: Other processes train on other batches, with the same monitors: what one acts on, all act on.
    """

    def __init__(
        self,
        monitors: Sequence[Monitor],
        device: torch.device,
        logged: Callable[[], Mapping[str, Tensor]],
        scalars: Mapping[str, Tensor],
        module: nn.Module,
        banks: list[SlotBank],
        *,
        statistics: Sequence[Statistics] = (),
        average: WeightAverage | None,
        norm: bool,
        visible: bool = False,
        several: bool = False,
    ) -> None:
        visible = visible and not several  # a process that sees no reason to act has to hear of the others'
        self._statistics = list(statistics)
        self.average = average
        self.verdicts = sorted(_verdicts(monitors), key=lambda verdict: _ORDER.index(verdict.action))
        actions = [verdict.action for verdict in self.verdicts]
        self._num_stop, self._num_hold = actions.count("stop"), actions.count("stop") + actions.count("skip")
        self.holds = self._num_hold > 0
        # the latch, then the verdicts of this step; side by side, so that one operation reduces them
        latched = torch.zeros(1 + len(self.verdicts), dtype=torch.bool, device=device)
        self.stopped = latched[0]  # shape=(), set for good
        self.acted = latched[1:]  # shape=(verdicts,)
        self._stop_flags, self._hold_flags = latched[: 1 + self._num_stop], latched[: 1 + self._num_hold]
        self._clip_flags = self.acted[self._num_hold :]
        self.hold = torch.zeros((), dtype=torch.bool, device=device)  # shape=(), this step's update is held back
        self.flag = torch.zeros((), dtype=torch.float32, device=device)  # shape=(), the same for optimizers
        limits = [verdict.monitor.clip_norm for verdict in self.verdicts[self._num_hold :]]
        self.conditions = Conditions(
            [v.monitor for v in self.verdicts], [limit for limit in limits if limit is not None]
        )
        self.values = (SeenValues if visible else StepValues)(
            device, logged, scalars, self.conditions.metrics, self.conditions.limits
        )
        self.conditions.bind(self.values, self.acted)
        self.gates = StepGates([verdict.timing for verdict in self.verdicts], device)
        self._shared = SharedVerdicts(len(self.verdicts), device) if several and self.verdicts else None
        self._seen = torch.zeros_like(self.acted)  # what held for an earlier batch of the window
        self.is_quiet = False  # whether the host knows that this step's update is as it would be without monitors
        self._latched = latched
        self._latched_seen: Any = None  # its memory, once somebody looked
        self._latched_here = latched.numpy().data.cast("B") if visible and self.verdicts else None
        self._seen_here = [False] * len(self.verdicts)  # what held for an earlier batch of the window
        self._acts_here = list(self._seen_here)  # what acts in this step
        self._clips = len(limits) > 0
        self._eps, self._one = self.values.board.new_full((), EPS), self.values.board.new_ones(())
        self._factors = self.values.board.new_ones(len(limits))  # shape=(clips,), what gradients are multiplied by
        self._first_factor = self._factors[0] if limits else self._one
        self._gradients = Gradients(visible=visible) if norm or self._clips else None
        self._module = module
        self._banks = banks
        self._places: list[Place] = []
        self._module_state = Copies()
        self._totals: list[Tensor] = []  # accumulators of the epoch
        self._totals_before: list[Tensor] = []  # their copies from before the step
        self._visible_totals: list[tuple[Any, Any]] = []  # where the host sees both, which costs less than operations
        self._num_banks = 0
        self._num_prepared = 0
        self._mask: Mask | None = None
        self._optimizers: tuple[Optimizer, ...] = ()
        self._by_hand: UpdatesByHand | None = None

    def prepare(self, optimizer: Optimizer) -> None:
        """Do the host's share before a step: get ready to hold back updates of `optimizer`, hand over its lr."""
        if self._optimizers != (optimizer,):
            self.release()
            self._optimizers = (optimizer,)
            self._mask = mask_for(optimizer, self.flag) if self.holds else None
        self._prepare()

    def prepare_by_hand(self, optimizers: Sequence[Optimizer], schedulers: Sequence[Any]) -> None:
        """Do the host's share before a batch that is optimized by hand: get ready to take all of it back."""
        if self._optimizers != tuple(optimizers):
            self.release()
            self._optimizers = tuple(optimizers)
            self._by_hand = UpdatesByHand(optimizers, measures_norm=self._gradients is not None)
            self._mask = BatchMask(optimizers, schedulers, self._module, self.flag) if self.holds else None
        self._prepare()

    def _prepare(self) -> None:
        if self.holds and (self._num_prepared < 2 or len(self._banks) != self._num_banks):
            # what a step makes for the first time has a copy before the next one, which may be captured
            self._num_prepared += 1
            self._places = list(changing_places(self._module))
            self._module_state.save_new(held(self._places))  # the others have theirs from before the window
            self._know_totals()
        self.values.take_lr(self._optimizers[0])
        self.is_quiet = False

    def release(self) -> None:
        """Leave the optimizers as they were found."""
        for part in (self._mask, self._by_hand):
            if part is not None:
                part.release()
        self._mask = self._by_hand = None
        self._optimizers = ()

    def begin_window(self) -> None:
        """Keep what the forward passes of the window are going to change."""
        if self.holds:
            if self._places:
                self._module_state.save(held(self._places))
            if self._visible_totals:
                for before, total in self._visible_totals:
                    before[:] = total
            elif self._totals:
                torch._foreach_copy_(self._totals_before, self._totals)

    def observe(self, loss: Tensor | None) -> None:
        """Look at the values of a batch whose window goes on: what held for one batch holds for the step."""
        known = self.values.fill(loss, None, ends_window=False)
        if self._latched_here is not None:
            self._seen_here = list(map(or_, self._seen_here, self.conditions.decide_here(known)))
        elif self.verdicts:
            self.conditions.decide(known)
            self._seen.logical_or_(self.acted)

    def begin_update(self) -> None:
        """Keep what the update is going to change."""
        if self._mask is not None:
            self._mask.before()
        if self._by_hand is not None:
            self._by_hand.begin()

    def judge(self, loss: Tensor | None, *, accumulates: bool) -> None:
        """Evaluate the conditions on the step's values; hold the update back, stop or clip."""
        gradients, norm = ([], None) if self._gradients is None else self._gradients.of(self._optimizers)
        self._judge(loss, norm, gradients, accumulates=accumulates)

    def judge_by_hand(self, loss: Tensor | None) -> None:
        """Evaluate the conditions on the values of a batch that is optimized by hand: take it back, or stop."""
        assert self._by_hand is not None
        norm = None if self._gradients is None else self._by_hand.norm()
        self._judge(loss, norm, [], accumulates=False)

    def _judge(
        self, loss: Tensor | None, norm: Tensor | ToGather | None, gradients: list[Tensor], *, accumulates: bool
    ) -> None:
        known = self.values.fill(loss, norm, ends_window=True)
        if self._latched_here is not None:
            self._decide_here(known, self._latched_here)
            self.is_quiet = 1 not in self._latched_here.tobytes()
        elif self.verdicts:
            self._decide(known, accumulates)
        else:
            self.is_quiet = True
        if self._mask is not None:
            self._mask.lift(self.is_quiet)
        if self._clips and gradients and not self.is_quiet:
            self._clip(gradients, known)
        if self._statistics:
            row = self.values.row(known)
            for statistics in self._statistics:
                statistics.update(row, self._held())

    def _decide(self, known: Known, accumulates: bool) -> None:
        self.conditions.decide(known)
        if accumulates:
            self.acted.logical_or_(self._seen)
            self._seen.zero_()
        if self._shared is not None:
            self._shared.share(self.acted)
        self.gates.decide(self.acted)
        self._spread()

    def _decide_here(self, known: Known, latched: memoryview) -> None:
        """Do what `_decide` does where the host sees the step's values: most steps give no reason to write anything."""
        holds = self.conditions.decide_here(known)
        if any(self._seen_here):
            holds = list(map(or_, holds, self._seen_here))
            self._seen_here = [False] * len(holds)
        acts = self.gates.decide_here(holds)
        if acts != self._acts_here:
            latched[1:] = bytes(acts)
            self._acts_here = acts
            self._spread()

    def _spread(self) -> None:
        """Write what follows from the verdicts."""
        if self.holds:
            if self._num_stop:
                self.stopped.copy_(self._stop_flags.any())
            torch.any(self._hold_flags, dim=0, out=self.hold)
            self.flag.copy_(self.hold)

    def _clip(self, gradients: list[Tensor], known: Known) -> None:
        if self._latched_here is not None:
            self.conditions.gather(known)
        limited = torch.div(self.conditions.further, torch.add(self.values.grad_norm, self._eps))
        torch.where(self._clip_flags, torch.minimum(limited, self._one), self._one, out=self._factors)
        factor = self._first_factor if len(self._factors) == 1 else self._factors.amin()
        torch._foreach_mul_(gradients, factor)

    def after_update(self) -> None:
        """Take the update back where it is to be held back; average the weights."""
        if self._mask is not None:
            self._mask.after()
        self.values.keep_lr()
        if self._places and not self.is_quiet:
            self._module_state.put_back(held(self._places), self.hold)
        if self.average is not None and (self._by_hand is None or self._by_hand.has_stepped):
            self.average.update(self._held())

    def look(self) -> None:
        """Find out if the step that ran is as it would be without monitors, where looking costs nothing."""
        if not self.is_quiet:
            if self._latched_seen is None:
                self._latched_seen = look_at(self._latched)
            self.is_quiet = 1 not in self._latched_seen.tobytes()

    def end_step(self) -> None:
        """Take the step's values out of the epoch again, where its update was held back."""
        if self.holds:
            if len(self._banks) != self._num_banks:
                self._know_totals()
            if not self.is_quiet:
                self._put_totals_back(self.hold)

    def _held(self) -> Tensor | None:
        """Return whether this step's update is held back, shape=(), bool; None where it certainly is not."""
        return self.hold if self.holds and not self.is_quiet else None

    def _put_totals_back(self, hold: Tensor) -> None:
        for total, before in zip(self._totals, self._totals_before, strict=True):
            torch.where(hold, before, total, out=total)

    def _know_totals(self) -> None:
        for bank in self._banks[self._num_banks :]:  # made in this window, so they were empty before it
            if bank.reduction != "step":  # it keeps no totals
                before = torch.full_like(bank._totals, IDENTITY[bank.reduction])
                self._totals.append(bank._totals)
                self._totals_before.append(before)
                if self._latched_here is not None:
                    self._visible_totals.append((look_at(before), look_at(bank._totals)))
        self._num_banks = len(self._banks)

    def put_back(self) -> None:
        """Return to the state of the last good step, in the middle of a window behind the latch.

        The copies of `begin_window` were made behind the latch as well, so they are that state.
        """
        self._module_state.put_back(held(self._places), self.stopped)
        self._put_totals_back(self.stopped)

    def state(self) -> dict[str, Tensor]:
        """Return what a run that goes on needs to know of the monitors, by name."""
        return {**self.gates.state(), **self.conditions.state()}

    def tensors(self) -> dict[str, Tensor]:
        """Return all that a step writes to, by name."""
        found = {"acted": self.acted, "stopped": self.stopped, "hold": self.hold, "flag": self.flag}
        found.update(seen=self._seen, board=self.values.board, factors=self._factors)
        parts: list[tuple[str, dict[str, Any]]] = [("state", self._module_state.tensors())]
        parts.append(("total", {str(index): copy for index, copy in enumerate(self._totals_before)}))
        parts.append(("average", self.average.tensors() if self.average is not None else {}))
        parts.append(("mask", self._mask.tensors() if self._mask is not None else {}))
        parts += [("gate", self.gates.tensors()), ("condition", self.conditions.tensors())]
        parts += [(f"statistics {index}", kept.tensors()) for index, kept in enumerate(self._statistics)]
        for where, tensors in parts:
            found.update((f"{where} {name}", tensor) for name, tensor in tensors.items())
        return {f"monitors' {name}": tensor for name, tensor in found.items()}


class Place(NamedTuple):
    """Where a module keeps a tensor that a forward pass may change."""

    path: str
    """Path of the module."""
    name: str
    """Name of the buffer or attribute."""
    holder: Any
    """The dictionary that holds it."""


def changing_places(module: nn.Module) -> Iterator[Place]:
    """Yield what a forward pass may change: buffers, and the states of torchmetrics metrics.

    Raises:
        ConfigError: A metric collects its values in a list, which can't be taken back on the device.
    """
    for path, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and not is_lazy(buffer):
                yield Place(path, name, part._buffers)
        for name in getattr(part, "_defaults", ()):  # a metric's states are attributes
            if isinstance(getattr(part, name, None), list):
                raise ConfigError(
                    f"trainer.monitors, nonfinite: {path or type(part).__name__} keeps {name!r} in a list, so a step "
                    "can't be held back on the device; give it a state of fixed size (thresholds=), or use then='warn'."
                )
            yield Place(path, name, part.__dict__)


def held(places: Sequence[Place]) -> dict[Hashable, Tensor]:
    """Return the tensors that `places` hold now."""
    found = ((place, place.holder.get(place.name)) for place in places)
    return {(place.path, place.name): tensor for place, tensor in found if isinstance(tensor, Tensor)}


def _verdicts(monitors: Sequence[Monitor]) -> list[Verdict]:
    found = []
    for monitor in monitors:
        what = monitor.describe()
        found.append(Verdict(monitor=monitor, action=monitor.action, timing=monitor.timing, reason=what))
        limit = monitor.stop_after if isinstance(monitor, NonFinite) else None
        if limit is not None:
            timing = Timing(patience=limit, after_step=monitor.timing.after_step)
            reason = f"{what} in {limit} steps in a row"
            found.append(Verdict(monitor=monitor, action="stop", timing=timing, reason=reason))
    return found
