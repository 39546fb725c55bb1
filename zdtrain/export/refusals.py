"""Why a module cannot be exported, in one sentence with the line that is to blame."""

import io
import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

from torch import nn
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError, GuardOnDataDependentSymNode

from zdtrain.export.examples import Examples
from zdtrain.source.location import frame_kind

_NOISY_LOGGERS = ("torch.export", "torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")


def refusal_of(module: nn.Module, examples: Examples, error: Exception) -> str:
    """Return why a module cannot be exported, where, and what helps."""
    forward, where = f"{type(module).__name__}.forward", where_of(error)
    if isinstance(error, GuardOnDataDependentSymNode):
        return (
            f"{forward} cannot be exported: its Python code depends on the values of a tensor{where}; use torch.where "
            f"or torch.cond in place of `if`, and no size or index that is read from a tensor ({summary_of(error)})"
        )
    if isinstance(error.__cause__ or error.__context__, ConstraintViolationError):
        _, _, needed = str(error).partition("Suggested fixes:")
        return (
            f"{forward} does not take every batch size: it needs {(needed or str(error)).strip().splitlines()[0]}. "
            f"Write -1 or x.shape[0] where it has a number, and no `if` on it; or pass dynamic_batch=False "
            f"(--static_batch). Taken as batched, since dimension 0 is {examples.batch_size}: "
            f"{', '.join(examples.batched)}; if one of them is not, give examples of another batch size"
        )
    try:
        examples.run(module)
    except Exception as own:  # then it is not about exporting
        return f"{forward} fails with the example inputs, before anything is exported: {summary_of(own)}{where_of(own)}"
    return (
        f"{forward} cannot be exported: {summary_of(error)}{where}. torch.export runs it with tensors that have no "
        f"values: it has to work with operations of torch alone"
    )


def where_of(error: BaseException) -> str:
    """Return the innermost line of the user's on the way to an error, as `` (file:line)``; nothing if there is none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame_kind(frame.filename) == "user"]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def summary_of(error: BaseException) -> str:
    """Return the kind of an error and the first line of its text."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


@contextmanager
def hushed() -> Iterator[None]:
    """Keep torch from printing half of a program, or tracebacks, before it raises."""
    loggers = [logging.getLogger(name) for name in _NOISY_LOGGERS]
    were = [logger.disabled for logger in loggers]
    try:
        for logger in loggers:
            logger.disabled = True
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        for logger, was in zip(loggers, were, strict=True):
            logger.disabled = was
