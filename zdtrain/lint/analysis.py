"""Analyses one file: walks what matters, finds out how often each function runs, and turns hits into findings."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from functools import cached_property

from zdtrain.lint import kinds as k
from zdtrain.lint.finding import Finding, Severity
from zdtrain.lint.flow import Flow
from zdtrain.lint.heat import Heat, is_evaluation, root_heat, within
from zdtrain.lint.infer import free_name_kind
from zdtrain.lint.kinds import Kind, Kinds
from zdtrain.lint.rules.base import Rules
from zdtrain.lint.source import Class, Function, Source
from zdtrain.lint.walked import Hit

_CONSTRUCTORS = ("__init__", "setup", "configure_model", "__post_init__")


class Unit:
    """The analysis of one file.

    Args:
        source: the parsed file.
        rules: the rules to apply.
        outside: qualified names of functions in this file -> how often other files call them.
        everything: walk also what nothing hot reaches; needed only to report notes.
    """

    def __init__(
        self, source: Source, rules: Rules, *, outside: Mapping[str, Heat] | None = None, everything: bool = False
    ) -> None:
        self.source = source
        self.rules = rules
        self.walks: dict[Function, Flow] = {}
        self._done: set[Function] = set()
        self._constructed: set[str] = set()
        self._roots: dict[Function, Heat] = {}
        self._outside: dict[Function, Heat] = {}
        self._passed_on: dict[str, Heat] = {}
        for name, heat in (outside or {}).items():
            self._called_from_outside(name, heat)
        self._everything = everything

    def _called_from_outside(self, name: str, heat: Heat) -> None:
        """Finds what a call from another file means; one to an inherited method goes on to the base's file."""
        owner, _, method = name.rpartition(".")
        if not owner:
            if name in self.source.functions:
                self._outside[self.source.functions[name]] = heat
        elif owner in self.source.classes:
            found = self.source.method(self.source.classes[owner], method)
            if found is not None:
                self._outside[found] = max(heat, self._outside.get(found, Heat.COLD))
            else:
                for base in self.source.outside_bases(self.source.classes[owner]):
                    self._passed_on[f"{base}.{method}"] = heat

    # What a walk asks for.

    def walk(self, function: Function, arguments: tuple[Kind, ...] = ()) -> Flow:
        """Walks a function the first time it is asked for."""
        flow = self.walks.get(function)
        if flow is None:
            flow = self.walks[function] = Flow(function, self, arguments)
            flow.walk()
            self._done.add(function)
        return flow

    def returns(self, function: Function, arguments: tuple[Kind, ...]) -> Kinds:
        """What a function returns; unknown while it is being walked."""
        flow = self.walk(function, arguments)
        if function not in self._done:
            return k.UNKNOWN
        return k.VALUE if flow.result.returns is None else flow.result.returns

    def construct(self, owner: Class) -> None:
        """Learns what a class's constructors put into its attributes."""
        for current in self.source.base_classes(owner):
            if current.name in self._constructed:
                continue
            self._constructed.add(current.name)
            for name in _CONSTRUCTORS:
                if name in current.methods:
                    self.walk(current.methods[name])

    def global_kind(self, name: str) -> Kind:
        """What a name of the file's body holds."""
        body = self.walks.get(self.source.body)
        known = body.env.get(name) if body is not None else None
        if known is not None:
            return known
        if name in self.source.imports or name in self.source.functions or name in self.source.classes:
            return k.UNKNOWN
        return free_name_kind(name)

    # The result.

    def run(self) -> tuple[list[Finding], dict[str, Heat]]:
        """The findings, and how often functions of other files are called (by dotted name)."""
        self.walk(self.source.body)
        for function in self.source.all_functions:
            if self._everything or self._matters(function):
                self.walk(function)
        heats, calls = self._spread()
        findings = [
            finding
            for function, flow in self.walks.items()
            for hit in flow.result.hits
            if (finding := self._finding(hit, heats[function])) is not None
        ]
        self._release()
        return sorted(set(findings)), calls

    def _release(self) -> None:
        """Cuts the references in circles, so that the syntax tree is freed at once, without a garbage collection."""
        self.walks.clear()
        for function in self.source.all_functions:
            function.nested.clear()
        for owner in self.source.classes.values():
            owner.methods.clear()

    def _matters(self, function: Function) -> bool:
        """Whether a function can hold a finding above a note, before calls are followed."""
        if function in self._outside:
            return True
        heat = self._root_heat(function)
        if heat.hot:
            return True
        if heat is not Heat.EVALUATION and (
            function.loops and ("train" in function.name or within(self.source.step_lines[0], *function.span))
        ):
            return True
        if function.name in _CONSTRUCTORS and function.owner is not None and self.source.is_module(function.owner):
            return True
        first, last = function.span
        at = bisect_left(self._trigger_lines, first)
        return at < len(self._trigger_lines) and self._trigger_lines[at] <= last

    @cached_property
    def _trigger_lines(self) -> list[int]:
        text, line_at = self.source.text, self.source.line_at
        return sorted({line_at(match.start()) for trigger in self.rules.triggers for match in trigger.finditer(text)})

    def _spread(self) -> tuple[dict[Function, Heat], dict[str, Heat]]:
        """Follows calls from hot code: what it calls is as hot."""
        heats = {function: self._own_heat(function) for function in self.walks}
        outward = dict(self._passed_on)
        waiting = list(self.walks)
        while waiting:
            caller = waiting.pop()
            for edge in self.walks[caller].result.calls:
                heat = edge.place.heat(heats[caller])
                if isinstance(edge.callee, str):
                    outward[edge.callee] = max(heat, outward.get(edge.callee, Heat.COLD))
                    continue
                if is_evaluation(edge.callee.name):
                    heat = min(heat, Heat.EVALUATION)
                if heat > heats[edge.callee]:
                    heats[edge.callee] = heat
                    waiting.append(edge.callee)
        return heats, {name: heat for name, heat in outward.items() if heat.hot}

    def _own_heat(self, function: Function) -> Heat:
        outside = Heat.COLD if is_evaluation(function.name) else self._outside.get(function, Heat.COLD)
        return max(self._root_heat(function), outside)

    def _root_heat(self, function: Function) -> Heat:
        found = self._roots.get(function)
        if found is None:
            found = self._roots[function] = root_heat(function, self.source)
        return found

    def _finding(self, hit: Hit, function: Heat) -> Finding | None:
        heat = hit.place.heat(function)
        severity = hit.rule.severity_at(heat)
        if severity is None or (severity is Severity.NOTE and not self._everything):
            return None
        column = hit.column
        if column and not (text := self.source.lines[hit.line - 1]).isascii():
            column = len(text.encode()[:column].decode(errors="replace"))
        return Finding(
            path=self.source.path,
            line=hit.line,
            column=column + 1,
            code=hit.rule.code,
            message=hit.message,
            severity=severity,
            heat=heat,
            end_line=hit.end_line,
            edits=hit.edits,
        )


def merge_heats(into: dict[str, Heat], found: Iterable[tuple[str, Heat]]) -> bool:
    """Adds what was found to what is known; whether anything got hotter."""
    changed = False
    for name, heat in found:
        if heat > into.get(name, Heat.COLD):
            into[name] = heat
            changed = True
    return changed
