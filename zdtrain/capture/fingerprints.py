"""What a program holds by value of the host, as one number that is part of the key."""

from collections.abc import Callable, Hashable
from typing import Any

from lightning.pytorch import LightningModule

from zdtrain.capture.guards import Guards, Numbers
from zdtrain.capture.key import torch_modes
from zdtrain.capture.modules import fingerprint, guard_modules, python_state
from zdtrain.capture.observe import attribute_reason
from zdtrain.capture.obstacles import module_obstacles
from zdtrain.capture.session import CaptureSession
from zdtrain.errors import FallbackReason

MANY_CHANGES = 16


class Fingerprint:
    """A number for a state of the host, looked at in full only where guards say that it may be another.

    Args:
        numbers: Gives states their numbers.
        look: Returns the state.
        guard: Lets guards look at it.
    """

    def __init__(self, numbers: Numbers, look: Callable[[], Hashable], guard: Callable[[Guards], None]) -> None:
        self._numbers = numbers
        self._look = look
        self._guard = guard
        self._guards: Guards | None = None
        self._number = 0

    def current(self) -> int:
        """Return the number that stands for the state as it is."""
        guards = self._guards
        if guards is not None and guards.unchanged():
            return self._number
        before, self._number = self._number, self._numbers.of(self._look())
        self._guards = None
        if self._number == before:  # guards take a few looks' time to set up, and have to last for some steps
            self._guards = Guards()
            self._guard(self._guards)
        return self._number

    def look_again(self) -> None:
        """Take nothing for granted when asked for the next time."""
        self._guards = None


class Fingerprints(Fingerprint):
    """The state of the module and of what steps read past it; names what goes on changing.

    Args:
        module: The module.
        session: Knows what steps read, and numbers fingerprints.
    """

    def __init__(self, module: LightningModule, session: CaptureSession) -> None:
        super().__init__(session.fingerprints, self._look_at_all, self._guard_all)
        self._module = module
        self._session = session
        self._inside: tuple[Hashable, ...] = ()
        self._outside: tuple[Hashable, ...] = ()
        self._values: dict[Any, Hashable] = {}
        self.obstacles: tuple[FallbackReason, ...] = ()  # of the module as it was when asked for `current`

    def _look_at_all(self) -> Hashable:
        session = self._session
        inside, outside = fingerprint(self._module, session.attributes), session.reach.values()
        self.obstacles = tuple(module_obstacles(self._module))
        if inside != self._inside or outside != self._outside:
            self._name_changes(outside)
        self._inside, self._outside = inside, outside
        return (inside, outside, torch_modes())

    def _guard_all(self, guards: Guards) -> None:
        guard_modules(guards, self._module, self._session.attributes)
        guards.hold(vars(self._module), "log", meaning=id)  # Lightning's own, or an obstacle
        self._session.reach.guard(guards)
        guards.read(torch_modes)

    def _name_changes(self, outside: tuple[Hashable, ...]) -> None:
        """Name what changes between steps, once it is clear that it goes on doing so."""
        session = self._session
        before, self._values = self._values, python_state(self._module, session.attributes)
        if session.fingerprints.count > MANY_CHANGES:
            for reason in session.reach.changes(self._outside, outside):
                session.note(reason)
            for (path, name), value in self._values.items():
                if before.get((path, name), value) != value:
                    session.note(attribute_reason(self._module, path, name, when="between steps"))
