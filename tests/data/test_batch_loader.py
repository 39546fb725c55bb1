"""Batches of BatchLoader against those of a plain DataLoader."""

import copy
import itertools
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from zdtrain.data import BatchLoader, InMemoryDataset, MemoryMappedDataset, as_batch_dataset, loader
from zdtrain.data.order import epoch_order, is_vectorised
from zdtrain.errors import ConfigError


def tensors(num_samples=50):
    return torch.arange(num_samples * 3.0).view(num_samples, 3), torch.arange(num_samples)


def assert_same_batches(ours, stock):
    for mine, theirs in itertools.zip_longest(ours, stock):
        assert type(mine) is type(theirs)
        assert len(mine) == len(theirs)
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("batch_size", [1, 7, 10, 50, 64])
def test_batches_and_random_stream_are_those_of_the_stock_loader_over_three_epochs(shuffle, drop_last, batch_size):
    dataset = TensorDataset(*tensors())
    options = {"batch_size": batch_size, "shuffle": shuffle, "drop_last": drop_last}
    ours, stock = loader(dataset, **options), DataLoader(dataset, **options)
    assert isinstance(ours, BatchLoader)
    assert len(ours) == len(stock)
    for _ in range(3):
        state = torch.get_rng_state()
        mine = list(ours)
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        assert_same_batches(mine, list(stock))
        assert torch.equal(after, torch.get_rng_state())


@pytest.mark.parametrize("batches_taken", [0, 1, 3, 5, 6])
def test_a_generator_gives_the_stock_order_also_after_an_epoch_that_stops_early(batches_taken):
    dataset = TensorDataset(*tensors())
    ours = loader(dataset, 10, True, generator=torch.Generator().manual_seed(7))
    stock = DataLoader(dataset, 10, True, generator=torch.Generator().manual_seed(7))
    for _ in range(3):
        assert_same_batches(itertools.islice(ours, batches_taken), itertools.islice(stock, batches_taken))
    assert_same_batches(ours, stock)


@pytest.mark.parametrize(
    "make_sampler",
    [
        lambda data: RandomSampler(data, replacement=True),
        lambda data: RandomSampler(data, num_samples=13),
        lambda data: RandomSampler(data, num_samples=120),
        lambda data: SubsetRandomSampler(range(0, 50, 3)),
        lambda data: WeightedRandomSampler(torch.linspace(0.1, 1, 50), 40),
        lambda data: [4, 2, 9],
    ],
)
def test_any_sampler_is_served_in_its_own_order(make_sampler):
    dataset = TensorDataset(*tensors())
    torch.manual_seed(1)
    mine = list(BatchLoader(as_batch_dataset(dataset), 4, sampler=make_sampler(dataset)))
    torch.manual_seed(1)
    assert_same_batches(mine, DataLoader(dataset, 4, sampler=make_sampler(dataset)))


def test_a_batch_sampler_is_served_in_its_own_order():
    batches = BatchSampler(range(9), 4, True)
    served = list(BatchLoader(InMemoryDataset(torch.arange(9)), batch_sampler=[*batches, [8, 0]]))
    assert [batch.tolist() for batch in served] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 0]]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("num_samples", "num_replicas"), [(50, 1), (50, 4), (3, 8), (51, 2)])
def test_the_order_under_ddp_is_the_distributed_samplers(num_samples, num_replicas, drop_last, shuffle):
    data = range(num_samples)
    for rank in range(num_replicas):
        sampler = DistributedSampler(data, num_replicas, rank, shuffle=shuffle, seed=3, drop_last=drop_last)
        for epoch in (0, 1):
            sampler.set_epoch(epoch)
            (order,) = epoch_order(sampler, torch.device("cpu"))
            assert order.tolist() == list(sampler)


def test_set_epoch_changes_the_order_of_the_loader():
    sampler = DistributedSampler(range(20), num_replicas=2, rank=1)
    batches = BatchLoader(InMemoryDataset(torch.arange(20)), 10, sampler=sampler)
    first = next(iter(batches)).tolist()
    sampler.set_epoch(1)
    assert next(iter(batches)).tolist() != first


def test_samplers_that_may_override_their_order_are_not_vectorised():
    class Reversed(RandomSampler):
        def __iter__(self):
            return iter(range(len(self.data_source) - 1, -1, -1))

    sampler = Reversed(range(3))
    assert not is_vectorised(sampler)
    assert next(iter(BatchLoader(InMemoryDataset(torch.arange(3)), 3, sampler=sampler))).tolist() == [2, 1, 0]


def test_batches_keep_the_structure_and_own_their_memory():
    data = {"image": torch.zeros(4, 2), "meta": (torch.arange(4), np.arange(4.0))}
    dataset = InMemoryDataset(data)
    batch = dataset.batch(torch.tensor([2, 0]))
    assert batch["meta"][0].tolist() == [2, 0]
    assert batch["meta"][1].dtype == torch.float64
    batch["image"].fill_(1)
    assert not data["image"].any()
    assert dataset[3]["meta"][0] == 3


def test_a_plain_loader_takes_a_batch_dataset_too():
    dataset = InMemoryDataset(list(tensors()))
    assert_same_batches(loader(dataset, 8), DataLoader(dataset, 8))


def test_random_split_is_served_by_the_batch_in_the_stock_order():
    parts = random_split(TensorDataset(*tensors()), [30, 20])
    for part in (*parts, Subset(parts[0], [3, 1, 4])):
        torch.manual_seed(5)
        mine = loader(part, 8, shuffle=True)
        assert isinstance(mine, BatchLoader)
        mine = list(mine)
        torch.manual_seed(5)
        assert_same_batches(mine, DataLoader(part, 8, shuffle=True))


def test_a_subclass_of_tensor_dataset_keeps_its_own_getitem():
    class Doubled(TensorDataset):
        def __getitem__(self, index):
            return tuple(2 * tensor for tensor in super().__getitem__(index))

    assert as_batch_dataset(Doubled(*tensors())) is None


def test_memory_mapped_files_are_served_and_never_written(tmp_path):
    array = np.arange(40, dtype=np.float32).reshape(10, 4)
    np.save(tmp_path / "x.npy", array)
    np.save(tmp_path / "y.npy", np.arange(10))
    dataset = MemoryMappedDataset({"x": tmp_path / "x.npy", "y": tmp_path / "y.npy"})
    batch = next(iter(loader(dataset, 4)))
    assert torch.equal(batch["x"], torch.from_numpy(array[:4]))
    dataset[0]["x"].fill_(-1)
    assert np.array_equal(np.load(tmp_path / "x.npy"), array)


def test_a_memory_mapped_dataset_travels_as_its_paths(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((1000, 100)))
    dataset = MemoryMappedDataset(tmp_path / "x.npy")
    sent = pickle.dumps(dataset)
    assert len(sent) < 1000
    assert torch.equal(pickle.loads(sent)[5], dataset[5])
    assert len(copy.deepcopy(dataset)) == 1000


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no\.npy"):
        MemoryMappedDataset(tmp_path / "no.npy")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "no tensor in it"),
        ({"x": torch.ones(3), "y": torch.ones(2)}, r"data\['y'\] has 2 samples .* data\['x'\] has 3; each"),
        ((torch.ones(3), torch.tensor(1.0)), r"data\[1\] is 0-dimensional"),
        ({"x": torch.ones(3), "y": torch.ones(3, device="meta")}, r"data\['y'\] is on meta but data\['x'\] is on cpu"),
    ],
)
def test_tensors_that_do_not_fit_together_are_named(data, message):
    with pytest.raises(ConfigError, match=message):
        InMemoryDataset(data)


def test_a_dataset_of_samples_is_refused_with_the_remedy():
    with pytest.raises(ConfigError, match=r"dataset=list does not serve batches.*zdtrain\.data\.loader"):
        BatchLoader([1, 2, 3], 2)


def test_switching_batching_off_is_refused():
    with pytest.raises(ConfigError, match="batch_size=None"):
        BatchLoader(InMemoryDataset(torch.ones(3)), None)


@pytest.mark.gpu
def test_device_resident_data_is_shuffled_on_the_device_without_a_host_read():
    dataset = InMemoryDataset((torch.arange(1000), torch.arange(1000.0))).to("cuda")
    batches = loader(dataset, 64, shuffle=True)
    list(batches)
    torch.cuda.set_sync_debug_mode("error")
    try:
        epoch = list(batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(batch[0].is_cuda for batch in epoch)
    assert torch.cat([batch[0] for batch in epoch]).sort().values.tolist() == list(range(1000))


@pytest.mark.gpu
def test_host_data_is_gathered_into_page_locked_memory():
    assert next(iter(loader(InMemoryDataset(torch.ones(8)), 4))).is_pinned()
