"""The protocol of the device door: streams, events, pinned memory, ordered copies, graphs.

Streams are named, not passed around: ``"train"`` is whatever stream is current in the calling thread, the others are
side streams that the runtime owns. Nothing outside this package touches ``torch.cuda``.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from zdtrain.errors import ZDTrainError

StreamName = Literal["train", "drain", "monitor", "copy"]
SyncDebugMode = Literal["default", "warn", "error"]


class UnsupportedError(ZDTrainError, NotImplementedError):
    """The device cannot do what was asked of its runtime."""


@dataclass(kw_only=True)
class Counters:
    """How often the host asked a runtime for something that can make it wait."""

    host_waits: int = 0
    """Blocking calls: `Event.synchronize` and `Runtime.synchronize`."""
    host_reads: int = 0
    """Blocking reads: `Runtime.read`."""
    copies: int = 0
    """Copies enqueued with `Runtime.copy_async`; none of them blocks."""


@dataclass(frozen=True, kw_only=True)
class MemoryStats:
    """Device memory of this process, in bytes, as torch's caching allocator sees it."""

    allocated_bytes: int
    """In live tensors."""
    reserved_bytes: int
    """Held by the allocator, graph pools included."""
    peak_allocated_bytes: int
    """Highest `allocated_bytes` so far."""
    free_bytes: int
    """On the device, in nobody's hands."""


class Event(Protocol):
    """A mark in a stream. Reusable: recording again moves it."""

    def record(self, stream: StreamName = "train") -> None:
        """Mark the work enqueued on `stream` so far."""

    def query(self) -> bool:
        """Return whether the marked work is done; never blocks. An event that was never recorded is done."""

    def wait(self, stream: StreamName) -> None:
        """Make later work on `stream` wait for the mark; the host does not wait."""

    def synchronize(self) -> None:
        """Block the host until the marked work is done. Counted in `Counters.host_waits`."""


class Graph(Protocol):
    """Device work captured once and replayed without Python."""

    def capture(self) -> AbstractContextManager[None]:
        """Record the body's device work instead of running it; it lies on a stream that is there for captures only.

        The body does *not* run on the device: `replay` once afterwards, or the step is lost.
        """

    def replay(self) -> None:
        """Enqueue the captured work on the current stream; outputs are overwritten in place."""

    def reset(self) -> None:
        """Free the graph and its share of the memory pool."""

    @property
    def memory_bytes(self) -> int:
        """Bytes by which the pool grew for it; memory that earlier graphs had left free is not counted."""


class Runtime(Protocol):
    """One device, seen through the few calls that training needs."""

    @property
    def device(self) -> torch.device:
        """The device this runtime is bound to."""

    @property
    def is_immediate(self) -> bool:
        """Whether what was enqueued is done, so that the host may look at tensors for nothing."""

    @property
    def has_graphs(self) -> bool:
        """Whether `graph` makes one."""

    @property
    def counters(self) -> Counters:
        """Host waits, host reads and copies so far."""

    def on(self, stream: StreamName) -> AbstractContextManager[None]:
        """Enqueue the body's device work on `stream`."""

    def event(self) -> Event:
        """Make an event. Make them ahead, record them per step."""

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate a zeroed host buffer that copies can reach without blocking. Allocate ahead, never in a step."""

    def copy_async(self, dst: Tensor, src: Tensor, stream: StreamName, *, after: Event, done: Event) -> None:
        """Enqueue ``dst.copy_(src)`` on `stream`.

        Args:
            dst: Destination, same shape and dtype as `src`. Not to be touched by the host before ``done.query()``,
                nor by a stream before ``done.wait(stream)``.
            src: Source. Not to be overwritten, and kept alive by the caller, until `done`.
            stream: Side stream that copies.
            after: `stream` waits for this event first: the last write of `src` and the last use of `dst` lie before it.
            done: Recorded on `stream` behind the copy.

        Raises:
            ValueError: The shapes or dtypes differ (`copy_` would broadcast or convert silently).
        """

    def read(self, src: Tensor) -> Tensor:
        """Copy `src` to the host; blocks until the current stream has caught up. Counted in `Counters.host_reads`."""

    def synchronize(self) -> None:
        """Block the host until all streams are idle. Counted in `Counters.host_waits`."""

    def graph(self) -> Graph:
        """Make an empty graph that shares this runtime's memory pool.

        Raises:
            UnsupportedError: The device has no graphs.
        """

    def release_pool(self) -> None:
        """Let go of the memory pool of graphs, which is free for others once they are gone."""

    def is_capturing(self) -> bool:
        """Return whether the current stream is being captured."""

    def rng_state(self) -> tuple[Tensor, ...]:
        """Return the states of the default generators: the host's, then the device's. Illegal in a capture."""

    def restore_rng(self, state: tuple[Tensor, ...]) -> None:
        """Put back what `rng_state` returned."""

    def memory(self) -> MemoryStats | None:
        """Return device memory statistics; ``None`` where the device has no allocator of its own."""

    def sync_debug(self, mode: SyncDebugMode) -> AbstractContextManager[None]:
        """Let torch report host reads inside the body; there is nothing to report on the host."""


def check_copy(dst: Tensor, src: Tensor) -> None:
    """Refuse a copy that would broadcast or convert.

    Raises:
        ValueError: The shapes or dtypes differ.
    """
    if dst.shape != src.shape or dst.dtype != src.dtype:
        raise ValueError(
            "copy_async needs one shape and dtype on both sides, "
            f"got dst {tuple(dst.shape)} {dst.dtype} and src {tuple(src.shape)} {src.dtype}"
        )
