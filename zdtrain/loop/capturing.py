"""What a Trainer needs for captured steps: a session per fit, a report, and properties that notice who reads them."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from typing import Any

from lightning.pytorch.utilities import rank_zero_info

from zdtrain.config import Capture, TrainerOptions
from zdtrain.drain import Drain
from zdtrain.errors import FallbackReason
from zdtrain.readless import readless_metrics
from zdtrain.records.recorder import RunRecorder
from zdtrain.step.reach import Reach
from zdtrain.step.report import CaptureReport
from zdtrain.step.session import CaptureSession


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
        """The number of optimizer steps taken. A step that is to be captured reads `scalars.global_step` instead."""
        self._note_read("global_step")
        return super().global_step  # type: ignore[misc,no-any-return]

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
        capture = self.options.capture_in_effect()
        if trainer.training:
            loop, step = trainer.fit_loop.epoch_loop.val_loop, "validation_step"
        elif trainer.testing:
            loop, step = trainer.test_loop, "test_step"
        else:
            loop, step = trainer.validate_loop, "validation_step"
        on = capture != "off"
        self._captures = self._session(capture, "training_step") if on and trainer.training else None
        self._evaluations = self._session(capture, step) if on else None
        trainer.fit_loop.epoch_loop.captures, loop.captures = self._captures, self._evaluations
        stream = self.drain.runtime.training() if on else nullcontext()
        reads_matter = on or self.drain.runtime.device.type != "cpu"
        try:
            # graphs cannot be captured on the default stream, nor gradients bound to another one
            with stream, readless_metrics() if reads_matter else nullcontext():
                yield
        finally:
            for session in (self._captures, self._evaluations):
                if session is not None:
                    session.release()  # teardown moves what the programs write to
            if on:
                self._publish(self.capture_report)

    def _session(self, capture: Capture, step: str) -> CaptureSession:
        runtime = self.drain.runtime
        return CaptureSession(
            capture=capture,
            verify=self.options.verify_capture,
            runtime=runtime,
            reach=Reach(self),
            tell=self.tell,
            device_graphs=runtime.device.type == "cuda",
            several=step == "training_step" and self.options.steps_per_replay > 1,
            step=step,
        )

    def tell(self, reason: FallbackReason) -> None:
        """Put a reason for not running or capturing a step the short way into the run folder, if there is one."""
        if self.recorder is not None:
            self.recorder.record_event("fallback", **asdict(reason))

    def _publish(self, report: CaptureReport) -> None:
        rank_zero_info(report.table())
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
