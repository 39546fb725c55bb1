"""What the CUDA runtime asks of torch, in which order, with torch.cuda replaced by a recorder: no device needed."""

import gc
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from zdtrain.device import is_capturing, runtime_for


class FakeCuda:
    """Records calls; streams are known by name, in the order they were made."""

    def __init__(self) -> None:
        self.calls = []
        self.default = self.current = "default"
        self.num_streams = 0
        self.debug_mode = "default"
        self.num_captures = self.num_pools = self.reserved = 0
        self.is_initialized = True
        self.refuses = False
        """Whether the next capture ends in an error, as after an operation that CUDA refused."""
        self.begins_nothing = False
        """Whether captures fail before they begin."""

    def install(self, monkeypatch) -> None:
        fake = self

        class Stream(str):
            def wait_stream(self, other):
                fake.calls.append(f"{self} waits for {other}")

        def make_stream(device):
            fake.num_streams += 1
            return Stream(f"side{fake.num_streams}")

        class Event:
            def record(self, stream):
                fake.calls.append(f"record on {stream}")

            def wait(self, stream):
                fake.calls.append(f"{stream} waits for event")

            def query(self):
                return False

            def synchronize(self):
                fake.calls.append("host waits for event")

        class CUDAGraph:
            has_ended = False

            def replay(self):
                fake.calls.append(f"replay on {fake.current}")

            def reset(self):
                fake.calls.append("reset")

            def pool(self):
                if not self.has_ended:
                    raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")

        @contextmanager
        def stream(new):
            before, fake.current = fake.current, new
            fake.calls.append(f"enter {new}")
            try:
                yield
            finally:
                fake.current = before

        @contextmanager
        def graph(graph, *, pool, stream, capture_error_mode):
            if fake.num_captures:  # the first one anchors the pool
                fake.calls.append(f"capture on {stream} in {pool}, {capture_error_mode}")
            fake.num_captures += 1
            fake.reserved //= 2  # the cache is emptied
            before, fake.current = fake.current, f"{stream}, captured"
            if fake.begins_nothing:
                raise RuntimeError("capture_begin: another capture is under way")
            try:
                yield
            finally:
                refuses, fake.refuses = fake.refuses, False
                if refuses:  # torch stays on the stream
                    raise RuntimeError("capture_end: operation failed due to a previous error during capture")
                graph.has_ended = True
                fake.current = before

        def pool_handle():
            fake.num_pools += 1
            return f"pool{fake.num_pools}"

        fake.default = fake.current = Stream("default")
        names = {
            "Stream": make_stream,
            "Event": Event,
            "CUDAGraph": CUDAGraph,
            "stream": stream,
            "graph": graph,
            "graph_pool_handle": pool_handle,
            "memory_reserved": lambda device: fake.reserved,
            "memory_allocated": lambda device: 1,
            "max_memory_allocated": lambda device: 2,
            "mem_get_info": lambda device: (3, 4),
            "current_device": lambda: 0,
            "current_stream": lambda device: fake.current,
            "is_initialized": lambda: fake.is_initialized,
            "is_current_stream_capturing": lambda: True,
            "synchronize": lambda device: fake.calls.append("host waits for device"),
            "get_sync_debug_mode": lambda: fake.debug_mode,
            "set_sync_debug_mode": lambda mode: setattr(fake, "debug_mode", mode),
        }
        for name, value in names.items():
            monkeypatch.setattr(torch.cuda, name, value)

        def of_the_allocator(name, index, pool):
            if fake.begins_nothing:
                raise RuntimeError("not currently recording to mempool_id")
            fake.calls.append(f"{name} {index} {pool}")

        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            monkeypatch.setattr(torch._C, name, partial(of_the_allocator, name), raising=False)
        zeros = torch.zeros
        monkeypatch.setattr(torch, "zeros", lambda *size, device=None, **options: zeros(*size, **options))


@pytest.fixture
def cuda(monkeypatch) -> FakeCuda:
    fake = FakeCuda()
    fake.install(monkeypatch)
    return fake


@pytest.fixture
def runtime(cuda):
    return runtime_for(torch.device("cuda"))


def test_a_device_without_an_index_is_bound_to_the_current_one(runtime):
    assert runtime.device == torch.device("cuda", 0)


def test_a_copy_waits_first_then_copies_on_its_stream_then_records(runtime, cuda):
    ready, done = runtime.event(), runtime.event()
    target = torch.zeros(2)
    ready.record("train")
    runtime.copy_async(target, torch.ones(2), "drain", after=ready, done=done)
    assert cuda.calls == ["record on default", "side1 waits for event", "enter side1", "record on side1"]
    assert target.tolist() == [1.0, 1.0]
    assert not done.query()
    assert (runtime.counters.copies, runtime.counters.host_waits) == (1, 0)


def test_a_side_stream_is_made_once(runtime, cuda):
    for _ in range(2):
        with runtime.on("monitor"):
            pass
        with runtime.on("copy"):
            pass
    assert cuda.calls == ["enter side1", "enter side2"] * 2


def test_graphs_are_captured_on_a_stream_of_their_own_in_one_pool_with_the_collector_still(runtime, cuda):
    for _ in range(2):
        graph = runtime.graph()
        with graph.capture():
            assert not gc.isenabled()
            assert cuda.current == "side1, captured"
        assert gc.isenabled()
        graph.replay()
        graph.reset()
    assert (
        cuda.calls[1:] == ["enter side1", "capture on side1 in pool1, thread_local", "replay on default", "reset"] * 2
    )


def test_a_graph_tells_by_how_much_the_pool_grew(runtime, cuda):
    cuda.reserved = 4096
    graph = runtime.graph()
    with graph.capture():
        cuda.reserved += 300
    assert graph.memory_bytes == 300


def test_memory_is_told_as_the_allocator_and_the_device_see_it(runtime, cuda):
    cuda.reserved = 4096
    memory = runtime.memory()
    assert (memory.allocated_bytes, memory.peak_allocated_bytes) == (1, 2)
    assert (memory.reserved_bytes, memory.free_bytes) == (4096, 3)


def test_a_released_pool_is_followed_by_another(runtime, cuda):
    with runtime.graph().capture():
        pass
    runtime.release_pool()
    with runtime.graph().capture():
        pass
    assert [call for call in cuda.calls if call.startswith("capture")] == [
        "capture on side1 in pool1, thread_local",
        "capture on side1 in pool2, thread_local",  # its anchor
        "capture on side1 in pool2, thread_local",
    ]


def test_a_body_that_fails_leaves_the_pool_as_it_is(runtime, cuda):
    with pytest.raises(RuntimeError, match="illegal"), runtime.graph().capture():
        raise RuntimeError("illegal")
    assert gc.isenabled()
    with runtime.graph().capture():
        pass
    assert [call for call in cuda.calls if not call.startswith("enter")] == [
        "capture on side1 in pool1, thread_local",
        "reset",
        "capture on side1 in pool1, thread_local",
    ]


def test_a_refused_operation_takes_the_stream_the_allocator_and_the_generator_back(runtime, cuda):
    runtime.pool()
    cuda.refuses = True
    with pytest.raises(RuntimeError, match="previous error during capture"), runtime.graph().capture():
        raise RuntimeError("operation not permitted when stream is capturing")
    assert gc.isenabled()
    assert cuda.current == "default"
    with runtime.graph().capture():
        pass
    assert [call for call in cuda.calls if not call.startswith("enter")] == [
        "capture on side1 in pool1, thread_local",
        "_cuda_endAllocateToPool 0 pool1",
        "_cuda_releasePool 0 pool1",
        "capture on side1 in pool2, thread_local",  # a capture that succeeds: the generator draws again
        "capture on side1 in pool2, thread_local",
    ]


def test_a_capture_that_does_not_begin_leaves_the_current_stream_and_says_why(runtime, cuda):
    cuda.begins_nothing = True
    with pytest.raises(RuntimeError, match="another capture is under way"), runtime.graph().capture():
        pass
    assert cuda.current == "default"
    assert gc.isenabled()
    cuda.begins_nothing = False
    with runtime.graph().capture():
        pass
    assert "capture on side1 in pool2, thread_local" in cuda.calls


def test_nothing_is_captured_before_cuda_is_in_use(runtime, cuda):
    assert runtime.is_capturing()
    assert is_capturing()
    cuda.is_initialized = False
    assert not is_capturing()


def test_blocking_calls_are_counted(runtime, cuda):
    runtime.event().synchronize()
    runtime.synchronize()
    runtime.read(torch.ones(1))
    assert cuda.calls == ["host waits for event", "host waits for device"]
    assert (runtime.counters.host_waits, runtime.counters.host_reads) == (2, 1)


def test_sync_debug_mode_is_put_back(runtime, cuda):
    modes = []
    with pytest.raises(RuntimeError, match="read"), runtime.sync_debug("error"):
        raise RuntimeError(f"read {modes.append(cuda.debug_mode)}")
    assert modes == ["error"]
    assert cuda.debug_mode == "default"
