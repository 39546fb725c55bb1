"""The shape of a rule and the tables by which a walk finds the rules for what it meets."""

import ast
import enum
import inspect
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from zdtrain.lint.finding import Edit, Severity
from zdtrain.lint.heat import Heat

if TYPE_CHECKING:
    from zdtrain.lint.expressions import Walk
    from zdtrain.lint.source import Function


class Scope(enum.Enum):
    """Where a rule applies."""

    READ = enum.auto()
    """With the rule's severity in code that runs once per step, as a note elsewhere."""
    HOT = enum.auto()
    """Only in code that runs once per step."""
    STEP = enum.auto()
    """Only in code that a capture would record."""
    ANYWHERE = enum.auto()
    """Everywhere, with the same severity."""


class StatementCall(NamedTuple):
    """A call that is a statement of its own, or the value assigned by one."""

    receiver: str
    """What the method is called on, as written; empty for a function."""
    method: str
    node: ast.Call


class Rule:
    """Base of every rule: what it looks at is declared, what it finds it reports to the walk.

    The docstring of a rule *is* its documentation page: a line that says what it finds, then the sections
    Why, Example, Use instead and When to allow. The linter's tests lint both code blocks.
    """

    code: ClassVar[str]
    """``ZD`` and three digits, never reused."""
    name: ClassVar[str]
    severity: ClassVar[Severity] = Severity.ERROR
    scope: ClassVar[Scope] = Scope.READ
    methods: ClassVar[tuple[str, ...]] = ()
    """Names of methods (``x.name(…)``) whose calls it wants to see."""
    functions: ClassVar[tuple[str, ...]] = ()
    """Dotted names of functions whose calls it wants to see."""
    libraries: ClassVar[tuple[str, ...]] = ()
    """Top-level modules (``math``) all of whose functions' calls it wants to see."""
    keywords: ClassVar[tuple[str, ...]] = ()
    """Keyword arguments whose calls it wants to see."""
    names: ClassVar[tuple[str, ...]] = ()
    """Names that it wants to see where they are read."""
    attributes: ClassVar[tuple[str, ...]] = ()
    """Attributes (``x.name``) that it wants to see where they are read."""
    expressions: ClassVar[tuple[type[ast.expr], ...]] = ()
    statements: ClassVar[tuple[type[ast.stmt], ...]] = ()
    triggers: ClassVar[tuple[str, ...]] = ()
    """Regular expressions without a match for which a function holds no finding of an ANYWHERE rule above a note.

    Each begins with literal text, so that searching for it costs next to nothing.
    """

    def severity_at(self, heat: Heat) -> Severity | None:
        """The severity of a finding in code of this heat; None if it is none."""
        if self.scope is Scope.ANYWHERE:
            return self.severity
        if self.scope is Scope.STEP:
            return self.severity if heat is Heat.STEP else None
        if heat.hot:
            return self.severity
        return Severity.NOTE if self.scope is Scope.READ else None

    def check_call(self, node: ast.Call, name: str, flow: "Walk") -> None:
        """Sees a call that `methods`, `functions` or `libraries` asked for, after its parts."""

    def check_keyword(self, node: ast.Call, value: ast.expr, flow: "Walk") -> None:
        """Sees a call with one of `keywords`, and what that is given."""

    def check_name(self, node: ast.Name | ast.Attribute, name: str, flow: "Walk") -> None:
        """Sees a name or attribute that `names` or `attributes` asked for."""

    def check_truth(self, node: ast.expr, flow: "Walk") -> None:
        """Sees an expression whose truth Python asks for."""

    def check_format(self, node: ast.expr, flow: "Walk") -> None:
        """Sees an expression that is turned into text."""

    def check_expression(self, node: ast.expr, flow: "Walk") -> None:
        """Sees an expression of a type in `expressions`, after its parts."""

    def check_statement(self, node: ast.stmt, flow: "Walk") -> None:
        """Sees a statement of a type in `statements`, after its parts."""

    def check_calls(self, calls: "list[StatementCall]", flow: "Walk") -> None:
        """Sees, for each list of statements of a function that takes a training step, the calls that make up a step."""

    def check_function(self, function: "Function", flow: "Walk") -> None:
        """Sees a whole function, last."""

    @classmethod
    def page(cls) -> str:
        """The rule's documentation page, in Markdown."""
        return f"# {cls.code} {cls.name}\n\n{inspect.cleandoc(cls.__doc__ or '')}\n"

    @classmethod
    def summary(cls) -> str:
        """The first line of the page."""
        return inspect.cleandoc(cls.__doc__ or "").partition("\n")[0]


class AnywhereRule(Rule):
    """Base of rules that apply to all code alike."""

    severity = Severity.WARNING
    scope = Scope.ANYWHERE


class CaptureRule(Rule):
    """Base of rules about what a captured step can't do as written."""

    severity = Severity.WARNING
    scope = Scope.STEP


class Rules:
    """The selected rules, by what they look at."""

    def __init__(self, selected: Iterable[Rule]) -> None:
        self.selected = tuple(selected)
        self.on_method: dict[str, list[Rule]] = {}
        self.on_call: dict[str, list[Rule]] = {}
        self.on_expression: dict[type[ast.expr], list[Rule]] = {}
        self.on_statement: dict[type[ast.stmt], list[Rule]] = {}
        self.on_library: dict[str, list[Rule]] = {}
        self.on_keyword: dict[str, list[Rule]] = {}
        self.on_name: dict[str, list[Rule]] = {}
        self.on_attribute: dict[str, list[Rule]] = {}
        for rule in self.selected:
            for table, wanted in (
                (self.on_method, rule.methods),
                (self.on_call, rule.functions),
                (self.on_library, rule.libraries),
                (self.on_keyword, rule.keywords),
                (self.on_name, rule.names),
                (self.on_attribute, rule.attributes),
            ):
                for name in wanted:
                    table.setdefault(name, []).append(rule)
            for expression in rule.expressions:
                self.on_expression.setdefault(expression, []).append(rule)
            for statement in rule.statements:
                self.on_statement.setdefault(statement, []).append(rule)
        self.on_truth = self._overriding("check_truth")
        self.on_format = self._overriding("check_format")
        self.on_calls = self._overriding("check_calls")
        self.on_function = self._overriding("check_function")
        self.triggers = tuple(re.compile(trigger) for trigger in {t for rule in self.selected for t in rule.triggers})

    def _overriding(self, name: str) -> list[Rule]:
        return [rule for rule in self.selected if getattr(type(rule), name) is not getattr(Rule, name)]


def owner_of(node: ast.Call) -> ast.expr | None:
    """What a method is called on; None for a function."""
    return node.func.value if isinstance(node.func, ast.Attribute) else None


def replaced(node: ast.expr, text: str) -> tuple[Edit, ...]:
    """The edit that puts `text` in the place of an expression."""
    return (Edit(node.lineno, node.col_offset, node.end_lineno or node.lineno, node.end_col_offset or 0, text),)


def short(node: ast.AST, limit: int = 40) -> str:
    """An expression as source, cut to fit a message."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
