"""Python values as something hashable that changes when they do."""

import random
import weakref
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zdtrain.source.location import is_users

MAX_ITEMS = 64
MAX_NUMBERS = 4096  # which are compared at once
MAX_DEPTH = 4
PLAIN = (bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.memory_format, type)
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
_NUMBERS = frozenset({bool, int, float, str})
# Kinds of which one object may hold other values later.
_CHANGING = (Tensor, Mapping, list, tuple, deque, set, frozenset, np.ndarray, weakref.ref, ContextVar, *GENERATORS)
_LIBRARIES = ("torch", "lightning", "zdtrain")


def frozen(value: Any, depth: int = 0) -> Hashable:
    """Return something hashable that changes when the Python value does; large containers count by their ends."""
    if isinstance(value, float):
        return (float, value if value and value == value else str(value))  # NaN is unequal to itself, 0.0 equal to -0.0
    if isinstance(value, Enum):
        return (value, frozen(value.value, depth + 1))
    if isinstance(value, PLAIN):
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
        return (frozen(value.__func__, depth + 1), frozen(value.__self__, depth + 1))
    if isinstance(value, partial):
        return (*(frozen(part, depth + 1) for part in (value.func, value.args, value.keywords)),)
    if isinstance(value, weakref.ref):
        return frozen(value(), depth + 1)
    if isinstance(value, ContextVar):
        return frozen(value.get(None), depth + 1)
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
    if _counts_by_identity(value):
        return {}
    kind = type(value)
    slots = [name for base in kind.__mro__ for name in _names(vars(base).get("__slots__", ())) if hasattr(value, name)]
    return {**{name: getattr(value, name) for name in slots}, **getattr(value, "__dict__", {})}


def _counts_by_identity(value: Any) -> bool:
    kind = type(value)
    if isinstance(value, type | FunctionType | BuiltinFunctionType | MethodType):
        return True
    return kind.__module__.startswith(_LIBRARIES) or (callable(value) and not is_users(kind))


def is_settled(value: Any, depth: int = 0) -> bool:
    """Return whether ``frozen(value)`` stays as it is for as long as `value` is the same object."""
    if isinstance(value, (float, *PLAIN, nn.Module, np.generic)):
        return True
    if isinstance(value, Enum):
        return is_settled(value.value, depth + 1)
    if type(value) is tuple and len(value) <= MAX_ITEMS and depth < MAX_DEPTH:
        return all(is_settled(item, depth + 1) for item in value)
    if isinstance(value, (*_CHANGING, FunctionType, MethodType, partial, staticmethod, classmethod)):
        return False
    return _counts_by_identity(value)


def is_bare(function: FunctionType) -> bool:
    """Return whether a function's code is all there is to it: it holds nothing that could change in place."""
    closed = function.__code__.co_freevars
    return closed in ((), ("__class__",)) and not function.__kwdefaults__ and is_settled(function.__defaults__)


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


def _frozen_items(items: Any, depth: int) -> Iterator[Hashable]:
    for index, (name, value) in enumerate(items):
        if index == MAX_ITEMS:
            return
        yield frozen(name, depth + 1), frozen(value, depth + 1)
