"""Writes findings: one line each, JSON, GitHub annotations or SARIF."""

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

from zdtrain.lint.finding import Finding, Severity
from zdtrain.lint.linter import NOT_LINTED, Report
from zdtrain.lint.rules.registry import ALL

_SARIF_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "note"}
_GITHUB_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "notice"}


def concise(report: Report) -> str:
    """``path:line:column: CODE message``, then a line that counts."""
    lines = [
        f"{f.path}:{f.line}:{f.column}: {f.code} {f.message}{' (confirmed by check)' if f.confirmed else ''}"
        for f in report.findings
    ]
    return "\n".join([*lines, summary(report)]) + "\n"


def summary(report: Report) -> str:
    """How many findings of which severity, in how many files, and what was left out."""
    counts = Counter(finding.severity for finding in report.findings)
    parts = [
        f"{counts[severity]} {severity.label}{'s' * (counts[severity] != 1)}"
        for severity in sorted(counts, reverse=True)
    ]
    found = ", ".join(parts) if parts else "no findings"
    counted = f"{found} in {report.files} file{'s' * (report.files != 1)} ({report.lines:,} lines)"
    if not report.left_out:
        return counted
    patterns = ", ".join(map(repr, report.left_out))
    return f"{counted}; exclude in pyproject.toml leaves out {patterns}: name files to lint them, or use --isolated"


def as_json(report: Report) -> str:
    """A JSON list of findings."""
    return json.dumps([_record(finding) for finding in report.findings], indent=2) + "\n"


def _record(finding: Finding) -> dict[str, Any]:
    return {
        "path": finding.path,
        "line": finding.line,
        "column": finding.column,
        "end_line": finding.end_line,
        "code": finding.code,
        "name": ALL[finding.code].name if finding.code in ALL else "not-linted",
        "severity": finding.severity.label,
        "runs": finding.heat.name.lower(),
        "message": finding.message,
        "fixable": bool(finding.edits),
        "confirmed": finding.confirmed,
    }


def github(report: Report) -> str:
    """Workflow commands that become annotations."""
    return "".join(
        f"::{_GITHUB_LEVELS[f.severity]} file={_escape(f.path, property=True)},line={f.line},col={f.column},"
        f"title={f.code}::{_escape(f.message)}\n"
        for f in report.findings
    )


def _escape(text: str, *, property: bool = False) -> str:
    text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text.replace(":", "%3A").replace(",", "%2C") if property else text


def sarif(report: Report) -> str:
    """SARIF 2.1.0."""
    rules = [
        {
            "id": code,
            "name": rule.name,
            "shortDescription": {"text": rule.summary()},
            "fullDescription": {"text": rule.summary()},
            "help": {"text": rule.page(), "markdown": rule.page()},
            "defaultConfiguration": {"level": _SARIF_LEVELS[rule.severity]},
        }
        for code, rule in ALL.items()
    ]
    order = {code: at for at, code in enumerate(ALL)}
    run = {
        "tool": {"driver": {"name": "zdtrain lint", "rules": rules}},
        "columnKind": "unicodeCodePoints",
        "results": [_result(finding, order) for finding in report.findings],
    }
    document = {"$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0", "runs": [run]}
    return json.dumps(document, indent=2) + "\n"


def _result(finding: Finding, order: dict[str, int]) -> dict[str, Any]:
    region = {"startLine": finding.line, "startColumn": finding.column, "endLine": finding.end_line}
    location = {"physicalLocation": {"artifactLocation": {"uri": finding.path}, "region": region}}
    result: dict[str, Any] = {
        "ruleId": finding.code,
        "level": _SARIF_LEVELS[finding.severity],
        "message": {"text": finding.message},
        "locations": [location],
    }
    if finding.code in order:
        result["ruleIndex"] = order[finding.code]
    return result


def statistics(report: Report) -> str:
    """How often each rule was hit, most often first."""
    counts = Counter(finding.code for finding in report.findings)
    names = {NOT_LINTED: "not-linted"} | {code: rule.name for code, rule in ALL.items()}
    lines = [
        f"{count:6}  {code}  {names[code]}"
        for code, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    ]
    return "\n".join([*lines, summary(report)]) + "\n"


FORMATS: dict[str, Callable[[Report], str]] = {"concise": concise, "json": as_json, "github": github, "sarif": sarif}
