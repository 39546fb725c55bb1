"""The record types that the rest of the project hands around; nothing here knows of torch or lightning."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from zdtrain.errors import ZDTrainError, ZDTrainWarning


class RecordError(ZDTrainError):
    """A run folder cannot be read or written; the message names the folder and the remedy."""


class RecordWarning(ZDTrainWarning):
    """Recording stopped or a folder is incomplete; training goes on."""


class StepRecord(NamedTuple):
    """The values of one finished training step, on the host."""

    step: int
    """Optimizer step as loggers see it, counted from 0."""
    epoch: int | None
    """Epoch the step belongs to, counted from 0; None where the writer has to take the current one."""
    wall_time: float
    """Seconds since the Unix epoch when the step ended, or the logger was called."""
    batch_idx: int | None = None
    """Index of the batch in its epoch; None for rows that come from a logger call."""
    values: Mapping[str, float] = MappingProxyType({})
    """Metric name → value, exactly as loggers receive it."""
