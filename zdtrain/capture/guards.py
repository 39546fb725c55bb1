"""Checks that nothing is another than it was, cheap enough to be made before every step."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from operator import attrgetter
from types import FunctionType
from typing import Any

from zdtrain.capture.frozen import frozen, is_bare, is_settled
from zdtrain.source.location import code_kind

GONE = object()  # in the place of what nobody holds any longer
Get = Callable[[str, Any], Any]
_PARTS = attrgetter("__code__", "__defaults__", "__kwdefaults__")


class Guards:
    """Remembers who holds which object, and tells whether all of them still do.

    An object that is settled, such as a number or a module, is compared by its identity, which takes a few hundredths
    of a microsecond. All else is read again. Where another object has taken the place, its value decides.
    """

    def __init__(self) -> None:
        self._held: list[tuple[Get, str, Any]] = []
        self._meanings: list[Callable[[Any], Any]] = []
        self._whole: list[Mapping[str, Any]] = []
        self._copies: list[Mapping[str, Any]] = []
        self._reads: list[tuple[Callable[[], Any], Any]] = []

    def hold(self, holder: Mapping[str, Any], name: str, meaning: Callable[[Any], Any] = frozen) -> None:
        """Remember what `holder` holds under `name`, if anything; only its identity is looked at later.

        Args:
            holder: A dictionary, or what ``vars`` returns.
            name: A name in it.
            meaning: Returns what of the object counts, where another one has taken its place.
        """
        self._held.append((holder.get, name, holder.get(name, GONE)))
        self._meanings.append(meaning)

    def hold_all(self, holders: Iterable[Mapping[str, Any]]) -> None:
        """Remember all that dictionaries hold, for objects that are equal to nothing but themselves."""
        self._whole += holders
        self._copies = [dict(holder) for holder in self._whole]

    def keep(self, holder: Mapping[str, Any], name: str, read: Callable[[], Any]) -> None:
        """Remember what `holder` holds under `name`; what is not settled is read again each time."""
        value = holder.get(name, GONE)
        if isinstance(value, FunctionType) and is_bare(value):
            self.hold(holder, name, meaning=id)
            if code_kind(value.__code__) == "user":
                self.read(partial(_PARTS, value))
        elif value is GONE or is_settled(value):
            self.hold(holder, name)
        else:
            self.read(read)

    def read(self, read: Callable[[], Any]) -> None:
        """Remember what `read` returns, comparable by equality."""
        self._reads.append((read, read()))

    def unchanged(self) -> bool:
        """Return whether all is as it was."""
        for get, name, value in self._held:
            if get(name, GONE) is not value:
                if not self._means_the_same():
                    return False
                break
        if self._whole != self._copies:
            return False
        for read, seen in self._reads:  # noqa: SIM110 - a third faster than `all`
            if read() != seen:
                return False
        return True

    def _means_the_same(self) -> bool:
        """Return whether objects that took the place of others mean the same; remember them in that case."""
        for index, (get, name, value) in enumerate(self._held):
            now, meaning = get(name, GONE), self._meanings[index]
            if now is not value:
                if meaning(now) != meaning(value):
                    return False
                self._held[index] = (get, name, now)
        return True


class Numbers:
    """Gives hashable states numbers, so that keys stay short.

    Args:
        cap: States that are kept; where there are more, old ones get new numbers.
    """

    def __init__(self, cap: int) -> None:
        self.count = 0
        """How many were given."""
        self._cap = cap
        self._known: dict[Hashable, int] = {}

    def of(self, state: Hashable) -> int:
        """Return the number that stands for `state`, and for no other one."""
        number = self._known.get(state)
        if number is None:
            if len(self._known) == self._cap:
                self._known.clear()  # costs a capture if an old one comes back
            self.count += 1
            number = self._known[state] = self.count
        return number

    def state_of(self, number: Hashable) -> Hashable | None:
        """Return the state that a number stands for, if it is kept."""
        return next((state for state, given in self._known.items() if given == number), None)
