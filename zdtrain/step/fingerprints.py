"""What a program holds by value of its module, as one number that is part of the key."""

from collections.abc import Callable, Hashable
from typing import Any

from lightning.pytorch import LightningModule

from zdtrain.errors import FallbackReason
from zdtrain.step.key import fingerprint, python_state
from zdtrain.step.observe import attribute_reason
from zdtrain.step.obstacles import module_obstacles
from zdtrain.step.session import CaptureSession

MANY_CHANGES = 16


class Fingerprints:
    """Looks at the module where user code may have changed it, and names what goes on changing.

    Args:
        module: The module.
        session: Knows which attributes steps read, and numbers fingerprints.
        every_step: User code runs between two steps.
        interruptions: Counts what may run such code at other times.
    """

    def __init__(
        self,
        module: LightningModule,
        session: CaptureSession,
        *,
        every_step: bool,
        interruptions: Callable[[], int] = lambda: 0,
    ) -> None:
        self._module = module
        self._session = session
        self._every_step = every_step
        self._interruptions = interruptions
        self._seen = -1
        self._number = 0
        self._inside: tuple[Hashable, ...] = ()
        self._outside: tuple[Hashable, ...] = ()
        self._values: dict[Any, Hashable] = {}
        self.obstacles: tuple[FallbackReason, ...] = ()  # of the module as it was when asked for `current`

    def current(self) -> int:
        """Return the number that stands for the module as it is."""
        interruptions = self._interruptions()
        outside = self._session.reach.values()
        if interruptions != self._seen or self._every_step:
            self._seen = interruptions
            inside = fingerprint(self._module, self._session.attributes)
            if inside != self._inside:
                self._inside = inside
                self.obstacles = tuple(module_obstacles(self._module))
        elif outside == self._outside:
            return self._number
        number = self._session.number_of((self._inside, outside))
        if number != self._number:
            self._name_changes(outside)
        self._number, self._outside = number, outside
        return number

    def look_again(self) -> None:
        """Take nothing for granted when asked for the next time."""
        self._seen = -1

    def _name_changes(self, outside: tuple[Hashable, ...]) -> None:
        """Name what changes between steps, once it is clear that it goes on doing so."""
        session = self._session
        before, self._values = self._values, python_state(self._module, session.attributes)
        if session.n_fingerprints > MANY_CHANGES:
            for reason in session.reach.changes(self._outside, outside):
                session.note(reason)
            for (path, name), value in self._values.items():
                if before.get((path, name), value) != value:
                    session.note(attribute_reason(self._module, path, name, when="between steps"))
