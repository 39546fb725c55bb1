"""What a captured step depends on besides tensor values: inputs' layout, and Python numbers that it would bake in."""

import random
import sys
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zdtrain.source.location import frame_kind
from zdtrain.step.reads import ALL
from zdtrain.step.watch import storage_of

# Written by Lightning around every hook, or caches of torchmetrics that are accounted for elsewhere.
LIGHTNING_ATTRIBUTES = frozenset({"_current_fx_name", "_metric_attributes", "_trainer", "_fabric", "log"})
METRIC_ATTRIBUTES = frozenset({"_update_count", "_computed", "_forward_cache", "_update_called", "_cache"})
MODULE_ATTRIBUTES = frozenset(nn.Module().__dict__) - {"training"}
MAX_ITEMS = 64
MAX_NUMBERS = 4096  # which are compared at once
_NUMBERS = frozenset({bool, int, float, str})
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
MAX_DEPTH = 4
_PLAIN = (bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.memory_format, Enum, type)


def flatten_batch(batch: Any) -> tuple[list[Any], Any]:
    """Return the leaves of a batch and how to put them together again; `unflatten_batch` is the inverse."""
    kind = type(batch)
    if kind is Tensor:
        return [batch], Tensor
    if (kind is tuple or kind is list) and all(type(item) is Tensor for item in batch):
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
    if isinstance(value, (*_PLAIN, float)):
        return (type(value), frozen(value))
    raise TypeError(type(value).__name__)


def python_state(root: nn.Module, only: Collection[tuple[str, str]] | None = None) -> dict[tuple[str, str], Hashable]:
    """Return the Python values that modules keep as attributes, by module path and attribute name.

    Tensors that are attributes are left out: a program holds or carries those.

    Args:
        root: The module.
        only: Paths and names to look at, see `AttributeReads.names`; None for all.
    """
    return {
        (path, name): frozen(value)
        for path, module, name, value in attributes(root)
        if not isinstance(value, Tensor | nn.Module) and (only is None or (path, name) in only or (path, ALL) in only)
    }


def attributes(root: nn.Module) -> Iterator[tuple[str, nn.Module, str, Any]]:
    """Yield path, module, name and value of every attribute of `root` and its submodules that users may have set."""
    for path, module in root.named_modules():
        ignored = METRIC_ATTRIBUTES if is_metric(module) else frozenset()
        for name, value in list(module.__dict__.items()):
            if name not in MODULE_ATTRIBUTES and name not in LIGHTNING_ATTRIBUTES and name not in ignored:
                yield path, module, name, value


def is_metric(module: nn.Module) -> bool:
    """Return whether `module` is a torchmetrics metric, without importing torchmetrics."""
    return hasattr(module, "_update_count") and hasattr(module, "_defaults")


def frozen(value: Any, depth: int = 0) -> Hashable:
    """Return something hashable that changes when the Python value does; large containers count by their ends."""
    if isinstance(value, float):
        return (float, value if value and value == value else str(value))  # NaN is unequal to itself, 0.0 equal to -0.0
    if isinstance(value, _PLAIN):
        return (bool, value) if isinstance(value, bool) else value  # True is equal to 1
    if isinstance(value, Tensor):
        return (type(value).__name__, id(value), value.requires_grad)
    if isinstance(value, nn.Module):
        return (type(value).__name__, id(value))
    if isinstance(value, np.generic | np.ndarray):
        return (value.shape, str(value.dtype), value.tobytes()) if value.size <= MAX_NUMBERS else id(value)
    if isinstance(value, random.Random):
        return hash(value.getstate())
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return str(value.get_state(legacy=False))
    if depth == MAX_DEPTH:
        return id(value)
    if isinstance(value, FunctionType):  # not its identity: one that is made anew may lie where the last one lay
        made = (*(value.__closure__ or ()), value.__defaults__, value.__kwdefaults__)
        return (id(value.__code__), *(frozen(content(part), depth + 1) for part in made))
    if isinstance(value, MethodType):
        return (frozen(value.__func__, depth + 1), id(value.__self__))
    if isinstance(value, partial):
        return (*(frozen(part, depth + 1) for part in (value.func, value.args, value.keywords)),)
    if isinstance(value, Mapping):
        return (len(value), *(_frozen_items(value.items(), depth)))
    if isinstance(value, list | tuple | deque):
        if len(value) > MAX_ITEMS and len(value) <= MAX_NUMBERS and _NUMBERS.issuperset(map(type, value)):
            return (type(value).__name__, *value)
        items = value if len(value) <= MAX_ITEMS else [value[0], value[-1]]
        return (type(value).__name__, len(value), *(frozen(item, depth + 1) for item in items))
    if isinstance(value, set | frozenset):
        return (len(value), frozenset(frozen(item, depth + 1) for item in value))
    return (id(value), *_frozen_items(_held(value).items(), depth))


def _held(value: Any) -> Mapping[str, Any]:
    """Return the attributes of an object that count for its value: not those of functions, classes or libraries."""
    kind = type(value)
    if isinstance(value, type | FunctionType | BuiltinFunctionType | MethodType):
        return {}
    if kind.__module__.startswith(("torch", "lightning", "zdtrain")) or (callable(value) and not is_users(kind)):
        return {}
    slots = [name for base in kind.__mro__ for name in _names(vars(base).get("__slots__", ())) if hasattr(value, name)]
    return {**{name: getattr(value, name) for name in slots}, **getattr(value, "__dict__", {})}


def content(part: Any) -> Any:
    """Return what a variable of a function around holds, or `part` itself where it is no such variable."""
    if not isinstance(part, CellType):
        return part
    try:
        return part.cell_contents
    except ValueError:  # not bound yet
        return None


def _names(slots: str | Iterable[str]) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


def is_users(kind: type | ModuleType) -> bool:
    """Return whether a class or module is written by the user."""
    module = kind.__name__ if isinstance(kind, ModuleType) else kind.__module__
    file = getattr(sys.modules.get(module), "__file__", None)
    return module == "__main__" or (file is not None and frame_kind(file) == "user")


def _frozen_items(items: Any, depth: int) -> Iterator[Hashable]:
    for index, (name, value) in enumerate(items):
        if index == MAX_ITEMS:
            return
        yield frozen(name, depth + 1), frozen(value, depth + 1)


def fingerprint(root: nn.Module, only: Collection[tuple[str, str]] | None = None) -> tuple[Hashable, ...]:
    """Return everything about `root` that a program holds by value: modes, Python attributes, what is trained.

    Args:
        root: The module.
        only: The attributes that steps read; None for all.
    """
    trained = tuple([(id(p), p.requires_grad, *map(bool, hooks_on(p))) for p in root.parameters()])
    kinds = tuple([(type(module), module.training, *map(len, hooks_of(module))) for module in root.modules()])
    shapes = tuple([buffer.shape for buffer in root.buffers()])
    layouts = tuple(
        [
            (path, name, value.shape, value.stride(), value.dtype, value.requires_grad)
            for path, _, name, value in attributes(root)
            if isinstance(value, Tensor) and value.layout is torch.strided and (only is None or (path, name) in only)
        ]
    )
    return (tuple(python_state(root, only).items()), trained, kinds, shapes, layouts)


def changed_part(before: Any, after: Any) -> str:
    """Return in words what is different between two fingerprints; empty where it is nothing that has a name."""
    old, new = dict(before[0]), dict(after[0])
    for (path, name), value in new.items():
        if old.get((path, name), value) != value:
            return f"the attribute {f'{path}.{name}' if path else name!r}"
    parts = zip(
        ("what is trained", "modes or hooks of modules", "buffers", "attributes"), before[1:], after[1:], strict=True
    )
    return next((what for what, part, other in parts if part != other), "")


def torch_modes() -> tuple[Hashable, ...]:
    """Return what torch's operations depend on besides their arguments."""
    kinds = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    return (torch.get_default_dtype(), *kinds, torch.is_autocast_cache_enabled())


def hooks_on(parameter: Tensor) -> tuple[Any, Any]:
    """Return the functions that torch calls with a parameter's gradient, before and after adding it."""
    return parameter._backward_hooks, parameter._post_accumulate_grad_hooks


def hooks_of(module: nn.Module) -> Iterator[Mapping[int, Any]]:
    """Yield the functions that torch calls around a module's forward and backward, by kind."""
    held = module.__dict__
    return (held[kind] for kind in _HOOKS)


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
