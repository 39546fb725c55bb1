"""The conditions of all monitors that act, evaluated together: a few vector operations, however many monitors.

Constants are tensors of the dtype that they meet, because a Python number makes an operation cost three times as much.
Where the host sees the values for nothing, on a CPU, it decides by the same rules in Python numbers, which costs less
than one operation; running state stays in the same tensors.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zdtrain.monitor.base import Monitor, RowMonitor
from zdtrain.monitor.conditions import INF, NonFinite, Plateau, Spike, Threshold
from zdtrain.monitor.values import HIGHEST, LOWEST, NAN, ZERO, Known, StepValues

Entry = str | Tensor | int
"""The name of a metric, a limit that metrics are compared with, or a cell of the board that holds a constant."""


class Panel(ABC):
    """All conditions of one kind.

    Args:
        monitors: Whose conditions they are.
        entries: What they look at.
    """

    absent = NAN
    """The cell that stands for a metric that a step does not have."""

    def __init__(self, monitors: Sequence[Monitor], entries: Sequence[Entry]) -> None:
        self.monitors = list(monitors)
        self.entries = list(entries)
        self.state: dict[str, Tensor] = {}  # running state by name, shape=(monitors,)

    @abstractmethod
    def bind(self, entries: Tensor, holds: Tensor) -> None:
        """Take note of where the values of `entries` will lie, and of where to write, shape=(monitors,), bool."""

    @abstractmethod
    def decide(self, present: Tensor | None) -> None:
        """Write whether the conditions hold.

        Args:
            present: Which monitors have their metric in this step, shape=(monitors,), bool; None where all have.
        """

    @abstractmethod
    def decide_here(self, entries: Sequence[float], present: Sequence[bool]) -> list[bool]:
        """Do what `decide` does, on a CPU, and return what it writes.

        Args:
            entries: The values of `entries`.
            present: Which monitors have their metric in this step.
        """

    @cached_property
    def _state_here(self) -> dict[str, Any]:
        """Running state as the host sees it on a CPU."""
        return {name: values.numpy().data for name, values in self.state.items()}


class ThresholdPanel(Panel):
    """``below > x`` or ``x > above``."""

    def __init__(self, monitors: Sequence[Threshold]) -> None:
        above = [HIGHEST if m.above is None else m.above for m in monitors]
        below = [LOWEST if m.below is None else m.below for m in monitors]
        self._has_below = any(m.below is not None for m in monitors)
        super().__init__(monitors, [*_metrics(monitors), *above, *(below if self._has_below else [])])

    def bind(self, entries: Tensor, holds: Tensor) -> None:
        """See `Panel`."""
        self._x, self._above, *self._below = entries.split(len(self.monitors))
        self._holds = holds

    def decide(self, present: Tensor | None) -> None:  # noqa: ARG002 - NaN is neither above nor below
        """See `Panel`."""
        torch.gt(self._x, self._above, out=self._holds)
        if self._has_below:
            self._holds.logical_or_(torch.lt(self._x, self._below[0]))

    def decide_here(self, entries: Sequence[float], present: Sequence[bool]) -> list[bool]:  # noqa: ARG002
        """See `Panel`."""
        n = len(self.monitors)
        holds = [x > above for x, above in zip(entries, entries[n : 2 * n], strict=False)]
        if self._has_below:
            holds = [held or x < below for held, x, below in zip(holds, entries, entries[2 * n :], strict=False)]
        return holds


class NonFinitePanel(Panel):
    """One of up to k metrics is not finite."""

    absent = ZERO

    def __init__(self, monitors: Sequence[NonFinite]) -> None:
        self._most = max(len(monitor.metrics or ()) for monitor in monitors)
        names = [(m.metrics or ()) + (m.metrics or ())[-1:] * (self._most - len(m.metrics or ())) for m in monitors]
        super().__init__(monitors, [name for row in names for name in row])

    def bind(self, entries: Tensor, holds: Tensor) -> None:
        """See `Panel`."""
        self._x, self._holds = entries.view(len(self.monitors), self._most), holds
        self._ones, self._none = entries.new_ones(self._most), entries.new_zeros(len(self.monitors))

    def decide(self, present: Tensor | None) -> None:  # noqa: ARG002 - 0 is finite
        """See `Panel`."""
        gap = self._x - self._x  # 0 where finite, else NaN
        torch.ne(torch.mv(gap, self._ones), self._none, out=self._holds)

    def decide_here(self, entries: Sequence[float], present: Sequence[bool]) -> list[bool]:  # noqa: ARG002
        """See `Panel`."""
        if all(map(math.isfinite, entries)):
            return [False] * len(self.monitors)
        finite = [math.isfinite(x) for x in entries]
        return [not all(finite[first : first + self._most]) for first in range(0, len(finite), self._most)]


class PlateauPanel(Panel):
    """No improvement."""

    def __init__(self, monitors: Sequence[Plateau]) -> None:
        super().__init__(monitors, [*_metrics(monitors), *(monitor.limit for monitor in monitors)])
        self._signs = [monitor.sign for monitor in monitors]

    def bind(self, entries: Tensor, holds: Tensor) -> None:
        """See `Panel`."""
        self._x, self._least = entries.split(len(self.monitors))
        self._holds = holds
        self._sign = entries.new_tensor(self._signs)
        self._best = self.state["best"] = entries.new_full((len(self.monitors),), INF)

    def decide(self, present: Tensor | None) -> None:
        """See `Panel`."""
        x = self._x * self._sign
        better = x < self._best - self._least
        torch.where(better, x, self._best, out=self._best)
        torch.logical_not(better, out=self._holds)
        if present is not None:
            self._holds.logical_and_(present)

    def decide_here(self, entries: Sequence[float], present: Sequence[bool]) -> list[bool]:
        """See `Panel`."""
        n, best, holds = len(self.monitors), self._state_here["best"], []
        for i, sign in enumerate(self._signs):
            x = entries[i] * sign
            better = x < best[i] - entries[n + i]
            if better:
                best[i] = x
            holds.append(present[i] and not better)
        return holds


class SpikePanel(Panel):
    """Far above the running mean; see `Spike` for the formulas."""

    def __init__(self, monitors: Sequence[Spike]) -> None:
        super().__init__(monitors, [*_metrics(monitors), *(monitor.limit for monitor in monitors)])
        self._spikes = list(monitors)

    def bind(self, entries: Tensor, holds: Tensor) -> None:
        """See `Panel`."""
        self._x, self._factor = entries.split(len(self.monitors))
        self._holds = holds
        self._min_steps = entries.new_tensor([monitor.min_steps for monitor in self._spikes])
        self._least_weight = entries.new_tensor([monitor.least_weight for monitor in self._spikes])
        self._one, self._none = torch.ones_like(self._min_steps), torch.zeros_like(self._min_steps)
        self.state = {name: torch.zeros_like(self._min_steps) for name in ("mean", "variance", "count")}

    def decide(self, present: Tensor | None) -> None:
        """See `Panel`."""
        mean, variance, count = self.state["mean"], self.state["variance"], self.state["count"]
        limit = torch.addcmul(mean, self._factor, variance.sqrt())
        spike = torch.gt(self._x, limit, out=self._holds).logical_and_(count >= self._min_steps)
        delta = torch.where(spike, limit, self._x).sub_(mean).nan_to_num_(0.0, 0.0, 0.0)
        count.add_(self._one if present is None else present)
        weight = torch.maximum(count.reciprocal(), self._least_weight)
        if present is not None:
            weight = torch.where(present, weight, self._none)
        shift = weight * delta
        mean.add_(shift)
        variance.addcmul_(delta, shift).mul_(self._one - weight)

    def decide_here(self, entries: Sequence[float], present: Sequence[bool]) -> list[bool]:
        """See `Panel`."""
        n, holds = len(self.monitors), []
        mean, variance, count = (self._state_here[name] for name in ("mean", "variance", "count"))
        for i, monitor in enumerate(self._spikes):
            x, limit = entries[i], mean[i] + entries[n + i] * math.sqrt(variance[i])
            spike = x > limit and count[i] >= monitor.min_steps
            holds.append(spike)
            if present[i]:
                delta = (limit if spike else x) - mean[i]
                delta = delta if math.isfinite(delta) else 0.0
                count[i] += 1
                weight = max(1 / count[i], monitor.least_weight)
                shift = weight * delta
                mean[i] += shift
                variance[i] = (variance[i] + delta * shift) * (1 - weight)
        return holds


class Plan(NamedTuple):
    """What to look at in a step that has certain values."""

    places: Tensor
    """Where the entries of all panels lie on the board, shape=(entries,), int64."""
    present: list[Tensor | None]
    """For each panel which monitors have their metric, shape=(monitors,), bool; None where all have."""
    here: list[tuple[list[int], list[bool]]]
    """The same of each panel for the host: places, and which monitors have their metric."""


class Conditions:
    """The conditions of some monitors, in their order.

    Args:
        monitors: The monitors; one may appear several times.
        limits: Further limits that are to be gathered with the values.
    """

    def __init__(self, monitors: Sequence[Monitor], limits: Sequence[Tensor] = ()) -> None:
        self._monitors = list(monitors)
        by_kind: dict[Callable[[Any], Panel], list[Monitor]] = {}
        for monitor in monitors:
            kind = _panel_of(monitor)
            if kind is not None:
                by_kind.setdefault(kind, []).append(monitor)
        self._panels = [kind(members) for kind, members in by_kind.items()]
        self._functions = [monitor for monitor in monitors if _panel_of(monitor) is None]
        entries = [entry for panel in self._panels for entry in panel.entries]
        self.metrics = [entry for entry in entries if isinstance(entry, str)]
        self.limits = [*(entry for entry in entries if isinstance(entry, Tensor)), *limits]
        self._num_further = len(limits)
        self._plans: dict[Known, Plan] = {}

    def bind(self, values: StepValues, holds: Tensor) -> None:
        """Take note of where the values lie, and of where to write.

        Args:
            values: Made for `metrics` and `limits`.
            holds: Whether each condition holds, shape=(monitors,), bool.
        """
        self._values, self._holds = values, holds
        by_panel = [*(monitor for panel in self._panels for monitor in panel.monitors), *self._functions]
        order, free = [], list(enumerate(by_panel))
        for monitor in self._monitors:
            place = next(index for index, (_, other) in enumerate(free) if other is monitor)
            order.append(free.pop(place)[0])
        in_order = order == sorted(order)
        self._order_here = None if in_order else order
        self._order = None if in_order else torch.tensor(order, dtype=torch.int64, device=holds.device)
        self._unordered = holds if in_order else torch.zeros_like(holds)
        sizes = [len(panel.entries) for panel in self._panels]
        self._entries = values.board.new_zeros(sum(sizes) + self._num_further)
        *parts, self.further = self._entries.split([*sizes, self._num_further])
        *mine, rest = self._unordered.split([*(len(p.monitors) for p in self._panels), len(self._functions)])
        for panel, entries, held in zip(self._panels, parts, mine, strict=True):
            panel.bind(entries, held)
        self._function_cells = rest.unbind()
        scratch = torch.zeros_like(rest, device="cpu")  # what acts is more than what holds
        self._cells_here, self._functions_here = scratch.unbind(), scratch.numpy().data

    def decide_here(self, known: Known) -> list[bool]:
        """Return what `decide` writes, where the host sees the step's values for nothing."""
        number_at, holds = self._values.look().__getitem__, []
        for panel, (places, present) in zip(self._panels, self._plan_for(known).here, strict=True):
            holds += panel.decide_here(list(map(number_at, places)), present)
        if self._functions:
            self._call_functions(known, self._cells_here)
            holds += map(bool, self._functions_here)
        return holds if self._order_here is None else [holds[index] for index in self._order_here]

    def decide(self, known: Known) -> None:
        """Write whether the conditions hold in a step that has the values `known`."""
        self.gather(known)
        for panel, among in zip(self._panels, self._plan_for(known).present, strict=True):
            panel.decide(among)
        if self._functions:
            self._call_functions(known, self._function_cells)
        if self._order is not None:
            torch.index_select(self._unordered, 0, self._order, out=self._holds)

    def gather(self, known: Known) -> None:
        """Bring what a step that has the values `known` is judged by side by side."""
        self._values.complete()
        torch.index_select(self._values.board, 0, self._plan_for(known).places, out=self._entries)

    def _call_functions(self, known: Known, cells: Sequence[Tensor]) -> None:
        row = self._values.row(known)
        for monitor, cell in zip(self._functions, cells, strict=True):
            assert isinstance(monitor, RowMonitor)
            if monitor.metrics is None or any(metric in row for metric in monitor.metrics):
                cell.copy_(monitor.condition(row))
            else:
                cell.zero_()

    def _plan_for(self, known: Known) -> Plan:
        plan = self._plans.get(known)
        if plan is None:
            plan = self._plans[known] = self._plan(known)
        return plan

    def _plan(self, known: Known) -> Plan:
        found, limit, device = self._values.places(known), self._values.first_limit, self._holds.device
        places: list[int] = []
        masks: list[Tensor | None] = []
        here = []
        for panel in self._panels:
            first = len(places)
            for entry in panel.entries:
                if isinstance(entry, Tensor):
                    places.append(limit)
                    limit += 1
                else:
                    places.append(found.get(entry, panel.absent) if isinstance(entry, str) else entry)
            present = [any(metric in found for metric in monitor.metrics or ()) for monitor in panel.monitors]
            masks.append(None if all(present) else torch.tensor(present, device=device))
            here.append((places[first:], present))
        places += range(limit, limit + self._num_further)
        return Plan(torch.tensor(places, dtype=torch.int64, device=device), masks, here)

    def state(self) -> dict[str, Tensor]:
        """Return what a run that goes on needs to know, by name."""
        return {f"{type(p).__name__} {name}": values for p in self._panels for name, values in p.state.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Return what a step writes."""
        return {**self.state(), "entries": self._entries, "unordered": self._unordered}


_PANELS: dict[type[Monitor], Callable[[Any], Panel]] = {
    Threshold: ThresholdPanel,
    NonFinite: NonFinitePanel,
    Plateau: PlateauPanel,
    Spike: SpikePanel,
}


def _panel_of(monitor: Monitor) -> Callable[[Any], Panel] | None:
    """Return what evaluates `monitor`; None for a function of the row, which a subclass's condition is too."""
    kinds = (kind for kind in _PANELS if isinstance(monitor, kind))
    return next((_PANELS[k] for k in kinds if type(monitor) is k or not isinstance(monitor, RowMonitor)), None)


def _metrics(monitors: Sequence[Monitor]) -> list[str]:
    return [metric for monitor in monitors for metric in (monitor.metrics or ())[:1]]
