"""Where values past the module are, and how they are read again."""

import argparse
import os
import types
import weakref
from collections.abc import Callable, Hashable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from zdtrain.capture.frozen import GENERATORS, content, frozen
from zdtrain.capture.guards import GONE, Guards
from zdtrain.source.location import Location, is_users

_CONTAINERS = (list, tuple, dict, set, frozenset, Mapping, np.generic, np.ndarray, weakref.ref, ContextVar)
_NAMESPACES = (argparse.Namespace, types.SimpleNamespace)
FILL_A_TENSOR = "make it a tensor that is filled in place"
NUMBERS = (bool, int, float, str, bytes, type(None))


@dataclass(frozen=True, slots=True)
class Root:
    """One value that is looked at again before every step."""

    label: str
    """What it is, in words."""
    place: Location
    """A line that reads it."""
    read: Callable[[], Hashable]
    """Returns something that changes when the value does."""
    holders: tuple[Mapping[str, Any], ...] = ()
    """Where a lookup would find it, in order, if it is no more than a name in a dictionary."""
    name: str = ""
    """That name."""
    instead: str = FILL_A_TENSOR
    """What helps where it changes between steps."""

    def guard(self, guards: Guards) -> None:
        """Let `guards` look at it."""
        if not self.holders:
            guards.read(self.read)
        for holder in self.holders:
            guards.keep(holder, self.name, self.read)
            if self.name in holder:
                break


def cell_reader(function: FunctionType, name: str) -> Callable[[], Hashable]:
    """Return what reads a variable of the functions around `function`."""
    function_of, index = weakref.ref(function), function.__code__.co_freevars.index(name)
    last: Hashable = GONE

    def read() -> Hashable:
        nonlocal last
        alive = function_of()
        if alive is not None:
            last = valued(content((alive.__closure__ or ())[index]))
        return last  # of a function that is gone and was another one with the same code: it changes nothing any more

    return read


def class_reader(cls: type, name: str) -> Callable[[], Hashable]:
    """Return what reads an attribute of a class or of those that it inherits from, as it lies there."""

    def read() -> Hashable:
        for kind in cls.__mro__:
            if name in kind.__dict__:
                return valued(kind.__dict__[name])
        return GONE

    return read


def part_reader(module: nn.Module, name: str) -> Callable[[], Hashable]:
    """Return what reads an attribute, parameter, buffer or submodule."""
    module_of = weakref.ref(module)

    def read() -> Hashable:
        held = vars(module_of()) if module_of() is not None else {}
        for names in (held, *(held.get(kind, {}) for kind in ("_parameters", "_buffers", "_modules"))):
            if name in names:
                return valued(names[name])
        return GONE

    return read


def attribute_reader(owner: Any, name: str) -> Callable[[], Hashable]:
    """Return what reads an attribute."""
    return lambda: valued(getattr(owner, name, GONE))


def item_reader(holder: Mapping[str, Any], name: str) -> Callable[[], Hashable]:
    """Return what reads a name in a dictionary."""
    return lambda: valued(holder.get(name, GONE))


def options_reader(optimizer: Optimizer) -> Callable[[], Hashable]:
    """Return what reads the options of all groups."""

    def read() -> Hashable:
        groups = optimizer.param_groups
        return tuple([tuple([frozen(value) for name, value in g.items() if name != "params"]) for g in groups])

    return read


def read_environment() -> Hashable:
    """Return all variables of the process's environment."""
    return tuple(os.environ._data.items())  # type: ignore[attr-defined]  # as bytes: a tenth of the time


def valued(value: Any) -> Hashable:
    """Return something that changes when another value takes the place of this one, or if it is one that changes."""
    value = value.__func__ if isinstance(value, staticmethod | classmethod) else value
    if isinstance(value, FunctionType):
        bare = not (value.__closure__ or value.__defaults__ or value.__kwdefaults__)
        return id(value.__code__) if bare else frozen(value)
    return frozen(value) if is_state(value) or isinstance(value, Tensor | nn.Module) else id(value)


def is_state(value: Any) -> bool:
    """Return whether `value` is a Python value, or an object that holds some, that could be another one later."""
    if isinstance(value, (*NUMBERS, *_CONTAINERS, *GENERATORS, *_NAMESPACES)):
        return True
    if isinstance(value, Tensor | nn.Module | Optimizer | FunctionType | type | types.MethodType | property):
        return False
    return is_users(type(value))
