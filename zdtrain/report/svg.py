"""A chart as SVG: axes with round ticks, curves, bands and event marks; colours come from the page's style sheet."""

import math
from collections.abc import Sequence
from html import escape

from zdtrain.report.series import Band, Chart, Line, Marker

WIDTH, HEIGHT = 560, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 12, 36
_DASHES = ("", "6 3", "2 3", "8 3 2 3")


class Axes:
    """Maps steps and values to pixels.

    Args:
        steps: Every step that has to fit.
        values: Every value that has to fit; none where no value is a number.
    """

    def __init__(self, steps: Sequence[float], values: Sequence[float]) -> None:
        values = values or (0.0,)
        self.x_ticks = round_ticks(min(steps), max(steps))
        self.y_ticks = round_ticks(min(values), max(values))
        self.x_range = (min(steps), max(max(steps), min(steps) + 1))
        self.y_range = (min(self.y_ticks[0], min(values)), max(self.y_ticks[-1], max(values)))

    def x(self, step: float) -> float:
        """Return the horizontal pixel of `step`."""
        low, high = self.x_range
        return round(_LEFT + (step - low) / (high - low) * (WIDTH - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        """Return the vertical pixel of `value`."""
        low, high = self.y_range
        return round(HEIGHT - _BOTTOM - (value - low) / (high - low) * (HEIGHT - _TOP - _BOTTOM), 1)


def draw_chart(chart: Chart) -> str:
    """Return `chart` as an ``<svg>`` element."""
    bands = [line.band for line in chart.lines if line.band is not None]
    axes = Axes(
        [step for line in chart.lines for step in (*line.steps, *line.missing)],
        [v for line in chart.lines for v in line.values] + [v for band in bands for v in (*band.minima, *band.maxima)],
    )
    metrics = list(dict.fromkeys(line.metric for line in chart.lines))
    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.title)} over steps" '
        f'data-low="{axes.x_range[0]:g}" data-high="{axes.x_range[1]:g}">',
        *_grid(axes),
        *(_marker(axes, marker) for marker in _apart(axes, chart.markers)),
        *(_band(axes, line.run, line.band) for line in chart.lines if line.band is not None),
        *(_curve(axes, line, dashes(metrics.index(line.metric))) for line in chart.lines if line.values),
        *(_missing(axes, line) for line in chart.lines if line.missing),
        '<line class="cursor" y1="12" y2="264" visibility="hidden"/>',
        "</svg>",
    ]
    return "\n".join(parts)


def dashes(number: int) -> str:
    """Return the dashes of the metric with this number in its chart."""
    return _DASHES[number % len(_DASHES)]


def draw_key(number: int) -> str:
    """Return a short piece of the line of the metric with this number in its chart."""
    line = f'<line x2="24" y1="3" y2="3" stroke-dasharray="{dashes(number)}"/>'
    return f'<svg class="key" viewBox="0 0 24 6">{line}</svg>'


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """Return `ticks` with as few digits as tell them apart, at least six."""
    for num_digits in range(6, 17):
        labels = [f"{tick:.{num_digits}g}" for tick in ticks]
        if len(set(labels)) == len(set(ticks)):
            break
    return labels


def round_ticks(low: float, high: float, target: int = 5) -> list[float]:
    """Return about `target` round numbers that span `low` to `high`; at least two, also where both are equal."""
    if high - low <= max(abs(low), abs(high), 1e-290) * 1e-9:  # no numbers of few digits lie in between
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    rough = (high - low) / target
    magnitude: float = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= rough)
    first = math.floor(low / step)
    digits = max(12, 2 - math.floor(math.log10(step)))
    return [round(number * step, digits) for number in range(first, math.ceil(high / step) + 1)]


def _grid(axes: Axes) -> list[str]:
    lines = [
        f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{axes.y(tick)}" y2="{axes.y(tick)}"/>'
        f'<text class="tick" x="{_LEFT - 8}" y="{axes.y(tick) + 4}" text-anchor="end">{label}</text>'
        for tick, label in zip(axes.y_ticks, tick_labels(axes.y_ticks), strict=True)
    ]
    lines += [
        f'<text class="tick" x="{axes.x(tick)}" y="{HEIGHT - _BOTTOM + 18}" text-anchor="middle">{tick:g}</text>'
        for tick in axes.x_ticks
        if axes.x_range[0] <= tick <= axes.x_range[1]
    ]
    return [*lines, f'<text class="tick" x="{WIDTH - _RIGHT}" y="{HEIGHT - 4}" text-anchor="end">step</text>']


def _curve(axes: Axes, line: Line, dashes: str) -> str:
    points = " ".join(f"{axes.x(s)},{axes.y(v)}" for s, v in zip(line.steps, line.values, strict=True))
    faint = " faint" if line.band is not None else ""
    style = f' stroke-dasharray="{dashes}"' if dashes else ""
    if len(line.steps) == 1:
        return f'<circle class="dot run{line.run}" cx="{axes.x(line.steps[0])}" cy="{axes.y(line.values[0])}" r="3"/>'
    return f'<polyline class="curve run{line.run}{faint}"{style} points="{points}"/>'


def _band(axes: Axes, run: int, band: Band) -> str:
    upper = [f"{axes.x(s)},{axes.y(v)}" for s, v in zip(band.steps, band.maxima, strict=True)]
    lower = [f"{axes.x(s)},{axes.y(v)}" for s, v in zip(band.steps, band.minima, strict=True)]
    means = " ".join(f"{axes.x(s)},{axes.y(v)}" for s, v in zip(band.steps, band.means, strict=True))
    return (
        f'<polygon class="band run{run}" points="{" ".join([*upper, *reversed(lower)])}"/>'
        f'<polyline class="mean run{run}" points="{means}"/>'
    )


def _marker(axes: Axes, marker: Marker) -> str:
    x = axes.x(min(max(marker.step, axes.x_range[0]), axes.x_range[1]))
    kind = escape(marker.kind)
    top = HEIGHT - _BOTTOM - 10 if marker.kind == "checkpoint" else _TOP
    return (
        f'<line class="marker run{marker.run}" data-kind="{kind}" x1="{x}" x2="{x}" y1="{top}" y2="{HEIGHT - _BOTTOM}">'
        f"<title>{kind} at step {marker.step:g}</title></line>"
    )


def _apart(axes: Axes, markers: Sequence[Marker]) -> list[Marker]:
    """Return one marker of each kind and run where several would be drawn upon each other."""
    return list({(marker.run, marker.kind, round(axes.x(marker.step))): marker for marker in markers}.values())


def _missing(axes: Axes, line: Line) -> str:
    """Ticks at the upper edge, where a value is not finite."""
    ticks = "".join(f"M{x},{_TOP}v8" for x in dict.fromkeys(round(axes.x(step)) for step in line.missing))
    return f'<path class="missing run{line.run}" d="{ticks}"/>'
