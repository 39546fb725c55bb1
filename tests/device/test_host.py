import pytest
import torch

from zdtrain.device import HostRuntime, Runtime, UnsupportedError, runtime_for


@pytest.fixture
def runtime() -> Runtime:
    return runtime_for(torch.device("cpu"))


def test_a_cpu_device_gets_the_host_runtime(runtime):
    assert isinstance(runtime, HostRuntime)
    assert runtime.device == torch.device("cpu")


def test_a_device_without_streams_gets_the_host_runtime():
    assert runtime_for(torch.device("meta")).device == torch.device("meta")


def test_a_copy_is_there_at_once_and_never_waits(runtime):
    ready, done = runtime.event(), runtime.event()
    source, host = torch.arange(3.0, requires_grad=True), runtime.pinned((3,), torch.float32)
    ready.record("train")
    runtime.copy_async(host, source, "drain", after=ready, done=done)
    assert done.query()
    assert host.tolist() == [0.0, 1.0, 2.0]
    assert not host.requires_grad
    assert (runtime.counters.copies, runtime.counters.host_waits, runtime.counters.host_reads) == (1, 0, 0)


def test_blocking_calls_are_counted(runtime):
    value = torch.tensor(2.5)
    copy = runtime.read(value)
    value.zero_()
    runtime.event().synchronize()
    runtime.synchronize()
    assert copy.item() == 2.5
    assert (runtime.counters.host_reads, runtime.counters.host_waits) == (1, 2)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((1,), torch.float32), ((3, 1), torch.float32), ((3,), torch.float64)], ids=str
)
def test_a_copy_that_would_broadcast_or_convert_is_refused(runtime, shape, dtype):
    event = runtime.event()
    with pytest.raises(ValueError, match=r"one shape and dtype on both sides, got dst \(3,\) torch.float32 and src"):
        runtime.copy_async(torch.zeros(3), torch.zeros(shape, dtype=dtype), "copy", after=event, done=event)


def test_a_host_has_no_graphs(runtime):
    with pytest.raises(UnsupportedError, match=r"device cpu has no graphs to capture.*op tape"):
        runtime.graph()
    assert not runtime.is_capturing()


def test_random_numbers_repeat_after_the_generators_are_restored(runtime):
    state = runtime.rng_state()
    first = torch.rand(4)
    runtime.restore_rng(state)
    assert torch.equal(torch.rand(4), first)


def test_contexts_leave_the_work_as_it_is(runtime):
    with runtime.on("monitor"), runtime.sync_debug("error"):
        assert torch.ones(2).sum().item() == 2.0
    assert runtime.memory() is None
