"""What steps ask of the host's counters, such as ``batch_idx % 5 == 0``: part of the key by the answer."""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MAX_CONDITIONS = 32  # each is evaluated before every step
ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "{} + {}": operator.add,
    "{} - {}": operator.sub,
    "{1} - {0}": lambda number, operand: operand - number,
    "{} * {}": operator.mul,
    "{} % {}": operator.mod,
    "{} // {}": operator.floordiv,
}
"""Operations with an integer that lead from one number to the next, by how they are written."""
RELATIONS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True, slots=True)
class Number:
    """An integer that is computed from a counter."""

    counter: str
    """``"batch_idx"``, or ``"global_step"`` as it is when the step begins."""
    operations: tuple[tuple[str, int], ...] = ()
    """Key of `ARITHMETIC` and operand, one after another."""

    def after(self, operation: str, operand: int) -> "Number":
        """Return what an operation makes of it."""
        return Number(self.counter, (*self.operations, (operation, operand)))

    def value(self, counters: Mapping[str, int]) -> int:
        """Return what it is for these counters."""
        value = counters[self.counter]
        for operation, operand in self.operations:
            value = ARITHMETIC[operation](value, operand)
        return value

    def __str__(self) -> str:
        text = self.counter
        for index, (operation, operand) in enumerate(self.operations):
            text = operation.format(f"({text})" if index else text, operand)
        return text


@dataclass(frozen=True, slots=True)
class Condition:
    """A number compared with a constant."""

    number: Number
    relation: str
    """A key of `RELATIONS`."""
    operand: float

    def holds(self, counters: Mapping[str, int]) -> bool:
        """Return whether it is true for these counters."""
        return RELATIONS[self.relation](self.number.value(counters), self.operand)

    def __str__(self) -> str:
        return f"{self.number} {self.relation} {self.operand}"


class Conditions:
    """The conditions that watched steps met; all of them are looked at before every step."""

    def __init__(self) -> None:
        self._known: dict[Condition, None] = {}

    def __contains__(self, condition: Condition) -> bool:
        return condition in self._known

    def __len__(self) -> int:
        return len(self._known)

    def learn(self, found: Iterable[Condition]) -> bool:
        """Take in what a step met; return whether anything of it is new."""
        before = len(self._known)
        self._known.update(dict.fromkeys(found))
        return len(self._known) > before

    def outcomes(self, counters: Mapping[str, int]) -> tuple[bool, ...]:
        """Return which of them are true for a step that begins with these counters."""
        return tuple([condition.holds(counters) for condition in self._known])

    def true(self, outcomes: tuple[bool, ...]) -> Iterator[Condition]:
        """Yield those that are true."""
        return (condition for condition, outcome in zip(self._known, outcomes, strict=False) if outcome)
