"""Applies the edits of findings whose fix is certain."""

from collections.abc import Iterable

from zdtrain.lint.finding import Edit, Finding


def apply(source: str, findings: Iterable[Finding]) -> tuple[str, int]:
    """Applies every edit that does not overlap one applied before.

    Returns:
        The new source and the number of findings fixed.
    """
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    data = b"".join(lines)

    def span(edit: Edit) -> tuple[int, int]:
        return starts[edit.line - 1] + edit.column, starts[edit.end_line - 1] + edit.end_column

    wanted = sorted((finding for finding in findings if finding.edits), key=lambda f: span(f.edits[0]), reverse=True)
    fixed = 0
    limit = len(data) + 1
    for finding in wanted:
        spans = [(*span(edit), edit.text) for edit in finding.edits]
        if max(end for _, end, _ in spans) > limit:
            continue
        for begin, end, text in sorted(spans, reverse=True):
            data = data[:begin] + text.encode() + data[end:]
            limit = begin
        fixed += 1
    return data.decode(), fixed
