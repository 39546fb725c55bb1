"""Who asked the run to stop: a request made by hand stands, an EarlyStopping verdict lasts until its next check."""

import sys
from types import FrameType

from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason

_CHECK = EarlyStopping._run_early_stopping_check.__code__


class StopRequests:
    """What ``trainer.should_stop`` stands for.

    Stock Lightning keeps one flag. Where ``min_epochs`` or ``min_steps`` makes a run go on after EarlyStopping gave
    up, the metric may recover, and the flag would still end the run at the minimum. Here a verdict replaces the same
    callback's earlier verdict; requests from anywhere else are never taken back by a callback.
    """

    def __init__(self) -> None:
        self.by_hand = False
        self._verdicts: dict[int, bool] = {}  # by id of the callback

    def __bool__(self) -> bool:
        return self.by_hand or any(self._verdicts.values())

    def read_from(self, frame: FrameType) -> bool:
        """Return whether to stop; an EarlyStopping check does not see earlier verdicts of its own kind."""
        return self.by_hand if frame.f_code is _CHECK else bool(self)

    def write_from(self, frame: FrameType, value: bool) -> None:
        """Take a request, or take it back."""
        if frame.f_code is not _CHECK:
            self.by_hand = value
            if not value:
                self._verdicts.clear()
            return
        if self.by_hand:
            return
        callback: EarlyStopping = frame.f_locals["self"]
        if self._verdicts.get(id(callback)) and not value:
            callback.stopped_epoch = 0
            callback.stopping_reason = EarlyStoppingReason.NOT_STOPPED
            callback.stopping_reason_message = None
        self._verdicts[id(callback)] = value


class LatchedStop(StopRequests):
    """Stock Lightning's one flag, whoever writes it."""

    def read_from(self, frame: FrameType) -> bool:  # noqa: ARG002
        """Return the flag."""
        return self.by_hand

    def write_from(self, frame: FrameType, value: bool) -> None:  # noqa: ARG002
        """Set the flag."""
        self.by_hand = value


class CanTakeBackStop:
    """Gives a Trainer a `should_stop` that is backed by `StopRequests`."""

    _stop_requests: StopRequests

    @property
    def should_stop(self) -> bool:
        """Whether the run ends at the next opportunity."""
        requests = self._stop_requests
        return bool(requests) and requests.read_from(sys._getframe(1))

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        self._stop_requests.write_from(sys._getframe(1), bool(value))
