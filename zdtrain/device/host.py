"""The host runtime: everything happens at once, so events are always done."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from zdtrain.device.base import (
    Counters,
    Event,
    Graph,
    MemoryStats,
    StreamName,
    SyncDebugMode,
    UnsupportedError,
    check_copy,
)


class HostEvent:
    """An event that is always done."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters

    def record(self, stream: StreamName = "train") -> None:
        """Do nothing: the work is done."""

    def query(self) -> bool:
        """Return True."""
        return True

    def wait(self, stream: StreamName) -> None:
        """Do nothing: the work is done."""

    def synchronize(self) -> None:
        """Count a host wait; a device would block here."""
        self._counters.host_waits += 1


class HostRuntime:
    """A `Runtime` for the CPU, and for devices whose work torch does not expose as streams."""

    has_graphs = False

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")
        self.is_immediate = self.device.type == "cpu"
        self.counters = Counters()

    def on(self, stream: StreamName) -> AbstractContextManager[None]:
        """Run the body as it is: the host has one stream."""
        return nullcontext()

    def event(self) -> Event:
        """Make an event that is always done."""
        return HostEvent(self.counters)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate an ordinary zeroed buffer: there is no transfer that pinning would help."""
        return torch.zeros(shape, dtype=dtype)

    def copy_async(self, dst: Tensor, src: Tensor, stream: StreamName, *, after: Event, done: Event) -> None:
        """Copy now."""
        check_copy(dst, src)
        self.counters.copies += 1
        dst.copy_(src.detach())

    def read(self, src: Tensor) -> Tensor:
        """Return a copy of `src` on the host."""
        self.counters.host_reads += 1
        return src.detach().to("cpu", copy=True)

    def synchronize(self) -> None:
        """Count a host wait; a device would block here."""
        self.counters.host_waits += 1

    def graph(self) -> Graph:
        """Refuse: the host has no graphs.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            f"device {self.device} has no graphs to capture; on a host the step is replayed from an op tape"
        )

    def release_pool(self) -> None:
        """Do nothing: the host has no pool."""

    def is_capturing(self) -> bool:
        """Return False."""
        return False

    def rng_state(self) -> tuple[Tensor, ...]:
        """Return the state of the host's default generator."""
        return (torch.get_rng_state(),)

    def restore_rng(self, state: tuple[Tensor, ...]) -> None:
        """Put back what `rng_state` returned."""
        torch.set_rng_state(state[0])

    def memory(self) -> MemoryStats | None:
        """Return None: host memory has no caching allocator to ask."""
        return None

    @contextmanager
    def sync_debug(self, mode: SyncDebugMode) -> Iterator[None]:
        """Run the body as it is: a host read on the host waits for nothing."""
        yield
