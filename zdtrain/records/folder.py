"""Names of run folders: `runs/YYYYMMDD/HHMMSS-name[-k]/`, never shared by two runs."""

import re
import time
from itertools import count
from pathlib import Path

METRICS, EVENTS, EPOCHS = "metrics.jsonl", "events.jsonl", "epochs.json"
SUMMARY, ENVIRONMENT, HPARAMS, CONFIG = "summary.json", "environment.json", "hparams.json", "config.yaml"
SUPERSEDED = "superseded.jsonl"
CHECKPOINTS = "checkpoints"
MAX_NAME = 100  # characters of a run's name; file systems take 255 bytes


def create_run_folder(root: str | Path, name: str, *, start_time: float | None = None) -> Path:
    """Create and return a new folder for one run.

    `mkdir` is the arbiter between processes that start in the same second: the one that loses takes the next number.

    Args:
        root: Folder that holds all runs, made when missing.
        name: Name of the run; characters other than letters, digits, ``.``, ``_`` and ``-`` become ``-``,
            and so many as a file system takes are kept.
        start_time: Seconds since the Unix epoch; now by default.

    Returns:
        The folder that was created, e.g. ``runs/20260328/101530-digits``.
    """
    started = time.localtime(start_time)
    day = Path(root) / time.strftime("%Y%m%d", started)
    day.mkdir(parents=True, exist_ok=True)
    clean = re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII).strip("-.")[:MAX_NAME] or "run"
    stem = f"{time.strftime('%H%M%S', started)}-{clean}"
    for attempt in count(1):
        folder = day / (stem if attempt == 1 else f"{stem}-{attempt}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise AssertionError("unreachable")


def is_run_folder(path: str | Path) -> bool:
    """Whether `path` is the folder of a run, finished or not."""
    return (Path(path) / SUMMARY).is_file()


def run_folder_of_checkpoint(checkpoint: str | Path) -> Path | None:
    """Return the run folder that `checkpoint` lies in (``RUN/checkpoints/*.ckpt``), or None."""
    folder = Path(checkpoint).absolute().parent.parent
    return folder if is_run_folder(folder) else None
