"""Measures how many lines per second the linter does, beside ``ast.parse`` alone, interleaved in one process.

Run ``python benchmarks/lint/speed.py PATH…``; prints one line per path.
"""

import ast
import gc
import statistics
import sys
import time

from zdtrain.lint.files import UnreadableError, find, read
from zdtrain.lint.linter import lint_paths
from zdtrain.lint.settings import LintSettings

ROUNDS = 7


def seconds(work) -> float:
    """CPU time of one call, garbage collected before."""
    gc.collect()
    start = time.process_time()
    work()
    return time.process_time() - start


def python(file: str, settings: LintSettings) -> str | None:
    """A file's source; None if it can't be read or parsed, as test data often can't."""
    try:
        text = read(file, settings).source
        ast.parse(text)
    except (UnreadableError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return text


def measure(path: str) -> None:
    """Prints medians for one tree."""
    settings = LintSettings()
    texts = {file: text for file in find([path], settings) if (text := python(file, settings)) is not None}
    files = list(texts)
    lines = sum(text.count("\n") for text in texts.values())
    pairs = [
        (
            seconds(lambda: [ast.parse(text) for text in texts.values()]),
            seconds(lambda: lint_paths(files, settings, jobs=1)),
        )
        for _ in range(ROUNDS)
    ]
    parse, lint = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(lint / parse for parse, lint in pairs)
    print(f"{path}: {lines:,} lines, parse {lines / parse:,.0f}/s, lint {lines / lint:,.0f}/s, {ratio:.2f} x parse")


if __name__ == "__main__":
    gc.disable()  # as the linter does, so that both columns are alike
    for argument in sys.argv[1:]:
        measure(argument)
