"""One parsed file: its imports, classes and functions, and the lines on which a training step shows."""

import ast
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from zdtrain.lint.infer import parameter_kind
from zdtrain.lint.kinds import VALUE, Kind

# What a name means where the file does not say (star imports, snippets).
_USUAL = {
    "np": "numpy",
    "nn": "torch.nn",
    "F": "torch.nn.functional",
    "pl": "lightning.pytorch",
    "L": "lightning",
    "dist": "torch.distributed",
}
_STEP_CALLS = (
    ".step(",
    "backward(",
    "train_step(",
    "train_batch(",
    "train_one_batch(",
    "train_iter(",
    "training_step(",
    "loss_scaler(",
    "step_and_update_lr(",
)
_STEPPER = re.compile(r"(\w+)(?:\[[^\]]*\])?$")
_OPTIMIZER = re.compile(r"opt|scaler|engine|accelerator", re.IGNORECASE)
_ENVIRONMENT = re.compile(r"^(?:\w+_)?envs?$|^environment$")
_LOOPS = frozenset({ast.For, ast.AsyncFor, ast.While})

_MODULE_BASES = re.compile(r"(?:^|\.)(?:\w*Module|Sequential|ModuleList|Transformer|PreTrainedModel)$|^torch\.nn\.")
_LIBRARIES = ("torch.", "lightning.", "pytorch_lightning.", "torchmetrics.", "collections.", "abc.", "typing.")
_DATASET_BASES = re.compile(r"Dataset$|DataModule$|Sampler$")


@dataclass(slots=True, eq=False)
class Class:
    """A class of the file and what its constructor says about its attributes."""

    name: str
    node: ast.ClassDef
    bases: tuple[str, ...]
    methods: dict[str, "Function"] = field(default_factory=dict)
    attributes: dict[str, Kind] = field(default_factory=dict)
    instances: dict[str, str] = field(default_factory=dict)
    """Attribute name -> dotted name of the class it was built from."""

    @property
    def is_module(self) -> bool:
        """Whether it is an ``nn.Module``, by the names of its bases."""
        return any(_MODULE_BASES.search(base) for base in self.bases) and not self.is_dataset

    @property
    def is_lightning(self) -> bool:
        """Whether it is a LightningModule, by its bases or by having a training_step."""
        return "training_step" in self.methods or any(
            base.rpartition(".")[2] == "LightningModule" for base in self.bases
        )

    @property
    def is_dataset(self) -> bool:
        """Whether its code runs in loader workers."""
        return any(_DATASET_BASES.search(base) for base in self.bases)

    def has_base(self, *names: str) -> bool:
        """Whether a base ends in one of `names`."""
        return any(base.rpartition(".")[2] in names for base in self.bases)


@dataclass(slots=True, eq=False)
class Function:
    """A function, a method or, with an empty name, the body of the file."""

    name: str
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Module
    owner: Class | None = None
    parent: "Function | None" = None
    nested: dict[str, "Function"] = field(default_factory=dict)
    loops: list[ast.For | ast.AsyncFor | ast.While] = field(default_factory=list)

    @property
    def span(self) -> tuple[int, int]:
        """First and last line."""
        if isinstance(self.node, ast.Module):
            return 1, 1 << 30
        return self.node.lineno, self.node.end_lineno or self.node.lineno


class Source:
    """A file, parsed once.

    Args:
        path: as the user wrote it; only for messages.
        text: the decoded source.

    Raises:
        SyntaxError: if the text is not Python.
    """

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.text = text
        self.tree = ast.parse(text, filename=path)
        self.imports: dict[str, str] = {}
        self.classes: dict[str, Class] = {}
        self.functions: dict[str, Function] = {}
        self.all_functions: list[Function] = []
        self.docstring_lines: set[int] = set()
        self._modules: dict[Class, bool] = {}
        self.body = Function("", self.tree)
        self.all_functions.append(self.body)
        self._index(self.tree.body, self.body, None)

    @cached_property
    def lines(self) -> list[str]:
        """The source by line, without line ends, as ``ast`` counts lines."""
        return self.text.split("\n")

    def segment(self, function: Function) -> str:
        """The text of a function."""
        if function.node is self.tree:
            return self.text
        first, last = function.span
        offsets = self._offsets
        return self.text[offsets[first - 1] : offsets[last] if last < len(offsets) else len(self.text)]

    @cached_property
    def _offsets(self) -> list[int]:
        return [0, *accumulate(len(line) + 1 for line in self.text.split("\n")[:-1])]

    def line_at(self, offset: int) -> int:
        """The line, from 1, that a position in the text is on."""
        return bisect_right(self._offsets, offset)

    def _index(self, body: list[ast.stmt], function: Function, owner: Class | None) -> None:
        for statement in body:
            add = _INDEXED.get(statement.__class__)
            if add is not None:
                add(self, statement, function, owner)

    def _add_block(self, node: ast.stmt, function: Function, owner: Class | None) -> None:
        if node.__class__ in _LOOPS:
            function.loops.append(node)  # type: ignore[arg-type]
        for block in blocks(node):
            self._index(block, function, owner)

    def _add_function(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef, parent: Function, owner: Class | None
    ) -> None:
        function = Function(node.name, node, owner, parent)
        self.all_functions.append(function)
        if owner is not None:
            owner.methods[node.name] = function
        elif parent is self.body:
            self.functions[node.name] = function
        else:
            parent.nested[node.name] = function
        self._index(node.body, function, None)

    def _add_class(self, node: ast.ClassDef, parent: Function, _owner: Class | None) -> None:
        bases = tuple(name for base in node.bases if (name := self.dotted(base)))
        found = Class(node.name, node, bases)
        self.classes[node.name] = found
        self._index(node.body, parent, found)

    def _add_annotation(self, node: ast.AnnAssign, _function: Function, owner: Class | None) -> None:
        if owner is not None and isinstance(node.target, ast.Name):
            kind = parameter_kind("", self.written(node.annotation), everything=False)
            owner.attributes[node.target.id] = kind & ~VALUE

    def _add_docstring(self, node: ast.Expr, *_place: object) -> None:
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            self.docstring_lines.update(range(node.lineno, (node.end_lineno or 0) + 1))

    def _add_import(self, node: ast.Import, *_place: object) -> None:
        for alias in node.names:
            top = alias.name.partition(".")[0]
            self.imports[alias.asname or top] = alias.name if alias.asname else top

    def _add_import_from(self, node: ast.ImportFrom, *_place: object) -> None:
        prefix = "." * node.level + (node.module or "")
        for alias in node.names:
            joint = "" if prefix.endswith(".") or not prefix else "."
            self.imports[alias.asname or alias.name] = f"{prefix}{joint}{alias.name}"

    def written(self, node: ast.expr) -> str:
        """An expression as it is written, if it stands on one line; else as ``ast`` writes it."""
        if node.end_lineno != node.lineno or node.end_col_offset is None:
            return ast.unparse(node)
        line = self.lines[node.lineno - 1]
        if line.isascii():
            return line[node.col_offset : node.end_col_offset]
        return line.encode()[node.col_offset : node.end_col_offset].decode()

    def dotted(self, node: ast.expr) -> str:
        """The full dotted name of ``a.b.c`` with imports resolved; empty if it is anything else."""
        parts: list[str] = []
        while node.__class__ is ast.Attribute:
            parts.append(node.attr)
            node = node.value
        if node.__class__ is not ast.Name:
            return ""
        name: str = node.id
        parts.append(self.imports.get(name) or (name if name in self.functions else _USUAL.get(name, name)))
        parts.reverse()
        return ".".join(parts)

    def base_classes(self, owner: Class) -> Iterator[Class]:
        """`owner` and those of its bases that the file defines, nearest first."""
        seen: set[str] = set()
        waiting = [owner]
        while waiting:
            current = waiting.pop(0)
            if current.name in seen:
                continue
            seen.add(current.name)
            yield current
            waiting += [
                self.classes[name] for base in current.bases if (name := base.rpartition(".")[2]) in self.classes
            ]

    def outside_bases(self, owner: Class) -> list[str]:
        """Dotted names of bases that another file of the project may define."""
        return [
            base
            for current in self.base_classes(owner)
            for base in current.bases
            if "." in base and base not in self.classes and not base.startswith(_LIBRARIES)
        ]

    def method(self, owner: Class, name: str) -> Function | None:
        """The method that ``self.name`` finds, through bases in the file."""
        for current in self.base_classes(owner):
            if name in current.methods:
                return current.methods[name]
        return None

    def attribute(self, owner: Class, name: str) -> Kind:
        """What constructors say ``self.name`` holds."""
        for current in self.base_classes(owner):
            if name in current.attributes:
                return current.attributes[name]
        return 0

    def is_module(self, owner: Class) -> bool:
        """Whether `owner` is an ``nn.Module``, through bases in the file."""
        known = self._modules.get(owner)
        if known is None:
            known = any(current.is_module or current.is_lightning for current in self.base_classes(owner))
            self._modules[owner] = known
        return known

    @cached_property
    def optimizer_lines(self) -> list[int]:
        """Those of the step lines that step an optimizer."""
        return [line for line in self.step_lines[0] if ".step" in self.lines[line - 1]]

    @cached_property
    def step_lines(self) -> tuple[list[int], list[int]]:
        """Lines, in order, that take a training step (backward, optimizer step, …), and that step an environment."""
        steps: set[int] = set()
        environments: set[int] = set()
        for start, stepper in step_calls(self.text):
            line = self.line_at(start)
            before = self.text[self._offsets[line - 1] : start]
            if line in self.docstring_lines or "#" in before or before.strip() in ("def", "async def"):
                continue
            if not stepper or _OPTIMIZER.search(stepper):
                steps.add(line)
            elif _ENVIRONMENT.match(stepper):
                environments.add(line)
        return sorted(steps), sorted(environments)


_INDEXED: dict[type[ast.stmt], Callable[..., None]] = {
    ast.FunctionDef: Source._add_function,
    ast.AsyncFunctionDef: Source._add_function,
    ast.ClassDef: Source._add_class,
    ast.Import: Source._add_import,
    ast.ImportFrom: Source._add_import_from,
    ast.AnnAssign: Source._add_annotation,
    ast.Expr: Source._add_docstring,
    **dict.fromkeys(
        (
            ast.If,
            ast.For,
            ast.AsyncFor,
            ast.While,
            ast.With,
            ast.AsyncWith,
            ast.Try,
            ast.TryStar,
            ast.Match,
        ),
        Source._add_block,
    ),
}


def step_calls(text: str) -> Iterator[tuple[int, str]]:
    """Where a text seems to take a training step, and for ``x.step(`` what is stepped (else empty)."""
    for word in _STEP_CALLS:
        for start in _occurrences(text, word):
            if word != ".step(":
                yield start, ""
                continue
            stepper = _STEPPER.search(text, text.rfind("\n", 0, start) + 1, start)
            if stepper and (_OPTIMIZER.search(stepper[1]) or _ENVIRONMENT.match(stepper[1])):
                yield start, stepper[1]


def _occurrences(text: str, word: str) -> Iterator[int]:
    """Where a word stands in a text: ``backward(`` in ``x.backward(`` and ``manual_backward(``, not in others."""
    at = text.find(word)
    while at >= 0:
        if (
            at == 0
            or word[0] == "."
            or not (text[at - 1].isalnum() or text[at - 1] == "_")
            or text.startswith("manual_", max(0, at - 7))
        ):
            yield at
        at = text.find(word, at + 1)


def blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    """The statement lists nested directly in a compound statement."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(statement, name, None)
        if block:
            yield block
    for handler in getattr(statement, "handlers", ()):
        yield handler.body
    for case in getattr(statement, "cases", ()):
        yield case.body
