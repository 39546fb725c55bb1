"""`zdtrain runs`: a table of recorded runs."""

import math
import sys
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zdtrain.cli import EXIT_OK
from zdtrain.errors import ConfigError
from zdtrain.parser import Parser
from zdtrain.records import RecordError, Run, find_runs, load_run
from zdtrain.suggest import did_you_mean

STATUSES = ("running", "finished", "interrupted", "failed")


def main(argv: list[str]) -> int:
    """List the runs below a folder, filtered by date, name, status and metric."""
    options = _parser().parse(argv)
    runs = _load(options.root)
    _check(runs, options)
    found = [run for run in runs if _matches(run, options)]
    if not found:
        names = [run.name for run in runs]
        print(f"none of the {len(runs)} runs below {options.root} matches; they are {names[0]} to {names[-1]}")
        return EXIT_OK
    if options.sort:
        found.sort(key=lambda run: _sort_key(run, options.sort, options.descending))
    Console().print(_table(found, options.metric))
    return EXIT_OK


def _load(root: str) -> list[Run]:
    """Load every run that can be read, and name the others."""
    runs = []
    for folder in find_runs(root):
        try:
            runs.append(load_run(folder))
        except RecordError as error:
            print(f"zdtrain: left out: {error}", file=sys.stderr)
    if not runs:
        raise ConfigError(f"no runs below {root}: name the folder that holds them, zdtrain runs FOLDER")
    return runs


def _parser() -> Parser:
    parser = Parser(prog="zdtrain runs", description="List recorded runs.")
    parser.add_argument("root", nargs="?", default="runs", help="folder that holds the runs (default: runs)")
    parser.add_argument("--date", default="", help="only this day or month, YYYYMMDD or a prefix of it")
    parser.add_argument("--name", default="", help="only runs whose name contains this")
    parser.add_argument("--status", default="", help="only finished, failed, interrupted or running runs")
    parser.add_argument("--metric", action="append", default=[], help="show this metric's last value; repeatable")
    parser.add_argument("--sort", metavar="METRIC", help="order by this metric's last value")
    parser.add_argument("--descending", action="store_true", help="largest first")
    return parser


def _check(runs: list[Run], options: Any) -> None:
    metrics = {name for run in runs for name in run.metrics}
    for metric in filter(None, [*options.metric, options.sort]):
        if metric not in metrics:
            raise ConfigError(f"no run has a metric {metric!r}{did_you_mean(metric, metrics)}")
    if options.status and options.status not in STATUSES:
        hint = did_you_mean(options.status, STATUSES)
        raise ConfigError(f"unknown status {options.status!r}: use one of {', '.join(STATUSES)}{hint}")
    if not options.date.isdigit() and options.date:
        raise ConfigError(f"--date {options.date}: give digits, YYYYMMDD or a prefix of it, such as {runs[-1].day}")


def _matches(run: Run, options: Any) -> bool:
    return (
        run.day.startswith(options.date)
        and options.name in run.folder.name
        and (not options.status or run.summary.get("status") == options.status)
    )


def _last(run: Run, metric: str) -> float | None:
    return run.series(metric)[1][-1] if metric in run.metrics else None


def _sort_key(run: Run, metric: str, descending: bool) -> tuple[bool, float]:
    """Runs without the metric, or with NaN, come last either way."""
    value = _last(run, metric)
    if value is None or math.isnan(value):
        return True, 0.0
    return False, -value if descending else value


def _table(runs: list[Run], metrics: list[str]) -> Table:
    table = Table("run", "status", "last step", "seconds", *map(escape, metrics))
    for run in runs:
        values = ["" if (value := _last(run, metric)) is None else f"{value:.6g}" for metric in metrics]
        last_step = str(run.steps[-1]) if run.steps else ""
        status, seconds = (str(run.summary.get(name, "")) for name in ("status", "seconds"))
        table.add_row(escape(run.name), escape(status), last_step, escape(seconds), *values)
    return table
