import pytest
import torch

from zdtrain.device.lagging import LaggingRuntime, OrderError


@pytest.fixture
def runtime() -> LaggingRuntime:
    return LaggingRuntime(lag=2)


def enqueue(runtime, dst, src, stream="drain"):
    """Enqueue a well-ordered copy and return its done event."""
    ready, done = runtime.event(), runtime.event()
    ready.record()
    runtime.copy_async(dst, src, stream, after=ready, done=done)
    return done


def test_a_copy_arrives_only_after_lag_queries(runtime):
    host = runtime.pinned((2,), torch.float32)
    done = enqueue(runtime, host, torch.ones(2))
    seen = []
    for _ in range(4):
        is_done = done.query()
        seen.append((is_done, host.tolist()))
    assert seen == [(False, [0, 0]), (False, [0, 0]), (True, [1, 1]), (True, [1, 1])]


def test_the_log_tells_the_order_of_waits_copies_and_reads(runtime):
    host = runtime.pinned((2,), torch.float32)
    enqueue(runtime, host, torch.ones(2)).synchronize()
    runtime.read(host)
    assert runtime.log == [
        "record e0 on train",
        "drain waits e0",
        "copy enqueued on drain",
        "record e1 on drain",
        "host waits e1",
        "copy run on drain",
        "host reads",
    ]
    assert (runtime.counters.host_waits, runtime.counters.host_reads) == (1, 1)


@pytest.mark.parametrize(
    "access",
    [torch.Tensor.tolist, torch.Tensor.numpy, lambda t: t[0].item(), lambda t: t.sum(), lambda t: t[1:].zero_()],
    ids=["tolist", "numpy", "item", "sum", "write"],
)
def test_touching_a_destination_before_its_event_is_done_raises(runtime, access):
    host = runtime.pinned((2,), torch.float32)
    with runtime.watching():
        done = enqueue(runtime, host, torch.ones(2))
        with pytest.raises(
            OrderError, match=r"the destination of a copy of .* on 'drain' is (read|written) by .* before"
        ):
            access(host)
        while not done.query():
            pass
        access(host)


def test_the_host_sees_nothing_of_a_copy_that_only_a_stream_waited_for(runtime):
    host = runtime.pinned((2,), torch.float32)
    with runtime.watching():
        enqueue(runtime, host, torch.ones(2)).wait("train")
        runtime.advance()
        with pytest.raises(OrderError, match="destination"):
            host.tolist()


def test_overwriting_a_source_in_flight_raises(runtime):
    host, row = runtime.pinned((2,), torch.float32), torch.ones(2)
    with runtime.watching():
        done = enqueue(runtime, host, row)
        assert row.sum() == 2  # reading it is fine
        with pytest.raises(OrderError, match=r"the source of .* is written by aten.add_"):
            row.add_(1)
        done.wait("train")
        row.add_(1)
        done.synchronize()
        assert host.tolist() == [1.0, 1.0]


def test_the_host_may_not_rewrite_a_pinned_source_that_only_a_stream_waited_for(runtime):
    batch, static = runtime.pinned((2,), torch.float32), torch.zeros(2)
    with runtime.watching():
        done = enqueue(runtime, static, batch, "copy")
        done.wait("train")
        with pytest.raises(OrderError, match="source"):
            batch.fill_(1)
        done.synchronize()
        batch.fill_(1)


def test_only_the_stream_that_waited_may_touch_a_destination(runtime):
    static = torch.zeros(2)
    with runtime.watching():
        done = enqueue(runtime, static, torch.ones(2), "copy")
        done.wait("train")
        assert static.sum() == 2
        with runtime.on("monitor"), pytest.raises(OrderError, match="destination"):
            static.sum()


def test_work_on_the_copying_stream_comes_behind_its_copies(runtime):
    static = torch.zeros(2)
    with runtime.watching():
        enqueue(runtime, static, torch.ones(2), "copy")
        with runtime.on("copy"):
            assert static.sum() == 2


def test_other_rows_of_the_same_storage_are_free(runtime):
    ring, host = torch.arange(6.0).view(3, 2), runtime.pinned((2,), torch.float32)
    with runtime.watching():
        done = enqueue(runtime, host, ring[0])
        ring[1].fill_(7)
        done.synchronize()
        assert host.tolist() == [0.0, 1.0]


def test_a_copy_of_what_was_written_after_its_event_raises(runtime):
    host, row = runtime.pinned((2,), torch.float32), torch.zeros(2)
    ready, done = runtime.event(), runtime.event()
    with runtime.watching():
        ready.record()
        row.fill_(1)
        with pytest.raises(OrderError, match="the source of a copy on 'drain' was used on 'train' after the event"):
            runtime.copy_async(host, row, "drain", after=ready, done=done)


def test_a_copy_onto_what_is_still_read_raises(runtime):
    static = torch.zeros(2)
    ready, done = runtime.event(), runtime.event()
    with runtime.watching():
        ready.record()
        static.sum()
        with pytest.raises(OrderError, match="the destination of a copy on 'copy' was used on 'train'"):
            runtime.copy_async(static, torch.ones(2), "copy", after=ready, done=done)


def test_order_carries_over_a_chain_of_events(runtime):
    host, row = runtime.pinned((), torch.float32), torch.zeros(2)
    written, reduced, done = (runtime.event() for _ in range(3))
    with runtime.watching():
        row.fill_(1)
        written.record("train")
        written.wait("monitor")
        with runtime.on("monitor"):
            total = row.sum()
        reduced.record("monitor")
        runtime.copy_async(host, total, "drain", after=reduced, done=done)
        done.wait("train")
        later = runtime.event()
        later.record("train")
        later.synchronize()  # behind `done`, so the host knows of the copy too
        assert host.item() == 2.0


def test_a_copy_of_a_stream_that_was_not_waited_for_raises(runtime):
    host, row = runtime.pinned((2,), torch.float32), torch.zeros(2)
    ready, done = runtime.event(), runtime.event()
    with runtime.watching():
        with runtime.on("monitor"):
            row.fill_(1)
        ready.record("train")
        with pytest.raises(OrderError, match="was used on 'monitor'"):
            runtime.copy_async(host, row, "drain", after=ready, done=done)


def test_what_the_host_has_seen_done_needs_no_event(runtime):
    host, row = runtime.pinned((2,), torch.float32), torch.zeros(2)
    early, written, done = (runtime.event() for _ in range(3))
    with runtime.watching():
        early.record()
        row.fill_(1)
        written.record()
        written.synchronize()
        runtime.copy_async(host, row, "drain", after=early, done=done)


def test_waiting_for_an_event_that_was_never_recorded_raises(runtime):
    with pytest.raises(OrderError, match="'drain' waits for event e0, which was never recorded"):
        runtime.event().wait("drain")


def test_synchronize_brings_every_copy_in(runtime):
    first, second = runtime.pinned((1,), torch.float32), runtime.pinned((1,), torch.float32)
    with runtime.watching():
        enqueue(runtime, first, torch.ones(1), "drain")
        enqueue(runtime, second, torch.ones(1), "copy")
        runtime.synchronize()
        assert (first.tolist(), second.tolist()) == ([1.0], [1.0])


def test_training_under_watch_gives_the_same_numbers(runtime):
    def train() -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
        return model.weight.detach().clone()

    plain = train()
    with runtime.watching():
        assert torch.equal(train(), plain)
