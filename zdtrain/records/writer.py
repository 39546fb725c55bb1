"""Writes one run folder. Lines are appended whole and documents replaced whole, so a kill leaves a readable folder."""

import json
import os
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from zdtrain.records.encoding import decode_float, dump_document, dump_line
from zdtrain.records.files import is_epoch_table, is_mapping, is_step_row, read_document, read_rows, read_whole_lines
from zdtrain.records.folder import EPOCHS, EVENTS, METRICS, SUMMARY, SUPERSEDED
from zdtrain.records.lock import FolderLock
from zdtrain.records.rows import EpochTable, Row, RowMerger, encode_rows, joined
from zdtrain.records.types import RecordError, RecordWarning, StepRecord, StepTable

OnError = Literal["warn", "raise"]

_STATE_SECONDS = 5.0  # how often epochs.json and summary.json are replaced while training


class RunWriter:
    """Appends records to a run folder in chunks.

    Args:
        folder: An existing folder: empty for a new run, or that of an earlier run, which is continued. The first row
            of a continued run decides where it goes on: earlier rows of that step and later ones move to
            ``superseded.jsonl``.
        chunk_rows: Records kept before rows are converted and written.
        chunk_seconds: Longest time in seconds that a record waits while others follow.
        on_error: What a full disk or an unwritable folder does: ``"warn"`` once and record no more, or ``"raise"``.

    Raises:
        RecordError: Files of the earlier run are damaged.
    """

    def __init__(
        self, folder: Path, *, chunk_rows: int = 256, chunk_seconds: float = 1.0, on_error: OnError = "warn"
    ) -> None:
        self.folder = folder
        self._chunk_rows, self._chunk_seconds, self._on_error = chunk_rows, chunk_seconds, on_error
        self._queue: list[StepRecord | StepTable] = []
        self._num_queued = 0  # rows in it
        self._merger, self._epochs = RowMerger(), EpochTable()
        self._summary: dict[str, Any] = {}
        self._num_steps = self._num_new_steps = 0
        self._last_step: int | None = None
        self._last_values: dict[str, float] = {}
        self._started = self._last_flush = time.monotonic()
        self._earlier_seconds = 0.0  # of an earlier run that is continued
        self._last_state = 0.0
        self._broken = False
        self._opened: set[str] = set()
        self._lock = FolderLock(folder)
        self._continues = (folder / METRICS).is_file()
        if self._continues:
            read_rows(folder / METRICS, is_step_row)  # what is damaged is refused now, and not by the first row
            self._keep_device_statistics(read_document(folder / EPOCHS, is_epoch_table, missing=[]))
            self._earlier_seconds = read_document(folder / SUMMARY, is_mapping, missing={}).get("seconds", 0.0)

    def add(self, *records: StepRecord) -> None:
        """Queue `records`; a full or old queue is converted and written."""
        self._queue += records
        self._queued(len(records))

    def add_table(self, table: StepTable) -> None:
        """Queue successive training steps, as `add` does."""
        self._queue.append(table)
        self._queued(len(table.steps))

    def _queued(self, count: int) -> None:
        self._num_queued += count
        if self._num_queued >= self._chunk_rows or time.monotonic() - self._last_flush >= self._chunk_seconds:
            self.flush()

    def flush(self, *, below: int | None = None) -> None:
        """Write every finished row; the newest step stays open, since its epoch values may still come.

        Args:
            below: Steps below this one are finished.
        """
        self._last_flush = time.monotonic()
        queue, self._queue, self._num_queued = self._queue, [], 0
        tables: list[StepTable] = []
        for item in queue:
            if isinstance(item, StepTable):
                tables += self._merger.add_table(item)
            else:
                tables += [row.as_table() for row in self._merger.add(item)]
        if below is not None:
            tables += [row.as_table() for row in self._merger.seal(below)]
        self._write_rows(tables)
        if self._last_flush - self._last_state >= _STATE_SECONDS:
            self.write_state()

    def event(self, kind: str, **fields: Any) -> None:
        """Append one line to `events.jsonl`, at once."""
        self._append(EVENTS, [dump_line({"wall_time": round(time.time(), 6), "kind": kind, **fields})])

    def epoch_statistics(self, epoch: int, metric: str, values: Mapping[str, Any]) -> None:
        """Keep statistics of an epoch that were computed on the device; they are written with the next state."""
        self._epochs.add_device_statistics(epoch, metric, values)

    def document(self, name: str, content: Any) -> None:
        """Replace the JSON document `name` of the folder."""
        self.text(name, dump_document(content))

    def text(self, name: str, content: str) -> None:
        """Replace the text file `name` of the folder."""

        self._guard(lambda: _replace(self.folder / name, content))

    def summarize(self, **fields: Any) -> None:
        """Set fields of `summary.json`; they are written with the next state."""
        self._summary.update(fields)

    def write_state(self) -> None:
        """Replace `epochs.json` and `summary.json`."""
        self._last_state = time.monotonic()
        seconds = self._last_state - self._started
        self.document(EPOCHS, self._epochs.as_list())
        summary = {
            "num_steps": self._num_steps or None,  # unknown where only logger calls were recorded
            "last_step": self._last_step,
            "seconds": round(self._earlier_seconds + seconds, 3),
            "steps_per_second": round(self._num_new_steps / seconds, 3) if self._num_new_steps else None,
            "last_values": self._last_values,
            **self._summary,
        }
        self.document(SUMMARY, summary)
        if self._broken and self.folder.is_dir():
            with suppress(OSError):  # why recording stopped was said; how the run went on may still find room
                _replace(self.folder / SUMMARY, dump_document(summary))

    def close(self, status: str) -> None:
        """Write everything that is left, say in the summary how the run ended, and let others continue the folder.

        Records that come later in this process are appended all the same.
        """
        self.flush()
        self._write_rows([row.as_table() for row in self._merger.close()])
        self.summarize(status=status)
        self.write_state()
        self._lock.release()

    def _write_rows(self, tables: list[StepTable]) -> None:
        if not tables:
            return
        if self._continues:
            self._continues = False
            self._guard(lambda: self._supersede_from(tables[0].steps[0]))
        lines: list[str] = []
        for table in joined(tables):
            self._num_new_steps += self._count(table)
            lines += encode_rows(table)
        self._append(METRICS, lines)

    def _count(self, table: StepTable) -> int:
        """Count rows; return how many of them are training steps."""
        self._epochs.update(table)
        num_steps = len(table.steps) - table.batches.count(None)
        self._num_steps += num_steps
        self._last_step = table.steps[-1]
        self._last_values.update(zip(table.names, table.values[-1], strict=True))
        return num_steps

    def _keep_device_statistics(self, epochs: list[dict[str, Any]]) -> None:
        """Take over from an earlier run what its rows do not tell."""
        for entry in epochs:
            for metric, values in entry.get("device", {}).items():
                self.epoch_statistics(entry["epoch"], metric, values)

    def _supersede_from(self, step: int) -> None:
        """Keep the rows of an earlier run below `step`, count them, and move the others out of the way."""
        kept, superseded = [], []
        for line in read_whole_lines(self.folder / METRICS):
            row = json.loads(line)
            if row["step"] >= step:
                superseded.append(line)
                continue
            kept.append(line)
            row["values"] = {name: decode_float(value) for name, value in row["values"].items()}
            self._count(Row(**row).as_table())
        if superseded:
            self._append(SUPERSEDED, superseded)
        if self._num_steps and self._last_step is not None and self._last_step + 1 < step:  # lost in a kill
            self.event("rows_missing", after=self._last_step, before=step)
        self.text(METRICS, "".join(f"{line}\n" for line in kept))

    def _append(self, name: str, lines: list[str]) -> None:
        def append() -> None:
            path = self.folder / name
            if name not in self._opened:
                self._opened.add(name)
                _drop_torn_line(path)
            with open(path, "ab") as file:
                file.write(("\n".join(lines) + "\n").encode())

        self._guard(append)

    def _guard(self, write: Callable[[], None]) -> None:
        if self._broken:
            return
        try:
            self._lock.acquire()
            write()
        except OSError as error:
            self._broken = True
            self.summarize(record_error=error.strerror or str(error))
            reason = f"cannot write the run folder {self.folder}: {error.strerror or error}"
            if self._on_error == "raise":
                raise RecordError(f"{reason}. Free space or choose another folder with records=PATH.") from error
            warnings.warn(
                f"{reason}. Training goes on, nothing more is recorded; pass RunRecorder(on_error='raise') to stop.",
                RecordWarning,
                stacklevel=2,
            )


def _replace(target: Path, content: str) -> None:
    """Replace a text file whole."""
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}.tmp")
    try:
        scratch.write_text(content, encoding="utf-8", errors="backslashreplace")
        scratch.replace(target)
    except OSError:
        scratch.unlink(missing_ok=True)  # a full disk needs the room
        raise


def _drop_torn_line(path: Path) -> None:
    """Cut off what a kill left of a last line, so that the next line starts on its own."""
    if path.is_file():
        text = path.read_bytes()
        whole = text.rfind(b"\n") + 1
        if whole < len(text):
            os.truncate(path, whole)
