"""Python and tensor state of a module before and after a step: what a replay would not repeat."""

import functools
import gc
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics import Metric

from zdtrain.check.dispatch import Born
from zdtrain.source.definitions import attribute_location, class_location
from zdtrain.source.location import Location, is_users

_DEPTH = 3
"""How far into containers and objects Python state is compared."""
_LIBRARIES = ("torch.", "lightning.", "torchmetrics.")
_CONTAINERS = (list, tuple, set, frozenset, deque)
_MAX_ITEMS = 1000
_MAX_BYTES = 1_000_000

Fingerprint = dict[str, Any]


@functools.cache
def _bookkeeping() -> frozenset[str]:
    """Attributes that torch and Lightning keep for themselves."""
    own = {"_hparams", "_hparams_initial", "_hparams_name"}  # set by save_hyperparameters
    return frozenset(vars(LightningModule())) | frozenset(vars(nn.Module())) | own


def is_library_class(cls: type) -> bool:
    """Whether torch, Lightning or torchmetrics define the class."""
    return cls.__module__.startswith(_LIBRARIES) or cls.__module__ == "torch"


def user_attributes(module: nn.Module, ignored: frozenset[str] = frozenset()) -> Iterator[tuple[str, Any]]:
    """The instance attributes that the user's class has set on a module."""
    if is_library_class(type(module)):
        return
    for name, value in vars(module).items():
        if name not in _bookkeeping() and name not in ignored:
            yield name, value


def _describe(value: Any, depth: int) -> Any:
    """Something that compares equal exactly when `value` has not changed, tensors apart."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return value if value == value else "nan"
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, np.ndarray):
        return value.shape, value.tobytes() if value.nbytes <= _MAX_BYTES else id(value)
    if depth > 0 and isinstance(value, _CONTAINERS):
        return type(value), len(value), tuple(_describe(item, depth - 1) for item in islice(value, _MAX_ITEMS))
    if depth > 0 and isinstance(value, dict):
        items = islice(value.items(), _MAX_ITEMS)
        return dict, len(value), tuple((str(key), _describe(item, depth - 1)) for key, item in items)
    if depth > 0 and not isinstance(value, nn.Module) and is_users(type(value)) and hasattr(value, "__dict__"):
        return type(value), tuple((name, _describe(item, depth - 1)) for name, item in sorted(vars(value).items()))
    return id(value), len(value) if isinstance(value, (*_CONTAINERS, dict)) else 0


def python_state(root: nn.Module, ignored: frozenset[str]) -> Fingerprint:
    """The Python attributes of the user's modules."""
    state = {}
    for path, module in root.named_modules():
        if isinstance(module, Metric):
            continue
        for name, value in user_attributes(module, ignored):
            state[f"{path}.{name}".lstrip(".")] = _describe(value, _DEPTH)
    return state


def tensor_bindings(root: nn.Module, ignored: frozenset[str]) -> dict[str, torch.Tensor]:
    """Every tensor that an attribute of a module names, metrics apart (their states are rebound by design)."""
    bindings = {}
    for path, module in root.named_modules():
        if isinstance(module, Metric):
            continue
        own = {**module._parameters, **module._buffers, **dict(user_attributes(module, ignored))}
        for name, value in own.items():
            full = f"{path}.{name}".lstrip(".")
            if isinstance(value, torch.Tensor):
                bindings[full] = value
            elif isinstance(value, list | tuple):
                items = list(value)[:_MAX_ITEMS]
                bindings |= {f"{full}[{i}]": item for i, item in enumerate(items) if isinstance(item, torch.Tensor)}
            elif isinstance(value, dict):
                items = list(value.items())[:_MAX_ITEMS]
                bindings |= {f"{full}[{key!r}]": item for key, item in items if isinstance(item, torch.Tensor)}
    return bindings


def holder_of(root: nn.Module, tensor: torch.Tensor) -> str | None:
    """The attribute of a module whose container holds `tensor`, if one does."""
    for path, module in root.named_modules():
        for name, value in user_attributes(module):
            items = value.values() if isinstance(value, dict) else value if isinstance(value, _CONTAINERS) else ()
            if any(item is tensor for item in items):
                return f"{path}.{name}".lstrip(".")
    return None


def growing_metrics(root: nn.Module) -> list[tuple[str, Metric]]:
    """Metrics that keep every batch in a list, and whose list is in use."""
    found = []
    for path, module in root.named_modules():
        if isinstance(module, Metric):
            lists = [name for name, default in module._defaults.items() if isinstance(default, list)]
            if any(getattr(module, name) for name in lists):
                found.append((path, module))
    return found


def owner_of(root: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The module and attribute that a dotted path names."""
    parent, _, name = path.partition("[")[0].rpartition(".")
    return root.get_submodule(parent), name


def change_location(root: nn.Module, path: str) -> Location:
    """The line that changes the attribute at `path`."""
    owner, name = owner_of(root, path)
    return attribute_location(type(owner), name, outside_init=True)


def metric_location(root: nn.Module, path: str) -> Location:
    """The line that creates the metric at `path`, in the class of the module that holds it."""
    parts = path.split(".")
    for depth in range(len(parts) - 1, -1, -1):
        owner = root.get_submodule(".".join(parts[:depth]))
        if not is_library_class(type(owner)):
            return attribute_location(type(owner), parts[depth])
    return class_location(type(root))


def _is_held(tensor: torch.Tensor, own: set[int]) -> bool:
    """Whether a Python container holds the tensor; autograd's saved tensors are held by C++ alone."""
    holders = [h for h in gc.get_referrers(tensor) if isinstance(h, list | dict | tuple | set | deque)]
    return any(id(holder) not in own for holder in holders)


def _survivors(born: list[Born], last_step: int) -> list[tuple[Born, torch.Tensor]]:
    """One tensor of each line and operation of which results of two or more earlier steps are alive."""
    alive: dict[tuple[Location, str], list[tuple[Born, torch.Tensor]]] = {}
    for item in born:
        tensor = item.reference()
        if tensor is not None and item.step < last_step:
            alive.setdefault((item.location, item.name), []).append((item, tensor))
    return [items[0] for items in alive.values() if len({item.step for item, _ in items}) > 1]


def kept_tensors(born: list[Born], last_step: int) -> list[tuple[Born, torch.Tensor]]:
    """Tensors of two or more earlier steps, from one line, that something still holds.

    A tensor of only one step is a cache or state that was created once; those of the last step may be in use.
    """
    if not _survivors(born, last_step):
        return []
    gc.collect()
    survivors = _survivors(born, last_step)
    own = {id(survivors), *(id(pair) for pair in survivors)}
    return [(item, tensor) for item, tensor in survivors if _is_held(tensor, own)]
