"""`zdtrain runs`: a table of recorded runs."""

import argparse
import math
from typing import Any

from rich.console import Console
from rich.table import Table

from zdtrain.cli import EXIT_OK
from zdtrain.cli.suggest import did_you_mean
from zdtrain.errors import ConfigError
from zdtrain.records import RecordError, Run, find_runs, load_run

STATUSES = ("running", "finished", "interrupted", "failed")


def main(argv: list[str]) -> int:
    """List the runs below a folder, filtered by date, name, status and metric."""
    options = _parser().parse_args(argv)
    try:
        runs = [load_run(folder) for folder in find_runs(options.root)]
    except RecordError as error:
        raise ConfigError(str(error)) from error
    if not runs:
        raise ConfigError(f"no runs below {options.root}: name the folder that holds them, zdtrain runs FOLDER")
    _check_names(runs, options)
    runs = [run for run in runs if _matches(run, options)]
    if options.sort:
        runs.sort(key=lambda run: _sort_key(run, options.sort, options.descending))
    Console().print(_table(runs, options.metric))
    return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="zdtrain runs", description="List recorded runs.", allow_abbrev=False)
    parser.add_argument("root", nargs="?", default="runs", help="folder that holds the runs (default: runs)")
    parser.add_argument("--date", default="", help="only this day or month, YYYYMMDD or a prefix of it")
    parser.add_argument("--name", default="", help="only runs whose name contains this")
    parser.add_argument("--status", default="", help="only finished, failed, interrupted or running runs")
    parser.add_argument("--metric", action="append", default=[], help="show this metric's last value; repeatable")
    parser.add_argument("--sort", metavar="METRIC", help="order by this metric's last value")
    parser.add_argument("--descending", action="store_true", help="largest first")
    return parser


def _check_names(runs: list[Run], options: Any) -> None:
    metrics = {name for run in runs for name in run.metrics}
    for metric in filter(None, [*options.metric, options.sort]):
        if metric not in metrics:
            raise ConfigError(f"no run has a metric {metric!r}{did_you_mean(metric, metrics)}")
    if options.status and options.status not in STATUSES:
        raise ConfigError(f"unknown status {options.status!r}: use one of {', '.join(STATUSES)}")


def _matches(run: Run, options: Any) -> bool:
    return (
        run.folder.parent.name.startswith(options.date)
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
    table = Table("run", "status", "last step", "seconds", *metrics)
    for run in runs:
        values = ["" if (value := _last(run, metric)) is None else f"{value:.6g}" for metric in metrics]
        last_step = str(run.steps[-1]) if run.steps else ""
        table.add_row(run.name, str(run.summary.get("status", "")), last_step, str(run.summary["seconds"]), *values)
    return table
