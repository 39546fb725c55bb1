"""``# noqa`` comments: which findings a line allows."""

import re
from collections.abc import Iterable

from zdtrain.lint.finding import Finding

_NOQA = re.compile(r"#\s*noqa(?P<codes>\s*:\s*(?P<list>[A-Za-z]+[0-9]+(?:[,\s]+[A-Za-z]+[0-9]+)*))?", re.IGNORECASE)
_FILE = re.compile(r"^\s*#\s*zdtrain:\s*noqa(?:\s*:\s*(?P<list>[\w,\s]+?))?\s*$", re.IGNORECASE | re.MULTILINE)


def allowed(finding: Finding, lines: list[str]) -> bool:
    """Whether a ``noqa`` on a finding's first or last line covers it; a bare one covers everything."""
    for number in {finding.line, finding.end_line}:
        if not 0 < number <= len(lines) or "noqa" not in lines[number - 1].lower():
            continue
        match = _NOQA.search(lines[number - 1])
        if match and (match["list"] is None or finding.code in codes(match["list"])):
            return True
    return False


def codes(text: str) -> set[str]:
    """The codes of a list such as ``ZD101, ZD103``."""
    return {code.upper() for code in re.split(r"[,\s]+", text.strip()) if code}


def file_level(text: str) -> set[str]:
    """Codes that ``# zdtrain: noqa: ZD101`` on a line of its own switches off in a file; ``{"ZD"}`` for all."""
    found: set[str] = set()
    if "zdtrain:" not in text:
        return found
    for match in _FILE.finditer(text):
        found |= codes(match["list"]) if match["list"] else {"ZD"}
    return found


def keep(findings: Iterable[Finding], text: str) -> list[Finding]:
    """The findings that no comment allows."""
    off = tuple(file_level(text))
    remaining = [finding for finding in findings if not (off and finding.code.startswith(off))]
    if not remaining or "noqa" not in text.lower():
        return remaining
    lines = text.split("\n")
    return [finding for finding in remaining if not allowed(finding, lines)]
