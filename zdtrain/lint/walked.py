"""What walking a function leaves behind: hits of rules, calls to follow, what it returns."""

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zdtrain.lint.finding import Edit
from zdtrain.lint.heat import Heat
from zdtrain.lint.kinds import Kinds
from zdtrain.lint.source import Function

if TYPE_CHECKING:
    from zdtrain.lint.rules.base import Rule


class Gate(enum.Enum):
    """What stands between a line and the function or loop it is in."""

    OPEN = enum.auto()
    INTERVAL = enum.auto()
    EVALUATION = enum.auto()
    LEAVING = enum.auto()


@dataclass(frozen=True, slots=True)
class Place:
    """How often a line runs, relative to its function."""

    loop: Heat = Heat.COLD
    """LOOP or EVALUATION inside such a loop; COLD: as often as the function."""
    gate: Gate = Gate.OPEN

    def heat(self, function: Heat) -> Heat:
        """How often the line runs when its function runs as often as `function`."""
        if self.gate is Gate.LEAVING:
            return Heat.RARE
        if self.gate is Gate.EVALUATION:
            return Heat.EVALUATION
        if self.loop is Heat.COLD or function is Heat.EVALUATION:
            found = function
        elif self.loop is Heat.LOOP:
            found = max(function, Heat.LOOP)
        else:
            found = self.loop
        return Heat.GATED if self.gate is Gate.INTERVAL and found.hot else found


@dataclass(frozen=True, slots=True)
class Hit:
    """What a rule saw, before it is known how often it runs."""

    rule: "Rule"
    line: int
    column: int
    """In UTF-8 bytes from 0, as ``ast`` counts."""
    end_line: int
    message: str
    place: Place
    edits: tuple[Edit, ...] = ()


@dataclass(frozen=True, slots=True)
class CallEdge:
    """A call to a function of this file, or by dotted name to one of another."""

    callee: Function | str
    place: Place


@dataclass(slots=True)
class Walked:
    """What walking a function gave."""

    hits: list[Hit] = field(default_factory=list)
    calls: list[CallEdge] = field(default_factory=list)
    returns: Kinds | None = None
