"""The conditions of all monitors that act, evaluated together: a few vector operations, however many monitors.

Constants are tensors of the dtype that they meet, because a Python number makes an operation cost three times as much.
Where the host sees the values for nothing, on a CPU, it decides by the same rules in Python numbers (see `rules.py`),
which costs less than one operation; running state stays in the same tensors.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zdtrain.monitor.base import Monitor, RowMonitor
from zdtrain.monitor.conditions import NonFinite, Plateau, Spike, Threshold
from zdtrain.monitor.numbers import values_at
from zdtrain.monitor.rules import MEMORY, Rule, kind_of, limits_of, rule_for, rules_out
from zdtrain.monitor.values import HIGHEST, LOWEST, NAN, ZERO, Known, SeenValues, StepValues
from zdtrain.ring import look_at

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

    def rules(self) -> list[Rule]:
        """Return the same conditions for the host, on a CPU, with the same running state."""
        state = {name: look_at(values) for name, values in self.state.items()}
        return [rule_for(monitor, state, place) for place, monitor in enumerate(self.monitors)]


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
        self.state = _start(Plateau, self._sign)

    def decide(self, present: Tensor | None) -> None:
        """See `Panel`."""
        x, best = self._x * self._sign, self.state["best"]
        better = x < best - self._least
        torch.where(better, x, best, out=best)
        torch.logical_not(better, out=self._holds)
        if present is not None:
            self._holds.logical_and_(present)


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
        self.state = _start(Spike, self._none)

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


def _start(kind: type[Monitor], like: Tensor) -> dict[str, Tensor]:
    return {name: torch.full_like(like, start) for name, start in MEMORY[kind].items()}


class Plan(NamedTuple):
    """What to look at in a step that has certain values."""

    places: Tensor
    """Where the entries of all panels lie on the board, shape=(entries,), int64."""
    present: list[Tensor | None]
    """For each panel which monitors have their metric, shape=(monitors,), bool; None where all have."""


class SeenRule(NamedTuple):
    """The condition of a monitor, in a step whose values the host sees."""

    place: int
    """Which condition it is, counted from 0."""
    rule: Rule
    """What decides."""
    look: Callable[[Any], Sequence[float]]
    """Takes the numbers on the board; returns those that the rule takes."""


class SeenPlan(NamedTuple):
    """What the host does in a step that has certain values."""

    rules: list[SeenRule]
    """Those that may hold."""
    remembering: list[SeenRule]
    """Those among them that have to take in every step."""
    rules_out: Callable[[Any], bool]
    """Takes the numbers on the board; returns whether one look shows that none of the others holds."""


class Conditions:
    """The conditions of some monitors, in their order.

    Args:
        monitors: The monitors; one may appear several times.
        limits: Further limits that are to be gathered with the values.
    """

    def __init__(self, monitors: Sequence[Monitor], limits: Sequence[Tensor] = ()) -> None:
        self._monitors = list(monitors)
        by_kind: dict[type[Monitor], list[Monitor]] = {}
        for monitor in monitors:
            kind = kind_of(monitor)
            if kind is not None:
                by_kind.setdefault(kind, []).append(monitor)
        self._panels = [_PANELS[kind](members) for kind, members in by_kind.items()]
        self._functions = [monitor for monitor in monitors if kind_of(monitor) is None]
        entries = [entry for panel in self._panels for entry in panel.entries]
        self.metrics = [entry for entry in entries if isinstance(entry, str)]
        self.limits = [*(entry for entry in entries if isinstance(entry, Tensor)), *limits]
        self._num_further = len(limits)
        self._plans: dict[Known, Plan] = {}
        self._seen: Any = None  # the numbers on the board, where the host sees them
        self._rules: list[Rule] = []  # of each monitor, for the host
        self._plans_here: dict[Known, SeenPlan] = {}

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
        self._order = None if in_order else torch.tensor(order, dtype=torch.int64, device=holds.device)
        self._unordered = holds if in_order else torch.zeros_like(holds)
        sizes = [len(panel.entries) for panel in self._panels]
        self._entries = values.board.new_zeros(sum(sizes) + self._num_further)
        *parts, self.further = self._entries.split([*sizes, self._num_further])
        *mine, rest = self._unordered.split([*(len(p.monitors) for p in self._panels), len(self._functions)])
        for panel, entries, held in zip(self._panels, parts, mine, strict=True):
            panel.bind(entries, held)
        self._function_cells = rest.unbind()
        if isinstance(values, SeenValues):
            self._seen = values.seen
            scratch = torch.zeros_like(rest)  # what acts is more than what holds
            self._function_cells = scratch.unbind()
            rules = [rule for panel in self._panels for rule in panel.rules()]
            rules += [partial(look_at(scratch).__getitem__, index) for index in range(len(self._functions))]
            self._rules = [rules[place] for place in order]

    def decide_here(self, known: Known) -> list[bool]:
        """Return what `decide` writes, where the host sees the step's values for nothing."""
        plan = self._plans_here.get(known)
        if plan is None:
            plan = self._plans_here[known] = self._plan_here(known)
        if self._functions:
            self._call_functions(known)
        seen, holds = self._seen, [False] * len(self._monitors)
        for place, rule, look in plan.remembering if plan.rules_out(seen) else plan.rules:
            holds[place] = rule(*look(seen))
        return holds

    def _plan_here(self, known: Known) -> SeenPlan:
        found, first_limit = self._values.places(known), self._values.first_limit
        limits = {id(limit): place for place, limit in enumerate(self.limits, first_limit)}
        rules, remembering, others = [], [], []
        for index, (monitor, rule) in enumerate(zip(self._monitors, self._rules, strict=True)):
            places = [found[metric] for metric in monitor.metrics or () if metric in found]
            bounds = [limits[id(limit)] for limit in limits_of(monitor)]
            is_function = kind_of(monitor) is None
            if places or is_function:
                rules.append(SeenRule(index, rule, values_at([] if is_function else places + bounds)))
                if isinstance(monitor, Threshold | NonFinite) and not is_function:
                    others.append((monitor, places, bounds))
                else:
                    remembering.append(rules[-1])
        return SeenPlan(rules, remembering, rules_out(others))

    def decide(self, known: Known) -> None:
        """Write whether the conditions hold in a step that has the values `known`."""
        self.gather(known)
        for panel, among in zip(self._panels, self._plan_for(known).present, strict=True):
            panel.decide(among)
        if self._functions:
            self._call_functions(known)
        if self._order is not None:
            torch.index_select(self._unordered, 0, self._order, out=self._holds)

    def gather(self, known: Known) -> None:
        """Bring what a step that has the values `known` is judged by side by side."""
        torch.index_select(self._values.board, 0, self._plan_for(known).places, out=self._entries)

    def _call_functions(self, known: Known) -> None:
        row = self._values.row(known)
        for monitor, cell in zip(self._functions, self._function_cells, strict=True):
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
        for panel in self._panels:
            for entry in panel.entries:
                if isinstance(entry, Tensor):
                    places.append(limit)
                    limit += 1
                else:
                    places.append(found.get(entry, panel.absent) if isinstance(entry, str) else entry)
            present = [any(metric in found for metric in monitor.metrics or ()) for monitor in panel.monitors]
            masks.append(None if all(present) else torch.tensor(present, device=device))
        places += range(limit, limit + self._num_further)
        return Plan(torch.tensor(places, dtype=torch.int64, device=device), masks)

    def state(self) -> dict[str, Tensor]:
        """Return what a run that goes on needs to know, by name."""
        return {f"{type(p).__name__} {name}": values for p in self._panels for name, values in p.state.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Return what a step writes."""
        return {**self.state(), "entries": self._entries, "unordered": self._unordered}


_PANELS: Mapping[type[Monitor], Callable[[Any], Panel]] = {
    Threshold: ThresholdPanel,
    NonFinite: NonFinitePanel,
    Plateau: PlateauPanel,
    Spike: SpikePanel,
}


def _metrics(monitors: Sequence[Monitor]) -> list[str]:
    return [metric for monitor in monitors for metric in (monitor.metrics or ())[:1]]
