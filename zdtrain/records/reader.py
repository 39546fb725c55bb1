"""Reading run folders back: rows as columns, documents as dictionaries; no lightning and no torch needed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zdtrain.records.encoding import decode_float
from zdtrain.records.files import (
    is_epoch_table,
    is_event,
    is_mapping,
    is_step_row,
    is_torn,
    read_document,
    read_rows,
)
from zdtrain.records.folder import ENVIRONMENT, EPOCHS, EVENTS, HPARAMS, METRICS, SUMMARY, is_run_folder
from zdtrain.records.types import RecordError


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run as its folder tells it."""

    folder: Path
    """The run folder."""
    steps: list[int]
    """Step of each row, ascending; one row per step."""
    epochs: list[int | None]
    """Epoch of each row."""
    wall_times: list[float]
    """Seconds since the Unix epoch of each row."""
    metrics: dict[str, list[float | None]]
    """Metric name → its value in each row, None where a row has none."""
    summary: dict[str, Any]
    """`summary.json`; `summary["status"]` is ``"running"`` also for a run that was killed."""
    hparams: dict[str, Any]
    """`hparams.json`, empty where the run logged none."""
    environment: dict[str, Any]
    """`environment.json`, empty where it is missing."""
    epoch_statistics: list[dict[str, Any]]
    """`epochs.json`: mean, variance, min, max and count of each metric in each epoch."""
    events: list[dict[str, Any]]
    """`events.jsonl`, in order."""
    is_complete: bool
    """False where the run did not end by itself, could not be recorded to its end, or the last row was torn off: its
    last rows may be missing."""

    @property
    def name(self) -> str:
        """Date and name of the run, e.g. ``20260328/101530-digits``."""
        return f"{self.day}/{self.folder.absolute().name}"

    @property
    def day(self) -> str:
        """Day on which the run started, e.g. ``20260328``."""
        return self.folder.absolute().parent.name

    def series(self, metric: str) -> tuple[list[int], list[float]]:
        """Return the steps at which `metric` has a value, and the values.

        Raises:
            RecordError: the run never logged `metric`.
        """
        if metric not in self.metrics:
            raise RecordError(f"{self.name} has no metric {metric!r}; it has: {', '.join(sorted(self.metrics))}")
        pairs = [(s, v) for s, v in zip(self.steps, self.metrics[metric], strict=True) if v is not None]
        return [step for step, _ in pairs], [value for _, value in pairs]

    def columns(self) -> dict[str, list[Any]]:
        """Return step, epoch, wall time and every metric as columns, ready for ``pandas.DataFrame`` or polars."""
        fixed: dict[str, list[Any]] = {"step": self.steps, "epoch": self.epochs, "wall_time": self.wall_times}
        return {**{name: column for name, column in self.metrics.items() if name not in fixed}, **fixed}


def load_run(path: str | Path) -> Run:
    """Read the run folder at `path`, finished, running or killed.

    Raises:
        RecordError: `path` is not a run folder, or one of its files is damaged or cannot be read.
    """
    folder = Path(path)
    if not is_run_folder(folder):
        raise RecordError(_no_run_folder(folder))
    by_step: dict[int, dict[str, Any]] = {}
    for row in read_rows(folder / METRICS, is_step_row):
        if (first := by_step.setdefault(row["step"], row)) is not row:
            first["values"].update(row["values"])
    rows = [by_step[step] for step in sorted(by_step)]
    summary = read_document(folder / SUMMARY, is_mapping)
    return Run(
        folder=folder,
        steps=[row["step"] for row in rows],
        epochs=[row["epoch"] for row in rows],
        wall_times=[row["wall_time"] for row in rows],
        metrics=_columns([row["values"] for row in rows]),
        summary=summary,
        hparams=read_document(folder / HPARAMS, is_mapping, missing={}),
        environment=read_document(folder / ENVIRONMENT, is_mapping, missing={}),
        epoch_statistics=read_document(folder / EPOCHS, is_epoch_table, missing=[]),
        events=read_rows(folder / EVENTS, is_event),
        is_complete=(
            summary.get("status") != "running" and "record_error" not in summary and not is_torn(folder / METRICS)
        ),
    )


def find_runs(root: str | Path) -> list[Path]:
    """Return every run folder below `root`, oldest first; `root` may also be the folder of one day, or of one run."""
    for pattern in (f"*/*/{SUMMARY}", f"*/{SUMMARY}", SUMMARY):
        if found := sorted(path.parent for path in Path(root).glob(pattern)):
            return found
    return []


def _columns(rows: Sequence[Mapping[str, float | str]]) -> dict[str, list[float | None]]:
    """Turn one mapping per row into one list per name, None where a row has no value."""
    columns: dict[str, list[float | None]] = {}
    for number, row in enumerate(rows):
        for name, stored in row.items():
            if name not in columns:
                columns[name] = [None] * len(rows)
            columns[name][number] = decode_float(stored)
    return columns


def _no_run_folder(folder: Path) -> str:
    if not folder.exists():
        return f"run folder {folder} does not exist"
    if is_run_folder(folder.parent):
        return f"{folder} is not a run folder but a part of one: {folder.parent}"
    inside = find_runs(folder) or find_runs(folder.parent)
    hint = f"; the newest run near it is {inside[-1]}" if inside else ""
    return f"{folder} is not a run folder (it holds no {SUMMARY}){hint}"
