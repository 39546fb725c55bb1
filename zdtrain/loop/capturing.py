"""What a Trainer needs for captured steps: a session per fit, a report, and properties that notice who reads them."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from typing import Any

from lightning.pytorch.utilities import rank_zero_info

from zdtrain.config import TrainerOptions
from zdtrain.drain import Drain
from zdtrain.errors import FallbackReason
from zdtrain.records.recorder import RunRecorder
from zdtrain.step.report import CaptureReport
from zdtrain.step.session import CaptureSession


class CanCapture:
    """Gives a Trainer captured steps."""

    options: TrainerOptions
    drain: Drain
    recorder: RunRecorder | None
    _captures: CaptureSession | None = None

    @property
    def capture_report(self) -> CaptureReport:
        """What captured steps did in the last fit: programs, replays, and why other steps ran eagerly."""
        report = CaptureReport(capture="off") if self._captures is None else self._captures.report()
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
        if self._captures is not None and self._captures.watch is not None:
            self._captures.watch.note_read(name)

    @contextmanager
    def _capturing(self) -> Iterator[None]:
        """Capture the training steps of the body, and say afterwards what became of them."""
        if not self.training:  # type: ignore[attr-defined]
            yield
            return
        capture = self.options.capture_in_effect()
        self._captures = None
        if capture != "off":
            runtime = self.drain.runtime
            self._captures = CaptureSession(
                capture=capture,
                verify=self.options.verify_capture,
                runtime=runtime,
                tell=self.tell,
                device_graphs=runtime.device.type == "cuda",
            )
        self.fit_loop.epoch_loop.captures = self._captures  # type: ignore[attr-defined]
        stream = nullcontext() if self._captures is None else self.drain.runtime.training()
        try:
            with stream:  # graphs cannot be captured on the default stream, nor gradients bound to another one
                yield
        finally:
            if self._captures is not None:
                self._captures.release()  # teardown moves what the programs write to
                self._publish(self.capture_report)

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
                host_reads_in_step=report.host_reads,
            )
