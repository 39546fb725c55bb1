"""Stand-ins for the host's counters that notice what a step does with them: conditions are served, the rest is named.

While a step is watched it gets integers that tell of their use. C code may read an integer without its telling, so a
step is recorded with objects that are no integers to C: what would read one past its methods fails, and the step stays
eager.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType
from typing import Any

from torch.overrides import TorchFunctionMode

from zdtrain.capture.conditions import ARITHMETIC, MAX_CONDITIONS, RELATIONS, Condition, Conditions, Number
from zdtrain.capture.watch import reason_at
from zdtrain.errors import FallbackReason, ZDTrainError
from zdtrain.source.location import Location, locate

CODES = {"batch_idx": "batch-idx", "global_step": "trainer-state"}
REMEDIES = {"batch_idx": "", "global_step": "; trainer.scalars.global_step is a tensor that a replay sees"}
_COMPUTES = {
    "add": "{} + {}",
    "radd": "{} + {}",
    "sub": "{} - {}",
    "rsub": "{1} - {0}",
    "mul": "{} * {}",
    "rmul": "{} * {}",
    "mod": "{} % {}",
    "floordiv": "{} // {}",
}
_COMPARES = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_READS = (
    *("truediv", "rtruediv", "rfloordiv", "rmod", "divmod", "rdivmod", "pow", "rpow", "and", "rand", "or", "ror"),
    *("xor", "rxor", "lshift", "rlshift", "rshift", "rrshift", "neg", "pos", "abs", "invert", "round", "trunc"),
    *("floor", "ceil", "index", "int", "float", "hash", "str", "repr", "format"),
)
_METHODS = ("as_integer_ratio", "bit_count", "bit_length", "conjugate", "to_bytes")
_PROPERTIES = ("real", "imag", "numerator", "denominator")
_DEPTH = 4


class CounterReadError(ZDTrainError):
    """A step that is being recorded reads a counter in a way that a replay would not see.

    Args:
        reason: How, and where.
    """

    def __init__(self, reason: FallbackReason) -> None:
        super().__init__(reason.message)
        self.reason = reason


class Counters:
    """Hands out the counters of one step, and hears what it asks of them.

    Args:
        values: The counters as the step begins; one that is not there does not change in it.
        boundary: Code of the function that drives the step.
        known: Where the step is recorded, the conditions in its key: anything else is an error.
    """

    def __init__(self, values: Mapping[str, int], boundary: CodeType | None, known: Conditions | None = None) -> None:
        self.values = values
        self.conditions: dict[Condition, Location] = {}
        self.reasons: list[FallbackReason] = []
        self._boundary = boundary
        self._known = known
        self._listens = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear of the uses in the body; later ones are nobody's business."""
        self._listens = True
        try:
            yield
        finally:
            self._listens = False

    def stand_in(self, name: str, value: int) -> Any:
        """Return what the step gets for a counter that is `value` now."""
        number, passed = Number(name), value - self.values.get(name, value)
        return self._made(value, number.after("{} + {}", passed) if passed else number)

    def read(self, name: str, value: int) -> Any:
        """Return what whoever reads a counter now gets: a stand-in, if it is code of the user."""
        return value if self._place() is None else self.stand_in(name, value)

    def compute(self, number: Number, operation: str, operand: Any, value: Any) -> Any:
        """Return the result of an operation, which tells of its use in turn."""
        if self._place() is None:
            return value
        if type(operand) is not int and type(operand) is not bool:
            self.refuse(number)
            return value
        return self._made(value, number.after(operation, int(operand)))

    def ask(self, number: Number, relation: str, operand: Any) -> None:
        """Hear of a comparison."""
        place = self._place()
        if place is None:
            return
        condition = Condition(number, relation, operand) if type(operand) in (int, float, bool) else None
        if condition is None or (self._known is not None and condition not in self._known):
            self.refuse(number)
        else:
            self.conditions.setdefault(condition, place)

    def refuse(self, number: Number) -> None:
        """Hear of a use that no replay can repeat.

        Raises:
            CounterReadError: The step is being recorded.
        """
        place = self._place()
        if place is None:
            return
        self.reasons.append(self.reason(number, place))
        self.check()

    def check(self) -> None:
        """Raise where a step that is recorded used a counter, though it may have caught the error that told so.

        Raises:
            CounterReadError: See there.
        """
        if self._known is not None and self.reasons:
            raise CounterReadError(self.reasons[0])

    def too_many(self, conditions: Conditions) -> FallbackReason | None:
        """Return the reason for not serving the conditions of this step, if they are too many."""
        new = [condition for condition in self.conditions if condition not in conditions]
        if len(conditions) + len(new) <= MAX_CONDITIONS:
            return None
        place = self.conditions[new[-1]]
        what = f"steps ask over {MAX_CONDITIONS} different things about counters, such as {new[-1]}"
        return reason_at(place, CODES[new[-1].number.counter], what)

    @staticmethod
    def reason(number: Number, place: Location) -> FallbackReason:
        """Return the reason for a use that is no condition."""
        what = (
            f"the step uses {number} as a number, which a replay does not see; comparisons of {number.counter} with "
            f"constants, such as {number.counter} % 5 == 0, are fine{REMEDIES[number.counter]}"
        )
        return reason_at(place, CODES[number.counter], what)

    def _made(self, value: int, number: Number) -> Any:
        return NotedInt(value, number, self) if self._known is None else GuardedInt(value, number, self)

    def _place(self) -> Location | None:
        """Return the line of the user that is running; None where a library runs on its own, or the step is over."""
        place = locate(self._boundary)[0] if self._listens else None
        return place if place is not None and place.is_user else None


class NotedInt(int):
    """A counter of a watched step; equal to the plain integer in every way.

    Args:
        value: The integer.
        number: What it is.
        counters: Whom to tell of its use.
    """

    number: Number
    counters: Counters

    def __new__(cls, value: int, number: Number, counters: Counters) -> "NotedInt":
        """Make one."""
        made = super().__new__(cls, value)
        made.number, made.counters = number, counters
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.counters.refuse(self.number)
        return int, (plain(self),)


class GuardedInt:
    """A counter of a step that is recorded: an integer to Python, but none to C, which has to call its methods.

    Args:
        value: The integer.
        number: What it is.
        counters: Whom to tell of its use.
    """

    __class__ = property(lambda _: int)  # what `isinstance` looks at

    def __init__(self, value: int, number: Number, counters: Counters) -> None:
        self._value = value
        self.number = number
        self.counters = counters

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.counters.refuse(self.number)
        return int, (plain(self),)


def is_counter(value: Any) -> bool:
    """Return whether `value` stands for a counter."""
    return type(value) in (NotedInt, GuardedInt)


def plain(value: Any) -> Any:
    """Return the integer that a counter stands for, and anything else as it is."""
    if type(value) is GuardedInt:
        return value._value
    return int.__int__(value) if type(value) is NotedInt else value


def counters_in(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yield the stand-ins for counters among arguments."""
    if is_counter(value):
        yield value
    elif depth < _DEPTH and isinstance(value, tuple | list | dict | slice):
        if isinstance(value, slice):
            value = (value.start, value.stop, value.step)
        for item in value.values() if isinstance(value, dict) else value:
            yield from counters_in(item, depth + 1)


class CounterArguments(TorchFunctionMode):
    """Tells of counters that the body gives to torch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for counter in counters_in((args, kwargs or {})):
            counter.counters.refuse(counter.number)
        return func(*args, **(kwargs or {}))


def _computes(operation: str) -> Callable[..., Any]:
    def compute(self: Any, operand: Any) -> Any:
        value = ARITHMETIC[operation](plain(self), plain(operand))
        return self.counters.compute(self.number, operation, operand, value)

    return compute


def _compares(relation: str) -> Callable[..., Any]:
    def compare(self: Any, operand: Any) -> Any:
        self.counters.ask(self.number, relation, operand)
        return RELATIONS[relation](plain(self), plain(operand))

    return compare


def _reads(name: str) -> Callable[..., Any]:
    method = getattr(int, name)

    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.counters.refuse(self.number)
        return method(plain(self), *map(plain, args), **kwargs)

    return read


def _truth(self: Any) -> bool:
    self.counters.ask(self.number, "!=", 0)
    return bool(plain(self) != 0)


def _property(name: str) -> property:
    def read(self: Any) -> Any:
        self.counters.refuse(self.number)
        return getattr(plain(self), name)

    return property(read)


for _kind in (NotedInt, GuardedInt):
    for _name, _operation in _COMPUTES.items():
        setattr(_kind, f"__{_name}__", _computes(_operation))
    for _name, _relation in _COMPARES.items():
        setattr(_kind, f"__{_name}__", _compares(_relation))
    for _name in (*(f"__{name}__" for name in _READS), *_METHODS):
        setattr(_kind, _name, _reads(_name))
    for _name in _PROPERTIES:
        setattr(_kind, _name, _property(_name))
    setattr(_kind, "__bool__", _truth)  # noqa: B010 - as above
