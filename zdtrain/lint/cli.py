"""``zdtrain lint`` and ``zdtrain rule``."""

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

from zdtrain.errors import ConfigError
from zdtrain.lint import confirm, files, fix, report
from zdtrain.lint.linter import NOT_LINTED, Report, lint_paths
from zdtrain.lint.rules.registry import ALL
from zdtrain.lint.settings import LEVELS, LintSettings, find_pyproject, load_settings, parse_level
from zdtrain.parser import Parser, whole_number


def _codes(text: str) -> tuple[str, ...]:
    return tuple(code.strip().upper() for code in text.split(",") if code.strip())


def lint_parser() -> Parser:
    """The options of ``zdtrain lint``."""
    parser = Parser(
        prog="zdtrain lint",
        description="Find host reads and other obstacles to a captured training step in source files.",
        epilog="Exit status: 0 nothing found, 1 findings, 2 wrong usage or a path that does not exist.",
    )
    parser.add_argument("paths", nargs="*", default=["."], metavar="PATH", help="files and folders (default: .)")
    parser.add_argument(
        "--select", type=_codes, metavar="CODES", help="rules to apply: codes or their beginnings, by comma"
    )
    parser.add_argument("--ignore", type=_codes, metavar="CODES", help="rules not to apply")
    parser.add_argument(
        "--level",
        choices=list(LEVELS),
        help="lowest severity to report (default: warning; note adds code that is not hot)",
    )
    parser.add_argument("--format", choices=list(report.FORMATS), default="concise", help="output format")
    parser.add_argument("--statistics", action="store_true", help="count findings by rule instead of listing them")
    parser.add_argument("--fix", action="store_true", help="apply the fixes that are certain")
    parser.add_argument(
        "--with-check",
        type=Path,
        metavar="REPORT",
        help="a `zdtrain check --format json` report: mark what it confirms",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="pyproject.toml to read (default: the nearest)")
    parser.add_argument("--isolated", action="store_true", help="read no pyproject.toml")
    parser.add_argument(
        "--jobs", type=whole_number(1), metavar="N", help="processes (default: one a core for large trees)"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``zdtrain lint``; returns the exit status."""
    try:
        options = lint_parser().parse(sys.argv[1:] if argv is None else argv)
        settings = _settings(options)
        checked = confirm.checked_lines(options.with_check) if options.with_check else {}
    except ConfigError as error:
        return _refuse(error)
    result = lint_paths(options.paths, settings, jobs=options.jobs)
    if options.fix:
        fixed = _apply_fixes(result)
        if fixed:
            result = lint_paths(options.paths, settings, jobs=options.jobs)
        print(f"fixed {fixed} finding{'s' * (fixed != 1)}", file=sys.stderr)
    if checked:
        result.findings = confirm.mark(result.findings, checked)
    write = report.statistics if options.statistics else report.FORMATS[options.format]
    sys.stdout.write(write(result))
    return 2 if result.missing else 1 if result.findings else 0


def _refuse(error: ConfigError | str) -> int:
    """Print what is wrong with the usage, in one line; return the exit status."""
    print(f"zdtrain: error: {error}", file=sys.stderr)
    return 2


def _settings(options: argparse.Namespace) -> LintSettings:
    if options.isolated:
        path = None
    elif options.config is not None:
        path = options.config
    else:
        path = find_pyproject(Path(options.paths[0]))
    level = parse_level(options.level, "--level") if options.level else None
    return load_settings(path).with_options(select=options.select, ignore=options.ignore, level=level)


def _apply_fixes(result: Report) -> int:
    total = 0
    for path in sorted({finding.path for finding in result.findings if finding.edits and finding.code != NOT_LINTED}):
        source = files.read(path, LintSettings()).source
        changed, fixed = fix.apply(source, [finding for finding in result.findings if finding.path == path])
        if fixed:
            files.write(path, changed)
            total += fixed
    return total


def rule_main(argv: Sequence[str] | None = None) -> int:
    """Runs ``zdtrain rule``; returns the exit status."""
    parser = Parser(prog="zdtrain rule", description="Explain a rule of zdtrain lint.")
    parser.add_argument("rule", nargs="*", metavar="RULE", help="a code (ZD101) or a name (item-read)")
    parser.add_argument("--all", action="store_true", help="list all rules")
    try:
        options = parser.parse(sys.argv[1:] if argv is None else argv)
    except ConfigError as error:
        return _refuse(error)
    if options.all or not options.rule:
        for code, rule in ALL.items():
            print(f"{code}  {rule.severity.label:7}  {rule.name:26}  {rule.summary()}")
        return 0
    by_name = {rule.name: code for code, rule in ALL.items()}
    for wanted in options.rule:
        code = by_name.get(wanted.lower(), wanted.upper())
        if code not in ALL:
            near = difflib.get_close_matches(wanted, [*ALL, *by_name], n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else "; `zdtrain rule --all` lists them"
            return _refuse(f"no rule {wanted!r}{hint}")
        print(ALL[code].page())
    return 0
