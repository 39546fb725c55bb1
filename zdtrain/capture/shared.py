"""What the captured steps of one run share: the device's graphs and memory, and whether any step is captured."""

from typing import TYPE_CHECKING

import torch

from zdtrain.capture.counters import CounterReadError
from zdtrain.capture.graph import rehearse
from zdtrain.capture.report import readable
from zdtrain.device.base import Runtime
from zdtrain.errors import FallbackReason

if TYPE_CHECKING:
    from zdtrain.capture.session import CaptureSession

OUT_OF_MEMORY = "out-of-memory"
REPLAY_FAILED = (
    "zdtrain: raised while a captured step was replayed, so that its update may be half written: go on from the last "
    'checkpoint. capture="off", or ZDTRAIN_CAPTURE=off, runs the step as it is; on a GPU, an error may also come from '
    "work before it, which CUDA_LAUNCH_BLOCKING=1 then tells."
)


class SharedCaptures:
    """The sessions of one run, of training and of evaluation steps, and what makes all of them give up.

    Args:
        runtime: The device door.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.sessions: list[CaptureSession] = []
        self.given_up: FallbackReason | None = None
        """Why no step is captured any more."""
        self._rehearsed = not runtime.has_graphs

    def are_on(self) -> bool:
        """Return whether steps are captured; the first time, go through all that this asks of the device."""
        if not self._rehearsed:
            self._rehearsed = True
            try:
                rehearse(self.runtime)
            except Exception as error:  # whatever a driver or another version of torch does not have
                self.give_up(failure("a graph that does next to nothing could not be captured and launched", error))
        return self.given_up is None

    def give_up(self, reason: FallbackReason) -> None:
        """Let go of all programs and capture nothing more in this run."""
        if self.given_up is not None:
            return
        self.given_up = reason
        self._note(reason)
        self.release()

    def release(self) -> None:
        """Let go of all programs and their memory; what they did stays in the reports."""
        for session in self.sessions:
            session.release()
        try:
            self.runtime.release_pool()
        except Exception as error:  # it goes with the process
            self._note(failure("the memory of graphs could not be given back", error))

    def _note(self, reason: FallbackReason) -> None:
        for session in self.sessions[:1]:  # it is about all of them
            session.note(reason)

    def memory_bytes(self) -> int:
        """Return the device memory that programs keep."""
        return sum(session.memory_bytes() for session in self.sessions)

    def lack_of_room(self) -> FallbackReason | None:
        """Return why programs leave too little memory, one having been captured just now; None where they do not.

        Eager steps, which the comparisons and other kinds of batches go on to need, cannot use the memory of graphs and
        take about as much again.
        """
        stats, held = self.runtime.memory(), self.memory_bytes()
        if stats is None or stats.free_bytes >= held:
            return None
        what = (
            f"captured steps keep {readable(held)} and leave {readable(stats.free_bytes)} on the device, too little to "
            "run such steps eagerly as well"
        )
        return FallbackReason(code=OUT_OF_MEMORY, message=what)

    def note_on(self, error: BaseException) -> None:
        """Tell whoever reads that the device ran out of memory how much of it captured steps hold."""
        held = self.memory_bytes()
        if held:
            error.add_note(
                f"zdtrain: captured steps hold {readable(held)} of the device's memory, which other work cannot use. "
                'Trainer(capture="off") or ZDTRAIN_CAPTURE=off does without them.'
            )


def failure(what: str, error: Exception) -> FallbackReason:
    """Return the reason for an error in capturing."""
    if isinstance(error, CounterReadError):
        return error.reason
    lines = str(error).strip().splitlines() or [""]
    code = OUT_OF_MEMORY if isinstance(error, torch.OutOfMemoryError) else "untraceable"
    return FallbackReason(code=code, message=f"{what}: {type(error).__name__}: {lines[0][:200]}")
