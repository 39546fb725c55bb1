"""The files of a run folder as they are read back: whole lines, rows, documents, or one line about what is wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zdtrain.records.encoding import is_stored_float
from zdtrain.records.types import RecordError

_NUMBERS = {int, float}


def read_whole_lines(path: Path) -> list[str]:
    """Return the complete lines of `path`, none where it is missing; a last line that a kill tore off is left out.

    Raises:
        RecordError: it cannot be read, or is not text.
    """
    if not path.is_file():
        return []
    text = _bytes(path)
    try:
        return text[: text.rfind(b"\n") + 1].decode().split("\n")[:-1]
    except UnicodeDecodeError as error:
        raise _damaged(path, str(error)) from error


def read_rows(path: Path, is_row: Callable[[Any], bool]) -> list[dict[str, Any]]:
    """Return the objects of a JSON-lines file, none where it is missing.

    Args:
        path: The file.
        is_row: Whether a value is what a line holds.

    Raises:
        RecordError: a line is damaged.
    """
    lines = read_whole_lines(path)
    rows = _parsed_at_once(lines) or [_parsed(path, number, line) for number, line in enumerate(lines, 1)]
    for number, row in enumerate(rows, 1):
        if not is_row(row):
            raise _damaged(path, f"line {number} is no record: {lines[number - 1][:80]}")
    return rows


def _parsed_at_once(lines: list[str]) -> list[Any] | None:
    """Return what the lines hold, in a third of the time that they take one by one; None where one is damaged."""
    try:
        values: list[Any] = json.loads(f"[{','.join(lines)}]")
    except ValueError:
        return None
    return values if len(values) == len(lines) else None


def _parsed(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise _damaged(path, f"line {number}: {error}") from error


def read_document(path: Path, is_document: Callable[[Any], bool], missing: Any = None) -> Any:
    """Return what a JSON document holds, `missing` where there is no such file.

    Raises:
        RecordError: it is damaged, or missing and has to be there.
    """
    if missing is not None and not path.is_file():
        return missing
    try:
        document = json.loads(_bytes(path))
    except ValueError as error:
        raise _damaged(path, str(error)) from error
    if not is_document(document):
        raise _damaged(path, f"it holds {str(document)[:80]}")
    return document


def is_torn(path: Path) -> bool:
    """Return whether a kill tore off the end of a file of lines."""
    return path.is_file() and path.stat().st_size > 0 and not _bytes(path).endswith(b"\n")


def is_step_row(row: Any) -> bool:
    """Return whether `row` is a line of `metrics.jsonl`."""
    return (
        isinstance(row, dict)
        and row.keys() >= {"step", "epoch", "batch_idx", "wall_time", "values"}
        and isinstance(row["step"], int)
        and isinstance(row["wall_time"], int | float)
        and isinstance(row["values"], dict)
        and (set(map(type, row["values"].values())) <= _NUMBERS or all(map(is_stored_float, row["values"].values())))
    )


def is_event(row: Any) -> bool:
    """Return whether `row` is a line of `events.jsonl`."""
    return isinstance(row, dict) and row.keys() >= {"kind", "wall_time"}


def is_mapping(document: Any) -> bool:
    """Return whether `document` is an object."""
    return isinstance(document, dict)


def is_epoch_table(document: Any) -> bool:
    """Return whether `document` is what `epochs.json` holds."""
    keys = {"epoch", "first_step", "last_step", "metrics"}
    return isinstance(document, list) and all(isinstance(epoch, dict) and epoch.keys() >= keys for epoch in document)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror or error}") from error


def _damaged(path: Path, what: str) -> RecordError:
    return RecordError(f"{path} is damaged: {what}")
