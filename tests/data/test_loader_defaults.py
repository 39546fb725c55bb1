"""The rule behind zdtrain.data.loader, and its workers while other threads hold locks."""

import multiprocessing
import threading

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from zdtrain.data import BatchLoader, InMemoryDataset, available_cores, default_num_workers, loader
from zdtrain.data import loaders as rules
from zdtrain.errors import ConfigError

LOCK = threading.Lock()


class NeedsTheLock(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        with LOCK:
            return torch.tensor(index)


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(4))


def test_workers_start_while_another_thread_holds_a_lock_they_need():
    with LOCK:  # a forked worker would find it locked, and wait for a thread that it does not have
        batches = loader(NeedsTheLock(), 4, num_workers=1, timeout=60)
        first_epoch = [batch.tolist() for batch in batches]
        workers = {child.pid for child in multiprocessing.active_children()}
        second_epoch = [batch.tolist() for batch in batches]
        assert {child.pid for child in multiprocessing.active_children()} == workers != set()
    assert first_epoch == second_epoch == [[0, 1, 2, 3], [4, 5, 6, 7]]
    del batches
    assert multiprocessing.active_children() == []


def test_samples_get_workers_that_persist_and_are_not_forked():
    batches = loader(NeedsTheLock(), 4)
    assert type(batches) is DataLoader
    assert batches.num_workers == default_num_workers()
    assert batches.persistent_workers
    assert batches.multiprocessing_context.get_start_method() in ("forkserver", "spawn")
    assert batches.pin_memory == torch.accelerator.is_available()


def test_each_default_can_be_overridden():
    batches = loader(
        NeedsTheLock(), 4, num_workers=2, persistent_workers=False, multiprocessing_context="fork", pin_memory=True
    )
    assert batches.num_workers == 2
    assert not batches.persistent_workers
    assert batches.multiprocessing_context.get_start_method() == "fork"
    assert batches.pin_memory
    in_process = loader(NeedsTheLock(), 4, num_workers=0)
    assert in_process.num_workers == 0
    assert in_process.multiprocessing_context is None


def test_an_iterable_dataset_is_not_repeated_by_default():
    assert [int(number) for batch in loader(Numbers(), 2) for number in batch] == [0, 1, 2, 3]


@pytest.mark.parametrize("dataset", [TensorDataset(torch.ones(4)), InMemoryDataset(torch.ones(4))])
def test_data_in_memory_is_served_by_the_batch_unless_workers_or_collation_are_asked_for(dataset):
    assert type(loader(dataset, 2)) is BatchLoader
    assert type(loader(dataset, 2, num_workers=1)) is DataLoader
    assert type(loader(dataset, 2, num_workers=0, collate_fn=list)) is DataLoader


@pytest.mark.parametrize(
    ("cores", "processes", "workers"), [(1, 1, 1), (2, 1, 2), (4, 1, 4), (64, 1, 8), (48, 8, 6), (8, 8, 1), (4, 8, 1)]
)
def test_workers_follow_the_cores_and_the_processes_that_share_them(monkeypatch, cores, processes, workers):
    monkeypatch.setattr(rules, "available_cores", lambda: cores)
    assert default_num_workers(processes) == workers
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    assert default_num_workers() == workers


def test_no_processes_are_refused():
    with pytest.raises(ConfigError, match="local_world_size=0 must be at least 1"):
        default_num_workers(0)


@pytest.mark.parametrize(("quota", "limit"), [("max 100000", None), ("150000 100000", 1), ("50000 100000", 1)])
def test_a_containers_quota_limits_the_cores(tmp_path, quota, limit):
    file = tmp_path / "cpu.max"
    unlimited = available_cores(file)
    file.write_text(quota)
    assert available_cores(file) == (limit or unlimited)
