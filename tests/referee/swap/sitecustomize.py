"""Put the class named by REFEREE_TRAINER (``module:Class``) in place of stock's Trainer.

Python imports this module at start-up when its folder is on PYTHONPATH, so the swap also reaches spawned workers,
script launchers and subprocesses. It happens right behind ``lightning.pytorch``, before anything can import the name.
"""

import importlib
import importlib.abc
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType


def swap(target: str) -> None:
    """Replace stock's Trainer by `target` in every loaded module outside the package of `target`."""
    stock = sys.modules["lightning.pytorch.trainer.trainer"].Trainer
    module_name, _, class_name = target.partition(":")
    trainer = getattr(importlib.import_module(module_name), class_name)
    if not (isinstance(trainer, type) and issubclass(trainer, stock)):
        raise TypeError(f"REFEREE_TRAINER={target} is not a subclass of {stock.__module__}.{stock.__qualname__}")
    own_package = trainer.__module__.partition(".")[0]
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == own_package:
            continue
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if value is stock:
                setattr(module, attribute, trainer)


class SwapBehindLightning(importlib.abc.MetaPathFinder):
    """Runs `swap` once ``lightning.pytorch`` has been executed."""

    def find_spec(self, name: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find ``lightning.pytorch`` as usual, with a loader that swaps behind it."""
        if name != "lightning.pytorch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_then_swap(module: ModuleType) -> None:
            execute(module)
            swap(os.environ["REFEREE_TRAINER"])

        spec.loader.exec_module = execute_then_swap
        return spec


if os.environ.get("REFEREE_TRAINER"):
    sys.meta_path.insert(0, SwapBehindLightning())
