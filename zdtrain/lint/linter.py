"""Lints files: one by one, then again those whose functions another file's training step calls."""

import contextlib
import gc
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from symtable import symtable

from zdtrain.lint import noqa
from zdtrain.lint.analysis import Unit, merge_heats
from zdtrain.lint.files import Text, UnreadableError, find, read
from zdtrain.lint.finding import Finding, Severity
from zdtrain.lint.heat import Heat
from zdtrain.lint.relevance import may_matter
from zdtrain.lint.rules.base import Rules
from zdtrain.lint.rules.registry import ALL
from zdtrain.lint.settings import LintSettings
from zdtrain.lint.source import Source

NOT_LINTED = "ZD000"
_FILES_PER_TASK = 16
_POOL_FROM_FILES = 100
_ROUNDS = 5


@dataclass(slots=True)
class FileResult:
    """What one file gave."""

    path: str
    lines: int = 0
    findings: list[Finding] = field(default_factory=list)
    calls: dict[str, Heat] = field(default_factory=dict)
    """Dotted names of functions elsewhere that code running once per step calls."""
    missing: bool = False


@dataclass(slots=True)
class Report:
    """What a run gave."""

    findings: list[Finding]
    files: int
    lines: int
    missing: bool
    """Whether a path that was named does not exist."""
    left_out: tuple[str, ...] = ()
    """Patterns of ``exclude`` that files or folders were left out by."""


def lint_source(
    text: str, path: str = "<string>", settings: LintSettings | None = None, *, outside: dict[str, Heat] | None = None
) -> list[Finding]:
    """Lints source text.

    Args:
        text: Python source.
        path: name for messages and for per-file ignores.
        settings: options; the defaults if None.
        outside: qualified name of a function in the text -> how often other files run it.

    Returns:
        The findings of at least ``settings.level``, by line.
    """
    return _lint_text(Text(text), path, settings or LintSettings(), outside or {}).findings


def lint_paths(paths: list[str], settings: LintSettings, *, jobs: int | None = None) -> Report:
    """Lints files and folders.

    Args:
        paths: files and folders.
        settings: options.
        jobs: processes to use; None chooses one for small trees and one per core for large ones.
    """
    left_out: set[str] = set()
    files = list(find(paths, settings, left_out))
    jobs = jobs or (len(os.sched_getaffinity(0)) if len(files) >= _POOL_FROM_FILES else 1)
    if jobs > 1:
        with ProcessPoolExecutor(jobs, initializer=gc.disable) as pool:
            results = _rounds(files, settings, partial(pool.map, chunksize=_FILES_PER_TASK))
    else:
        with _without_collection():
            results = _rounds(files, settings, map)
    findings = sorted(finding for result in results for finding in result.findings)
    return Report(
        findings=findings,
        files=len(results),
        lines=sum(result.lines for result in results),
        missing=any(result.missing for result in results),
        left_out=tuple(sorted(left_out)),
    )


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """No garbage collection inside: a syntax tree is many objects, none in a circle, freed by the last reference."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _rounds(files: list[str], settings: LintSettings, mapper: Callable[..., Iterable[FileResult]]) -> list[FileResult]:
    """A pass over all files; then passes over those that turned out to be called from another file's step."""
    work = partial(_lint_file, settings)
    results = dict(zip(files, mapper(work, [(path, {}) for path in files]), strict=True))
    if len(files) == 1:
        return list(results.values())
    modules = _Modules(files)
    outside: dict[str, dict[str, Heat]] = {}
    for _ in range(_ROUNDS):
        changed: set[str] = set()
        for result in results.values():
            for name, heat in result.calls.items():
                for path, function in modules.resolve(name, result.path):
                    if merge_heats(outside.setdefault(path, {}), [(function, heat)]):
                        changed.add(path)
        if not changed:
            break
        again = sorted(changed)
        results.update(zip(again, mapper(work, [(path, outside[path]) for path in again]), strict=True))
    return list(results.values())


class _Modules:
    """Finds the file that a dotted name of an import means, among the files linted."""

    def __init__(self, files: list[str]) -> None:
        self._by_last: dict[str, list[tuple[tuple[str, ...], str]]] = {}
        for path in files:
            parts = tuple(os.path.splitext(os.path.normpath(path))[0].split(os.sep))
            if parts[-1] == "__init__":
                parts = parts[:-1]
            if parts:
                self._by_last.setdefault(parts[-1], []).append((parts, path))

    def resolve(self, name: str, importer: str) -> list[tuple[str, str]]:
        """Files and functions that a name may mean: ``util.misc.all_reduce`` or ``.losses.Dice.forward``."""
        level = len(name) - len(name.lstrip("."))
        parts = tuple(name.lstrip(".").split("."))
        base: tuple[str, ...] = ()
        if level:
            folder = os.path.normpath(importer).split(os.sep)[:-level]
            base = tuple(folder)
        found = []
        for cut in (1, 2):
            module, qualified = (*base, *parts[:-cut]), ".".join(parts[-cut:])
            if not module or len(parts) < cut:
                continue
            for known, path in self._by_last.get(module[-1], ()):
                if path != importer and known[-len(module) :] == module:
                    found.append((path, qualified))
        return found


def _lint_file(settings: LintSettings, task: tuple[str, dict[str, Heat]]) -> FileResult:
    path, outside = task
    try:
        return _lint_text(read(path, settings), path, settings, outside)
    except UnreadableError as error:
        return FileResult(path, findings=[_not_linted(path, 1, str(error))], missing=not os.path.lexists(path))


def _lint_text(text: Text, path: str, settings: LintSettings, outside: dict[str, Heat]) -> FileResult:
    result = FileResult(path, lines=text.source.count("\n"))
    rules, everything = _rules(settings.codes), settings.level is Severity.NOTE
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # invalid escapes are another linter's business
            if not outside and not may_matter(text.source, rules, everything=everything):
                symtable(text.source, path, "exec")  # tells whether it is Python in half of the time
                return result
            source = Source(path, text.source)
        unit = Unit(source, rules, outside=outside, everything=everything)
        findings, result.calls = unit.run()
    except SyntaxError as error:
        result.findings = [_not_linted(path, error.lineno or 1, f"not Python: {error.msg}")]
    except (ValueError, RecursionError, MemoryError) as error:
        result.findings = [_not_linted(path, 1, f"not parsable: {error or type(error).__name__}")]
    else:
        off = settings.ignored_in(path)
        shown = [f for f in findings if f.severity >= settings.level and not (off and f.code.startswith(off))]
        result.findings = noqa.keep(shown, text.source)
    result.findings += [_not_linted(path, line, f"not Python: {why}") for line, why in text.broken]
    if text.cells:
        result.findings = [_in_cell(finding, text) for finding in result.findings]
    return result


def _not_linted(path: str, line: int, why: str) -> Finding:
    return Finding(path=path, line=line, column=1, code=NOT_LINTED, message=why, severity=Severity.ERROR, end_line=line)


def _in_cell(finding: Finding, text: Text) -> Finding:
    cell, line = text.cells[min(finding.line, len(text.cells)) - 1]
    return replace(finding, path=f"{finding.path}:cell {cell}", line=line, end_line=line, edits=())


_made: dict[tuple[str, ...], Rules] = {}


def _rules(codes: tuple[str, ...]) -> Rules:
    """The rules of these codes, made once per process."""
    if codes not in _made:
        _made[codes] = Rules(ALL[code]() for code in codes)
    return _made[codes]
