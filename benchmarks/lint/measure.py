"""Measures the linter against hand labels of public training files.

The files are not part of the project. Put each at ``CORPUS/<owner>+<name>/<path>`` as it is at the commit that
labels.json names, then run ``python benchmarks/lint/measure.py CORPUS``.
"""

import json
import sys
from collections import Counter
from pathlib import Path

from zdtrain.lint.finding import Finding
from zdtrain.lint.linter import lint_paths
from zdtrain.lint.settings import LintSettings

LABELS = Path(__file__).with_name("labels.json")
COPY_RULES = frozenset({"ZD116", "ZD119", "ZD124"})


def findings_by_file(corpus: Path, repository: str) -> dict[str, list[Finding]]:
    """Default-level ZD1 findings of a repository's files, linted together."""
    root = corpus / repository.replace("/", "+")
    found: dict[str, list[Finding]] = {}
    for finding in lint_paths([str(root)], LintSettings(select=("ZD1",)), jobs=1).findings:
        found.setdefault(str(Path(finding.path).relative_to(root)), []).append(finding)
    return found


def score(entry: dict, findings: list[Finding], text: str) -> Counter:
    """Counts for one file: lines, not findings."""
    lines = {kind: set(numbers) for kind, numbers in entry["lines"].items()}
    neutral = lines.get("neutral", set()) | lines.get("implicit_copy", set())
    reads, copies = lines.get("read", set()), lines.get("copy", set())
    read_hits = {f.line for f in findings if f.code not in COPY_RULES} - neutral
    copy_hits = {f.line for f in findings if f.code in COPY_RULES} - neutral
    grep = {number for number, line in enumerate(text.splitlines(), 1) if ".item()" in line} - neutral
    for kind, missed in (("missed read", reads - read_hits), ("missed copy", copies - copy_hits)):
        for line in sorted(missed):
            print(f"  {kind}: {entry['repository']} {entry['path']}:{line}")
    for line in sorted((read_hits - reads) | (copy_hits - copies)):
        print(f"  false: {entry['repository']} {entry['path']}:{line}")
    return Counter(
        files=1,
        reads=len(reads),
        reads_found=len(reads & read_hits),
        reads_reported=len(read_hits),
        copies=len(copies),
        copies_found=len(copies & copy_hits),
        copies_reported=len(copy_hits),
        grep_found=len(reads & grep),
        grep_reported=len(grep),
    )


def main(corpus: Path) -> None:
    """Prints recall and strict precision by split, and for a grep for ``.item()``."""
    entries = json.loads(LABELS.read_text(encoding="utf-8"))["files"]
    found = {repository: findings_by_file(corpus, repository) for repository in {e["repository"] for e in entries}}
    totals: dict[str, Counter] = {}
    for entry in entries:
        text = (corpus / entry["repository"].replace("/", "+") / entry["path"]).read_text(encoding="utf-8-sig")
        counts = score(entry, found[entry["repository"]].get(entry["path"], []), text)
        totals.setdefault(entry["split"], Counter()).update(counts)
    for split, counts in totals.items():
        print(f"{split}: {counts['files']} files")
        print(f"  reads    recall {counts['reads_found']}/{counts['reads']}", end="")
        print(f", strict precision {counts['reads_found']}/{counts['reads_reported']}")
        print(f"  copies   recall {counts['copies_found']}/{counts['copies']}", end="")
        print(f", strict precision {counts['copies_found']}/{counts['copies_reported']}")
        print(f"  .item()  recall {counts['grep_found']}/{counts['reads']}", end="")
        print(f", strict precision {counts['grep_found']}/{counts['grep_reported']}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
