"""Walks one function once, in order, and shows every rule what it wants to see, with what is known about it."""

import ast
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from zdtrain.lint import heat as h
from zdtrain.lint import infer as i
from zdtrain.lint import kinds as k
from zdtrain.lint.calls import Calls
from zdtrain.lint.heat import Heat
from zdtrain.lint.kinds import Kind, Kinds
from zdtrain.lint.rules.base import StatementCall
from zdtrain.lint.source import Function, Source
from zdtrain.lint.walked import Gate, Place, Walked

if TYPE_CHECKING:
    from zdtrain.lint.analysis import Unit


class Flow(Calls):
    """The walk over one function.

    Args:
        function: what to walk.
        unit: the file's analysis.
        arguments: kinds of positional arguments at the first call seen; empty if there was none.
    """

    def __init__(self, function: Function, unit: "Unit", arguments: tuple[Kind, ...] = ()) -> None:
        super().__init__(function, unit)
        self._heats = h.Loops(function, self.source) if function.loops else None
        self._bind_parameters(arguments)

    def walk(self) -> Walked:
        """Walks the body; afterwards the result says what was seen."""
        node = self.function.node
        if not isinstance(node, ast.Module):
            for decorator in node.decorator_list:
                if any(word in h.names_in(decorator) for word in ("no_grad", "inference_mode")):
                    self.no_grad += 1
        self._block(node.body)
        for rule in self.rules.on_function:
            rule.check_function(self.function, self)
        return self.result

    def _bind_parameters(self, arguments: tuple[Kind, ...]) -> None:
        node = self.function.node
        if isinstance(node, ast.Module):
            return
        if self.function.parent is not None and self.function.parent.name:
            outer = self.unit.walks.get(self.function.parent)
            if outer is not None:
                self.env.update(outer.env)
                self.instances.update(outer.instances)
        step = self.function.name in h.STEP_HOOKS or self.function.name == "forward"
        named = [*node.args.posonlyargs, *node.args.args]
        if self.function.owner is not None and named and named[0].arg in ("self", "cls"):
            named = named[1:]
        defaults = len(node.args.defaults)
        for position, argument in enumerate(named):
            has_default = position >= len(named) - defaults
            annotation = self.source.written(argument.annotation) if argument.annotation else ""
            kind = i.parameter_kind(argument.arg, annotation, everything=step and not has_default)
            if has_default and not annotation and _is_setting(node.args.defaults[position - len(named)]):
                kind = k.VALUE
            if kind & k.TENSOR and not annotation and self.function.name == "__init__":
                kind = k.UNKNOWN  # constructors take settings; a name like `prob` says little there
            if position < len(arguments) and arguments[position] and not annotation:
                kind = arguments[position]
            self.env[argument.arg] = kind
        for argument in node.args.kwonlyargs:
            annotation = self.source.written(argument.annotation) if argument.annotation else ""
            self.env[argument.arg] = i.parameter_kind(argument.arg, annotation, everything=False)

    def _block(self, body: list[ast.stmt]) -> None:
        before = self.place
        for position, statement in enumerate(body):
            self.statement = statement
            handler = _STATEMENTS.get(statement.__class__)
            if handler is not None:
                handler(self, statement)
            for rule in self.rules.on_statement.get(statement.__class__, ()):
                rule.check_statement(statement, self)
            if statement.__class__ is ast.If and self._skips_rest(statement, body[position + 1 :]):
                self.place = Place(self.place.loop, Gate.INTERVAL)
        if self._steps:
            calls = list(_step_calls(body, self.source))
            if calls:
                for rule in self.rules.on_calls:
                    rule.check_calls(calls, self)
        self.place = before

    def _skips_rest(self, statement: ast.If, rest: list[ast.stmt]) -> bool:
        return (
            self.place.gate is Gate.OPEN
            and bool(rest)
            and isinstance(statement.body[-1], ast.Continue | ast.Return)
            and (isinstance(statement.body[-1], ast.Continue) or not self.in_step_loop)
            and h.skips_most_steps(statement.test, self._is_gate)
            and not h.takes_step(rest, self.source, None)
        )

    def _is_gate(self, name: str) -> bool:
        return bool(self.env.get(name, 0) & k.GATE)

    def _if(self, node: ast.If) -> None:
        self.infer(node.test)
        self._truth(node.test)
        before, place = self.env, self.place
        self.env = dict(before)
        self._narrow(node.test)
        self.place = self._gated(node)
        self._block(node.body)
        after_body = self.env
        self.env = dict(before)
        self.place = place
        if node.orelse:
            if isinstance(node.test, ast.Attribute) and node.test.attr == "training":
                self.place = Place(place.loop, Gate.EVALUATION)
            self._block(node.orelse)
            self.place = place
        if isinstance(node.body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break):
            return
        joined = self.env
        for name, kind in after_body.items():
            joined[name] = k.join(joined[name], kind) if name in joined else kind

    def _gated(self, node: ast.If) -> Place:
        if self.place.gate in (Gate.LEAVING, Gate.EVALUATION):
            return self.place
        if h.leaves_loop(node.body, self.source, in_loop=self.in_step_loop):
            return Place(self.place.loop, Gate.LEAVING)
        if h.is_evaluation_test(node.test):
            return Place(self.place.loop, Gate.EVALUATION)
        if h.is_interval(node.test, self._is_gate) and not h.takes_step(node.body, self.source, self._step_loop()):
            return Place(self.place.loop, Gate.INTERVAL)
        return self.place

    def _step_loop(self) -> ast.stmt | None:
        return self.loops[-1] if self.loops and self.in_step_loop else None

    def _narrow(self, test: ast.expr) -> None:
        """``isinstance(v, torch.Tensor)`` says what ``v`` is in the branch."""
        for part in test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]:
            if not (isinstance(part, ast.Call) and part.args and isinstance(part.args[0], ast.Name)):
                continue
            name = self.dotted(part.func)
            if name == "torch.is_tensor" or (
                name == "isinstance" and len(part.args) > 1 and self.dotted(part.args[1]).endswith("Tensor")
            ):
                self.env[part.args[0].id] = self.env.get(part.args[0].id, 0) & k.TENSOR or k.TENSOR

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While) -> None:
        if isinstance(node, ast.While):
            self.infer(node.test)
            self._truth(node.test)
        else:
            self.infer(node.iter)
            self._assign(node.target, self._items(node.iter))
        place = self.place
        heat = self._heats.heat(node) if self._heats and place.loop is not Heat.LOOP else Heat.COLD
        if heat is Heat.LOOP:
            self.place = Place(Heat.LOOP)
        elif heat is Heat.EVALUATION and place.loop is Heat.COLD:
            self.place = Place(Heat.EVALUATION, place.gate)
        self.loops.append(node)
        self._block(node.body)
        self.loops.pop()
        self.place = place
        self._block(node.orelse)

    def _with(self, node: ast.With | ast.AsyncWith) -> None:
        quiet = 0
        for item in node.items:
            kind = self.infer(item.context_expr)
            name = self.dotted(item.context_expr.func) if isinstance(item.context_expr, ast.Call) else ""
            quiet += name.endswith(("no_grad", "inference_mode"))
            if item.optional_vars is not None:
                self._assign(item.optional_vars, kind)
        self.no_grad += quiet
        self._block(node.body)
        self.no_grad -= quiet

    def _try(self, node: ast.Try) -> None:
        self._block(node.body)
        place = self.place
        self.place = Place(place.loop, Gate.LEAVING)
        for handler in node.handlers:
            self._block(handler.body)
        self.place = place
        self._block(node.orelse)
        self._block(node.finalbody)

    def _match(self, node: ast.Match) -> None:
        self.infer(node.subject)
        for case in node.cases:
            self._block(case.body)

    def _assignment(self, node: ast.Assign | ast.AnnAssign) -> None:
        if node.value is None:
            return
        kind = self.infer(node.value)
        if isinstance(node, ast.AnnAssign):
            if not i.flat(kind):
                kind = i.parameter_kind("", self.source.written(node.annotation), everything=False)
            targets: list[ast.expr] = [node.target]
        else:
            targets = node.targets
        if isinstance(node.value, ast.Compare | ast.BoolOp) and h.is_interval(node.value, self._is_gate):
            kind = i.flat(kind) | k.GATE
        if isinstance(node.value, ast.Tuple):
            kind = tuple(self.kind(item) for item in node.value.elts)
        for target in targets:
            self._assign(target, kind)
            if isinstance(node.value, ast.Call):
                self._remember_class(target, node.value)
            if isinstance(target, ast.Name):
                self._remember_alias(target.id, node.value)

    def _remember_alias(self, name: str, value: ast.expr) -> None:
        self.aliases.pop(name, None)
        if isinstance(value, ast.IfExp):  # Tensor = torch.cuda.FloatTensor if cuda else torch.FloatTensor
            value = value.body
        if isinstance(value, ast.Attribute):
            dotted = self.dotted(value)
            if dotted.startswith("torch."):
                self.aliases[name] = dotted

    def _remember_class(self, target: ast.expr, call: ast.Call) -> None:
        name = self.dotted(call.func)
        if not name.rpartition(".")[2][:1].isupper():
            return
        if isinstance(target, ast.Name):
            self.instances[target.id] = name
        elif isinstance(target, ast.Attribute) and self.is_self(target.value) and self.owner is not None:
            self.owner.instances.setdefault(target.attr, name)

    def _augmented(self, node: ast.AugAssign) -> None:
        left, right = i.flat(self.infer(node.target)), i.flat(self.infer(node.value))
        is_container = left & k.TENSORS and not left & k.TENSOR
        kind = left | (right & k.GRAPH) if is_container else i.binary(left, right)
        if isinstance(node.target, ast.Name):
            self.env[node.target.id] = kind  # in place: where the name was made does not change
        else:
            self._assign(node.target, kind)

    def _expression(self, node: ast.Expr) -> None:
        self.infer(node.value)

    def _return(self, node: ast.Return) -> None:
        if node.value is None:
            return
        kind = self.infer(node.value)
        if isinstance(node.value, ast.Tuple):
            kind = tuple(self.kind(item) for item in node.value.elts)
        previous = self.result.returns
        if previous is None:
            self.result.returns = kind
        elif isinstance(previous, tuple) and isinstance(kind, tuple) and len(previous) == len(kind):
            self.result.returns = tuple(k.join(i.flat(a), i.flat(b)) for a, b in zip(previous, kind, strict=True))
        else:
            self.result.returns = k.join(i.flat(previous), i.flat(kind))

    def _assert(self, node: ast.Assert) -> None:
        self.infer(node.test)
        self._truth(node.test)

    def _delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            if isinstance(target, ast.Name):
                self.env.pop(target.id, None)

    def _raise(self, node: ast.Raise) -> None:
        if node.exc is not None:
            place, self.place = self.place, Place(self.place.loop, Gate.LEAVING)
            self.infer(node.exc)
            self.place = place

    def _assign(self, target: ast.expr, kind: Kinds) -> None:
        if isinstance(target, ast.Name):
            self.env[target.id] = i.flat(kind)
            if self.in_step_loop:
                self.cold_names.discard(target.id)
            else:
                self.cold_names.add(target.id)
        elif isinstance(target, ast.Tuple | ast.List):
            self._unpack(target, kind)
        elif isinstance(target, ast.Starred):
            self._assign(target.value, kind)
        elif isinstance(target, ast.Attribute):
            self.infer(target.value)
            if self.is_self(target.value):
                self._assign_attribute(target.attr, i.flat(kind))
        elif isinstance(target, ast.Subscript):
            self.infer(target.value)
            self.infer(target.slice)
            if isinstance(target.value, ast.Name):
                self._fill(target.value.id, i.flat(kind))

    def _fill(self, name: str, kind: Kind) -> None:
        """``name[key] = …``: a dict made here holds tensors if all that is put into it are."""
        held = self.env.get(name, 0)
        if held & (k.VALUE | k.MAPPING) and not held & k.ARRAY and kind & k.TENSOR:
            self.env[name] = k.TENSORS | k.MAPPING | (kind & (k.GRAPH | k.ON_HOST))
        elif held & k.MAPPING:
            self.env[name] = k.MAPPING

    def _assign_attribute(self, name: str, kind: Kind) -> None:
        if self.owner is None:
            return
        if self.function.name in ("__init__", "setup", "configure_model", "__post_init__", "build", "reset"):
            known = self.owner.attributes.get(name)
            self.owner.attributes[name] = kind if known is None else k.join(known, kind) or kind
        self.env[f"self.{name}"] = kind

    def _unpack(self, target: ast.Tuple | ast.List, kind: Kinds) -> None:
        if isinstance(kind, tuple) and len(kind) == len(target.elts):
            for item, held in zip(target.elts, kind, strict=True):
                self._assign(item, held)
            return
        one = i.element(kind)
        if i.flat(kind) & k.TENSORS and i.flat(kind) & k.ON_HOST:
            one |= k.ON_HOST
        for item in target.elts:
            self._assign(item, k.TENSORS | k.ON_HOST if isinstance(item, ast.Tuple) and one & k.ON_HOST else one)

    def _items(self, node: ast.expr) -> Kinds:
        """The kind of what iterating an expression gives."""
        kind = self._kinds.get(node, k.UNKNOWN)
        if not isinstance(node, ast.Call):
            return k.VALUE if i.flat(kind) & k.MAPPING else i.element(kind)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        first = node.args[0] if node.args else None
        if name == "range":
            return k.VALUE
        if name == "enumerate" and first is not None:
            return (k.VALUE, self._items(first))
        if name == "zip":
            return tuple(self._items(argument) for argument in node.args)
        if name in ("items", "named_parameters", "named_buffers"):
            return (k.VALUE, k.TENSOR if name != "items" else i.element(kind))
        if name in ("named_modules", "named_children"):
            return (k.VALUE, k.MODULE)
        if name in ("modules", "children"):
            return k.MODULE
        if first is not None and (name in i.WRAPPERS or self.kind(first) & k.LOADER):
            return self._items(first)
        return i.element(kind)


_STEP_METHODS = frozenset(
    (
        "backward",
        "manual_backward",
        "zero_grad",
        "step",
        "update",
        "unscale_",
        "clip_grad_norm_",
        "clip_grad_value_",
    )
)


def _step_calls(body: list[ast.stmt], source: Source) -> Iterator[StatementCall]:
    """The calls in a list of statements that make up a training step, in order."""
    for statement in body:
        value = statement.value if isinstance(statement, ast.Expr | ast.Assign) else None
        if not isinstance(value, ast.Call):
            continue
        if isinstance(value.func, ast.Attribute) and value.func.attr in _STEP_METHODS:
            yield StatementCall(source.written(value.func.value), value.func.attr, value)
        elif isinstance(value.func, ast.Name) and value.func.id in _STEP_METHODS:
            yield StatementCall("", value.func.id, value)


def _is_setting(default: ast.expr) -> bool:
    """Whether a default value shows that a parameter is a setting, not a tensor."""
    return isinstance(default, ast.Constant) and default.value is not None


_STATEMENTS: dict[type[ast.stmt], Callable[[Flow, Any], None]] = {
    ast.If: Flow._if,
    ast.For: Flow._loop,
    ast.AsyncFor: Flow._loop,
    ast.While: Flow._loop,
    ast.With: Flow._with,
    ast.AsyncWith: Flow._with,
    ast.Try: Flow._try,
    ast.TryStar: Flow._try,
    ast.Match: Flow._match,
    ast.Assign: Flow._assignment,
    ast.AnnAssign: Flow._assignment,
    ast.AugAssign: Flow._augmented,
    ast.Expr: Flow._expression,
    ast.Return: Flow._return,
    ast.Assert: Flow._assert,
    ast.Delete: Flow._delete,
    ast.Raise: Flow._raise,
}
