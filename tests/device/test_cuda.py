import pytest
import torch

from zdtrain.device import Runtime, runtime_for

pytestmark = pytest.mark.gpu


@pytest.fixture
def runtime() -> Runtime:
    return runtime_for(torch.device("cuda"))


def test_a_copy_reaches_pinned_memory_behind_its_events(runtime):
    row = torch.arange(4.0, device=runtime.device)
    host = runtime.pinned((4,), torch.float32)
    ready, done = runtime.event(), runtime.event()
    ready.record("train")
    with runtime.sync_debug("error"):
        runtime.copy_async(host, row, "drain", after=ready, done=done)
    done.synchronize()
    assert host.is_pinned()
    assert host.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert runtime.counters.host_waits == 1


def test_a_captured_step_is_replayed_on_the_current_stream(runtime):
    total = torch.zeros((), device=runtime.device)
    total.add_(1)  # warm-up
    graph = runtime.graph()
    with graph.capture():
        total.add_(1)
        assert runtime.is_capturing()
    assert runtime.read(total).item() == 1.0  # capturing ran nothing
    for _ in range(3):
        graph.replay()
    assert runtime.read(total).item() == 4.0
    graph.reset()


def test_random_numbers_repeat_after_the_generators_are_restored(runtime):
    state = runtime.rng_state()
    first = torch.rand(4, device=runtime.device)
    runtime.restore_rng(state)
    assert torch.equal(torch.rand(4, device=runtime.device), first)


def test_memory_counts_live_tensors(runtime):
    before = runtime.memory().allocated_bytes
    kept = torch.zeros(1024, device=runtime.device)
    assert runtime.memory().allocated_bytes - before >= kept.nbytes
