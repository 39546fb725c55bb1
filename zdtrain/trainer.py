"""The `lightning.pytorch.Trainer` subclass that people import."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.utilities.argparse import _defaults_from_env_vars

from zdtrain.config import Capture, Nonfinite, TrainerOptions
from zdtrain.consumers.steps import StepStream
from zdtrain.device import Runtime, runtime_for
from zdtrain.drain import Drain
from zdtrain.loop.accounting import accounted
from zdtrain.loop.capturing import CanCapture
from zdtrain.loop.connector import LoggerConnector
from zdtrain.loop.epoch import EpochLoop
from zdtrain.loop.evaluation import EvaluationLoop
from zdtrain.loop.restoring import CheckpointConnector
from zdtrain.loop.rows import StepRows
from zdtrain.loop.run_scalars import ScalarsState, run_scalars
from zdtrain.loop.stop import CanTakeBackStop, LatchedStop, StopRequests
from zdtrain.loop.watching import CanMonitor
from zdtrain.monitor.base import Monitor
from zdtrain.monitor.statistics import Statistics
from zdtrain.records.recorder import RunRecorder, attach_recorder, recorder_for
from zdtrain.scalars import DeviceScalars


class Trainer(CanTakeBackStop, CanCapture, CanMonitor, LightningTrainer):
    """Lightning's Trainer with a training loop that does not wait for the device.

    Takes every argument of `lightning.pytorch.Trainer`, and the fields of `zdtrain.config.TrainerOptions`.

    Args:
        records: Write a run folder: ``True`` for ``runs/`` under `default_root_dir`, a path for another place, a
            `RunRecorder` for full control.
        scalars: Numbers that live on the device as 0-D tensors, by name: ``trainer.scalars.alpha`` reads one, assigning
            to it writes it in place. They are saved in checkpoints.
        capture: Record the training step once and replay it: ``"off"``, ``"graph"``, ``"compile"``, or ``"auto"``,
            which is ``"graph"`` on one CUDA device and ``"off"`` elsewhere. What cannot be recorded runs eagerly and is
            named in `capture_report`. The environment variable ZDTRAIN_CAPTURE wins.
        verify_capture: Compare every recorded step with an eager one before it is trusted, and again once an epoch.
        steps_per_replay: Steps that run as one program where steps are captured and nobody looks in between. Batches,
            counters, logged values and outputs stay those of each step. Where that is not possible, one line says why.
        prefetch: Copy each batch to the device while the step before it runs, on a stream of its own. Where that is not
            possible, one line says why.
        monitors: Conditions on the values of a step that act in that very step: `zdtrain.monitors`, and functions from
            the row to a 0-D bool tensor.
        max_lag_steps: Steps that the host may be behind the device before it waits, where there are monitors.
        nonfinite: What a loss or gradient norm that is NaN or infinite does: ``"skip"`` the update, ``"stop"`` the run,
            or nothing (``"off"``).
        ema_decay: Keep an exponential moving average of the weights, `ema`, with this decay.
        ema_validation: Validate with the averaged weights.
        lightning_quirks: Keep stock Lightning's behaviour where zdtrain trains differently on purpose.
        **kwargs: Arguments of `lightning.pytorch.Trainer`.

    Raises:
        ConfigError: An option has a value that cannot be used.

    Example:
        >>> from zdtrain import Trainer
        >>> trainer = Trainer(max_epochs=3, accelerator="cpu")
    """

    @_defaults_from_env_vars
    def __init__(
        self,
        *,
        records: bool | str | Path | RunRecorder = False,
        scalars: dict[str, Any] | DeviceScalars | None = None,
        capture: Capture = "auto",
        verify_capture: bool = True,
        steps_per_replay: int = 1,
        prefetch: bool = False,
        monitors: Sequence[Monitor | Statistics] | None = None,
        max_lag_steps: int = 50,
        nonfinite: Nonfinite = "off",
        ema_decay: float | None = None,
        ema_validation: bool = False,
        lightning_quirks: bool = False,
        **kwargs: Any,
    ) -> None:
        self.options = TrainerOptions(
            records=records,
            scalars=scalars,
            capture=capture,
            verify_capture=verify_capture,
            steps_per_replay=steps_per_replay,
            prefetch=prefetch,
            monitors=monitors,
            max_lag_steps=max_lag_steps,
            nonfinite=nonfinite,
            ema_decay=ema_decay,
            ema_validation=ema_validation,
            lightning_quirks=lightning_quirks,
        )
        self.options.check_window(kwargs.get("accumulate_grad_batches", 1))
        self._stop_requests = LatchedStop() if lightning_quirks else StopRequests()
        recorder = None
        if not (kwargs.get("fast_dev_run") or kwargs.get("barebones")):  # these write nothing, as in stock
            recorder = recorder_for(records, kwargs.get("default_root_dir"))
        if recorder is not None and kwargs.get("logger") is None:
            kwargs["logger"] = False  # nobody asked for another logger: the run folder is the one
        # undecorated: stock's own look into the environment would hand it our options
        LightningTrainer.__init__.__wrapped__(self, **kwargs)  # type: ignore[attr-defined]
        self.drain = Drain(self._open_runtime)
        self._checkpoint_connector = CheckpointConnector(self)
        self._logger_connector = self._connector = LoggerConnector(self, self._logger_connector, self.drain)
        epoch_loop = EpochLoop(self, self.fit_loop.epoch_loop, lightning_quirks=lightning_quirks)
        self.fit_loop.epoch_loop = epoch_loop
        self.validate_loop = EvaluationLoop(self, self.validate_loop)
        self.test_loop = EvaluationLoop(self, self.test_loop)
        self._scalars: DeviceScalars | None = None  # made when somebody wants them
        self.counters_on_device = False
        if scalars is not None:
            self._scalars = run_scalars(scalars)
            self.callbacks.insert(0, ScalarsState(self._scalars))  # type: ignore[attr-defined]
        self._take_monitors(self.options)
        self.recorder = recorder
        if recorder is not None:
            attach_recorder(self, recorder, _settings(kwargs, self.options))
            stream = StepStream(self.drain, [recorder])
            self._connector.rows = StepRows(epoch_loop.results, stream)

    def _open_runtime(self) -> Runtime:
        return runtime_for(self.strategy.root_device)

    @property
    def scalars(self) -> DeviceScalars:
        """The run's scalars on the training device, ``global_step`` and ``current_epoch`` among them."""
        if self._scalars is None or not self.counters_on_device:
            with torch.inference_mode(False):  # validation may be the first to ask
                self._scalars = run_scalars(None) if self._scalars is None else self._scalars
                self._scalars.to(self.strategy.root_device)
            self.counters_on_device = True
            self.write_counters()
        return self._scalars

    def write_counters(self) -> None:
        """Bring the device's copies of the counters up to date; costs nothing as long as nobody reads `scalars`."""
        if self.counters_on_device:
            self.scalars.global_step = self.global_step
            self.scalars.current_epoch = self.current_epoch

    def _run(
        self, model: LightningModule, ckpt_path: str | Path | None = None, weights_only: bool | None = None
    ) -> Any:
        if self.recorder is not None and self.state.fn == "fit" and ckpt_path and Path(ckpt_path).is_file():
            self.recorder.continue_from(ckpt_path)
        return super()._run(model, ckpt_path=ckpt_path, weights_only=weights_only)

    def _run_stage(self) -> Any:
        try:
            with self._watching(), accounted(self), self._capturing():
                return super()._run_stage()
        finally:
            self._connector.flush()  # nothing that a finished step logged is lost, whatever ended the stage
            self.fit_loop.epoch_loop.plan = None  # nothing of the steps is kept, nor pickled


def _settings(arguments: Mapping[str, Any], options: TrainerOptions) -> dict[str, Any]:
    """Return what somebody chose about training: arguments of stock, and those of ours that are not the default."""
    ours = {f.name: getattr(options, f.name) for f in fields(options) if getattr(options, f.name) != f.default}
    elsewhere = ("records", "logger", "default_root_dir", "scalars")
    return {k: v for k, v in {**arguments, **ours}.items() if k not in elsewhere and v is not None}


def _joint_signature() -> inspect.Signature:
    """Return stock's parameters followed by ours: what environment defaults, LightningCLI and jsonargparse read."""
    stock = inspect.signature(LightningTrainer.__init__).parameters
    ours = inspect.signature(Trainer.__init__).parameters
    named = [p for p in ours.values() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    return inspect.Signature([*stock.values(), *named], return_annotation=None)


Trainer.__init__.__signature__ = _joint_signature()  # type: ignore[attr-defined]
