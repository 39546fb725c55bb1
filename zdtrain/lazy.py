"""Public names that are imported on first use (PEP 562)."""

import sys
from collections.abc import Callable, Collection, Mapping
from importlib import import_module


def lazily(
    module: str, places: Mapping[str, str], *, parts: Collection[str] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a module whose names lie in other modules.

    Args:
        module: The module's own name.
        places: Full name of the module that holds each public name.
        parts: Names of modules inside it.
    """

    def find(name: str) -> object:
        if name in places:
            return getattr(import_module(places[name]), name)
        if name in parts:
            return import_module(f"{module}.{name}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    def names() -> list[str]:
        return sorted({*vars(sys.modules[module]), *places, *parts})

    return find, names
