"""Reading run folders back: rows as columns, documents as dictionaries; no lightning and no torch needed."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zdtrain.records.encoding import decode_float
from zdtrain.records.folder import ENVIRONMENT, EPOCHS, EVENTS, HPARAMS, METRICS, SUMMARY, is_run_folder
from zdtrain.records.types import RecordError
from zdtrain.records.writer import read_whole_lines


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
    """False where the run did not end by itself, or the last row was torn off: its last rows may be missing."""

    @property
    def name(self) -> str:
        """Date and name of the run, e.g. ``20260328/101530-digits``."""
        return f"{self.folder.parent.name}/{self.folder.name}"

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
        RecordError: `path` is not a run folder, or one of its documents is not JSON.
    """
    folder = Path(path)
    if not is_run_folder(folder):
        raise RecordError(_no_run_folder(folder))
    lines, is_torn = _rows(folder / METRICS)
    by_step: dict[int, dict[str, Any]] = {}
    for row in lines:
        merged = by_step.setdefault(row["step"], {**row, "values": {}})
        merged["values"].update(row["values"])
    rows = [by_step[step] for step in sorted(by_step)]
    names = list(dict.fromkeys(name for row in rows for name in row["values"]))
    summary = _document(folder / SUMMARY)
    return Run(
        folder=folder,
        steps=[row["step"] for row in rows],
        epochs=[row["epoch"] for row in rows],
        wall_times=[row["wall_time"] for row in rows],
        metrics={name: [_value(row["values"].get(name)) for row in rows] for name in names},
        summary=summary,
        hparams=_document(folder / HPARAMS, missing={}),
        environment=_document(folder / ENVIRONMENT, missing={}),
        epoch_statistics=_document(folder / EPOCHS, missing=[]),
        events=_rows(folder / EVENTS)[0],
        is_complete=summary.get("status") != "running" and not is_torn,
    )


def find_runs(root: str | Path) -> list[Path]:
    """Return every run folder below `root`, oldest first."""
    return sorted(path.parent for path in Path(root).glob(f"*/*/{SUMMARY}"))


def _value(stored: float | str | None) -> float | None:
    return None if stored is None else decode_float(stored)


def _rows(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """Return the rows of a JSON-lines file and whether a kill tore off its end."""
    lines = read_whole_lines(path)
    is_torn = path.is_file() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
    try:
        return [json.loads(line) for line in lines], is_torn
    except json.JSONDecodeError as error:
        raise RecordError(f"{path} is damaged: {error}") from error


def _document(path: Path, missing: Any = None) -> Any:
    if not path.is_file() and missing is not None:
        return missing
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise RecordError(f"{path} is damaged: {error}") from error


def _no_run_folder(folder: Path) -> str:
    if not folder.exists():
        return f"run folder {folder} does not exist"
    inside = find_runs(folder) or find_runs(folder.parent)
    hint = f"; the newest run near it is {inside[-1]}" if inside else ""
    return f"{folder} is not a run folder (it holds no {SUMMARY}){hint}"
