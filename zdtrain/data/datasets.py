"""Datasets that give a whole batch for a tensor of indices, instead of one sample for one index."""

from abc import ABC, abstractmethod
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map
from torch.utils.data import Dataset, Subset, TensorDataset

from zdtrain.errors import ConfigError


class BatchDataset(Dataset[Any], ABC):
    """A map-style dataset that also serves batches; `zdtrain.data.BatchLoader` needs one.

    Indexed one sample at a time it is an ordinary dataset, so a plain ``DataLoader`` works with it too.
    """

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the batches are made, and where their indices have to be."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples."""

    @abstractmethod
    def batch(self, indices: Tensor, *, pin_memory: bool = False) -> Any:
        """Return the samples at `indices` as one batch, in that order, in memory of its own.

        Args:
            indices: int64, shape (B,), on `device`.
            pin_memory: Make the batch in page-locked host memory; needs an accelerator.
        """

    @abstractmethod
    def __getitem__(self, index: int) -> Any:
        """Return one sample."""


class InMemoryDataset(BatchDataset):
    """Tensors that fit in memory, indexed along their first dimension; one ``index_select`` per tensor and batch.

    Args:
        data: A tensor, or a tuple, list, dict or other pytree of tensors or NumPy arrays (shared, not copied), each of
            shape (N, ...). Batches have the same structure. Tensors on an accelerator make a device-resident dataset.

    Raises:
        ConfigError: There is no tensor, or they differ in their first dimension or their device.

    Example:
        >>> dataset = InMemoryDataset({"x": torch.arange(10.0), "y": torch.arange(10)})
        >>> dataset.batch(torch.tensor([3, 1]))
        {'x': tensor([3., 1.]), 'y': tensor([3, 1])}
    """

    def __init__(self, data: Any) -> None:
        named, self._spec = tree_flatten_with_path(data)
        self._leaves = [torch.as_tensor(leaf) for _, leaf in named]
        _check_rows({f"data{keystr(path)}": leaf for (path, _), leaf in zip(named, self._leaves, strict=True)})

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self._leaves[0].device

    def to(self, device: torch.device | str) -> "InMemoryDataset":
        """Return the dataset with its tensors on `device`: batches are then made, and shuffled, there."""
        return InMemoryDataset(self._spec.unflatten([leaf.to(device) for leaf in self._leaves]))

    def batch(self, indices: Tensor, *, pin_memory: bool = False) -> Any:
        """Return the samples at `indices` as one batch."""
        gather = _gather_pinned if pin_memory and self.device.type == "cpu" else torch.index_select
        return self._spec.unflatten([gather(leaf, 0, indices) for leaf in self._leaves])

    def __len__(self) -> int:
        return self._leaves[0].shape[0]

    def __getitem__(self, index: int) -> Any:
        return self._spec.unflatten([leaf[index] for leaf in self._leaves])


class MemoryMappedDataset(InMemoryDataset):
    """Arrays in ``.npy`` files, mapped instead of read: the operating system loads the pages that batches touch.

    Writing to a tensor of this dataset changes a private copy of the page, never the file. Sent to another process, the
    dataset opens its files again there instead of copying their contents.

    Args:
        paths: A path, or a pytree of paths; batches have the same structure.

    Raises:
        ConfigError: The arrays differ in their first dimension.
        FileNotFoundError: A file is missing.

    Example:
        >>> dataset = MemoryMappedDataset({"tokens": "tokens.npy", "label": "label.npy"})  # doctest: +SKIP
    """

    def __init__(self, paths: Any) -> None:
        self._paths = paths
        super().__init__(tree_map(_map_array, paths))

    def __reduce__(self) -> tuple[type["MemoryMappedDataset"], tuple[Any]]:
        return type(self), (self._paths,)


class BatchSubset(BatchDataset):
    """The samples of `dataset` at `indices`, served by the batch; `as_batch_dataset` makes it of a ``Subset``."""

    def __init__(self, dataset: BatchDataset, indices: Tensor) -> None:
        self._dataset = dataset
        self._indices = indices.to(dataset.device)

    @property
    def device(self) -> torch.device:
        """Where the dataset is."""
        return self._dataset.device

    def batch(self, indices: Tensor, *, pin_memory: bool = False) -> Any:
        """Return the samples at `indices` of this subset as one batch."""
        return self._dataset.batch(self._indices.index_select(0, indices), pin_memory=pin_memory)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[int(self._indices[index])]


def as_batch_dataset(dataset: Dataset[Any]) -> BatchDataset | None:
    """Return `dataset` in a form that serves batches, or ``None`` where only its samples are known.

    A ``TensorDataset`` gives its tensors as a list, which is what default collation makes of its samples. A ``Subset``
    (``random_split``) of a dataset that serves batches serves batches.
    """
    if isinstance(dataset, BatchDataset):
        return dataset
    if type(dataset) is TensorDataset and len({tensor.device for tensor in dataset.tensors}) == 1:
        return InMemoryDataset(list(dataset.tensors))
    if type(dataset) is Subset:
        whole = as_batch_dataset(dataset.dataset)
        return None if whole is None else BatchSubset(whole, torch.as_tensor(dataset.indices, dtype=torch.int64))
    return None


def _check_rows(leaves: dict[str, Tensor]) -> None:
    if not leaves:
        raise ConfigError("data has no tensor in it; give a tensor or a tuple, list or dict of tensors")
    first_name, first = next(iter(leaves.items()))
    for name, leaf in leaves.items():
        if leaf.ndim == 0:
            raise ConfigError(f"{name} is 0-dimensional; each tensor needs the samples along its first dimension")
        if leaf.shape[0] != first.shape[0]:
            raise ConfigError(
                f"{name} has {leaf.shape[0]} samples (shape {tuple(leaf.shape)}) but {first_name} has {first.shape[0]}"
                "; each tensor needs one row per sample"
            )
        if leaf.device != first.device:
            raise ConfigError(
                f"{name} is on {leaf.device} but {first_name} is on {first.device}; move them to one device"
            )


def _gather_pinned(leaf: Tensor, dim: int, indices: Tensor) -> Tensor:
    out = torch.empty((len(indices), *leaf.shape[1:]), dtype=leaf.dtype, pin_memory=True)
    return torch.index_select(leaf, dim, indices, out=out)


def _map_array(path: str | PathLike[str]) -> Tensor:
    # "c" is copy-on-write: writable, as torch wants its memory, with the file left alone.
    return torch.from_numpy(np.load(path, mmap_mode="c"))
