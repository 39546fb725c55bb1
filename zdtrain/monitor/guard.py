"""What a training step does for its monitors: judge the step's values, and hold its update back where one says so."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from zdtrain.errors import ConfigError
from zdtrain.monitor.average import WeightAverage
from zdtrain.monitor.base import Monitor
from zdtrain.monitor.conditions import NonFinite
from zdtrain.monitor.events import Row
from zdtrain.monitor.gate import DeviceGate, Timing
from zdtrain.monitor.masking import Copies, Mask, mask_for
from zdtrain.monitor.statistics import Statistics
from zdtrain.monitor.values import StepValues
from zdtrain.optim.clipping import total_norm
from zdtrain.slots import IDENTITY, SlotBank

_ORDER = ("stop", "skip", "clip")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One column of `StepGuard.acted`."""

    monitor: Monitor
    """Whose condition it is."""
    action: str
    """``"stop"``, ``"skip"`` or ``"clip"``."""
    gate: DeviceGate
    """When the condition leads to the action."""
    reason: str
    """What the event says."""


class StepGuard:
    """Evaluates monitors inside the step, by tensor operations on fixed addresses that may be captured with it.

    A step calls, in this order: `prepare`, outside of what is captured; `begin_window` before the first forward pass of
    an accumulation window, `observe` after each but the last, `begin_update` before ``optimizer.step``, `judge` between
    backward and the update, `after_update` behind it, `end_step` when its logged values are folded into the epoch.

    Args:
        monitors: Those that act inside the step.
        values: Where the values of the step lie.
        module: The LightningModule.
        banks: Where logged values are; the list may grow.
        statistics: What to keep of the step's values.
        average: Weights to average, if any.
        norm: Measure the gradient norm.
        step: Number of the next step.
    """

    def __init__(
        self,
        monitors: Sequence[Monitor],
        values: StepValues,
        module: nn.Module,
        banks: list[SlotBank],
        *,
        statistics: Sequence[Statistics] = (),
        average: WeightAverage | None,
        norm: bool,
        step: int,
    ) -> None:
        self.monitors = list(monitors)
        self.values = values
        self._statistics = list(statistics)
        self.average = average
        device = values.device
        self.verdicts = sorted(_verdicts(self.monitors, device), key=lambda verdict: _ORDER.index(verdict.action))
        actions = [verdict.action for verdict in self.verdicts]
        self._num_stop, self._num_hold = actions.count("stop"), actions.count("stop") + actions.count("skip")
        self.holds = self._num_hold > 0
        # the latch, then the verdicts of this step; side by side, so that one operation reduces them
        latched = torch.zeros(1 + len(self.verdicts), dtype=torch.bool, device=device)
        self.stopped = latched[0]  # shape=(), set for good
        self.acted = latched[1:]  # shape=(verdicts,)
        self._stop_flags, self._hold_flags = latched[: 1 + self._num_stop], latched[: 1 + self._num_hold]
        self.hold = torch.zeros((), dtype=torch.bool, device=device)  # shape=(), this step's update is held back
        self.flag = torch.zeros((), dtype=torch.float32, device=device)  # shape=(), the same for optimizers
        self._step = torch.full((), step, dtype=torch.int64, device=device)  # shape=(), number of the step
        self._counts_steps = any(verdict.gate.counts_steps for verdict in self.verdicts)
        self._seen = {id(m): torch.zeros((), dtype=torch.bool, device=device) for m in self.monitors}  # in the window
        self._measures_norm = norm
        self._never = torch.zeros((), dtype=torch.bool, device=device)
        self._module = module
        self._banks = banks
        self._places: list[Place] = []
        self._module_state = Copies()
        self._totals: list[tuple[Tensor, Tensor]] = []  # accumulators of the epoch, and copies from before the step
        self._num_prepared = 0
        self._mask: Mask | None = None
        self._optimizer: Optimizer | None = None

    def prepare(self, optimizer: Optimizer) -> None:
        """Do the host's share before a step: get ready to hold back updates of `optimizer`, hand over its lr."""
        if optimizer is not self._optimizer:
            self.release()
            self._optimizer = optimizer
            self._mask = mask_for(optimizer, self.flag) if self.holds else None
        if self.holds and (self._num_prepared < 2 or len(self._banks) != len(self._totals)):
            # what a step makes for the first time has a copy before the next one, which may be captured
            self._num_prepared += 1
            self._places = list(changing_places(self._module))
            self._module_state.save(held(self._places))
            self._know_totals()
        self.values.take_lr(optimizer)

    def release(self) -> None:
        """Leave the optimizer as it was found."""
        if self._mask is not None:
            self._mask.release()
        self._mask = self._optimizer = None

    def begin_window(self) -> None:
        """Keep what the forward passes of the window are going to change."""
        if self.holds:
            if self._places:
                self._module_state.save(held(self._places))
            for total, copy in self._totals:
                copy.copy_(total)

    def observe(self, loss: Tensor | None) -> None:
        """Look at the values of a batch whose window goes on: what held for one batch holds for the step."""
        self.values.take_loss(loss)
        row = self.values.row(ends_window=False)
        for monitor in self.monitors:
            if monitor.metrics is None or any(metric in row for metric in monitor.metrics):
                self._seen[id(monitor)].logical_or_(monitor.condition(row))

    def begin_update(self) -> None:
        """Keep what the update is going to change."""
        if self._mask is not None:
            self._mask.before()

    def judge(self, loss: Tensor | None, *, accumulates: bool) -> None:
        """Evaluate the conditions on the step's values; hold the update back, stop or clip."""
        self.values.take_loss(loss)
        gradients = self._gradients() if self._measures_norm or len(self.verdicts) > self._num_hold else []
        if self._measures_norm and gradients:
            self.values.take_norm(total_norm(gradients))
        if not self.verdicts and not self._statistics:
            return
        row = self.values.row(ends_window=True)
        if self.verdicts:
            self._decide(row, gradients, accumulates)
        for statistics in self._statistics:
            statistics.update(row, self.hold if self.holds else None)

    def _decide(self, row: Row, gradients: list[Tensor], accumulates: bool) -> None:
        holds = {id(monitor): self._condition(monitor, row, accumulates) for monitor in self.monitors}
        decided = [verdict.gate.decide(holds[id(verdict.monitor)], self._step) for verdict in self.verdicts]
        self.acted.copy_(torch.stack(decided) if len(decided) > 1 else decided[0])
        if self.holds:
            if self._num_stop:
                self.stopped.copy_(self._stop_flags.any())
            self.hold.copy_(self._hold_flags.any())
            self.flag.copy_(self.hold)
        self._clip(decided, gradients)
        if self._counts_steps:
            self._step.add_(1)

    def _condition(self, monitor: Monitor, row: Row, accumulates: bool) -> Tensor:
        known = monitor.metrics is None or any(metric in row for metric in monitor.metrics)
        holds = monitor.condition(row) if known else self._never
        if accumulates:
            seen = self._seen[id(monitor)]
            holds = holds | seen
            seen.zero_()
        return holds

    def _gradients(self) -> list[Tensor]:
        assert self._optimizer is not None
        parameters = (p for group in self._optimizer.param_groups for p in group["params"])
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def _clip(self, decided: Sequence[Tensor], gradients: list[Tensor]) -> None:
        for verdict, acts in zip(self.verdicts[self._num_hold :], decided[self._num_hold :], strict=True):
            limit = verdict.monitor.clip_norm
            if limit is not None and gradients:
                factor = (limit / (total_norm(gradients) + 1e-6)).clamp(max=1.0)
                torch._foreach_mul_(gradients, torch.where(acts, factor, 1.0))

    def after_update(self) -> None:
        """Take the update back where it is to be held back; average the weights."""
        if self._mask is not None:
            self._mask.after()
        self.values.keep_lr()
        if self._places:
            self._module_state.put_back(held(self._places), self.hold)
        if self.average is not None:
            self.average.update(self.hold if self.holds else None)

    def end_step(self) -> None:
        """Take the step's values out of the epoch again, where its update was held back."""
        if not self.holds:
            return
        self._know_totals()
        for total, copy in self._totals:
            torch.where(self.hold, copy, total, out=total)

    def _know_totals(self) -> None:
        for bank in self._banks[len(self._totals) :]:  # made in this window, so they were empty before it
            self._totals.append((bank._totals, torch.full_like(bank._totals, IDENTITY[bank.reduction])))

    def put_back(self) -> None:
        """Return to the state of the last good step, in the middle of a window behind the latch.

        The copies of `begin_window` were made behind the latch as well, so they are that state.
        """
        self._module_state.put_back(held(self._places), self.stopped)
        for total, copy in self._totals:
            torch.where(self.stopped, copy, total, out=total)

    def tensors(self) -> dict[str, Tensor]:
        """Return all that a step writes to, by name."""
        found = {"acted": self.acted, "stopped": self.stopped, "hold": self.hold, "flag": self.flag}
        found.update(step=self._step, loss=self.values.loss, grad_norm=self.values.grad_norm)
        parts: list[tuple[str, dict[str, Any]]] = [("state", self._module_state.tensors())]
        parts.append(("total", {str(index): copy for index, (_, copy) in enumerate(self._totals)}))
        parts.append(("average", self.average.tensors() if self.average is not None else {}))
        parts.append(("mask", self._mask.tensors() if self._mask is not None else {}))
        parts += [(f"gate {index}", verdict.gate.tensors()) for index, verdict in enumerate(self.verdicts)]
        parts += [(f"monitor {index}", monitor.tensors()) for index, monitor in enumerate(self.monitors)]
        parts += [(f"statistics {index}", kept.tensors()) for index, kept in enumerate(self._statistics)]
        parts.append(("seen", {str(index): seen for index, seen in enumerate(self._seen.values())}))
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
                    f"trainer.monitors: {path or type(part).__name__} keeps {name!r} in a list, so a step can't be "
                    "held back on the device; give it a state of fixed size, e.g. thresholds=, or use then='warn'."
                )
            yield Place(path, name, part.__dict__)


def held(places: Sequence[Place]) -> dict[Hashable, Tensor]:
    """Return the tensors that `places` hold now."""
    found = ((place, place.holder.get(place.name)) for place in places)
    return {(place.path, place.name): tensor for place, tensor in found if isinstance(tensor, Tensor)}


def _verdicts(monitors: Sequence[Monitor], device: torch.device) -> list[Verdict]:
    found = []
    for monitor in monitors:
        what = monitor.describe()
        found.append(
            Verdict(monitor=monitor, action=monitor.action, gate=DeviceGate(monitor.timing, device), reason=what)
        )
        limit = monitor.stop_after if isinstance(monitor, NonFinite) else None
        if limit is not None:
            gate = DeviceGate(Timing(patience=limit, after_step=monitor.timing.after_step), device)
            reason = f"{what} in {limit} steps in a row"
            found.append(Verdict(monitor=monitor, action="stop", gate=gate, reason=reason))
    return found
