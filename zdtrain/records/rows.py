"""From records to rows: values of one step that arrive in several pieces become one row, rows feed epoch statistics."""

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby, repeat
from operator import mul, sub
from typing import Any

from zdtrain.records.encoding import dump_line
from zdtrain.records.types import StepRecord, StepTable

_MAX_OPEN_ROWS = 1000


@dataclass(slots=True, kw_only=True)
class Row:
    """One line of `metrics.jsonl`, while it is being put together."""

    step: int
    epoch: int | None
    batch_idx: int | None
    wall_time: float
    values: dict[str, float]

    def as_table(self) -> StepTable:
        """Return the row as a table of one."""
        values: list[Sequence[float]] = [[*self.values.values()]]
        return StepTable(self.epoch, tuple(self.values), [self.step], [self.batch_idx], [self.wall_time], values)


def joined(tables: Iterable[StepTable]) -> Iterator[StepTable]:
    """Yield successive tables of one epoch with the same names as one."""
    for (epoch, names), group in groupby(tables, key=lambda table: table[:2]):
        alike = list(group)
        columns = zip(*[table[2:] for table in alike], strict=True)
        yield alike[0] if len(alike) == 1 else StepTable(epoch, names, *[[*chain(*parts)] for parts in columns])


def encode_rows(table: StepTable) -> list[str]:
    """Return rows as lines of strict JSON without line ends."""
    epoch, names = table.epoch, table.names
    rows = zip(table.steps, table.batches, table.wall_times, table.values, strict=True)
    numbers = [*chain(*table.values)]
    if epoch is None or set(map(type, numbers)) != {float} or not math.isfinite(sum(numbers)):
        return [
            dump_line(
                {
                    "step": step,
                    "epoch": epoch,
                    "batch_idx": batch_idx,
                    "wall_time": round(wall_time, 6),
                    "values": dict(zip(names, values, strict=True)),
                }
            )
            for step, batch_idx, wall_time, values in rows
        ]
    # all 17 digits of a float64 that holds a float32 cost half of what looking for the fewest does, and are as many
    form = "%.17g" if array("f", numbers).tolist() == numbers and not any(map(float.is_integer, numbers)) else "%r"
    shown = ", ".join([f"{dump_line(name).replace('%', '%%')}: {form}" for name in names])
    line = f'{{"step": %d, "epoch": {epoch}, "batch_idx": %s, "wall_time": %.6f, "values": {{{shown}}}}}'
    return [
        line % (step, "null" if batch_idx is None else batch_idx, wall_time, *values)
        for step, batch_idx, wall_time, values in rows
    ]


class RowMerger:
    """Merges step records and logger calls into one row per step.

    A row stays open until a later training step arrives, because epoch means, validation metrics and learning rates
    of a step reach loggers after its training values. Learning rates may also come before: training values can lag.
    """

    def __init__(self) -> None:
        self._open: dict[int, Row] = {}
        self._newest_training_step: int | None = None
        self._epoch: int | None = None

    def add(self, record: StepRecord) -> list[Row]:
        """Merge `record`; return the rows that no later record of the same run is expected to touch."""
        step, epoch, wall_time, batch_idx, values = record
        row = self._open.get(step)
        if row is None:
            row = self._open[step] = Row(
                step=step, epoch=epoch, batch_idx=batch_idx, wall_time=wall_time, values=dict(values)
            )
        else:
            row.values.update(values)
        if epoch is not None:
            row.epoch = self._epoch = epoch
        if batch_idx is not None:
            row.batch_idx, row.wall_time = batch_idx, wall_time
            self._newest_training_step = step
        sealed_below = self._newest_training_step
        if sealed_below is None or len(self._open) > _MAX_OPEN_ROWS:  # only logger calls: the newest one stays open
            sealed_below = record.step
        return self.seal(sealed_below)

    def add_table(self, table: StepTable) -> list[StepTable]:
        """Merge successive training steps; return as `add` does."""
        if any(step >= table.steps[0] for step in self._open):
            records = map(table.record, range(len(table.steps)))
            return [row.as_table() for record in records for row in self.add(record)]
        self._epoch = table.epoch
        sealed = [row.as_table() for row in self.seal(table.steps[-1])]
        self.add(table.record(-1))
        if len(table.steps) > 1:
            sealed.append(table.without_last())
        return sealed

    def close(self) -> list[Row]:
        """Return every open row."""
        return self.seal(None)

    def seal(self, below: int | None) -> list[Row]:
        """Return the open rows of steps below `below`, or all: nothing more is expected for them."""
        if len(self._open) == 1 and below in self._open:  # nothing is older
            return []
        sealed = [self._open.pop(step) for step in sorted(self._open) if below is None or step < below]
        for row in sealed:
            if row.epoch is None:
                row.epoch = self._epoch
        return sealed


@dataclass(slots=True)
class MetricStatistics:
    """Running statistics of one metric over one epoch, in float64 (Welford's update).

    mean_n = mean_{n-1} + (x − mean_{n-1}) / n,  M2_n = M2_{n-1} + (x − mean_{n-1})(x − mean_n)
    """

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0
    minimum: float = math.inf
    maximum: float = -math.inf
    last: float = math.nan
    num_nonfinite: int = 0

    def update(self, value: float) -> None:
        """Take in one value; NaN and infinities are counted apart and leave the other statistics alone."""
        self.last = value
        if not math.isfinite(value):
            self.num_nonfinite += 1
            return
        self.count += 1
        delta = value - self.mean
        self.mean += delta / self.count
        self.m2 += delta * (value - self.mean)
        if value < self.minimum:
            self.minimum = value
        if value > self.maximum:
            self.maximum = value

    def take(self, values: Sequence[float]) -> None:
        """Take in several values, as `update` does one by one, up to rounding."""
        total, n = sum(values), len(values)
        if not math.isfinite(total):
            for value in values:
                self.update(value)
            return
        mean = total / n
        deviations = list(map(sub, values, repeat(mean)))
        delta, count = mean - self.mean, self.count + n
        self.m2 += sum(map(mul, deviations, deviations)) + delta * delta * (self.count * n / count)
        self.mean += delta * (n / count)
        self.count = count
        self.minimum, self.maximum = min(self.minimum, min(values)), max(self.maximum, max(values))
        self.last = values[-1]

    def as_dict(self) -> dict[str, Any]:
        """Return mean, population variance, min, max, count, last and the number of non-finite values."""
        known = self.count > 0
        return {
            "mean": self.mean if known else None,
            "variance": self.m2 / self.count if known else None,
            "min": self.minimum if known else None,
            "max": self.maximum if known else None,
            "count": self.count,
            "last": self.last,
            "num_nonfinite": self.num_nonfinite,
        }


@dataclass(slots=True, kw_only=True)
class EpochStatistics:
    """What `epochs.json` says of one epoch."""

    epoch: int
    first_step: int
    last_step: int
    first_wall_time: float
    last_wall_time: float
    num_steps: int = 0
    metrics: dict[str, MetricStatistics] = field(default_factory=dict)

    def update(self, table: StepTable) -> None:
        """Take in finished rows of this epoch."""
        self.first_step, self.last_step = min(self.first_step, *table.steps), max(self.last_step, *table.steps)
        self.last_wall_time = max(self.last_wall_time, *table.wall_times)
        self.num_steps += len(table.steps) - table.batches.count(None)
        for name, values in zip(table.names, zip(*table.values, strict=True), strict=True):
            statistics = self.metrics.get(name)
            if statistics is None:
                statistics = self.metrics[name] = MetricStatistics()
            statistics.take(values)

    def as_dict(self) -> dict[str, Any]:
        """Return the epoch as its JSON object."""
        return {
            "epoch": self.epoch,
            "first_step": self.first_step,
            "last_step": self.last_step,
            "num_steps": self.num_steps,
            "seconds": round(self.last_wall_time - self.first_wall_time, 6),
            "metrics": {name: statistics.as_dict() for name, statistics in self.metrics.items()},
        }


class EpochTable:
    """Statistics of every epoch of a run."""

    def __init__(self) -> None:
        self._epochs: dict[int, EpochStatistics] = {}
        self._device: dict[int, dict[str, Any]] = {}  # what was computed on the device, by epoch and metric

    def add_device_statistics(self, epoch: int, metric: str, values: Mapping[str, Any]) -> None:
        """Keep statistics of an epoch that were computed on the device."""
        self._device.setdefault(epoch, {})[metric] = dict(values)

    def update(self, table: StepTable) -> None:
        """Take in finished rows; those outside any epoch count to epoch 0."""
        epoch = table.epoch or 0
        entry = self._epochs.get(epoch)
        if entry is None:
            entry = self._epochs[epoch] = EpochStatistics(
                epoch=epoch,
                first_step=table.steps[0],
                last_step=table.steps[0],
                first_wall_time=table.wall_times[0],
                last_wall_time=table.wall_times[0],
            )
        entry.update(table)

    def as_list(self) -> list[dict[str, Any]]:
        """Return the epochs in order as JSON objects."""
        epochs = [self._epochs[epoch].as_dict() for epoch in sorted(self._epochs)]
        for entry in epochs:
            if entry["epoch"] in self._device:
                entry["device"] = self._device[entry["epoch"]]
        return epochs
