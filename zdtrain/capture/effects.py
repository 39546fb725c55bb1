"""Calls in a step that do something outside of it, or look at something there: a replay does neither."""

import builtins
import io
import logging
import os
import threading
import time
import warnings
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from types import BuiltinFunctionType, CodeType, FrameType
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import Logger

from zdtrain.source.location import code_kind

_CLOCK = "reads the clock"
_CLOCKS = frozenset({time.time, time.time_ns, time.perf_counter, time.perf_counter_ns, time.monotonic})
_BUILT_IN: dict[Any, str] = {
    builtins.print: "prints",
    builtins.open: "opens a file",
    builtins.input: "waits for input",
    warnings.warn: "warns",
}
_FILES = frozenset(
    {
        *(io.open, os.open, os.stat, os.lstat, os.access, os.listdir, os.scandir, os.read, os.write),
        *(os.mkdir, os.rename, os.replace, os.remove, os.unlink, os.rmdir),
    }
)
_IN_PYTHON: dict[CodeType, str] = {
    logging.Logger.handle.__code__: "writes a log record",
    LightningModule.print.__code__: "prints",
    **{
        function.__code__: "starts a thread or process, where nobody sees what it reads"
        for function in (
            *(threading.Thread.start, ThreadPoolExecutor.submit, ProcessPoolExecutor.submit),
            BaseProcess.start,
        )
    },
}
_NAMES_OF_LOGGERS = frozenset({"name", "version", "save_dir", "log_dir", "root_dir", "group_separator"})


class Effect(NamedTuple):
    """A call that a replay would leave out."""

    frame: FrameType
    """The user's function that made it, or called who did."""
    code: str
    """``"side-effect"`` or ``"host-clock"``."""
    message: str
    """What it does, and what helps."""


def effect_of(frame: FrameType, event: str, called: Any) -> Effect | None:
    """Return what a call does outside of a step, if it is the user's doing; None where it does nothing there.

    Args:
        frame: The function that is called, or that calls a function written in C.
        event: ``"call"`` or ``"c_call"``, of a profile function.
        called: The function written in C.
    """
    of_logger = _of_logger(frame) if event == "call" else None
    words = of_logger or (_IN_PYTHON.get(frame.f_code) if event == "call" else _in_c(frame, called))
    if words is None:
        return None
    user = _user_around(frame.f_back if event == "call" else frame, past_libraries=of_logger is not None)
    if user is None:
        return None
    if words == _CLOCK:
        return Effect(user, "host-clock", f"the step {words}, which a replay does not")
    return Effect(user, "side-effect", f"the step {words}, which a replay does not: do it in a hook around the step")


def _of_logger(frame: FrameType) -> str | None:
    """Return what is called of a logger, but for what says where it writes."""
    code = frame.f_code
    if not code.co_argcount or code.co_name in _NAMES_OF_LOGGERS or code.co_name.startswith("__"):
        return None
    owner = frame.f_locals.get(code.co_varnames[0])
    return f"calls {type(owner).__name__}.{code.co_name}" if isinstance(owner, Logger) else None


def _in_c(frame: FrameType, called: Any) -> str | None:
    if not isinstance(called, BuiltinFunctionType):
        return None
    if code_kind(frame.f_code) == "user":
        dated = isinstance(called.__self__, type) and called.__name__ in ("now", "utcnow", "today")
        if called in _CLOCKS or dated:
            return _CLOCK
        if called in _BUILT_IN:
            return _BUILT_IN[called]
        if isinstance(called.__self__, io.IOBase) and called.__name__.startswith(("write", "read")):
            return "reads or writes a file"
    return "reads, writes or looks for a file" if called in _FILES else None


def _user_around(frame: FrameType | None, *, past_libraries: bool = False) -> FrameType | None:
    """Return the user's frame that called, maybe through Python's library and installed packages, but by no finalizer.

    Args:
        frame: Where to begin.
        past_libraries: It may have called through torch and Lightning, too, which do such things for themselves.
    """
    while frame is not None and frame.f_code.co_name != "__del__":
        kind = code_kind(frame.f_code)
        if kind == "user":
            return frame
        if kind in ("library", "check") and not past_libraries:
            return None
        frame = frame.f_back
    return None
