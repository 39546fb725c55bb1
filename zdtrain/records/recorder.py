"""The run folder as a Lightning logger, so that it composes with TensorBoard, CSV and the others."""

import os
import sys
import time
import traceback
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

from lightning.fabric.loggers.logger import _DummyExperiment, rank_zero_experiment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn
from typing_extensions import override

from zdtrain.errors import ConfigError
from zdtrain.records.encoding import to_plain
from zdtrain.records.environment import describe_environment
from zdtrain.records.folder import (
    CHECKPOINTS,
    CONFIG,
    ENVIRONMENT,
    EVENTS,
    HPARAMS,
    SUMMARY,
    create_run_folder,
    is_run_folder,
    run_folder_of_checkpoint,
)
from zdtrain.records.types import RecordError, RecordWarning, StepRecord, StepTable
from zdtrain.records.writer import OnError, RunWriter


class RunRecorder(Logger):
    """Records a run into a folder of its own, ``root/YYYYMMDD/HHMMSS-name[-k]/``.

    One row per step: `record_steps` takes the values of every training step, `log_metrics` what Lightning and
    callbacks log besides (epoch means, validation metrics, learning rates), and both meet in the row of their step.

    Args:
        root: Folder that holds all runs.
        name: Name of the run, part of the folder's name.
        folder: Continue this run folder instead of making a new one.
        on_error: What a full disk or an unwritable folder does: ``"warn"`` once and record no more, or ``"raise"``.
        chunk_rows: Records that are kept before they are converted and written.
        chunk_seconds: Longest time in seconds that a record waits while others follow.

    Raises:
        RecordError: `folder` is not a run folder.
        ConfigError: `root` is not on a local file system, or another option cannot be used.

    Example::

        Trainer(records=RunRecorder("experiments", name="baseline"))
    """

    def __init__(
        self,
        root: str | Path = "runs",
        *,
        name: str = "run",
        folder: str | Path | None = None,
        on_error: OnError = "warn",
        chunk_rows: int = 256,
        chunk_seconds: float = 1.0,
    ) -> None:
        super().__init__()
        if not _is_local(root):
            raise ConfigError(f"trainer.records={str(root)!r}: run folders are local, use the path of a local folder")
        if on_error not in get_args(OnError):
            raise ConfigError(f"records.on_error={on_error!r}: use one of {', '.join(get_args(OnError))}")
        if chunk_rows < 1:
            raise ConfigError(f"records.chunk_rows={chunk_rows!r}: use 1 or more")
        if folder is not None and not is_run_folder(folder):
            raise RecordError(f"records.folder: {folder} is not a run folder (it holds no {SUMMARY})")
        self._root, self._run_name = Path(root), name
        self._folder = None if folder is None else Path(folder)
        self._on_error, self._chunk_rows, self._chunk_seconds = on_error, chunk_rows, chunk_seconds
        self._is_off = False
        self._writer: RunWriter | None = None
        self._left_out: set[str] = set()  # metrics that are not numbers
        self._lag_seconds = 0.0  # how far a row was behind its step at most
        self._hparams: dict[str, Any] = {}
        self._notes: dict[Path, Path] = {}  # hyperparameters beside a checkpoint → the checkpoint

    @property
    def folder(self) -> Path | None:
        """The run folder, made on first use; None on ranks other than 0 before setup, and where it cannot be made."""
        if self._folder is None and not self._is_off and _is_rank_zero():
            self._make_folder()
        return self._folder

    def _make_folder(self) -> None:
        try:
            self._folder = create_run_folder(self._root, self._run_name)
        except OSError as error:
            self._is_off = True
            reason = f"cannot make a run folder in {self._root}: {error.strerror or error}"
            if self._on_error == "raise":
                raise RecordError(f"{reason}. Choose another root with records=PATH.") from error
            rank_zero_warn(f"{reason}. Training goes on, nothing is recorded.", category=RecordWarning)

    def continue_from(self, checkpoint: str | Path) -> None:
        """Continue the run folder that `checkpoint` lies in; any other checkpoint or an open folder changes nothing."""
        if self._folder is None:
            self._folder = run_folder_of_checkpoint(checkpoint)

    def record_steps(self, table: StepTable) -> None:
        """Take the values of finished training steps, in order; conversion and writing happen in chunks."""
        writer = self._writer or self.experiment
        writer.add_table(table)
        self._lag_seconds = max(self._lag_seconds, time.time() - table.wall_times[0])

    @rank_zero_only
    def record_epoch_statistics(self, epoch: int, metric: str, values: Mapping[str, Any]) -> None:
        """Keep statistics of a metric over an epoch that were computed on the device, for `epochs.json`."""
        self.experiment.epoch_statistics(epoch, metric, values)

    @rank_zero_only
    def record_event(self, kind: str, **fields: Any) -> None:
        """Append an event (a capture, a fallback, a monitor's action, an exception) to `events.jsonl`."""
        self.experiment.event(kind, **fields)

    @rank_zero_only
    def record_config(self, text: str) -> None:
        """Keep the resolved configuration; that of a continued run is kept beside the first, numbered."""
        if self.folder is None:
            return
        target = self.folder / CONFIG
        number = 2
        while target.is_file() and target.read_text(encoding="utf-8") != text:
            target = self.folder / f"{Path(CONFIG).stem}-{number}.yaml"
            number += 1
        self.experiment.text(target.name, text)

    @rank_zero_only
    def record_environment(self, **fields: Any) -> None:
        """Keep versions, machine, command line and git state, and `fields`; a continued run keeps the first ones."""
        environment = {**describe_environment(), **fields}
        if self.folder is not None and (self.folder / ENVIRONMENT).is_file():
            self.experiment.event("continued", environment=environment)
        else:
            self.experiment.document(ENVIRONMENT, environment)

    @rank_zero_only
    def summarize(self, **fields: Any) -> None:
        """Set fields of `summary.json`, such as host reads, captures and peak memory."""
        self.experiment.summarize(**fields)

    @rank_zero_only
    def flush(self, *, below: int | None = None) -> None:
        """Write the rows of every step but the newest, and of those below `below`."""
        if self._writer is not None:
            self._writer.flush(below=below)

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The writer of the folder; a dummy that takes any call on ranks other than 0 and without a folder."""
        if self.folder is None:
            return _DummyExperiment()
        if self._writer is None:
            self._writer = RunWriter(
                self.folder,
                chunk_rows=self._chunk_rows,
                chunk_seconds=self._chunk_seconds,
                on_error=self._on_error,
            )
            self._writer.summarize(status="running")
            self._writer.write_state()
        return self._writer

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        values = {name: number for name, value in _flat(metrics) if (number := self._number(name, value)) is not None}
        epoch = values.get("epoch")
        if epoch is not None and epoch.is_integer():
            del values["epoch"]
        else:
            epoch = None
        self.experiment.add(
            StepRecord(
                step=0 if step is None else step,
                epoch=None if epoch is None else int(epoch),
                values=values,
                wall_time=time.time(),
            )
        )

    def _number(self, name: str, value: Any) -> float | None:
        """Return the value of a metric as a number; one that is none is left out, which is said once."""
        number = _number(value)
        if number is None and name not in self._left_out:
            self._left_out.add(name)
            what = f"metric {name!r} is not recorded: {to_plain(value)!s:.80} is not one number"
            rank_zero_warn(what, category=RecordWarning)
        return number

    @override
    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace | None, *_: Any, **__: Any) -> None:
        if params is None:
            return
        given = vars(params) if isinstance(params, Namespace) else params
        self._hparams.update({name: to_plain(value) for name, value in given.items() if not name.startswith("_")})
        self.experiment.document(HPARAMS, self._hparams)

    @override
    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        """Write the hyperparameters beside the checkpoint, and drop those of checkpoints that are gone."""
        saved, step = checkpoint_callback._last_checkpoint_saved, checkpoint_callback._last_global_step_saved
        writer = self.experiment
        writer.flush()
        writer.event("checkpoint", path=_below(saved, self.folder), global_step=step)
        if not _is_local(saved):
            return
        path = Path(saved)
        monitored = {
            "monitor": checkpoint_callback.monitor,
            "value": checkpoint_callback.current_score,
            "best_value": checkpoint_callback.best_model_score,
        }
        note = path.with_suffix(".json").absolute()
        writer.document(
            str(note),
            {
                "checkpoint": path.name,
                "global_step": step,
                **(monitored if checkpoint_callback.monitor else {}),
                "run": str(self.folder),
                "hparams": self._hparams,
            },
        )
        self._notes[note] = path
        self._drop_orphaned_notes()

    def _drop_orphaned_notes(self) -> None:
        """Remove the notes of checkpoints that top-k deleted."""
        for note in [note for note, checkpoint in self._notes.items() if not checkpoint.exists()]:
            note.unlink(missing_ok=True)
            del self._notes[note]

    @override
    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self._writer is None:
            return
        self._drop_orphaned_notes()
        if status == "success":
            status = "finished"
        elif status == "failed" and isinstance(sys.exc_info()[1], KeyboardInterrupt):
            status = "interrupted"
        self._writer.summarize(read_back_lag_seconds=round(self._lag_seconds, 6))
        self._writer.close(status)

    @property
    @override
    def save_dir(self) -> str | None:
        """The run folder; Lightning puts checkpoints and profiles below it."""
        return None if self.folder is None else str(self.folder)

    @property
    @override
    def name(self) -> str:
        """Empty: the run folder is complete without a subfolder per logger."""
        return ""

    @property
    @override
    def version(self) -> str:
        """Empty, see `name`."""
        return ""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_writer": None}


class RecordCallback(Callback):
    """What a recorder has to hear that loggers are not told.

    Puts checkpoints without a folder of their own into the run folder, shares the folder's name between ranks, and
    records the environment, the optimizers' settings and exceptions.

    Args:
        recorder: The recorder of the same trainer.
        settings: Arguments of the trainer.
    """

    def __init__(self, recorder: RunRecorder, settings: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._recorder = recorder
        self._settings = dict(settings)
        self._described = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        recorder = self._recorder
        recorder._folder = folder = trainer.strategy.broadcast(recorder.folder)
        for callback in trainer.checkpoint_callbacks:
            if folder is not None and isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
                callback.dirpath = str((folder / CHECKPOINTS).absolute())
        if not self._described:
            self._described = True
            if self._settings:
                recorder.log_hyperparams({"trainer": self._settings})
            recorder.record_environment(
                model=type(pl_module),
                device=str(trainer.strategy.root_device),
                strategy=type(trainer.strategy).__name__,
                precision=trainer.precision,
                num_processes=trainer.world_size,
            )
        recorder.record_event("start", stage=stage)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._recorder.log_hyperparams(
            {"optimizers": [{"class": type(o), **o.defaults} for o in trainer.optimizers]}
            if trainer.optimizers
            else None
        )

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._recorder.record_event(
            "exception",
            type=type(exception).__name__,
            message=str(exception),
            global_step=trainer.global_step,
            traceback="".join(traceback.format_exception(exception)),
        )
        if self._recorder.folder is not None:
            exception.add_note(f"traceback in {self._recorder.folder / EVENTS}")


def recorder_for(
    records: bool | str | Path | RunRecorder, default_root_dir: str | Path | None, *, name: str = "run"
) -> RunRecorder | None:
    """Return the recorder that the option ``Trainer(records=…)`` asks for.

    Args:
        records: True for ``runs/`` below `default_root_dir`; a run folder, which is continued; any other path, below
            which the run folder is made; or a recorder.
        default_root_dir: The trainer's; None is the working directory.
        name: Name of a new run folder.

    Raises:
        ConfigError: `records` is none of these.
    """
    if isinstance(records, RunRecorder):
        return records
    if not isinstance(records, bool | str | Path):
        raise ConfigError(f"trainer.records={records!r}: use True, False, the path of a folder, or a RunRecorder")
    if isinstance(records, bool):
        return RunRecorder(os.path.join(default_root_dir or "", "runs"), name=name) if records else None
    return RunRecorder(folder=records) if is_run_folder(records) else RunRecorder(records, name=name)


def attach_recorder(trainer: Trainer, recorder: RunRecorder, settings: Mapping[str, Any]) -> None:
    """Let `recorder` record what `trainer` does; it comes last, so that ``trainer.logger`` stays the user's.

    Args:
        trainer: The trainer.
        recorder: The recorder.
        settings: Arguments of the trainer, kept with the hyperparameters.
    """
    trainer.loggers = [*trainer.loggers, recorder]
    trainer.callbacks.insert(0, RecordCallback(recorder, to_plain(settings)))  # type: ignore[attr-defined]


def find_recorder(loggers: list[Logger]) -> RunRecorder | None:
    """Return the run recorder among `loggers`, if any."""
    return next((logger for logger in loggers if isinstance(logger, RunRecorder)), None)


def _is_rank_zero() -> bool:
    return getattr(rank_zero_only, "rank", 0) == 0


def _is_local(path: str | Path) -> bool:
    return "://" not in str(path)


def _below(path: str, folder: Path | None) -> str:
    """`path` relative to the run folder, where it lies in it."""
    inside = folder is not None and Path(path).absolute().is_relative_to(folder.absolute())
    return os.path.relpath(path, folder) if inside else path


def _flat(metrics: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield name and value of each metric; names of nested ones are joined by ``/``."""
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def _number(value: Any) -> float | None:
    """Return `value` as a number; None where it is none, such as text or a tensor of several."""
    try:
        return None if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
