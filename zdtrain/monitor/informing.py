"""Monitors that only inform: what the host keeps of each, and what the rows of many steps say about it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zdtrain.consumers.steps import Stamp
from zdtrain.drain import Value
from zdtrain.monitor.base import Monitor, RowMonitor
from zdtrain.monitor.events import Row
from zdtrain.monitor.gate import HostGate
from zdtrain.monitor.rules import MEMORY, Rule, kind_of, limits_of, never_holds, rule_for


class Columns(NamedTuple):
    """Where a monitor looks in rows."""

    names: list[str]
    """Names of the values that it looks at."""
    places: list[int]
    """Their columns."""
    is_whole: bool
    """Whether every row holds all of them."""

    def there(self, stamp: Stamp) -> list[tuple[str, int]]:
        """Return names and columns of the values that one row holds."""
        fresh = stamp.fresh
        pairs = zip(self.names, self.places, strict=True)
        return [(name, place) for name, place in pairs if place >= len(fresh) or fresh[place]]


class Watched:
    """A monitor that informs, and what the host keeps of it.

    A condition without a memory is evaluated on the device, for all rows at once; where the host sees the rows for
    nothing, and where there is a memory, the host follows the rows by the rule for numbers.

    Args:
        monitor: The monitor.
        on_host: The host sees the rows for nothing.
    """

    def __init__(self, monitor: Monitor, *, on_host: bool) -> None:
        self.monitor = monitor
        self.gate = HostGate(monitor.timing)
        self._on_host = on_host
        self._memory: dict[str, list[float]] = {}
        self._rule: Rule | None = None
        kind = kind_of(monitor)
        if kind is not None and (on_host or not isinstance(monitor, RowMonitor)):
            self._memory = {name: [start] for name, start in MEMORY[kind].items()}
            self._rule = rule_for(monitor, self._memory)
        self._limits = limits_of(monitor)

    @property
    def asks_for_rows(self) -> bool:
        """Whether `ask` looks at rows on the device."""
        return self._rule is None

    def ask(self, rows: Tensor | None, columns: Columns, stamps: Sequence[Stamp]) -> list[Tensor]:
        """Return what the host needs of the device, vectors: whether the condition holds by row, or its limits now.

        Args:
            rows: The rows, shape=(rows, columns), where it asks for them.
            columns: Where it looks.
            stamps: What the host knows of the rows.
        """
        if self._rule is not None:
            return [limit.reshape(1) for limit in self._limits]
        assert rows is not None
        assert isinstance(self.monitor, RowMonitor)
        return [_holds(self.monitor, rows, columns, stamps)]

    def follow(
        self, answers: Sequence[Value], table: Sequence[Sequence[Value]], columns: Columns, stamps: Sequence[Stamp]
    ) -> list[int]:
        """Take in rows; return the indices of those to act at.

        Args:
            answers: What `ask` returned, maybe for some more rows.
            table: The columns of the rows.
            columns: Where it looks.
            stamps: What the host knows of the rows.
        """
        if self._rule is None:
            holds = answers[: len(stamps)]
        elif not columns.places:
            holds = [False] * len(stamps)
        elif not columns.is_whole:
            holds = _follow_some(self._rule, answers, table, columns, stamps)
        else:
            looked_at = [table[place] for place in columns.places]
            if never_holds(self.monitor, looked_at, answers):
                holds = [False] * len(stamps)
            else:
                rule = self._rule
                holds = [rule(*values, *answers) for values in zip(*looked_at, strict=True)]
        return self.gate.acting(holds, [stamp.step for stamp in stamps])

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept."""
        return {"gate": self.gate.state_dict(), "memory": {name: value for name, (value,) in self._memory.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what was kept."""
        self.gate.load_state_dict(state["gate"])
        for name, kept in self._memory.items():
            kept[0] = state["memory"][name]

    def copy(self) -> "Watched":
        """Return one that goes its own way from here."""
        other = Watched(self.monitor, on_host=self._on_host)
        other.load_state_dict(self.state_dict())
        return other


def _holds(monitor: RowMonitor, rows: Tensor, columns: Columns, stamps: Sequence[Stamp]) -> Tensor:
    """Return whether the condition of `monitor` holds in each row, shape=(rows,), bool."""
    if monitor.elementwise and columns.is_whole and columns.places:
        return monitor.condition(Row(zip(columns.names, rows[:, columns.places].unbind(1), strict=True)))
    never, holds = torch.zeros((), dtype=torch.bool, device=rows.device), []
    cells = {place: rows[:, place].unbind() for place in columns.places}
    for index, stamp in enumerate(stamps):
        row = Row((name, cells[place][index]) for name, place in columns.there(stamp))
        holds.append(monitor.condition(row) if row else never)
    return torch.stack(holds)


def _follow_some(
    rule: Rule,
    limits: Sequence[Value],
    table: Sequence[Sequence[Value]],
    columns: Columns,
    stamps: Sequence[Stamp],
) -> list[bool]:
    """Let `rule` take in the rows that hold what it looks at; return whether its condition holds in each."""
    holds = []
    for index, stamp in enumerate(stamps):
        values = [table[place][index] for _, place in columns.there(stamp)]
        holds.append(bool(values) and rule(*values, *limits))
    return holds
