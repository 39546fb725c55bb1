"""What a program holds by value of its module, as one number that is part of the key."""

from collections.abc import Callable, Hashable
from typing import Any

from lightning.pytorch import LightningModule

from zdtrain.step.key import fingerprint, python_state
from zdtrain.step.observe import attribute_reason
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
        self._values: dict[Any, Hashable] = {}

    def current(self) -> int:
        """Return the number that stands for the module as it is."""
        interruptions = self._interruptions()
        if interruptions != self._seen or self._every_step:
            self._seen = interruptions
            number = self._session.number_of(fingerprint(self._module, self._session.attributes))
            if number != self._number and self._every_step:
                self._name_changes()
            self._number = number
        return self._number

    def look_again(self) -> None:
        """Take nothing for granted when asked for the next time."""
        self._seen = -1

    def _name_changes(self) -> None:
        """Name the attributes that change between steps, once it is clear that they go on doing so."""
        before, self._values = self._values, python_state(self._module, self._session.attributes)
        if self._session.n_fingerprints > MANY_CHANGES:
            for (path, name), value in self._values.items():
                if before.get((path, name), value) != value:
                    self._session.note(attribute_reason(self._module, path, name, when="between steps"))
