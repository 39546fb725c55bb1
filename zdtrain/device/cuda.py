"""The CUDA runtime: the only module that touches ``torch.cuda``."""

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zdtrain.device.base import Counters, Event, Graph, MemoryStats, StreamName, SyncDebugMode, check_copy


class CudaEvent:
    """A ``torch.cuda.Event`` without timing, recorded on and waited for by named streams."""

    def __init__(self, runtime: "CudaRuntime") -> None:
        self._runtime = runtime
        self._event = torch.cuda.Event()

    def record(self, stream: StreamName = "train") -> None:
        """Mark the work enqueued on `stream` so far."""
        self._event.record(self._runtime.raw_stream(stream))

    def query(self) -> bool:
        """Return whether the marked work is done; never blocks."""
        return bool(self._event.query())

    def wait(self, stream: StreamName) -> None:
        """Make later work on `stream` wait for the mark."""
        self._event.wait(self._runtime.raw_stream(stream))

    def synchronize(self) -> None:
        """Block the host until the marked work is done."""
        self._runtime.counters.host_waits += 1
        self._event.synchronize()


class CudaGraph:
    """A CUDA graph, captured in the runtime's memory pool, replayed on whatever stream is current."""

    def __init__(self, runtime: "CudaRuntime") -> None:
        self._runtime = runtime
        self._graph = torch.cuda.CUDAGraph()
        self._growth = 0

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Record the body's work instead of running it, on a stream that is there for captures only."""
        runtime = self._runtime
        pool = runtime.pool()
        with collector_frozen(), runtime.recording(self._graph, pool):
            before = torch.cuda.memory_reserved(runtime.device)  # behind the emptying of the allocator's cache
            yield
            self._growth = torch.cuda.memory_reserved(runtime.device) - before

    @property
    def memory_bytes(self) -> int:
        """Bytes by which the pool grew for it; memory that graphs before it had left free is not counted."""
        return self._growth

    def replay(self) -> None:
        """Enqueue the captured work on the current stream."""
        self._graph.replay()

    def reset(self) -> None:
        """Free the graph and its share of the memory pool."""
        self._graph.reset()


@dataclass(frozen=True, kw_only=True)
class Pool:
    """The memory that graphs share."""

    handle: Any
    """Torch's opaque name for it."""
    anchor: torch.cuda.CUDAGraph
    """Keeps it in use."""


class CudaRuntime:
    """A `Runtime` for one CUDA device. Side streams and the graph pool are made when first used."""

    has_graphs = True

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self.is_immediate = False
        self.counters = Counters()
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._pool: Pool | None = None
        self._failed: list[torch.cuda.CUDAGraph] = []

    def raw_stream(self, name: StreamName) -> torch.cuda.Stream:
        """Return the torch stream behind `name`; ``"train"`` is the current one."""
        return torch.cuda.current_stream(self.device) if name == "train" else self._side(name)

    def pool(self) -> Any:
        """Return the memory pool that all graphs of this runtime share.

        A graph that does next to nothing anchors it: torch refuses to capture into a pool whose graphs are all gone
        while tensors still lie in it, as gradients do.
        """
        if self._pool is None:
            handle, anchor = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
            with self.recording(anchor, handle):
                torch.zeros(1, device=self.device)
            self._pool = Pool(handle=handle, anchor=anchor)
        return self._pool.handle

    def release_pool(self) -> None:
        """Let go of the pool: its memory is free for others once its graphs are gone, too."""
        self._pool = None

    @contextmanager
    def recording(self, graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
        """Record the body's work into `graph`, on the capture stream, with its memory in `pool`."""
        stream = self._side("capture")
        try:
            with (
                torch.cuda.stream(stream),  # torch.cuda.graph stays on its stream where beginning or ending fails
                # thread_local: a pin-memory thread may query its own events while this thread captures.
                torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
            ):
                yield
        except BaseException:
            self._recover(graph, pool)
            raise

    def _recover(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        """Put right what a failed capture leaves behind.

        Where CUDA refused an operation, torch's ``capture_end`` gives up half-way. The allocator would go on asking
        `graph` which allocations are for the pool, so `graph` has to stay alive and later graphs need another pool. In
        torch 2.11 the random generator, too, takes itself to be captured and refuses to draw until a capture succeeds;
        that of the new pool's anchor does.
        """
        if has_ended(graph):  # only the body failed
            graph.reset()
            return
        self._failed.append(graph)
        with suppress(RuntimeError):  # torch may not have come so far as to tell the allocator of the pool
            torch._C._cuda_endAllocateToPool(self.device.index, pool)
            torch._C._cuda_releasePool(self.device.index, pool)
        if self._pool is not None:  # otherwise it is the anchor that failed
            self._pool = None
            self.pool()

    def on(self, stream: StreamName) -> AbstractContextManager[None]:
        """Enqueue the body's device work on `stream`."""
        return torch.cuda.stream(self.raw_stream(stream))

    def event(self) -> Event:
        """Make an event without timing."""
        return CudaEvent(self)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate a zeroed page-locked host buffer."""
        return torch.zeros(shape, dtype=dtype, pin_memory=True)

    def copy_async(self, dst: Tensor, src: Tensor, stream: StreamName, *, after: Event, done: Event) -> None:
        """Enqueue the copy on `stream`, between `after` and `done`."""
        check_copy(dst, src)
        self.counters.copies += 1
        after.wait(stream)
        with self.on(stream):
            dst.copy_(src.detach(), non_blocking=True)
        done.record(stream)

    def read(self, src: Tensor) -> Tensor:
        """Copy `src` to the host, blocking."""
        self.counters.host_reads += 1
        return src.detach().to("cpu", copy=True)

    def synchronize(self) -> None:
        """Block the host until all streams of the device are idle."""
        self.counters.host_waits += 1
        torch.cuda.synchronize(self.device)

    def graph(self) -> Graph:
        """Make an empty graph that shares this runtime's memory pool."""
        return CudaGraph(self)

    def is_capturing(self) -> bool:
        """Return whether the current stream is being captured."""
        return is_capturing()

    def rng_state(self) -> tuple[Tensor, ...]:
        """Return the states of the host's and the device's default generators."""
        return torch.get_rng_state(), torch.cuda.get_rng_state(self.device)

    def restore_rng(self, state: tuple[Tensor, ...]) -> None:
        """Put back what `rng_state` returned."""
        host, device = state
        torch.set_rng_state(host)
        torch.cuda.set_rng_state(device, self.device)

    def memory(self) -> MemoryStats:
        """Return what the caching allocator holds on this device."""
        return MemoryStats(
            allocated_bytes=torch.cuda.memory_allocated(self.device),
            reserved_bytes=torch.cuda.memory_reserved(self.device),
            peak_allocated_bytes=torch.cuda.max_memory_allocated(self.device),
            free_bytes=torch.cuda.mem_get_info(self.device)[0],
        )

    @contextmanager
    def sync_debug(self, mode: SyncDebugMode) -> Iterator[None]:
        """Warn or raise where the body makes the host wait for the device; covers what torch itself knows to block."""
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def _side(self, name: str) -> torch.cuda.Stream:
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = torch.cuda.Stream(self.device)
        return stream


def is_capturing() -> bool:
    """Return whether the current stream of the current device is being captured."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def has_ended(graph: torch.cuda.CUDAGraph) -> bool:
    """Return whether the capture of `graph` came to its end, so that torch has let go of its pool."""
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


@contextmanager
def collector_frozen() -> Iterator[None]:
    """Keep Python's garbage collector from freeing CUDA objects in the body, which would invalidate a capture."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
