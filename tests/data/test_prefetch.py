"""Prefetching against a device on which copies arrive late and every unordered access is an error."""

import gc
import weakref
from collections import namedtuple

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from zdtrain.data import DevicePrefetcher, prefetch
from zdtrain.device import HostRuntime
from zdtrain.device.lagging import LaggingRuntime, OrderError


def batches(count=6, size=4):
    return [{"x": torch.full((size,), float(k)), "y": (torch.arange(k + 1), "name")} for k in range(count)]


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_batches_arrive_whole_and_in_order_however_late_the_copies_are(lag):
    runtime = LaggingRuntime(lag=lag)
    with runtime.watching():
        served = [
            (batch["x"] * 1, batch["y"][0].clone(), batch["y"][1])
            for batch in DevicePrefetcher(batches(), runtime=runtime)
        ]
    expected = batches()
    assert len(served) == len(expected)
    for (x, y, name), batch in zip(served, expected, strict=True):
        assert torch.equal(x, batch["x"])
        assert torch.equal(y, batch["y"][0])
        assert name == "name"


def test_the_next_copy_is_enqueued_before_the_step_and_waits_for_the_step_before_it():
    runtime = LaggingRuntime()
    for k, _ in enumerate(DevicePrefetcher([torch.full((2,), float(k)) for k in range(3)], runtime=runtime)):
        runtime.tick(f"step {k}")
    kept = [
        line for line in runtime.log if line.endswith("on train") or line.startswith(("step", "copy waits", "copy enq"))
    ]
    even, odd = ([f"record {used} on train", f"copy waits {used}", "copy enqueued on copy"] for used in ("e0", "e2"))
    assert kept == [*even, *odd, "step 0", *even, "step 1", "step 2"]


def test_each_step_waits_for_its_own_copy():
    runtime = LaggingRuntime()
    source = DevicePrefetcher([torch.ones(2), torch.ones(2)], runtime=runtime)
    iterator = iter(source)
    next(iterator)
    assert runtime.log.count("copy enqueued on copy") == 2
    assert runtime.log.count("copy run on copy") == 1


def test_the_lagging_device_would_notice_a_batch_read_before_its_copy():
    runtime = LaggingRuntime()
    prefetcher = DevicePrefetcher([torch.ones(2)], runtime=runtime)
    ahead = prefetcher._ahead._fetch(iter(prefetcher.loader))
    with runtime.watching(), pytest.raises(OrderError, match="read by"):
        ahead.batch.add(1)


def test_a_buffer_is_filled_again_only_after_the_copy_out_of_it():
    runtime = LaggingRuntime(lag=5)
    with runtime.watching():
        for batch in DevicePrefetcher([torch.full((8,), float(k)) for k in range(5)], runtime=runtime):
            batch.mul_(2)
    assert runtime.counters.host_waits > 0  # this device is never done in time, so the host waited instead of racing


def test_a_device_that_keeps_up_never_makes_the_host_wait():
    runtime = LaggingRuntime(lag=0)
    list(DevicePrefetcher(batches(), runtime=runtime))
    assert runtime.counters.host_waits == runtime.counters.host_reads == 0


def test_batches_can_be_kept():
    kept = list(DevicePrefetcher([torch.full((3,), float(k)) for k in range(5)], runtime=HostRuntime()))
    assert [batch.tolist() for batch in kept] == [[float(k)] * 3 for k in range(5)]


def test_batches_that_are_not_kept_are_freed():
    def source():
        for k in range(4):
            yield torch.full((3,), float(k))

    iterator = iter(DevicePrefetcher(source(), runtime=HostRuntime()))
    first = weakref.ref(next(iterator))
    next(iterator)
    gc.collect()
    assert first() is None


Pair = namedtuple("Pair", ["a", "b"])


def test_structure_strides_and_other_leaves_survive():
    image = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    batch = Pair(
        a=[image, image[:, :1].expand(2, 3, 4, 5)], b={"empty": torch.empty(0, 2), "id": 7, "flag": torch.tensor(True)}
    )
    (served,) = DevicePrefetcher([batch], runtime=LaggingRuntime())
    assert isinstance(served, Pair)
    assert served.a[0].is_contiguous(memory_format=torch.channels_last)
    assert all(torch.equal(mine, given) for mine, given in zip(served.a, batch.a, strict=True))
    assert served.b["empty"].shape == (0, 2)
    assert served.b["id"] == 7
    assert served.b["flag"]
    assert served.a[0].data_ptr() != image.data_ptr()


def test_leaves_that_are_not_plain_host_tensors_pass_through():
    sparse, wanting_grad = torch.eye(2).to_sparse(), torch.ones(2, requires_grad=True)
    (served,) = DevicePrefetcher([(sparse, wanting_grad)], runtime=HostRuntime())
    assert served[0] is sparse
    assert served[1] is wanting_grad


def test_an_error_in_the_loader_comes_when_its_batch_is_due():
    def source():
        yield torch.zeros(1)
        yield torch.ones(1)
        raise OSError("disk gone")

    iterator = iter(DevicePrefetcher(source(), runtime=HostRuntime()))
    assert [next(iterator).item(), next(iterator).item()] == [0.0, 1.0]
    with pytest.raises(OSError, match="disk gone"):
        next(iterator)


def test_it_is_sized_and_iterable_again_and_shows_its_samplers():
    loader = DataLoader(TensorDataset(torch.arange(10)), batch_size=4)
    prefetcher = DevicePrefetcher(loader, runtime=HostRuntime())
    assert len(prefetcher) == 3
    assert len(list(prefetcher)) == len(list(prefetcher)) == 3
    assert prefetcher.sampler is loader.sampler
    assert prefetcher.batch_sampler is loader.batch_sampler
    with pytest.raises(TypeError, match="has no len"):
        len(DevicePrefetcher(iter([]), runtime=HostRuntime()))


def test_stopping_early_and_starting_again_stays_in_order():
    runtime = LaggingRuntime(lag=2)
    prefetcher = DevicePrefetcher([torch.full((4,), float(k)) for k in range(5)], runtime=runtime)
    with runtime.watching():
        for _ in range(3):
            for k, batch in enumerate(prefetcher):
                assert batch.sum() == 4 * k
                if k == 1:
                    break


def test_an_empty_loader_gives_nothing():
    assert list(DevicePrefetcher([], runtime=LaggingRuntime())) == []


def test_the_cpu_needs_no_prefetching():
    loader = [torch.ones(1)]
    assert prefetch(loader, "cpu") is loader


@pytest.mark.gpu
def test_batches_arrive_on_the_gpu_equal_while_steps_run():
    data = [torch.randn(1 << 20) for _ in range(8)]
    sums = [(batch * 2).sum() for batch in prefetch(data, "cuda")]
    assert torch.allclose(torch.stack(sums).cpu(), torch.stack([(batch * 2).sum() for batch in data]), atol=1e-1)
