"""Evaluates expressions while a function is walked: what they hold, and which rules want to see them."""

import ast
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from zdtrain.lint import heat as h
from zdtrain.lint import infer as i
from zdtrain.lint import kinds as k
from zdtrain.lint.finding import Edit
from zdtrain.lint.heat import Heat
from zdtrain.lint.kinds import Kind, Kinds
from zdtrain.lint.source import Class, Function, Source
from zdtrain.lint.walked import Hit, Place, Walked

if TYPE_CHECKING:
    from zdtrain.lint.analysis import Unit
    from zdtrain.lint.rules.base import Rule, Rules


class Walk:
    """The state of a walk, what rules may ask about it, and names, attributes and operators.

    Args:
        function: what to walk.
        unit: the file's analysis; gives kinds of globals, attributes and of what other functions return.
    """

    def __init__(self, function: Function, unit: "Unit") -> None:
        self.function = function
        self.unit = unit
        self.source: Source = unit.source
        self.owner: Class | None = function.owner or (function.parent.owner if function.parent else None)
        self.rules: Rules = unit.rules
        self.result = Walked()
        self.place = Place()
        self.loops: list[ast.stmt] = []
        self.no_grad = 0
        self.statement: ast.stmt | None = None
        self.env: dict[str, Kind] = {}
        self.instances: dict[str, str] = {}
        self.cold_names: set[str] = set()
        """Names last assigned outside any loop that trains."""
        self.calls_module = False
        self.aliases: dict[str, str] = {}
        """Names that were given a function of a library: ``wait = torch.cuda.synchronize``."""
        self._kinds: dict[ast.expr, Kinds] = {}
        self._applied: dict[ast.expr, str] = {}
        self._steps = bool(h.within(self.source.step_lines[0], *function.span))

    # What rules ask for.

    def kind(self, node: ast.expr) -> Kind:
        """What an expression holds, at the point where it was evaluated."""
        found = self._kinds.get(node)
        if found is None:
            return k.VALUE if node.__class__ is ast.Constant else k.UNKNOWN
        return found if found.__class__ is int else i.flat(found)

    def dotted(self, node: ast.expr) -> str:
        """The dotted name of an expression, imports resolved."""
        return self.source.dotted(node)

    def report(
        self, rule: "Rule", node: ast.AST, message: str, edits: tuple[Edit, ...] = (), *, at_method: bool = False
    ) -> None:
        """Notes that `rule` applies to `node`; `at_method` points at the method's name, which may be lines below."""
        line, column = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)
        if at_method and isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            line = node.func.end_lineno or line
            column = (node.func.end_col_offset or 0) - len(node.func.attr.encode())
        last = max(line, getattr(node, "end_lineno", line) or line)
        self.result.hits.append(Hit(rule, line, column, last, message, self.place, edits))

    def applied(self, node: ast.expr) -> str:
        """The method that is called on an expression right away: ``to`` for the ``x`` in ``x.to(…)``."""
        return self._applied.get(node, "")

    @property
    def in_step_loop(self) -> bool:
        """Whether the current line is in a loop that trains."""
        return self.place.loop is Heat.LOOP

    def is_self(self, node: ast.expr) -> bool:
        """Whether an expression is ``self`` in a method."""
        return node.__class__ is ast.Name and node.id == "self"

    # Evaluation.

    def infer(self, node: ast.expr) -> Kinds:
        """Evaluates an expression: shows it to the rules and returns what it holds."""
        what = node.__class__
        if what is ast.Constant:
            return k.VALUE
        handler = _EXPRESSIONS.get(what)
        kind = k.UNKNOWN if handler is None else handler(self, node)
        self._kinds[node] = kind
        for rule in self.rules.on_expression.get(what, ()):
            rule.check_expression(node, self)
        return kind

    def value(self, node: ast.expr) -> Kind:
        """`infer`, as one kind."""
        return i.flat(self.infer(node))

    def _truth(self, test: ast.expr) -> None:
        """A condition: each operand whose truth Python asks for."""
        if isinstance(test, ast.BoolOp):
            return self._truth(test.values[-1])  # the others were seen when the BoolOp was evaluated
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return None  # likewise
        for rule in self.rules.on_truth:
            rule.check_truth(test, self)
        return None

    def _name(self, node: ast.Name) -> Kind:
        name = node.id
        for rule in self.rules.on_name.get(name, ()):
            rule.check_name(node, name, self)
        found = self.env.get(name)
        if found is None:
            found = self.unit.global_kind(name)
        return found

    def _attribute(self, node: ast.Attribute) -> Kind:
        kind = self._attribute_kind(node)
        for rule in self.rules.on_attribute.get(node.attr, ()):
            rule.check_name(node, node.attr, self)
        return kind

    def _attribute_kind(self, node: ast.Attribute) -> Kind:
        value = node.value
        if isinstance(value, ast.Name):
            if value.id == "self" and self.owner is not None:
                return self._self_attribute(node.attr)
            if self._is_import(value.id):
                return k.VALUE if self.dotted(node).startswith(("math.", "numpy.", "torch.")) else k.UNKNOWN
        return i.attribute_kind(self.value(value), node.attr)

    def _self_attribute(self, name: str) -> Kind:
        assert self.owner is not None
        local = self.env.get(f"self.{name}")
        if local:
            return local
        self.unit.construct(self.owner)
        known = self.source.attribute(self.owner, name)
        if known:
            return known
        if name in ("device", "dtype", "training", "global_step", "current_epoch", "trainer", "logger", "global_rank"):
            return k.VALUE
        if self.source.is_module(self.owner) and i.free_name_kind(name) & k.MODULE:
            return k.MODULE
        return k.VALUE if i.free_name_kind(name) & k.VALUE else k.UNKNOWN

    def _is_import(self, name: str) -> bool:
        return name in self.source.imports and name not in self.env

    def _binary(self, node: ast.BinOp) -> Kind:
        left, right = self.value(node.left), self.value(node.right)
        if (
            isinstance(node.op, ast.Mod)
            and isinstance(node.left, ast.Constant | ast.JoinedStr | ast.BinOp)
            and _is_text(node.left)
        ):
            for argument in node.right.elts if isinstance(node.right, ast.Tuple) else [node.right]:
                self._formatted(argument)
            return k.VALUE
        return i.binary(left, right)

    def _unary(self, node: ast.UnaryOp) -> Kind:
        kind = self.value(node.operand)
        if isinstance(node.op, ast.Not):
            self._truth(node.operand)
            return k.VALUE
        return kind

    def _boolean(self, node: ast.BoolOp) -> Kind:
        found = [self.value(value) for value in node.values]
        for value in node.values[:-1]:
            self._truth(value)
        result = found[0]
        for kind in found[1:]:
            result = k.join(result, kind)
        return result

    def _compare(self, node: ast.Compare) -> Kind:
        sides = [self.value(node.left), *(self.value(side) for side in node.comparators)]
        if any(isinstance(operator, ast.Is | ast.IsNot | ast.In | ast.NotIn) for operator in node.ops):
            return k.VALUE
        if any(
            isinstance(side, ast.Constant) and (side.value is None or isinstance(side.value, str))
            for side in node.comparators
        ):
            return k.VALUE
        if not any(side & k.TENSOR for side in sides):
            return k.VALUE if all(side & k.VALUE for side in sides) else k.UNKNOWN
        if len(node.ops) > 1:
            for rule in self.rules.on_truth:
                rule.check_truth(node, self)
        return i.binary(sides[0], sides[1]) | k.MASK

    def _subscript(self, node: ast.Subscript) -> Kinds:
        owner = self.infer(node.value)
        index = self.value(node.slice)
        if isinstance(owner, tuple):
            position = node.slice.value if isinstance(node.slice, ast.Constant) else None
            if isinstance(position, int) and -len(owner) <= position < len(owner):
                return owner[position]
            owner = i.flat(owner)
        if owner & (k.TENSOR | k.OUTPUT):
            if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
                return i.element(owner) & ~k.OUTPUT
            place = 0 if index & k.TENSOR and not index & k.ON_HOST else owner & k.ON_HOST
            return k.TENSOR | (owner & (k.GRAPH | k.MASK | k.OUTPUT)) | place
        if isinstance(node.slice, ast.Slice):
            return owner
        return i.element(owner)

    def _conditional(self, node: ast.IfExp) -> Kind:
        self.infer(node.test)
        self._truth(node.test)
        before = self.env
        self.env = dict(before)
        self._narrow(node.test)
        first = self.value(node.body)
        self.env = before
        second = self.value(node.orelse)
        return k.join(first, second)

    def _display(self, node: ast.List | ast.Tuple | ast.Set) -> Kinds:
        items = [self.value(item) for item in node.elts]
        return i.container(items) if items else k.VALUE

    def _starred(self, node: ast.Starred) -> Kind:
        return i.element(self.infer(node.value))

    def _dict(self, node: ast.Dict) -> Kind:
        for key in node.keys:
            if key is not None:
                self.infer(key)
        items = [self.value(item) for item in node.values]
        return i.container(items) | k.MAPPING if items else k.VALUE

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> Kind:
        before = self.env
        self.env = dict(before)
        for generator in node.generators:
            self.infer(generator.iter)
            self._assign(generator.target, self._items(generator.iter))
            for condition in generator.ifs:
                self.infer(condition)
                self._truth(condition)
        if isinstance(node, ast.DictComp):
            self.infer(node.key)
            kind = i.container([self.value(node.value)]) | k.MAPPING
        else:
            kind = i.container([self.value(node.elt)])
        self.env = before
        return kind

    def _joined(self, node: ast.JoinedStr) -> Kind:
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                self.infer(part.value)
                self._formatted(part.value)
                if part.format_spec is not None:
                    self.infer(part.format_spec)
        return k.VALUE

    def _formatted(self, node: ast.expr) -> None:
        for rule in self.rules.on_format:
            rule.check_format(node, self)

    def _lambda(self, node: ast.Lambda) -> Kind:
        before = self.env
        self.env = dict(before)
        for argument in node.args.args:
            self.env[argument.arg] = k.UNKNOWN
        self.infer(node.body)
        self.env = before
        return k.UNKNOWN

    def _named(self, node: ast.NamedExpr) -> Kinds:
        kind = self.infer(node.value)
        self._assign(node.target, kind)
        return kind

    def _slice(self, node: ast.Slice) -> Kind:
        for part in (node.lower, node.upper, node.step):
            if part is not None:
                self.infer(part)
        return k.VALUE

    def _await(self, node: ast.Await | ast.YieldFrom) -> Kinds:
        return self.infer(node.value)

    def _yield(self, node: ast.Yield) -> Kind:
        if node.value is not None:
            self.infer(node.value)
        self.result.returns = k.UNKNOWN
        return k.UNKNOWN

    # Filled in by `zdtrain.lint.calls` and `zdtrain.lint.flow`.

    def _call(self, node: ast.Call) -> Kinds:
        raise NotImplementedError

    def _assign(self, target: ast.expr, kind: Kinds) -> None:
        raise NotImplementedError

    def _items(self, node: ast.expr) -> Kinds:
        raise NotImplementedError

    def _narrow(self, test: ast.expr) -> None:
        raise NotImplementedError


def _is_text(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return _is_text(node.left) or _is_text(node.right)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


_EXPRESSIONS: dict[type[ast.expr], Callable[[Walk, Any], Kinds]] = {
    ast.Name: Walk._name,
    ast.Attribute: Walk._attribute,
    ast.BinOp: Walk._binary,
    ast.UnaryOp: Walk._unary,
    ast.BoolOp: Walk._boolean,
    ast.Compare: Walk._compare,
    ast.Subscript: Walk._subscript,
    ast.IfExp: Walk._conditional,
    ast.List: Walk._display,
    ast.Tuple: Walk._display,
    ast.Set: Walk._display,
    ast.Starred: Walk._starred,
    ast.Dict: Walk._dict,
    ast.ListComp: Walk._comprehension,
    ast.SetComp: Walk._comprehension,
    ast.GeneratorExp: Walk._comprehension,
    ast.DictComp: Walk._comprehension,
    ast.JoinedStr: Walk._joined,
    ast.Lambda: Walk._lambda,
    ast.NamedExpr: Walk._named,
    ast.Slice: Walk._slice,
    ast.Await: Walk._await,
    ast.YieldFrom: Walk._await,
    ast.Yield: Walk._yield,
    ast.Call: lambda walk, node: walk._call(node),
}
