"""`zdtrain runs`: a table of recorded runs."""

import math
import operator
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zdtrain.cli import EXIT_OK
from zdtrain.errors import ConfigError
from zdtrain.parser import Parser
from zdtrain.records import RecordError, find_runs, load_run
from zdtrain.records.encoding import decode_float, is_stored_float
from zdtrain.records.files import is_mapping, read_document
from zdtrain.records.folder import SUMMARY
from zdtrain.suggest import did_you_mean

STATUSES = ("running", "finished", "interrupted", "failed")
_CONDITION = re.compile(r"(?P<metric>.+?)\s*(?P<sign><=|>=|<|>)\s*(?P<number>[^<>=]+)")
_SIGNS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


@dataclass(frozen=True, kw_only=True)
class Listed:
    """What the table says of a run."""

    folder: Path
    """The run folder."""
    status: str
    """How it ended; ``"running"`` also where it was killed."""
    seconds: Any
    """How long it ran."""
    last_step: Any
    """Step of its last row."""
    values: Mapping[str, float]
    """Last value of each metric."""

    @property
    def day(self) -> str:
        """Day on which the run started."""
        return self.folder.absolute().parent.name

    @property
    def name(self) -> str:
        """Date and name of the run."""
        return f"{self.day}/{self.folder.absolute().name}"


def main(argv: list[str]) -> int:
    """List the runs below a folder, filtered by date, name, status and metric."""
    options = _parser().parse(argv)
    runs = _load(options.root)
    wanted = _conditions(runs, options)
    found = [run for run in runs if _matches(run, options) and all(holds(run) for holds in wanted)]
    if not found:
        names = list(dict.fromkeys((runs[0].name, runs[-1].name)))
        print(f"none of the {len(runs)} runs below {options.root} matches; they are {' to '.join(names)}")
        return EXIT_OK
    if options.sort:
        found.sort(key=lambda run: _sort_key(run, options.sort, options.descending))
    table = _table(found, list(dict.fromkeys([*options.metric, *filter(None, [options.sort])])))
    console = Console()
    if not console.is_terminal:  # a program reads it, or a file keeps it: nothing is cut off
        console = Console(width=max(80, console.measure(table, options=console.options.update(width=10_000)).maximum))
    console.print(table)
    return EXIT_OK


def _load(root: str) -> list[Listed]:
    """Load every run that can be read, and name the others."""
    runs = []
    for folder in find_runs(root):
        try:
            runs.append(_listed(folder))
        except RecordError as error:
            print(f"zdtrain: left out: {error}", file=sys.stderr)
    if not runs:
        raise ConfigError(f"no runs below {root}: name the folder that holds them, zdtrain runs FOLDER")
    return runs


def _listed(folder: Path) -> Listed:
    """Read the summary of a run, which holds all that is needed; of one that did not end also the rows."""
    summary = read_document(folder / SUMMARY, is_mapping)
    stored, last_step = summary.get("last_values"), summary.get("last_step")
    if summary.get("status") != "running" and is_mapping(stored) and all(map(is_stored_float, stored.values())):
        values = {name: decode_float(value) for name, value in stored.items()}
    else:
        run = load_run(folder)
        values = {name: run.series(name)[1][-1] for name in run.metrics}
        last_step = run.steps[-1] if run.steps else None
    status, seconds = str(summary.get("status", "")), summary.get("seconds", "")
    return Listed(folder=folder, status=status, seconds=seconds, last_step=last_step, values=values)


def _parser() -> Parser:
    parser = Parser(prog="zdtrain runs", description="List recorded runs.")
    parser.add_argument("root", nargs="?", default="runs", help="folder that holds the runs (default: runs)")
    parser.add_argument("--date", default="", help="only this day or month, YYYYMMDD or a prefix of it")
    parser.add_argument("--name", default="", help="only runs whose name contains this")
    parser.add_argument("--status", default="", help="only finished, failed, interrupted or running runs")
    parser.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="CONDITION",
        help="only runs with this metric, or whose last value of it is so: 'val_acc>=0.9'; repeatable",
    )
    parser.add_argument("--metric", action="append", default=[], help="show this metric's last value; repeatable")
    parser.add_argument("--sort", metavar="METRIC", help="order by this metric's last value, and show it")
    parser.add_argument("--descending", action="store_true", help="largest first")
    return parser


def _conditions(runs: list[Listed], options: Any) -> list[Callable[[Listed], bool]]:
    """Return what `--where` asks of a run, after checking every option.

    Raises:
        ConfigError: an option names what is not there.
    """
    metrics = {name for run in runs for name in run.values}
    for metric in filter(None, [*options.metric, options.sort]):
        _check_metric(metric, metrics)
    if options.status and options.status not in STATUSES:
        hint = did_you_mean(options.status, STATUSES)
        raise ConfigError(f"unknown status {options.status!r}: use one of {', '.join(STATUSES)}{hint}")
    if not options.date.isdigit() and options.date:
        raise ConfigError(f"--date {options.date}: give digits, YYYYMMDD or a prefix of it, such as {runs[-1].day}")
    return [_condition(text, metrics) for text in options.where]


def _condition(text: str, metrics: set[str]) -> Callable[[Listed], bool]:
    found = None if text in metrics else _CONDITION.fullmatch(text)
    if found is None:
        _check_metric(text, metrics)
        return lambda run: text in run.values
    metric, compare = found["metric"], _SIGNS[found["sign"]]
    _check_metric(metric, metrics)
    try:
        limit = float(found["number"])
    except ValueError:
        raise ConfigError(f"--where {text!r}: {found['number']!r} is no number") from None
    return lambda run: metric in run.values and compare(run.values[metric], limit)


def _check_metric(metric: str, metrics: set[str]) -> None:
    if metric not in metrics:
        raise ConfigError(f"no run has a metric {metric!r}{did_you_mean(metric, metrics)}")


def _matches(run: Listed, options: Any) -> bool:
    return (
        run.day.startswith(options.date)
        and options.name in run.folder.name
        and (not options.status or run.status == options.status)
    )


def _sort_key(run: Listed, metric: str, descending: bool) -> tuple[bool, float]:
    """Runs without the metric, or with NaN, come last either way."""
    value = run.values.get(metric)
    if value is None or math.isnan(value):
        return True, 0.0
    return False, -value if descending else value


def _table(runs: list[Listed], metrics: list[str]) -> Table:
    table = Table()
    table.add_column("run", overflow="fold", no_wrap=True)  # a name that is cut off is no name
    for title in ("status", "last step", "seconds", *map(escape, metrics)):
        table.add_column(title, overflow="fold")
    for run in runs:
        values = ["" if (value := run.values.get(metric)) is None else f"{value:.6g}" for metric in metrics]
        last_step = "" if run.last_step is None else str(run.last_step)
        table.add_row(escape(run.name), escape(run.status), last_step, escape(str(run.seconds)), *values)
    return table
