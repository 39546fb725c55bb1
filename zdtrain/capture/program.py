"""Programs and where they are kept."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from zdtrain.capture.guards import Guards
from zdtrain.errors import FallbackReason

Moved = dict[int, Sequence[float]]
"""Values of what the host counts, by id of the parameter that it belongs to."""


class Program(Protocol):
    """A captured function of tensors that also writes to tensors in place."""

    overwrites: bool
    """Whether a run writes its outputs over those of the run before."""
    used: list[int]
    """Indices of the inputs that it reads."""

    def __len__(self) -> int:
        """Return the number of recorded operations."""

    @property
    def memory_bytes(self) -> int | None:
        """Bytes of device memory that it keeps between runs; None where it keeps none of its own."""

    def run(self, inputs: Sequence[Tensor | None]) -> list[Any]:
        """Run it on inputs of the captured layout; return its outputs."""

    def spare_kept(self) -> None:
        """Give outputs of the last run that somebody has kept memory of their own, where runs overwrite them."""

    def body(self, inputs: Sequence[Tensor | None]) -> list[Any]:
        """Do what `run` does, without a graph of its own, so that a larger one can hold it."""


class RecordedPart(Protocol):
    """The host's share in replays of one program."""

    def refill(self, moved: Moved | None = None) -> None:
        """Bring what the host changes into tensors, before a run.

        Args:
            moved: Where other updates come before that run: counts after those, by id of the parameter; added to.
        """

    def rates(self) -> list[Tensor]:
        """Return the tensors that `refill` fills and a program reads."""

    def ran(self) -> None:
        """Do, after a run, what the program could not because it is on the host."""

    def count(self) -> None:
        """Do the rest of the host's share of a replay."""


class Part(Protocol):
    """What a program covers and the host has a share in: an optimizer."""

    exact: bool
    """Whether it computes the same bits in a program as eagerly."""
    refusal: FallbackReason | None
    """Why it could not take part in the step that was watched last."""

    @property
    def counts_on_host(self) -> bool:
        """Whether the host computes numbers for each update from how many there were."""

    def key(self) -> Hashable:
        """Return what a program would hold by value."""

    def guard(self, guards: Guards) -> None:
        """Let `guards` look at what decides over `key`."""

    def recording(self) -> AbstractContextManager[None]:
        """Arrange it for watching and recording."""

    def recorded(self) -> RecordedPart:
        """Return the host's share in replays of what was recorded last."""


Value = TypeVar("Value")


@dataclass(kw_only=True)
class LeastRecentlyUsed(Generic[Value]):
    """A capped dictionary that lets go of what was not used for longest."""

    cap: int
    """Entries kept."""
    evicted: Callable[[Value], None]
    """Called with every entry that has to go."""
    entries: "OrderedDict[Hashable, Value]" = field(default_factory=OrderedDict)

    def get(self, key: Hashable) -> Value | None:
        """Return the entry, which becomes the most recently used one."""
        entry = self.entries.get(key)
        if entry is not None:
            self.entries.move_to_end(key)
        return entry

    def add(self, key: Hashable, entry: Value) -> None:
        """Keep `entry`, in the place of the least recently used one where there is no room."""
        self.entries[key] = entry
        if len(self.entries) > self.cap:
            _, gone = self.entries.popitem(last=False)
            self.evicted(gone)
