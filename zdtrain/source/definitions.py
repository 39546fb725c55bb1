"""Where the user's classes and methods are defined, and which of their lines bind an attribute."""

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Iterator

from zdtrain.source.location import NOWHERE, Location, code_kind, frame_kind


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
    return next((place for place, _ in _places(cls)), NOWHERE)


def _places(cls: type) -> Iterator[tuple[Location, list[str]]]:
    """Where a class and its bases are defined, as far as they are the user's, and their lines."""
    for base in cls.__mro__:
        try:
            file = inspect.getsourcefile(base)
            lines, first = inspect.getsourcelines(base)
        except (TypeError, OSError):
            continue
        if file and frame_kind(file) in ("user", "third-party"):
            yield Location(file, first, base.__qualname__), lines


@functools.lru_cache(maxsize=256)
def _parse(source: str) -> ast.Module:
    return ast.parse(textwrap.dedent(source))


def attribute_location(cls: type, name: str, *, outside_init: bool = False) -> Location:
    """The line of a class that binds or changes ``self.<name>``.

    Args:
        cls: the class of the object; its bases are searched too.
        name: the attribute.
        outside_init: prefer a line outside ``__init__``.
    """
    for place, lines in _places(cls):
        uses = _AttributeUses(name)
        uses.visit(_parse("".join(lines)))
        ordered = sorted(uses.lines, key=lambda use: (use[0] if outside_init else not use[0], use[1]))
        if ordered:
            return place._replace(line=place.line + ordered[0][1] - 1)
    return class_location(cls)


def method_location(owner: object, name: str) -> Location:
    """Where a method is defined."""
    function = inspect.unwrap(getattr(owner, name))
    code = getattr(function, "__code__", None)
    if code is None or code_kind(code) not in ("user", "third-party"):
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
