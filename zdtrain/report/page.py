"""One self-contained HTML page about one run, or several compared."""

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from zdtrain.records.folder import EVENTS
from zdtrain.records.reader import Run
from zdtrain.report.assets import SCRIPT, STYLE
from zdtrain.report.series import Chart, Line, build_charts
from zdtrain.report.svg import draw_chart, draw_key

_FACTS = ("status", "num_steps", "last_step", "seconds", "steps_per_second")


def render_page(runs: Sequence[Run]) -> str:
    """Return the page as HTML that asks the network for nothing.

    Args:
        runs: The runs, at least one; the first is the one that others are compared with.
    """
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    charts = build_charts(runs)
    body = [
        f"<header><h1>{escape(title)}</h1>{_legend(runs)}</header>",
        _section("Summary", _table(_facts(runs), runs)),
        _section("Curves", f'<div class="charts">{"".join(_figure(chart, runs) for chart in charts)}</div>'),
        _section("Final values", _table(_final_values(runs), runs)),
        _configuration(runs),
        _fold("Events", _events(runs)),
        _fold("Environment", _table(_rows(_flat(run.environment) for run in runs), runs)),
    ]
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style></head><body>",
            *body,
            f"<script>{SCRIPT}</script></body></html>\n",
        ]
    )


def _legend(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        return ""
    items = "".join(f'<li><span class="swatch run{i}"></span>{escape(run.name)}</li>' for i, run in enumerate(runs))
    return f'<ul class="legend">{items}</ul>'


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>" if content else ""


def _fold(title: str, content: str) -> str:
    """A section that opens on a click."""
    return f"<details><summary>{escape(title)}</summary>{content}</details>" if content else ""


def _figure(chart: Chart, runs: Sequence[Run]) -> str:
    metrics = list(dict.fromkeys(line.metric for line in chart.lines))
    caption = escape(chart.title)
    if metrics not in ([chart.title], ["speed"]):
        keys = [draw_key(number) if len(metrics) > 1 else "" for number in range(len(metrics))]
        caption += ": " + ", ".join(f"{k}{escape(metric)}" for k, metric in zip(keys, metrics, strict=True))
    data = [
        {
            "name": _line_name(line, runs),
            "steps": line.steps,
            "values": line.values,
        }
        for line in chart.lines
        if line.values
    ]
    notes = "".join(f"<p>{escape(_missing(line, runs))}</p>" for line in chart.lines if line.missing)
    embedded = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    return (
        f"<figure><figcaption>{caption}</figcaption>{draw_chart(chart)}{notes}"
        f'<output></output><script type="application/json">{embedded}</script></figure>'
    )


def _line_name(line: Line, runs: Sequence[Run]) -> str:
    return line.metric if len(runs) == 1 else f"{runs[line.run].name} {line.metric}"


def _missing(line: Line, runs: Sequence[Run]) -> str:
    first = f"the first at step {line.missing[0]:g}"
    return f"{_line_name(line, runs)}: {len(line.missing)} of {line.num_values} values are not finite, {first}"


def _facts(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Rows of the summary: what every run has first, then what the trainer reports (host reads, captures, …)."""
    facts = [{name: run.summary.get(name) for name in _FACTS} for run in runs]
    others = [_flat({k: v for k, v in run.summary.items() if k not in (*_FACTS, "last_values")}) for run in runs]
    for run, fact in zip(runs, facts, strict=True):
        if not run.is_complete:
            fact["status"] = f"{fact['status']} (last rows may be missing)"
    return {**_rows(facts), **_rows(others)}


def _final_values(runs: Sequence[Run]) -> dict[str, list[Any]]:
    return _rows({name: run.series(name)[1][-1] for name in run.metrics} for run in runs)


def _configuration(runs: Sequence[Run]) -> str:
    settings = _rows(_flat(run.hparams) for run in runs)
    if len(runs) == 1:
        return _fold("Configuration", _table(settings, runs))
    different = {name: values for name, values in settings.items() if any(value != values[0] for value in values)}
    table = _table(different, runs) or "<p>The runs have the same configuration.</p>"
    return _section("Configuration differences", table)


def _events(runs: Sequence[Run]) -> str:
    items = [
        f'<li><span class="swatch run{index}"></span><b>{escape(event["kind"])}</b> {escape(_event_text(event))}</li>'
        for index, run in enumerate(runs)
        for event in _ends(run.events)
    ]
    return f'<ul class="events">{"".join(items)}</ul>' if items else ""


def _ends(events: Sequence[Mapping[str, Any]], limit: int = 200) -> list[Mapping[str, Any]]:
    """Return the first and the last events where there are many: a monitor may warn in every step."""
    num_left_out = len(events) - 2 * limit
    if num_left_out <= 0:
        return list(events)
    gap = {"kind": "…", "message": f"{num_left_out} more in {EVENTS}"}
    return [*events[:limit], gap, *events[-limit:]]


def _event_text(event: Mapping[str, Any]) -> str:
    hidden = ("kind", "wall_time", "traceback", "environment")
    return ", ".join(f"{name} {value}" for name, value in event.items() if name not in hidden)


def _rows(columns: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Turn one mapping per run into one list per name."""
    columns = list(columns)
    names = dict.fromkeys(name for column in columns for name in column)
    return {name: [column.get(name) for column in columns] for name in names}


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, item in value.items():
        nested = {f"{name}[{i}]": part for i, part in enumerate(item)} if _is_table(item) else {name: item}
        for key, part in nested.items():
            flat.update(_flat(part, f"{prefix}{key}.") if isinstance(part, Mapping) else {f"{prefix}{key}": part})
    return flat


def _is_table(item: Any) -> bool:
    """Whether `item` is a list of mappings, such as the settings of optimizers."""
    return isinstance(item, list) and bool(item) and all(isinstance(part, Mapping) for part in item)


def _table(rows: Mapping[str, Sequence[Any]], runs: Sequence[Run]) -> str:
    if not rows:
        return ""
    head = ""
    if len(runs) > 1:
        cells = "".join(f'<th><span class="swatch run{i}"></span>{escape(run.name)}</th>' for i, run in enumerate(runs))
        head = f"<thead><tr><th></th>{cells}</tr></thead>"
    body = "".join(
        f"<tr><th>{escape(name)}</th>{''.join(f'<td>{escape(_text(v))}</td>' for v in values)}</tr>"
        for name, values in rows.items()
    )
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'


def _text(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
