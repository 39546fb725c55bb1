"""Exceptions, warnings and the reasons why a step leaves the fast path."""

from dataclasses import dataclass


class ZDTrainError(Exception):
    """Base of every error that zdtrain raises on purpose."""


class ConfigError(ZDTrainError, ValueError):
    """An option has a value that cannot be used; the message names the option, the value and the remedy."""


class CaptureError(ZDTrainError, RuntimeError):
    """A captured step failed and could not be taken back: the run must not go on from there."""


class LossShapeError(ZDTrainError, ValueError):
    """A training step returned a loss that is not a single number."""


class ZDTrainWarning(UserWarning):
    """Base of every warning that zdtrain gives."""


def yaml_hint(value: object) -> str:
    """Return what an error about `value` adds where YAML has read a number (``1e-3``) as text; else nothing."""
    if isinstance(value, str):
        try:
            return f": YAML reads it as text, write {float(value)!r}"
        except ValueError:
            return ""
    return ""


@dataclass(frozen=True, kw_only=True)
class FallbackReason:
    """Why a run uses a slower path than it could: a stable code for programs, a message for people."""

    code: str
    """Stable machine-readable name, e.g. ``"manual-optimization"``."""
    message: str
    """One sentence that names what was found and what would lift it."""
    file: str | None = None
    """The user's file that caused it, where one is known."""
    line: int | None = None
    """Line in `file`, counted from 1."""
    step: str | None = None
    """The step that it keeps from being captured, where that is not the training step: ``"validation_step"``."""

    def __str__(self) -> str:
        where = f" ({self.file}:{self.line})" if self.file else ""
        who = f"{self.step}: " if self.step else ""
        return f"{who}{self.message}{where} [{self.code}]"
