"""Which line of the user's source is responsible for what runs now."""

import ast
import functools
import importlib.util
import inspect
import linecache
import os
import re
import sys
import sysconfig
import textwrap
from types import CodeType, FrameType
from typing import Any, Literal, NamedTuple

FrameKind = Literal["check", "skip", "library", "third-party", "user"]

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
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
_DYNAMO = os.path.join(os.sep, "torch", "_dynamo", "")  # wraps dispatch modes


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


@functools.lru_cache(maxsize=None)
def frame_kind(filename: str) -> FrameKind:
    """Whose code a file holds."""
    if filename.startswith("<") and filename != "<stdin>":
        return "skip"
    path = os.path.abspath(filename)
    if path.startswith(_HERE):
        return "check"
    if path.startswith(_library_folders()):
        return "library"
    if _SITE_PACKAGES in path:
        return "third-party"
    return "skip" if path.startswith(_STDLIB) else "user"


@functools.lru_cache(maxsize=None)
def _is_api(filename: str) -> bool:
    return filename.endswith(_API_FILES) or _DYNAMO in filename


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
        kind = frame_kind(filename)
        if kind == "user":
            return Location(filename, frame.f_lineno, frame.f_code.co_qualname, library), frame
        if kind == "third-party":
            third_party = third_party or frame
            library = library or _label(frame)
        elif kind == "library" and library is None and not _is_api(filename):
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


class _AttributeUses(ast.NodeVisitor):
    """Lines that bind ``self.<name>`` or call a method of it."""

    _MUTATORS = frozenset({"append", "extend", "add", "update", "insert", "appendleft", "pop", "clear", "setdefault"})

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: list[tuple[bool, int]] = []  # (inside __init__, line)
        self._in_init = False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        before, self._in_init = self._in_init, node.name == "__init__"
        self.generic_visit(node)
        self._in_init = before

    def _is_attribute(self, node: ast.AST) -> bool:
        while isinstance(node, ast.Subscript):
            node = node.value
        if not isinstance(node, ast.Attribute):
            return False
        return node.attr == self.name or self._is_attribute(node.value)

    def _targets(self, node: ast.AST) -> list[ast.AST]:
        if isinstance(node, ast.Assign):
            targets: list[ast.AST] = []
            for target in node.targets:
                targets += target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
            return targets
        return [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else []

    def generic_visit(self, node: ast.AST) -> None:
        named = any(self._is_attribute(target) for target in self._targets(node))
        if isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Attribute) and function.attr in self._MUTATORS:
                named = named or self._is_attribute(function.value)
            literal = node.args[0] if node.args else None
            named = named or (isinstance(literal, ast.Constant) and literal.value == self.name)
        if named:
            self.lines.append((self._in_init, getattr(node, "lineno", 0)))
        super().generic_visit(node)


def class_location(cls: type) -> Location:
    """Where a class of the user is defined; `NOWHERE` if none of its bases is the user's."""
    for base in cls.__mro__:
        try:
            file = inspect.getsourcefile(base)
            _, line = inspect.getsourcelines(base)
        except (TypeError, OSError):
            continue
        if file and frame_kind(file) in ("user", "third-party"):
            return Location(file, line, base.__qualname__)
    return NOWHERE


@functools.lru_cache(maxsize=1024)
def attribute_location(cls: type, name: str, *, outside_init: bool = False) -> Location:
    """The line of a class that binds or changes ``self.<name>``.

    Args:
        cls: the class of the object; its bases are searched too.
        name: the attribute.
        outside_init: prefer a line outside ``__init__``.
    """
    for base in cls.__mro__:
        try:
            file = inspect.getsourcefile(base)
            source, first = inspect.getsourcelines(base)
        except (TypeError, OSError):
            continue
        if not file or frame_kind(file) not in ("user", "third-party"):
            continue
        uses = _AttributeUses(name)
        uses.visit(ast.parse(textwrap.dedent("".join(source))))
        ordered = sorted(uses.lines, key=lambda use: (use[0] if outside_init else not use[0], use[1]))
        if ordered:
            return Location(file, first + ordered[0][1] - 1, base.__qualname__)
    return class_location(cls)


def method_location(owner: object, name: str) -> Location:
    """Where a method is defined."""
    function = inspect.unwrap(getattr(owner, name))
    code = getattr(function, "__code__", None)
    if code is None or frame_kind(code.co_filename) not in ("user", "third-party"):
        return class_location(type(owner))
    return Location(code.co_filename, code.co_firstlineno, code.co_qualname)


def line_matching(owner: object, name: str, patterns: tuple[str, ...]) -> Location:
    """The first line of a method that matches the first pattern that matches at all; else the method itself."""
    place = method_location(owner, name)
    try:
        lines, first = inspect.getsourcelines(inspect.unwrap(getattr(owner, name)))
    except (TypeError, OSError):
        return place
    for pattern in patterns:
        for offset, line in enumerate(lines):
            if re.search(pattern, line):
                return place._replace(line=first + offset)
    return place
