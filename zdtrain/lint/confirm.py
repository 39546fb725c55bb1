"""Marks findings that ``zdtrain check`` saw happen: its JSON report names the lines."""

import json
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from zdtrain.errors import ConfigError
from zdtrain.lint.finding import Finding


def checked_lines(path: Path) -> dict[str, set[int]]:
    """The lines of each file (by real path) on which a check found something.

    Args:
        path: what ``zdtrain check CONFIG --format json`` wrote.

    Raises:
        ConfigError: if the file is not such a report.
    """
    try:
        findings = json.loads(path.read_text(encoding="utf-8"))["findings"]
        lines: dict[str, set[int]] = {}
        for finding in findings:
            if finding["file"]:
                lines.setdefault(os.path.realpath(finding["file"]), set()).add(finding["line"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"--with-check {path}: not a report of `zdtrain check --format json` ({reason})") from error
    return lines


def mark(findings: Iterable[Finding], lines: dict[str, set[int]]) -> list[Finding]:
    """The findings, those confirmed that a check found something in."""
    return [
        replace(finding, confirmed=not lines.get(os.path.realpath(finding.path), set()).isdisjoint(_span(finding)))
        for finding in findings
    ]


def _span(finding: Finding) -> range:
    return range(finding.line, finding.end_line + 1)
