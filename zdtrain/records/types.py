"""The record types that the rest of the project hands around; nothing here knows of torch or lightning."""

from collections.abc import Mapping, Sequence
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


class StepTable(NamedTuple):
    """The values of successive finished steps of one epoch that have the same names."""

    epoch: int | None
    """See `StepRecord`."""
    names: tuple[str, ...]
    """Metric of each column."""
    steps: list[int]
    """See `StepRecord`; one per row, in order."""
    batches: list[int | None]
    """See `StepRecord.batch_idx`."""
    wall_times: list[float]
    """See `StepRecord`."""
    values: list[Sequence[float]]
    """Rows: a value for each name."""

    def record(self, index: int) -> StepRecord:
        """Return one row."""
        values = dict(zip(self.names, self.values[index], strict=True))
        return StepRecord(self.steps[index], self.epoch, self.wall_times[index], self.batches[index], values)

    def without_last(self) -> "StepTable":
        """Return all rows but the last."""
        return StepTable(
            self.epoch, self.names, self.steps[:-1], self.batches[:-1], self.wall_times[:-1], self.values[:-1]
        )
