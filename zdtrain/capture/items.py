"""Which items of a batch a step reads, as far as its source says so for certain: others are no part of the key."""

import ast
import builtins
import functools
import inspect
import linecache
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zdtrain.source.location import code_kind

_SEES_ALL = frozenset({"locals", "vars", "eval", "exec", "dir", "globals", "super", "_getframe", "currentframe"})
_VALUES = (str, bool, int, float)
Items = frozenset[str | int]
Definition = ast.FunctionDef | ast.AsyncFunctionDef


class BatchItems:
    """Leaves out of a batch what no step looks at: names, paths and other Python values under keys that are never read.

    Args:
        module: The module.
        step: Name of its step, whose first argument is the batch.
    """

    def __init__(self, module: LightningModule, step: str) -> None:
        self._module = module
        self._step = step
        self._read: Items | None = None
        self._is_known = False

    def look_again(self) -> None:
        """Look at the source of the functions that are in place now, when asked for the next time."""
        self._is_known = False

    def kept(self, batch: Any) -> Any:
        """Return the batch with None in the place of values that no step reads.

        How they are nested stays: Lightning finds the batch size by it.
        """
        if type(batch) not in (dict, list, tuple) or all(isinstance(item, Tensor) for item in _values(batch)):
            return batch
        if not self._is_known:
            self._read, self._is_known = _reads_of(getattr(self._module, self._step), 0, frozenset()), True
        if self._read is None:
            return batch
        if isinstance(batch, dict):
            return {key: item if key in self._read else _without_values(item) for key, item in batch.items()}
        read = {index % len(batch) for index in self._read if isinstance(index, int)}
        return type(batch)([item if index in read else _without_values(item) for index, item in enumerate(batch)])


def _values(batch: Any) -> Any:
    return batch.values() if isinstance(batch, dict) else batch


def _without_values(item: Any) -> Any:
    return pytree.tree_map(lambda leaf: None if isinstance(leaf, _VALUES) else leaf, item)


def _reads_of(method: Any, position: int | str, around: frozenset[tuple[int, str]]) -> Items | None:
    """Return the items that a function reads of an argument; None where the source does not say.

    Args:
        method: The function, bound or not.
        position: Place of the argument in a call, or its name.
        around: Functions and arguments that are being looked at.
    """
    owner, function = (method.__self__, method.__func__) if isinstance(method, MethodType) else (None, method)
    if not isinstance(function, FunctionType) or code_kind(function.__code__) != "user":
        return None
    name = _parameter(method, position)
    node = _definition(function.__code__)
    if name is None or node is None:
        return None
    if (id(function.__code__), name) in around:
        return frozenset()
    around |= {(id(function.__code__), name)}
    names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)}
    if names & _SEES_ALL or any(isinstance(part, ast.Attribute) and part.attr in _SEES_ALL for part in ast.walk(node)):
        return None
    found: set[str | int] = set()
    for parents in _uses(node, name):
        items = _items_of_use(parents, names, function, owner, around)
        if items is None:
            return None
        found |= items
    return frozenset(found)


def _items_of_use(
    parents: list[Any], names: set[str], function: FunctionType, owner: Any, around: frozenset[tuple[int, str]]
) -> Items | None:
    """Return the items that one mention of the batch reads; `parents` are the nodes around it, innermost first."""
    match parents:
        case [name, ast.Subscript(value=value, slice=index, ctx=ast.Load()), *_] if value is name:
            return _constant(index)
        case [name, ast.Attribute(value=value, attr="get"), ast.Call(args=[key, *_]) as call, *_] if value is name:
            return _constant(key) if parents[1] is call.func else None
        case [_, ast.Compare(ops=[ast.In() | ast.NotIn()], left=left), *_] if left is not parents[0]:
            return frozenset()
        case [name, ast.Assign(targets=[ast.Tuple(elts=targets) | ast.List(elts=targets)], value=value), *_]:
            if value is name and all(isinstance(target, ast.Name) for target in targets):
                return frozenset(i for i, target in enumerate(targets) if ast.unparse(target) in names)
            return None
        case [name, ast.Call(func=called, args=arguments) as call, *_] if name in arguments:
            if any(isinstance(argument, ast.Starred) for argument in arguments):
                return None
            callee = _resolved(called, function, owner)
            return frozenset() if callee is len else _reads_of(callee, arguments.index(name), around)
        case [name, ast.keyword(arg=str(keyword)), ast.Call(func=called), *_]:
            return _reads_of(_resolved(called, function, owner), keyword, around)
    return None


def _constant(index: ast.expr) -> Items | None:
    try:
        key = ast.literal_eval(index)
    except ValueError:
        return None
    return frozenset({key}) if type(key) in (str, int) else None


def _resolved(called: ast.expr, function: FunctionType, owner: Any) -> Any:
    """Return what a call calls; None where that is not clear."""
    if isinstance(called, ast.Name):
        code = function.__code__
        if called.id in code.co_varnames or called.id in code.co_freevars or called.id in code.co_cellvars:
            if owner is None or called.id != code.co_varnames[0]:
                return None
            return _forward(owner)
        return function.__globals__.get(called.id, getattr(builtins, called.id, None))
    if not isinstance(called, ast.Attribute) or owner is None or not isinstance(called.value, ast.Name):
        return None
    if called.value.id != function.__code__.co_varnames[0]:
        return None
    if isinstance(owner, nn.Module) and called.attr in owner._modules:
        return _forward(owner._modules[called.attr])
    held = inspect.getattr_static(owner, called.attr, None)
    return MethodType(held, owner) if isinstance(held, FunctionType) and called.attr not in vars(owner) else None


def _forward(module: Any) -> Any:
    """Return what calling a module calls; hooks on modules keep steps from being captured."""
    if not isinstance(module, nn.Module) or type(module).__call__ is not nn.Module.__call__:
        return None
    return None if "forward" in vars(module) else MethodType(type(module).forward, module)


def _parameter(method: Any, position: int | str) -> str | None:
    try:
        parameters = list(inspect.signature(method, follow_wrapped=False).parameters.values())
    except (TypeError, ValueError):
        return None
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if isinstance(position, int):
        return named[position] if position < len(named) else None
    return (
        position
        if position in {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        else None
    )


def _uses(node: Definition, name: str) -> Iterator[list[ast.AST]]:
    """Yield every mention of a variable but its deletion, with the nodes around it."""

    def walk(part: ast.AST, parents: list[ast.AST]) -> Iterator[list[ast.AST]]:
        if isinstance(part, ast.Name) and part.id == name and not isinstance(part.ctx, ast.Del):
            yield [part, *parents]
        for child in ast.iter_child_nodes(part):
            yield from walk(child, [part, *parents])

    for statement in node.body:
        yield from walk(statement, [])


def _definition(code: CodeType) -> Definition | None:
    """Return the source of a function, if it is what the function was compiled from."""
    found = _functions(code.co_filename, "".join(linecache.getlines(code.co_filename)))
    node, compiled = found.get((code.co_name, code.co_firstlineno), (None, None))
    same = compiled is not None and (compiled.co_code, compiled.co_names) == (code.co_code, code.co_names)
    return node if same and _constants(compiled) == _constants(code) else None


def _constants(code: CodeType | None) -> list[Any]:
    return [] if code is None else [repr(value) for value in code.co_consts if not isinstance(value, CodeType)]


@functools.lru_cache(maxsize=64)
def _functions(filename: str, source: str) -> dict[tuple[str, int], tuple[Definition, CodeType]]:
    """Return the functions of a file by name and first line, but for those that share a line: which is which?"""
    try:
        tree, whole = ast.parse(source), compile(source, filename, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return {}
    codes: dict[tuple[str, int], list[CodeType]] = {}
    todo = [whole]
    while todo:
        code = todo.pop()
        codes.setdefault((code.co_name, code.co_firstlineno), []).append(code)
        todo += [value for value in code.co_consts if isinstance(value, CodeType)]
    found: dict[tuple[str, int], tuple[Definition, CodeType]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            key = (node.name, min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]))
            if len(codes.get(key, ())) == 1:
                found[key] = (node, codes[key][0])
    return found
