"""From the ring to everybody who wants the values of every single step."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from zdtrain.drain import Drain, Value
from zdtrain.records.types import StepRecord
from zdtrain.ring import MetricRing

CHUNK_ROWS = 64
CHUNK_SECONDS = 0.5


class StepConsumer(Protocol):
    """Somebody who wants the values of every step."""

    def record_step(self, record: StepRecord) -> None:
        """Take the values of one finished step; called in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLayout:
    """What the columns of a row mean."""

    names: tuple[str, ...]
    """Metric of each column, as loggers spell it."""
    widths: tuple[int, ...]
    """Lengths of the vectors that make up a row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stamp:
    """What the host knows of a row."""

    step: int
    """Optimizer step, as loggers count it."""
    epoch: int
    """Epoch, from 0."""
    batch_idx: int
    """Batch within the epoch, from 0."""
    present: tuple[bool, ...]
    """For each column whether the step logged it."""
    wall_time: float
    """Seconds since the Unix epoch when the step ended."""


class StepStream:
    """Collects a row per step on the device and hands them over in chunks, as `StepRecord`s in order.

    Args:
        drain: The way to the host.
        consumers: Who gets the records.
    """

    def __init__(self, drain: Drain, consumers: Sequence[StepConsumer]) -> None:
        self._drain = drain
        self._consumers = list(consumers)
        self._layout: RowLayout | None = None
        self._ring: MetricRing | None = None
        self._first_row = 0
        self._stamps: list[Stamp] = []
        self._due = 0.0

    def push(self, layout: RowLayout, parts: Sequence[Tensor], stamp: Stamp) -> None:
        """Keep the values of a step; `parts` are read on the device, now."""
        if layout != self._layout:
            self.send()
            self._layout = layout
            self._ring = MetricRing(layout.widths, parts[0].device)
        assert self._ring is not None
        row = self._ring.write(parts)
        if not self._stamps:
            self._first_row = row
        self._stamps.append(stamp)
        if len(self._stamps) == CHUNK_ROWS or row == self._ring.rows - 1 or time.monotonic() >= self._due:
            self.send()

    def send(self) -> None:
        """Send the rows collected so far on their way to the host."""
        self._due = time.monotonic() + CHUNK_SECONDS
        if not self._stamps or self._ring is None or self._layout is None:
            return
        stamps, self._stamps = self._stamps, []
        names, columns = self._layout.names, len(self._layout.names)
        rows = self._ring.storage[self._first_row : self._first_row + len(stamps)]

        def deliver(numbers: list[Value]) -> None:
            for i, stamp in enumerate(stamps):
                self._hand_over(stamp, names, numbers[i * columns : (i + 1) * columns])

        # a copy on the device, so that the ring may go on whatever the host does
        self._drain.send(rows.reshape(-1).clone(), deliver)

    def _hand_over(self, stamp: Stamp, names: Sequence[str], numbers: Sequence[Value]) -> None:
        values = {name: number for name, number, present in zip(names, numbers, stamp.present, strict=True) if present}
        record = StepRecord(
            step=stamp.step, epoch=stamp.epoch, batch_idx=stamp.batch_idx, values=values, wall_time=stamp.wall_time
        )
        for consumer in self._consumers:
            consumer.record_step(record)
