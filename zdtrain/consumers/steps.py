"""From the ring to everybody who wants the values of every single step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, pairwise
from operator import itemgetter
from time import monotonic
from typing import NamedTuple, Protocol

from torch import Tensor

from zdtrain.drain import Drain, Value
from zdtrain.records.types import StepTable
from zdtrain.ring import MetricRing, RowKeeper, Rows, SeenRows

CHUNK_ROWS = 64
CHUNK_SECONDS = 0.5


class StepConsumer(Protocol):
    """Somebody who wants the values of every step."""

    def record_steps(self, table: StepTable) -> None:
        """Take the values of finished steps, one or more; called in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLayout:
    """What the columns of a row mean."""

    names: tuple[str, ...]
    """Metric of each column, as loggers spell it."""
    widths: tuple[int, ...]
    """Lengths of the vectors that make up a row; what follows the metrics is a `RowWatcher`'s."""
    metrics: tuple[str, ...] = ()
    """Metric of each column, as it was logged."""
    order: tuple[int, ...] = ()
    """Columns in the order in which they were first logged."""


class Stamp(NamedTuple):
    """What the host knows of a row."""

    step: int
    """Optimizer step, as loggers count it."""
    epoch: int
    """Epoch, from 0."""
    batch_idx: int
    """Batch within the epoch, from 0."""
    present: tuple[bool, ...]
    """For each column whether the step logged it for loggers to see."""
    fresh: tuple[bool, ...]
    """For each column whether the step logged it."""
    wall_time: float
    """Seconds since the Unix epoch when the step ended."""


class RowWatcher(Protocol):
    """Somebody who looks at all rows before the consumers get them, and decides whether they do."""

    def watch(self, rows: Rows, layout: RowLayout, stamps: Sequence[Stamp]) -> None:
        """Look at a chunk of rows where they are."""

    def hear(self, stamps: Sequence[Stamp], layout: RowLayout, rows: Sequence[Sequence[Value]]) -> int:
        """Take in rows that have arrived; return how many of them, from the first on, consumers get."""

    def tell(self) -> None:
        """Say what there is to say of the rows heard last; consumers have them."""


class StepStream:
    """Collects a row per step on the device and hands them over in chunks, as `StepTable`s in order.

    Args:
        drain: The way to the host.
        consumers: Who gets the values.
        chunk_rows: Rows that travel together.
        watcher: Who looks at the rows first.
    """

    def __init__(
        self,
        drain: Drain,
        consumers: Sequence[StepConsumer],
        *,
        chunk_rows: int = CHUNK_ROWS,
        watcher: RowWatcher | None = None,
    ) -> None:
        self._drain = drain
        self._consumers = list(consumers)
        self.chunk_rows = chunk_rows
        self.watcher = watcher
        self._layout: RowLayout | None = None
        self._rows: RowKeeper | None = None
        self._stamps: list[Stamp] = []
        self._due = 0.0

    def push(self, layout: RowLayout, parts: list[Tensor], stamp: Stamp) -> None:
        """Keep the values of a step; `parts` are read on the device, now."""
        if layout is not self._layout and layout != self._layout:
            self.send()
            self._layout = layout
            runtime = self._drain.runtime
            self._rows = SeenRows() if runtime.is_immediate else MetricRing(layout.widths, runtime.device)
        assert self._rows is not None
        is_full = self._rows.write(parts)
        self._stamps.append(stamp)
        if is_full or len(self._stamps) >= self.chunk_rows or monotonic() >= self._due:
            self.send()

    def send(self) -> None:
        """Send the rows collected so far on their way to the host."""
        self._due = monotonic() + CHUNK_SECONDS
        if not self._stamps or self._rows is None or self._layout is None:
            return
        stamps, self._stamps = self._stamps, []
        layout = self._layout
        rows = self._rows.take()
        if isinstance(rows, Tensor):
            columns = rows.shape[1]

            def deliver(numbers: list[Value]) -> None:
                firsts = range(0, len(numbers), columns)
                self._hand_over(stamps, layout, [numbers[first : first + columns] for first in firsts])

            self._drain.send(rows.reshape(-1), deliver)
        else:
            self._hand_over(stamps, layout, rows)
        if self.watcher is not None:
            self.watcher.watch(rows, layout, stamps)

    def _hand_over(self, stamps: Sequence[Stamp], layout: RowLayout, rows: Sequence[Sequence[Value]]) -> None:
        watcher = self.watcher
        count = len(stamps) if watcher is None else watcher.hear(stamps, layout, rows)
        if self._consumers:
            for table in _tables(stamps[:count], layout.names, rows):
                for consumer in self._consumers:
                    consumer.record_steps(table)
        if watcher is not None:
            watcher.tell()


def _tables(stamps: Sequence[Stamp], names: tuple[str, ...], rows: Sequence[Sequence[Value]]) -> Iterator[StepTable]:
    """Yield the values to be shown of steps that show the same ones, together."""
    names_only = itemgetter(slice(len(names)))
    changes = [i for i, (a, b) in enumerate(pairwise(stamps), 1) if a.present != b.present or a.epoch != b.epoch]
    for first, end in pairwise([0, *changes, len(stamps)]):
        if first == end or True not in stamps[first].present:
            continue
        present = stamps[first].present
        steps, _, batches, _, _, wall_times = map(list, zip(*stamps[first:end], strict=True))
        values = list(map(names_only, rows[first:end]))
        yield StepTable(
            epoch=stamps[first].epoch,
            names=tuple(compress(names, present)),
            steps=steps,
            batches=batches,
            wall_times=wall_times,
            values=[list(compress(row, present)) for row in values] if False in present else values,
        )
