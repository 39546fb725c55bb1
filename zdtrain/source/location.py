"""Which line of the user's source is responsible for what runs now."""

import functools
import importlib.util
import linecache
import os
import sys
import sysconfig
from types import CodeType, FrameType, ModuleType
from typing import Any, Literal, NamedTuple

FrameKind = Literal["check", "skip", "library", "third-party", "user"]

_ZDTRAIN = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_WATCHES = tuple(os.path.join(_ZDTRAIN, "capture", name) for name in ("counters.py", "watch.py"))
_CHECK = (os.path.join(_ZDTRAIN, "check", ""), *_WATCHES)  # what watches others
_STDLIB = os.path.realpath(sysconfig.get_paths()["stdlib"]) + os.sep
_SITE_PACKAGES = f"{os.sep}site-packages{os.sep}"
_LIBRARIES = (
    "torch",
    "lightning",
    "lightning_fabric",
    "pytorch_lightning",
    "lightning_utilities",
    "torchmetrics",
    "zdtrain",
)

# Python files that only carry a call of the public tensor API into C++: whoever calls them called the operation itself.
_API_FILES = tuple(
    os.path.join("torch", *parts)
    for parts in (
        ("_tensor.py",),
        ("functional.py",),
        ("_jit_internal.py",),
        ("_ops.py",),
        ("_VF.py",),
        ("overrides.py",),
        ("nn", "functional.py"),
        ("utils", "_contextlib.py"),
        ("utils", "_device.py"),
        ("_compile.py",),
        ("autograd", "__init__.py"),
        ("autograd", "graph.py"),
        ("nn", "modules", "module.py"),
    )
)
_PRECISION_PLUGIN = os.path.join("pytorch", "plugins", "precision", "amp.py")
_GENERATED = ("<frozen ", "<__array_function__", "<eval_with_key>", "<attrs generated")  # code that libraries write
_NAMED_TUPLE, _DATACLASS = ("_tuple_new",), "__create_fn__"  # names in, and around, code that Python writes
_HEAP_TYPE = 1 << 9  # of type.__flags__: made by a class statement, here by one in a namespace without a name
_DYNAMO = os.path.join(os.sep, "torch", "_dynamo", "")  # wraps dispatch modes


_claimed: set[str] = set()  # folders and files in site-packages that are the user's


class Location(NamedTuple):
    """A place in source code, with the library call made from it."""

    file: str
    line: int
    function: str
    library: str | None = None

    @property
    def is_user(self) -> bool:
        """Whether code of the user is responsible (otherwise a library ran on its own)."""
        return bool(self.file)


NOWHERE = Location("", 0, "")


@functools.cache
def _library_folders() -> tuple[str, ...]:
    folders = []
    for name in _LIBRARIES:
        spec = importlib.util.find_spec(name)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            folders += [folder + os.sep, os.path.realpath(folder) + os.sep]
    return tuple(folders)


@functools.cache
def frame_kind(filename: str) -> FrameKind:
    """Whose code a file holds; what was typed in, or run by ``exec``, is the user's."""
    if filename.startswith("<"):
        return "skip" if filename.startswith(_GENERATED) else "user"
    path = os.path.abspath(filename)
    if path.startswith(_CHECK):
        return "check"
    if path.startswith(_library_folders()):
        return "library"
    if _SITE_PACKAGES in path:
        return "user" if path.startswith(tuple(_claimed)) else "third-party"
    return "skip" if path.startswith(_STDLIB) else "user"


def claim(cls: type) -> None:
    """Take the packages that define a class and its bases for the user's own from now on, though they are installed."""
    for base in cls.__mro__:
        package = sys.modules.get(base.__module__.partition(".")[0])
        folders, file = getattr(package, "__path__", ()), getattr(package, "__file__", None)
        places = [os.path.join(os.path.abspath(folder), "") for folder in folders]
        for place in places or ([os.path.abspath(file)] if file else []):
            if place not in _claimed and frame_kind(place) == "third-party":
                _claimed.add(place)
                frame_kind.cache_clear()


def code_kind(code: CodeType) -> FrameKind:
    """Whose code it is; what Python itself writes for named tuples and dataclasses is nobody's."""
    if code.co_filename == "<string>" and (code.co_names == _NAMED_TUPLE or code.co_qualname.startswith(_DATACLASS)):
        return "skip"
    return frame_kind(code.co_filename)


def is_users(kind: type | ModuleType) -> bool:
    """Return whether a class or module is the user's: in a file of theirs, typed in, or run by ``exec``."""
    if isinstance(kind, type) and kind.__module__ == "builtins":
        return bool(kind.__flags__ & _HEAP_TYPE)
    name = kind.__name__ if isinstance(kind, ModuleType) else kind.__module__
    package = name.partition(".")[0]
    files = [getattr(sys.modules.get(each), "__file__", None) for each in (name, package)]
    file = files[0] or files[1]  # a module that C makes has none, but its package has
    if file is None:  # typed in, made by hand, or built into Python
        return package not in sys.stdlib_module_names
    return name == "__main__" or frame_kind(file) == "user"


@functools.cache
def _is_api(filename: str) -> bool:
    return filename.endswith(_API_FILES) or _DYNAMO in filename


@functools.cache
def _is_precision_plugin(filename: str) -> bool:
    """Whether a file is Lightning's precision plugin, which, and not the user, calls torch's loss scaler."""
    return filename.endswith(_PRECISION_PLUGIN)


def _label(frame: FrameType) -> str:
    return f"{frame.f_globals.get('__name__', '?')}.{frame.f_code.co_qualname}:{frame.f_lineno}"


def locate(boundary: CodeType | None, node: Any = None) -> tuple[Location, FrameType | None]:
    """The innermost line of the user's code on the stack, and its frame.

    Args:
        boundary: the code object of the function that drives the step; frames around it are not looked at.
        node: the autograd node being evaluated, if any; its ``"zd_location"`` metadata is the line of its forward.
    """
    frame: FrameType | None = sys._getframe(1)
    library: str | None = None
    third_party: FrameType | None = None
    while frame is not None and frame.f_code is not boundary:
        if node is not None and frame.f_code.co_name == "_engine_run_backward":
            forward: Location | None = node.metadata.get("zd_location")
            if forward is not None:
                return forward, None
            node = None
        filename = frame.f_code.co_filename
        kind = code_kind(frame.f_code)
        if kind == "user":
            return Location(filename, frame.f_lineno, frame.f_code.co_qualname, library), frame
        if kind == "third-party":
            third_party = third_party or frame
            library = library or _label(frame)
        elif kind == "library":
            if library is None:
                library = None if _is_api(filename) else _label(frame)
            elif _is_precision_plugin(filename) and library.startswith("torch.amp.grad_scaler"):
                library = _label(frame)
        frame = frame.f_back
    if third_party is not None:
        code = third_party.f_code
        return Location(code.co_filename, third_party.f_lineno, code.co_qualname, None), third_party
    return NOWHERE._replace(library=library), None


def expression(frame: FrameType | None) -> str:
    """The source text that `frame` is evaluating, e.g. ``"float(loss)"``; empty when it cannot be known."""
    if frame is None:
        return ""
    positions = list(frame.f_code.co_positions())
    index = frame.f_lasti // 2
    if index >= len(positions):
        return ""
    first, last, start, end = positions[index]
    if first is None or last is None or start is None or end is None:
        return ""
    lines = [linecache.getline(frame.f_code.co_filename, number) for number in range(first, last + 1)]
    if not all(lines):
        return ""
    encoded = [line.encode() for line in lines]  # columns count bytes
    encoded[-1] = encoded[-1][:end]
    encoded[0] = encoded[0][start:]
    text = " ".join(b"".join(encoded).decode(errors="replace").split())
    return text if len(text) <= 80 else text[:77] + "..."
