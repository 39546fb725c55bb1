"""From records to rows: values of one step that arrive in several pieces become one row, rows feed epoch statistics."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from zdtrain.records.encoding import dump_line
from zdtrain.records.types import StepRecord

_MAX_OPEN_ROWS = 1000


@dataclass(slots=True, kw_only=True)
class Row:
    """One line of `metrics.jsonl`, while it is being put together."""

    step: int
    epoch: int | None
    batch_idx: int | None
    wall_time: float
    values: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """Return the row as its JSON object, keys in file order."""
        return {
            "step": self.step,
            "epoch": self.epoch,
            "batch_idx": self.batch_idx,
            "wall_time": round(self.wall_time, 6),
            "values": self.values,
        }


def alike(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Yield successive rows that belong to one epoch and have values of the same names, so that they are one table."""
    for _, group in groupby(rows, key=lambda row: (row.epoch, tuple(row.values))):
        yield list(group)


def encode_rows(rows: Sequence[Row]) -> list[str]:
    """Return rows that are alike as lines of strict JSON without line ends, as `dump_line` encodes their `as_dict`."""
    first = rows[0]
    numbers = [number for row in rows for number in row.values.values()]
    if first.epoch is None or set(map(type, numbers)) != {float} or not math.isfinite(sum(numbers)):
        return [dump_line(row.as_dict()) for row in rows]
    names = ", ".join([dump_line(name).replace("%", "%%") + ": %r" for name in first.values])
    head = f'{{"step": %d, "epoch": {first.epoch}, "batch_idx": %s, "wall_time": %r, "values": {{{names}}}}}'
    return [
        head
        % (
            row.step,
            "null" if row.batch_idx is None else row.batch_idx,
            round(row.wall_time, 6),
            *row.values.values(),
        )
        for row in rows
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
        deviations = [value - mean for value in values]
        delta, count = mean - self.mean, self.count + n
        self.m2 += sum([d * d for d in deviations]) + delta * delta * (self.count * n / count)
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

    def update(self, rows: Sequence[Row]) -> None:
        """Take in finished rows of this epoch, all with values of the same names."""
        steps = [row.step for row in rows]
        self.first_step, self.last_step = min(self.first_step, *steps), max(self.last_step, *steps)
        self.last_wall_time = max(self.last_wall_time, *[row.wall_time for row in rows])
        self.num_steps += sum([row.batch_idx is not None for row in rows])
        for name, values in zip(rows[0].values, zip(*[row.values.values() for row in rows], strict=True), strict=True):
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

    def update(self, rows: Sequence[Row]) -> None:
        """Take in finished rows of one epoch, all with values of the same names; those outside any count to epoch 0."""
        first = rows[0]
        epoch = first.epoch or 0
        entry = self._epochs.get(epoch)
        if entry is None:
            entry = self._epochs[epoch] = EpochStatistics(
                epoch=epoch,
                first_step=first.step,
                last_step=first.step,
                first_wall_time=first.wall_time,
                last_wall_time=first.wall_time,
            )
        entry.update(rows)

    def as_list(self) -> list[dict[str, Any]]:
        """Return the epochs in order as JSON objects."""
        epochs = [self._epochs[epoch].as_dict() for epoch in sorted(self._epochs)]
        for entry in epochs:
            if entry["epoch"] in self._device:
                entry["device"] = self._device[entry["epoch"]]
        return epochs
