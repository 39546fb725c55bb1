"""What a captured step depends on besides tensor values: inputs' layout, and Python numbers that it would bake in."""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zdtrain.capture.frozen import PLAIN, frozen
from zdtrain.capture.guards import Numbers
from zdtrain.capture.watch import storage_of


def flatten_batch(batch: Any) -> tuple[list[Any], Any]:
    """Return the leaves of a batch and how to put them together again; `unflatten_batch` is the inverse."""
    kind = type(batch)
    if kind is Tensor:
        return [batch], Tensor
    if kind is tuple or kind is list:
        for item in batch:
            if type(item) is not Tensor:
                break
        else:
            return list(batch), kind  # the common batch, past pytree's dispatch
    return pytree.tree_flatten(batch)


def unflatten_batch(leaves: Sequence[Any], structure: Any) -> Any:
    """Return the batch that `flatten_batch` took apart, with `leaves` in the place of the old ones."""
    if structure is Tensor:
        return leaves[0]
    if structure is tuple or structure is list:
        return structure(leaves)
    return pytree.tree_unflatten(list(leaves), structure)


def signature(values: Sequence[Any]) -> tuple[Hashable, ...]:
    """Return what has to agree before a program may take `values` as inputs: layout of tensors, other leaves by value.

    Raises:
        TypeError: A leaf is neither a tensor nor a plain value.
    """
    return (*[_signature_of(value) for value in values], _shared(values))


def _shared(values: Sequence[Any]) -> tuple[int, ...]:
    """Return which tensors are one object or lie in one memory, by the index of the first; empty where none do."""
    if len(values) < 2:
        return ()
    storages = [storage_of(value) if isinstance(value, Tensor) else -1 - i for i, value in enumerate(values)]
    if len(set(storages)) == len(storages):
        return ()
    ids = [id(value) for value in values]
    return tuple([storages.index(storage) for storage in storages] + [ids.index(one) for one in ids])


def _signature_of(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return (value.shape, value.dtype, value.stride(), value.device, value.requires_grad, type(value))
    if isinstance(value, (*PLAIN, float)):
        return (type(value), frozen(value))
    raise TypeError(type(value).__name__)


class Layouts:
    """Numbers the layouts of batches; one like the last is recognized in a third of the time.

    Args:
        cap: See `Numbers`.
    """

    def __init__(self, cap: int) -> None:
        self._numbers = Numbers(cap)
        self._number = 0
        self._structure: Any = None
        self._signature: tuple[Hashable, ...] = ()
        self.before: tuple[Hashable, ...] = ()
        """Signature of the batch before the last."""
        self._seen: list[tuple[Any, ...]] = []  # of the last batch, if it is all plain tensors in memory of their own

    def number(self, leaves: Sequence[Any], structure: Any) -> int:
        """Return the number that stands for the layout of a batch that `flatten_batch` took apart.

        Raises:
            TypeError: See `signature`.
        """
        self.before = self._signature
        if not self._is_like_last(leaves, structure):
            layout = self._signature = signature(leaves)
            self._number = self._numbers.of((structure if isinstance(structure, type) else str(structure), layout))
            plain = all(type(leaf) is Tensor for leaf in leaves) and not layout[-1]
            self._structure = structure
            self._seen = [(t.shape, t.dtype, t.stride(), t.device, t.requires_grad) for t in leaves] if plain else []
        return self._number

    def _is_like_last(self, leaves: Sequence[Any], structure: Any) -> bool:
        seen = self._seen
        if not seen or len(leaves) != len(seen) or structure != self._structure:
            return False
        storages = set()
        for leaf, (shape, dtype, stride, device, trained) in zip(leaves, seen, strict=True):
            if type(leaf) is not Tensor or leaf.shape != shape or leaf.dtype is not dtype or leaf.stride() != stride:
                return False
            if leaf.device != device or leaf.requires_grad is not trained:
                return False
            storages.add(leaf.untyped_storage().data_ptr())
        return len(storages) == len(leaves)


def torch_modes() -> tuple[Hashable, ...]:
    """Return what torch's operations depend on besides their arguments."""
    return (
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.is_autocast_cache_enabled(),
    )


def changing_leaf(batch: Any, before: Sequence[Hashable]) -> str | None:
    """Return in words which Python value in a batch is another one than in the batch before; None if there is none.

    Args:
        batch: The batch.
        before: The signature of the leaves of the one before.
    """
    for (path, leaf), old in zip(pytree.tree_flatten_with_path(batch)[0], before, strict=False):
        if not isinstance(leaf, Tensor) and _signature_of(leaf) != old:
            where = f"batch{pytree.keystr(path)}"
            return (
                f"{where} holds a {type(leaf).__name__} that changes, and a replay would repeat it: leave it out in "
                "the collate function or in on_after_batch_transfer, or make it a tensor"
            )
    return None


def describe(leaves: list[Any], phase: str) -> str:
    """Return the key of a step in words: its tensors, and what else tells it apart."""
    shapes = [
        f"{tuple(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}" for leaf in leaves if isinstance(leaf, Tensor)
    ]
    return "; ".join([", ".join(shapes), *([phase] if phase else [])])
