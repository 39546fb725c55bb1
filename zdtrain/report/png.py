"""The charts of the page as one PNG picture, with matplotlib."""

import math
from collections.abc import Sequence
from pathlib import Path

from zdtrain.errors import ConfigError
from zdtrain.records.reader import Run
from zdtrain.report.series import build_charts

_STYLES = ("-", "--", ":", "-.")


def save_png(runs: Sequence[Run], path: str | Path) -> None:
    """Draw the charts of `runs` into the PNG file `path`.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--png needs matplotlib: pip install 'zdtrain[report]'") from error
    charts = build_charts(runs)
    num_columns = min(2, len(charts)) or 1
    num_rows = math.ceil(len(charts) / num_columns) or 1
    width, height = 7 * num_columns, 3.8 * num_rows
    figure = Figure(figsize=(width, height))  # margins by hand: matplotlib's layouts draw all charts twice
    figure.subplots_adjust(0.8 / width, 0.6 / height, 1 - 0.2 / width, 1 - 0.4 / height, wspace=0.16, hspace=0.36)
    for number, chart in enumerate(charts, start=1):
        axes = figure.add_subplot(num_rows, num_columns, number)
        metrics = list(dict.fromkeys(line.metric for line in chart.lines))
        for line in chart.lines:
            color = f"C{line.run}"
            label = line.metric if len(runs) == 1 else f"{runs[line.run].name} {line.metric}"
            style = _STYLES[metrics.index(line.metric) % len(_STYLES)]
            faint = 0.4 if line.band is not None else 1.0
            marker = "o" if len(line.steps) == 1 else None
            axes.plot(line.steps, line.values, style, color=color, alpha=faint, label=_shown(label), marker=marker)
            if line.band is not None:
                axes.fill_between(line.band.steps, line.band.minima, line.band.maxima, color=color, alpha=0.15)
                axes.plot(line.band.steps, line.band.means, color=color, linewidth=2)
            top = [1.0] * len(line.missing)
            axes.plot(line.missing, top, "|", color="#e03131", transform=axes.get_xaxis_transform())
        axes.set_title(_shown(chart.title), parse_math=False)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        for text in axes.legend(fontsize="small", loc="upper right").get_texts():
            text.set_parse_math(False)  # a dollar sign in a name begins no formula
    figure.savefig(path, dpi=110)


def _shown(name: str) -> str:
    """Return a name as text that can be drawn; a legend leaves out what begins with an underscore."""
    return name.encode("utf-8", "backslashreplace").decode().lstrip("_") or "_"
