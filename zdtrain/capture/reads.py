"""Which Python attributes of a module a step reads: only those can change what it does."""

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from zdtrain.source.location import code_kind

_OURS = ("lightning.", "zdtrain.")  # which keep logged values in modules
ALL = "*"  # in the place of a name: every attribute


class AttributeReads:
    """Notes the attributes that are read of a module and its submodules.

    Args:
        root: The module.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._noted: set[tuple[int, str]] = set()  # id of the module, name
        self._modules: dict[int, weakref.ref[nn.Module]] = {}  # by id

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Note what the body reads."""
        noted, modules = self._noted, self._modules

        def getattribute(module: nn.Module, name: str) -> Any:
            if id(module) not in modules:
                modules[id(module)] = weakref.ref(module)
            noted.add((id(module), name))
            if name == "__dict__" and code_kind(sys._getframe(1).f_code) != "library":
                noted.add((id(module), ALL))
            return super(nn.Module, module).__getattribute__(name)

        nn.Module.__getattribute__ = getattribute  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            del nn.Module.__getattribute__

    def names(self) -> set[tuple[str, str]]:
        """Return path of the module and name of every attribute that was read; `ALL` stands for all of a module."""
        paths = {id(module): path for path, module in self._root.named_modules()}
        return {(paths[key], name) for key, name in self._noted if key in paths}

    def elsewhere(self) -> Iterator[tuple[nn.Module, str]]:
        """Yield modules that are none of the root's, such as one in a list, with the names that were read of them."""
        inside = {id(module) for module in self._root.modules()}
        for key, name in self._noted:
            module = self._modules[key]()
            if module is not None and key not in inside and not type(module).__module__.startswith(_OURS):
                yield module, name
