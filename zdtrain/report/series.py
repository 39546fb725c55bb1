"""From the rows of runs to the lines of charts: which metrics share a chart, and how many points a curve needs."""

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

from zdtrain.records.reader import Run

MAX_POINTS = 400
_MAX_VALUE = 1e300  # twice of it is still finite, so the distance of two values is

_PREFIX = re.compile(r"^(train|val|valid|validation|test)[_/]")
_SUFFIX = re.compile(r"_(step|epoch)$")
_TITLES = (
    (re.compile(r"^lr\b|learning_rate|^lr-"), "learning rate"),
    (re.compile(r"grad(ient)?[_ ]?norm"), "gradient norm"),
)


@dataclass(frozen=True, kw_only=True)
class Band:
    """Mean, least and greatest value of each epoch, drawn behind a curve."""

    steps: list[float]
    """Middle of each epoch, in steps."""
    means: list[float]
    """Mean of each epoch."""
    minima: list[float]
    """Least value of each epoch."""
    maxima: list[float]
    """Greatest value of each epoch."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One metric of one run."""

    run: int
    """Index of the run; runs differ in colour."""
    metric: str
    """Name as logged; metrics of one chart differ in dashes."""
    steps: list[float]
    """Horizontal positions."""
    values: list[float]
    """Vertical positions, all finite and at most 1e300."""
    band: Band | None = None
    """Epoch statistics, where an epoch has more than one value."""
    missing: list[float] = field(default_factory=list)
    """Steps whose value has no place on an axis: NaN, or infinite."""
    num_values: int = 0
    """Values of the run, drawn or not."""


@dataclass(frozen=True, kw_only=True)
class Marker:
    """An event on the step axis."""

    run: int
    """Index of the run."""
    step: float
    """Where it happened."""
    kind: str
    """What happened."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Lines that share a pair of axes."""

    title: str
    """What is measured."""
    lines: list[Line]
    """Metrics of runs."""
    markers: list[Marker]
    """Events of the same runs."""


def build_charts(runs: Sequence[Run]) -> list[Chart]:
    """Return a chart for each kind of metric in `runs`, and one for the speed."""
    titles: dict[str, list[tuple[int, str]]] = {}
    for index, run in enumerate(runs):
        for metric in run.metrics:
            titles.setdefault(chart_title(metric), []).append((index, metric))
    markers = [marker for index, run in enumerate(runs) for marker in _markers(index, run)]
    charts = [
        Chart(title=title, lines=[line for i, m in found if (line := _line(i, runs[i], m)).num_values], markers=markers)
        for title, found in titles.items()
    ]
    charts.append(Chart(title="steps per second", lines=list(_speed(runs)), markers=[]))
    return [chart for chart in charts if chart.lines]


def chart_title(metric: str) -> str:
    """Return what `metric` and those drawn beside it have in common: ``train_loss_step``, ``val_loss`` → ``loss``."""
    for pattern, title in _TITLES:
        if pattern.search(metric):
            return title
    return _PREFIX.sub("", _SUFFIX.sub("", metric)) or metric


def thin_out(
    steps: Sequence[float], values: Sequence[float], limit: int = MAX_POINTS
) -> tuple[list[float], list[float]]:
    """Keep at most about `limit` points: the least and the greatest of each stretch, so that no peak gets lost."""
    if len(steps) <= limit:
        return list(steps), list(values)
    kept: list[int] = []
    stretch = len(steps) / (limit // 2)
    for number in range(limit // 2):
        indices = range(int(number * stretch), int((number + 1) * stretch))
        kept += sorted({min(indices, key=values.__getitem__), max(indices, key=values.__getitem__)})
    return [steps[i] for i in kept], [values[i] for i in kept]


def _line(index: int, run: Run, metric: str) -> Line:
    steps, values = run.series(metric)
    finite = [(float(step), value) for step, value in zip(steps, values, strict=True) if _is_drawable(value)]
    thin_steps, thin_values = thin_out([step for step, _ in finite], [value for _, value in finite])
    return Line(
        run=index,
        metric=metric,
        steps=thin_steps,
        values=thin_values,
        band=_band(run, metric),
        missing=[float(step) for step, value in zip(steps, values, strict=True) if not _is_drawable(value)],
        num_values=len(values),
    )


def _band(run: Run, metric: str) -> Band | None:
    epochs = [
        (epoch, statistics)
        for epoch in run.epoch_statistics
        if (statistics := epoch["metrics"].get(metric)) is not None
        and statistics["count"] > 1
        and all(_is_drawable(statistics[name]) for name in ("mean", "min", "max"))
    ]
    if len(epochs) < 2:
        return None
    return Band(
        steps=[(epoch["first_step"] + epoch["last_step"]) / 2 for epoch, _ in epochs],
        means=[statistics["mean"] for _, statistics in epochs],
        minima=[statistics["min"] for _, statistics in epochs],
        maxima=[statistics["max"] for _, statistics in epochs],
    )


def _is_drawable(value: Any) -> bool:
    """Return whether there is a place for a value on an axis: what is not finite, or stored as its name, has none."""
    return isinstance(value, int | float) and abs(value) <= _MAX_VALUE


def _markers(index: int, run: Run) -> Iterable[Marker]:
    """Place events at the step that they name, others at the last one before their wall time."""
    if not run.steps:
        return
    timeline = sorted(zip(run.wall_times, run.steps, strict=True))
    times = [at for at, _ in timeline]
    reached = list(accumulate((step for _, step in timeline), max))
    for event in run.events:
        if event["kind"] == "start":
            continue
        before = bisect_right(times, event["wall_time"])
        step = _step_of(event)
        if step is None:
            step = reached[before - 1] if before else run.steps[0]
        yield Marker(run=index, step=float(step), kind=event["kind"])


def _step_of(event: Mapping[str, Any]) -> int | None:
    """Return the step that an event is about; `global_step` counts the steps so far, so it is one more."""
    if isinstance(event.get("step"), int):
        return int(event["step"])
    return max(0, event["global_step"] - 1) if isinstance(event.get("global_step"), int) else None


def _speed(runs: Sequence[Run], num_stretches: int = 50) -> Iterable[Line]:
    for index, run in enumerate(runs):
        width = max(1, len(run.steps) // num_stretches)
        edges = range(0, len(run.steps), width)
        points = [
            (float(run.steps[end]), (run.steps[end] - run.steps[start]) / seconds)
            for start, end in pairwise(edges)
            if (seconds := run.wall_times[end] - run.wall_times[start]) > 0
        ]
        if points:
            yield Line(
                run=index,
                metric="speed",
                steps=[step for step, _ in points],
                values=[float(f"{rate:.4g}") for _, rate in points],
                num_values=len(points),
            )
