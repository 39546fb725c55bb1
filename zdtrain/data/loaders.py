"""Loaders: whole batches in this process where the data allows it, measured defaults for workers where not."""

import math
import os
import sys
from array import array
from collections.abc import Iterable, Iterator
from multiprocessing import get_all_start_methods
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler

from zdtrain.data.datasets import BatchDataset, as_batch_dataset
from zdtrain.data.order import epoch_order, is_vectorised
from zdtrain.errors import ConfigError

MAX_DEFAULT_WORKERS = 8


class BatchLoader(DataLoader[Any]):
    """A ``DataLoader`` that asks its dataset for one batch at a time, in this process, without collation.

    It is a ``DataLoader`` to Lightning: sized, iterable again, its sampler replaced under DDP and told the epoch. For
    data on the CPU its order is that of ``DataLoader(dataset, shuffle=...)`` under the same seed or `generator`, epoch
    after epoch. Data on a device is shuffled there (see `zdtrain.data.order.epoch_order`) and never leaves it.

    Args:
        dataset: What to serve.
        batch_size: Samples per batch.
        shuffle: A new order each epoch.
        sampler: Indices to serve instead, one at a time; excludes `shuffle`.
        batch_sampler: Lists of indices to serve instead; excludes the others.
        drop_last: Leave out the last batch where it is smaller.
        generator: Source of the order; the default generator if not given.
        pin_memory: Gather host data into page-locked memory, from which copies do not block. Takes effect where there
            is an accelerator, as in ``DataLoader``.

    Raises:
        ConfigError: The dataset does not serve batches, or `batch_size` is None.

    Example:
        >>> from zdtrain.data import InMemoryDataset
        >>> [batch.tolist() for batch in BatchLoader(InMemoryDataset(torch.arange(5)), batch_size=2)]
        [[0, 1], [2, 3], [4]]
    """

    def __init__(
        self,
        dataset: BatchDataset,
        batch_size: int | None = 1,
        *,
        shuffle: bool | None = None,
        sampler: Sampler[int] | Iterable[int] | None = None,
        batch_sampler: Sampler[list[int]] | Iterable[list[int]] | None = None,
        drop_last: bool = False,
        generator: torch.Generator | None = None,
        pin_memory: bool = False,
    ) -> None:
        if not isinstance(dataset, BatchDataset):
            raise ConfigError(
                f"dataset={type(dataset).__name__} does not serve batches; "
                "subclass zdtrain.data.BatchDataset, or use zdtrain.data.loader, which takes any dataset"
            )
        if batch_size is None and batch_sampler is None:
            raise ConfigError("batch_size=None switches batching off; give a number of samples")
        super().__init__(
            dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            sampler=sampler,
            batch_sampler=batch_sampler,
            drop_last=drop_last,
            generator=generator,
            pin_memory=pin_memory,
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override] # torch promises its own private iterator class
        # DataLoader draws a seed for its workers here, even without any: drawing it too gives the same order.
        torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        dataset: BatchDataset = self.dataset  # type: ignore[assignment] # checked in the constructor
        pin_memory = self.pin_memory and torch.accelerator.is_available()
        for indices in self._index_batches(dataset.device):
            yield dataset.batch(indices, pin_memory=pin_memory)

    def _index_batches(self, device: torch.device) -> Iterator[Tensor]:
        if type(self.batch_sampler) is BatchSampler and is_vectorised(self.sampler):
            for order in epoch_order(self.sampler, device):  # type: ignore[arg-type] # the sampler is one of torch's
                yield from order.split(self.batch_sampler.batch_size)[: len(self)]
        else:
            assert self.batch_sampler is not None
            for batch in self.batch_sampler:
                yield _as_indices(batch, device)


def loader(
    dataset: Dataset[Any],
    batch_size: int | None = 1,
    shuffle: bool | None = None,
    *,
    num_workers: int | None = None,
    **options: Any,
) -> DataLoader[Any]:
    """Make a ``DataLoader`` with defaults that were measured (``benchmarks/data.py``); each option overrides its own.

    - A `BatchDataset`, a ``TensorDataset`` or a ``Subset`` of one, without `collate_fn` or workers: a `BatchLoader`.
    - ``num_workers``: `default_num_workers`, 0 for an ``IterableDataset`` (each worker would repeat its data).
    - ``persistent_workers``: wherever there are workers, so that an epoch does not start them again.
    - ``multiprocessing_context``: ``"forkserver"`` where the system has it, else ``"spawn"``. A fork copies the locks
      that other threads hold at that moment, and a worker that needs one hangs for ever.
    - ``pin_memory``: where there is an accelerator.

    Workers that are not forked get the dataset pickled and import the main script: define the dataset at the top level
    of a module and start training under ``if __name__ == "__main__":``.

    Args:
        dataset: Any dataset.
        batch_size: Samples per batch.
        shuffle: A new order each epoch.
        num_workers: Worker processes; None for the rule above.
        **options: Any other option of ``torch.utils.data.DataLoader``.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> type(loader(TensorDataset(torch.ones(4, 2)), batch_size=2)).__name__
        'BatchLoader'
    """
    options.setdefault("pin_memory", torch.accelerator.is_available())
    if not num_workers and _BATCH_LOADER_OPTIONS.issuperset(options):
        batches = as_batch_dataset(dataset)
        if batches is not None:
            return BatchLoader(batches, batch_size=batch_size, shuffle=shuffle, **options)
    if num_workers is None:
        num_workers = 0 if isinstance(dataset, IterableDataset) else default_num_workers()
    if num_workers > 0:
        options.setdefault("persistent_workers", True)
        options.setdefault("multiprocessing_context", worker_context(dataset))
    # Keywords, because Lightning repeats this call with some of them replaced.
    return DataLoader(dataset, batch_size=batch_size, shuffle=shuffle, num_workers=num_workers, **options)


_BATCH_LOADER_OPTIONS = {"sampler", "batch_sampler", "drop_last", "generator", "pin_memory"}


def default_num_workers(local_world_size: int | None = None) -> int:
    r"""Return how many workers one training process should have.

    .. math:: \min(8, \max(1, \lfloor \text{cores} / \text{processes} \rfloor))

    No core is kept for the training process: where workers are busy it waits for them, and where it is busy their
    queues are full. The bound keeps memory and start-up in check on large machines.

    Args:
        local_world_size: Training processes on this machine; ``LOCAL_WORLD_SIZE`` or 1 if not given.
    """
    if local_world_size is None:
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if local_world_size < 1:
        raise ConfigError(f"local_world_size={local_world_size} must be at least 1")
    return min(MAX_DEFAULT_WORKERS, max(1, available_cores() // local_world_size))


def available_cores(quota_file: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return how many cores this process may use: its affinity, and its container's quota where there is one.

    Args:
        quota_file: The control group's ``cpu.max``: quota and period in microseconds, or ``max`` for no quota.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not quota_file.is_file():
        return cores
    quota, period = quota_file.read_text().split()
    return cores if quota == "max" else min(cores, max(1, math.floor(int(quota) / int(period))))


def worker_context(dataset: Dataset[Any]) -> BaseContext:
    """Return the fastest way of starting workers that is safe while other threads run.

    The fork server imports what the workers need once, before its first fork; each worker would import it otherwise.

    Args:
        dataset: Its module is imported too.
    """
    if "forkserver" not in get_all_start_methods():
        return torch.multiprocessing.get_context("spawn")
    context = torch.multiprocessing.get_context("forkserver")
    needed = ("torch", "lightning.pytorch", type(dataset).__module__)
    context.set_forkserver_preload([name for name in needed if name in sys.modules and name != "__main__"])
    return context


def _as_indices(batch: Iterable[int], device: torch.device) -> Tensor:
    indices = torch.frombuffer(array("q", batch), dtype=torch.int64)  # a fifth of the time of torch.tensor(list)
    if device.type == "cpu":
        return indices
    return indices.pin_memory().to(device, non_blocking=True)
