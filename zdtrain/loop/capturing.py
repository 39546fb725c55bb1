"""What a Trainer needs for captured steps: a session per fit, a report, and properties that notice who reads them."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_info

from zdtrain.capture.reach import Reach
from zdtrain.capture.report import CaptureReport
from zdtrain.capture.session import CaptureSession
from zdtrain.capture.shared import SharedCaptures
from zdtrain.config import Capture, TrainerOptions
from zdtrain.drain import Drain
from zdtrain.errors import FallbackReason
from zdtrain.readless import readless_metrics
from zdtrain.records.recorder import RunRecorder
from zdtrain.source.location import claim


class CanCapture:
    """Gives a Trainer captured steps."""

    options: TrainerOptions
    drain: Drain
    recorder: RunRecorder | None
    _captures: CaptureSession | None = None
    """Of training steps."""
    _evaluations: CaptureSession | None = None
    """Of validation or test steps."""

    @property
    def capture_report(self) -> CaptureReport:
        """What captured steps did in the last fit, validate or test: programs, replays, why other steps ran eagerly."""
        report = CaptureReport(capture="off") if self._captures is None else self._captures.report()
        if self._evaluations is not None:
            report = report.with_evaluation(self._evaluations.report())
        loop = self.fit_loop.epoch_loop  # type: ignore[attr-defined]
        return replace(report, fallbacks=(*loop.fallbacks, *report.fallbacks))

    @property
    def current_epoch(self) -> int:
        """The current epoch, counted from 0. A captured step may read it: every epoch then has its own programs."""
        self._note_read("current_epoch")
        return super().current_epoch  # type: ignore[misc,no-any-return]

    @property
    def global_step(self) -> int:
        """The number of optimizer steps taken. A captured step may compare it with constants; see `scalars`, too."""
        value: int = super().global_step  # type: ignore[misc]
        for session in (self._captures, self._evaluations):
            if session is not None and session.counters is not None:
                return session.counters.read("global_step", value)  # type: ignore[no-any-return]
        return value

    @property
    def callback_metrics(self) -> dict[str, Any]:
        """Current values for callbacks: the live dictionary, holding tensors."""
        self._note_read("callback_metrics")
        return super().callback_metrics  # type: ignore[misc,no-any-return]

    @property
    def logged_metrics(self) -> dict[str, Any]:
        """Current values for loggers: the live dictionary, holding tensors."""
        self._note_read("logged_metrics")
        return super().logged_metrics  # type: ignore[misc,no-any-return]

    def _note_read(self, name: str) -> None:
        for session in (self._captures, self._evaluations):
            if session is not None and session.watch is not None:
                session.watch.note_read(name)

    @contextmanager
    def _capturing(self) -> Iterator[None]:
        """Capture the steps of the body, and say afterwards what became of them."""
        trainer: Any = self
        if trainer.predicting:
            yield
            return
        capture = self.capture_in_effect
        self._captures = self._evaluations = None
        if capture == "off":
            if not self.options.verify_capture:
                what = "verify_capture=False has no effect here: steps are not captured"
                trainer.fit_loop.epoch_loop.say(FallbackReason(code="verify-capture", message=what))
            with readless_metrics() if trainer.strategy.root_device.type != "cpu" else nullcontext():
                yield
            return
        claim(type(trainer.lightning_module))
        shared = SharedCaptures(self.drain.runtime)
        if trainer.training:
            self._captures = self._session(capture, shared, "training_step")
            loop, step = trainer.fit_loop.epoch_loop.val_loop, "validation_step"
        elif trainer.testing:
            loop, step = trainer.test_loop, "test_step"
        else:
            loop, step = trainer.validate_loop, "validation_step"
        self._evaluations = self._session(capture, shared, step)
        trainer.fit_loop.epoch_loop.captures, loop.captures = self._captures, self._evaluations
        if trainer._detect_anomaly or torch.is_anomaly_enabled():
            what = "detect_anomaly=True has the host look at every gradient, which a replay would not"
            shared.give_up(FallbackReason(code="detect-anomaly", message=what))
        try:
            with readless_metrics():
                yield
        except torch.OutOfMemoryError as error:
            shared.note_on(error)
            raise
        finally:
            trainer.fit_loop.epoch_loop.captures = loop.captures = None
            shared.release()  # teardown moves what the programs write to
            self._publish(self.capture_report)

    @property
    def capture_in_effect(self) -> Capture:
        """How the steps of this run are captured: ``"off"``, ``"graph"`` or ``"compile"``."""
        trainer: Any = self
        on_one_device = type(trainer.strategy) is SingleDeviceStrategy and trainer.world_size == 1
        return self.options.capture_in_effect(device_graphs=on_one_device and self.drain.runtime.has_graphs)

    def _session(self, capture: Capture, shared: SharedCaptures, step: str) -> CaptureSession:
        return CaptureSession(
            capture=capture,
            verify=self.options.verify_capture,
            shared=shared,
            reach=Reach(self),
            tell=self.tell,
            several=step == "training_step" and self.options.steps_per_replay > 1,
            step=step,
        )

    def tell(self, reason: FallbackReason) -> None:
        """Put a reason for not running or capturing a step the short way into the run folder, if there is one."""
        if self.recorder is not None:
            self.recorder.record_event("fallback", **asdict(reason))

    def _publish(self, report: CaptureReport) -> None:
        said = self.fit_loop.epoch_loop.fallbacks  # type: ignore[attr-defined]
        new = replace(report, fallbacks=tuple(reason for reason in report.fallbacks if reason not in said))
        if text := new.table() if self.options.chooses_capture else new.summary():
            rank_zero_info(text)
        if self.recorder is not None:
            for program in report.programs:
                self.recorder.record_event("program", **asdict(program))
            self.recorder.summarize(
                capture=report.capture,
                captures=sum(program.captures for program in report.programs),
                steps_replayed=report.steps_replayed,
                steps_eager=report.steps_eager,
                evaluation_replayed=report.evaluation_replayed,
                evaluation_eager=report.evaluation_eager,
                host_reads_in_step=report.host_reads,
            )
