"""Python's and NumPy's global random generators: did a step draw from them, and where."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np

from zdtrain.source.location import NOWHERE, Location, frame_kind


def host_random_state() -> tuple[Any, ...]:
    """Return the state of Python's and NumPy's global generators, comparable by equality."""
    name, keys, position, *rest = np.random.get_state(legacy=True)
    return (random.getstate(), name, bytes(np.asarray(keys).data), position, *rest)


class DrawFinder:
    """Finds the line of the user's code during which a global generator moved on."""

    def __init__(self) -> None:
        self.place: Location = NOWHERE
        self._state: tuple[Any, ...] = ()
        self._last: Location = NOWHERE

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Trace the body line by line; slow, for one step."""
        before = sys.gettrace()
        self._state = host_random_state()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:  # noqa: ARG002
        return self._line if frame_kind(frame.f_code.co_filename) == "user" else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:  # noqa: ARG002
        state = host_random_state()
        if not self.place.is_user and state != self._state:
            self.place = self._last
        self._state = state
        self._last = Location(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname)
        return self._line
