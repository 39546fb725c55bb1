"""State that a step has no business with, such as Python's and NumPy's random generators: which line changed it."""

import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
from lightning.pytorch import Trainer
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zdtrain.capture.optimizers import options_of, schedule_state
from zdtrain.capture.watch import reason_at
from zdtrain.errors import FallbackReason
from zdtrain.source.location import NOWHERE, Location, code_kind


def host_random_state() -> tuple[Any, ...]:
    """Return the state of Python's and NumPy's global generators, comparable by equality."""
    name, keys, position, *rest = np.random.get_state(legacy=True)
    return (random.getstate(), name, bytes(np.asarray(keys).data), position, *rest)


# What a replay would not change, by the code of the reason; the first that is found stands for those that it implies.
CHANGES = {
    "host-randomness": "the step draws from Python's or NumPy's random generator; draw from torch's",
    "scheduler-by-hand": (
        "the step moves a learning-rate scheduler on, which a replay would not: return it from configure_optimizers, "
        "or step it in a hook around the step"
    ),
    "lr-replaced": (
        "the step sets an option of an optimizer's param_groups, which a replay would not: use a learning-rate "
        "scheduler, or set it in a hook around the step"
    ),
}


class HostLooks:
    """Looks at what a replay would not change, by the code of the reason.

    Args:
        optimizers: The optimizers.
        schedulers: Learning-rate schedulers.
    """

    def __init__(self, optimizers: Sequence[Optimizer] = (), schedulers: Sequence[Any] = ()) -> None:
        self._looks: dict[str, Callable[[], Any]] = {
            "host-randomness": host_random_state,
            "scheduler-by-hand": lambda: [schedule_state(scheduler) for scheduler in schedulers],
            "lr-replaced": lambda: [options_of(optimizer) for optimizer in optimizers],
        }

    def states(self) -> dict[str, Any]:
        """Return all of it, each comparable by equality."""
        return {code: look() for code, look in self._looks.items()}

    def changes(self, before: Mapping[str, Any]) -> set[str]:
        """Return what is different from `before`."""
        return {code for code, state in self.states().items() if state != before[code]}


def looks_of(trainer: Trainer, optimizers: Sequence[Optimizer]) -> HostLooks:
    """Return looks at optimizers and at all schedulers that Lightning or an attribute of a module holds."""
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    own = [value for part in trainer.lightning_module.modules() for value in vars(part).values()]
    schedulers += [value for value in own if isinstance(value, LRScheduler)]
    return HostLooks(optimizers, schedulers)


def change_reasons(codes: Collection[str], places: Mapping[str, Location]) -> Iterator[FallbackReason]:
    """Yield the reasons for changes, at the lines where they are known."""
    for code, what in CHANGES.items():
        if code in codes and not (code == "lr-replaced" and "scheduler-by-hand" in codes):
            yield reason_at(places.get(code, NOWHERE), code, what)


class ChangeFinder:
    """Finds the lines of the user's code that change what is looked at.

    Args:
        looks: What to look at.
    """

    def __init__(self, looks: HostLooks) -> None:
        self.places: dict[str, Location] = {}  # the first change of each
        self._looks = looks
        self._states: dict[str, Any] = {}
        self._last: Location = NOWHERE

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Trace the body line by line; slow, for one step."""
        before = sys.gettrace()
        self._states = self._looks.states()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:  # noqa: ARG002
        return self._line if code_kind(frame.f_code) == "user" else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:  # noqa: ARG002
        for code in self._looks.changes(self._states):
            self.places.setdefault(code, self._last)
        self._states = self._looks.states()
        caller = frame.f_back
        if event == "return" and caller is not None and code_kind(caller.f_code) == "user":
            frame = caller  # whose line goes on without an event of its own
        self._last = Location(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname)
        return self._line
