"""Which Python attributes of a module a step reads: only those can change what it does."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from zdtrain.source.location import frame_kind

ALL = "*"  # in the place of a name: every attribute


class AttributeReads:
    """Notes the attributes that are read of a module and its submodules.

    Args:
        root: The module.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._noted: set[tuple[int, str]] = set()  # id of the module, name

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Note what the body reads."""
        noted = self._noted

        def getattribute(module: nn.Module, name: str) -> Any:
            noted.add((id(module), name))
            if name == "__dict__" and frame_kind(sys._getframe(1).f_code.co_filename) != "library":
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
