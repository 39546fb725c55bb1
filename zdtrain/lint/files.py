"""Finds the files to lint and reads them, whatever state they are in."""

import ast
import io
import json
import os
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zdtrain.lint.settings import LintSettings, matches

_SKIPPED_FOLDERS = frozenset(
    [
        ".git",
        ".hg",
        ".svn",
        ".venv",
        "venv",
        "env",
        "node_modules",
        "__pycache__",
        ".tox",
        ".nox",
        ".mypy_cache",
        ".ruff_cache",
        ".pytest_cache",
        "build",
        "dist",
        "site-packages",
        ".eggs",
        ".ipynb_checkpoints",
    ]
)
_PYTHON_CELLS = ("%%time", "%%capture", "%%prun")
_MAGIC_VALUE = re.compile(r"^(\s*[\w.,\s\[\]'\"]+=\s*)[%!].*$")


class UnreadableError(Exception):
    """A file that can't be linted; the message says why, in one line."""


@dataclass(frozen=True, slots=True)
class Text:
    """A file's source. For a notebook: its code cells in order, and where each line came from."""

    source: str
    cells: tuple[tuple[int, int], ...] = ()
    """For each line of a notebook's source: cell and line in the cell, from 1."""
    broken: tuple[tuple[int, str], ...] = ()
    """Lines of the source where a cell is not Python, and why; such a cell is left out."""


def find(paths: list[str], settings: LintSettings, left_out: set[str] | None = None) -> Iterator[str]:
    """Python files under the paths, each once, in order; a file that is named is taken as it is.

    Args:
        paths: files and folders.
        settings: what to leave out.
        left_out: gets the patterns of ``exclude`` that something was left out by.

    Raises:
        Nothing: a path that does not exist is yielded, so that reading it reports it.
    """
    seen: set[str] = set()
    left_out = set() if left_out is None else left_out
    for path in paths:
        for found in _walk(path, settings, left_out) if os.path.isdir(path) else [path]:
            real = os.path.realpath(found)
            if real not in seen:
                seen.add(real)
                yield found


def _walk(root: str, settings: LintSettings, left_out: set[str]) -> Iterator[str]:
    def is_excluded(path: str) -> bool:
        patterns = [pattern for pattern in settings.exclude if matches(path, pattern)]
        left_out.update(patterns)
        return bool(patterns)

    for folder, folders, files in os.walk(root):
        folders[:] = sorted(
            name
            for name in folders
            if name not in _SKIPPED_FOLDERS
            and not os.path.exists(os.path.join(folder, name, "pyvenv.cfg"))
            and not is_excluded(os.path.join(folder, name))
        )
        for name in sorted(files):
            path = os.path.join(folder, name)
            if name.endswith((".py", ".pyi")) and not is_excluded(path):
                yield path


def read(path: str, settings: LintSettings) -> Text:
    """Reads and decodes a file.

    Raises:
        UnreadableError: if it is missing, too large, not text, or a broken notebook.
    """
    try:
        size = os.stat(path).st_size
        if not os.path.isfile(path):
            raise UnreadableError("not a regular file")
        if size > settings.max_file_bytes:
            raise UnreadableError(
                f"{size:,} bytes are more than max-file-bytes = {settings.max_file_bytes:,}; generated?"
            )
        data = Path(path).read_bytes()
    except OSError as error:
        raise UnreadableError(error.strerror or str(error)) from error
    if path.endswith(".ipynb"):
        return _notebook(data)
    return Text(_decode(data))


def _decode(data: bytes) -> str:
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return io.TextIOWrapper(io.BytesIO(data), encoding, line_buffering=True).read()
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        raise UnreadableError(f"not decodable: {error}") from error


def _notebook(data: bytes) -> Text:
    try:
        cells = [
            (number, "".join(cell["source"]))
            for number, cell in enumerate(json.loads(data)["cells"], 1)
            if cell["cell_type"] == "code"
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise UnreadableError(f"not a notebook: {type(error).__name__}: {error}") from error
    lines: list[str] = []
    places: list[tuple[int, int]] = []
    broken: list[tuple[int, str]] = []
    for number, source in cells:
        cell = _without_magic(source)
        try:
            ast.parse("\n".join(cell) + "\n")
        except (SyntaxError, ValueError) as error:
            line = min(getattr(error, "lineno", None) or 1, len(cell))
            broken.append((len(lines) + line, getattr(error, "msg", str(error))))
            cell = ["pass"] * len(cell)
        lines += cell
        places += [(number, at) for at in range(1, len(cell) + 1)]
    return Text("\n".join(lines) + "\n", tuple(places), tuple(broken))


def _without_magic(source: str) -> list[str]:
    """A cell's lines with what only IPython understands replaced by ``pass`` or ``None``."""
    lines = source.split("\n")
    if source.startswith("%%") and not source.startswith(_PYTHON_CELLS):
        return ["pass"] * len(lines)  # another language
    continued, indent = False, ""
    for at, line in enumerate(lines):
        code = line.strip()
        if continued or code.startswith(("%", "!", "?")) or (code.endswith("?") and "#" not in code):
            indent = indent if continued else line[: len(line) - len(line.lstrip())]
            continued = code.endswith("\\")
            lines[at] = indent + "pass"
        else:
            lines[at] = _MAGIC_VALUE.sub(r"\1None", line)
    return lines


def write(path: str, source: str) -> None:
    """Writes a fixed file in the encoding and with the line ends it had."""
    data = Path(path).read_bytes()
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    newline = "\r\n" if b"\r\n" in data else "\n"
    Path(path).write_bytes(source.replace("\n", newline).encode(encoding))
