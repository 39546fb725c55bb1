"""A user's code is looked at wherever it is: typed in, run by ``exec``, or in a package of theirs that is installed."""

import atexit
import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from tests.capture import test_reach, test_swapped

PACKAGE = "installed_models"


def typed_in(module: ModuleType) -> dict[str, object]:
    """Run the source of a module as a prompt does; return its names."""
    names: dict[str, object] = {"__name__": "typed_in", "__package__": module.__package__, "__file__": "<string>"}
    exec(compile(source_of(module), "<string>", "exec"), names)
    return names


def installed(module: ModuleType) -> dict[str, object]:
    """Import a copy of a module out of a package among installed ones; return its names."""
    if PACKAGE not in sys.modules:
        folder = Path(tempfile.mkdtemp())
        atexit.register(shutil.rmtree, folder)
        package = sys.modules[PACKAGE] = ModuleType(PACKAGE)
        package.__path__ = [str(folder / "site-packages" / PACKAGE)]
        Path(package.__path__[0]).mkdir(parents=True)
    name = module.__name__.rpartition(".")[2].removeprefix("test_")
    file = Path(sys.modules[PACKAGE].__path__[0]) / f"{name}.py"
    file.write_text(source_of(module), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"{PACKAGE}.{name}", file)
    copied = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copied)
    return vars(copied)


def source_of(module: ModuleType) -> str:
    return Path(module.__file__).read_text(encoding="utf-8")


for _place in (typed_in, installed):
    for _module in (test_reach, test_swapped):
        for _name, _value in _place(_module).items():
            if _name.startswith("test_") and callable(_value):
                globals()[f"{_name}_{_place.__name__}"] = _value
