"""Options of the Trainer that stock Lightning does not have."""

import difflib
import os
from dataclasses import dataclass
from typing import Any, Literal, get_args

from zdtrain.errors import ConfigError

Capture = Literal["auto", "off", "graph", "compile"]
Nonfinite = Literal["off", "skip", "stop"]
NONFINITE_IN_ROW = 10
CAPTURE_VARIABLE = "ZDTRAIN_CAPTURE"


@dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """What `zdtrain.Trainer` takes beyond the arguments of `lightning.pytorch.Trainer`."""

    records: Any = False
    """Write a run folder: ``True`` for ``runs/`` under `default_root_dir`, a path for elsewhere, or a `RunRecorder`."""
    scalars: Any = None
    """Numbers that live on the device as 0-D tensors, by name, or a `DeviceScalars`."""
    capture: Capture = "auto"
    """Record the training step once and replay it: ``"off"``, ``"graph"`` (the very operations of the eager step),
    ``"compile"`` (the same, lowered by Inductor), or ``"auto"``: ``"graph"`` on one CUDA device, ``"off"`` elsewhere.
    The environment variable ZDTRAIN_CAPTURE, where it is set, wins."""
    verify_capture: bool = True
    """Compare every recorded step with an eager one before it is trusted, and again once an epoch."""
    steps_per_replay: int = 1
    """Steps that run as one program where steps are captured and nobody looks in between."""
    prefetch: bool = False
    """Copy each batch to the device while the step before it runs, on a stream of its own."""
    monitors: Any = None
    """Conditions on the values of a step: a list of `zdtrain.monitors`, and functions from the row to a bool tensor."""
    max_lag_steps: int = 50
    """Steps that the host may be behind the device, where there are monitors, before it waits."""
    nonfinite: Nonfinite = "off"
    """What a loss or gradient norm that is NaN or infinite does: ``"skip"`` the update, and stop after
    `NONFINITE_IN_ROW` in a row, ``"stop"`` the run, or nothing (``"off"``)."""
    ema_decay: float | None = None
    """Keep an exponential moving average of the weights with this decay, on the device."""
    ema_validation: bool = False
    """Validate with the averaged weights."""
    lightning_quirks: bool = False
    """Keep stock Lightning's behaviour in the two places where zdtrain trains differently on purpose: the partial last
    accumulation window, and an early stop that was requested before ``min_epochs`` (docs/differences.md)."""

    def __post_init__(self) -> None:
        for name in ("lightning_quirks", "verify_capture", "prefetch", "ema_validation"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ConfigError(f"trainer.{name}={value!r}: use True or False.")
        _check_choice("trainer.capture", self.capture, Capture)
        self._choice()
        _check_choice("trainer.nonfinite", self.nonfinite, Nonfinite)
        lag, decay = self.max_lag_steps, self.ema_decay
        if isinstance(lag, bool) or not isinstance(lag, int) or lag < 1:
            raise ConfigError(f"trainer.max_lag_steps={lag!r}: use a whole number that is at least 1.")
        several = self.steps_per_replay
        if isinstance(several, bool) or not isinstance(several, int) or several < 1:
            raise ConfigError(f"trainer.steps_per_replay={several!r}: use a whole number that is at least 1.")
        if decay is not None and (isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 < decay < 1):
            raise ConfigError(f"trainer.ema_decay={decay!r}: use a number between 0 and 1, e.g. 0.999, or None.")
        if self.ema_validation and decay is None:
            raise ConfigError("trainer.ema_validation=True does nothing without trainer.ema_decay, e.g. 0.999.")

    def check_window(self, window: int) -> None:
        """Check what depends on the batches of an accumulation window.

        Raises:
            ConfigError: `steps_per_replay` would cut one in two.
        """
        several = self.steps_per_replay
        if several > 1 and isinstance(window, int) and window > 1 and several % window:
            raise ConfigError(
                f"trainer.steps_per_replay={several} counts batches and would cut an accumulation window of "
                f"{window} in two: use a multiple of accumulate_grad_batches={window}, e.g. {window * 4}."
            )

    @property
    def chooses_capture(self) -> bool:
        """Whether somebody asked for a way to capture steps, or for none, instead of leaving it to us."""
        return self._choice() != "auto"

    def capture_in_effect(self, *, device_graphs: bool) -> Capture:
        """Return how steps are captured: ``"off"``, ``"graph"`` or ``"compile"``.

        Args:
            device_graphs: Steps run on one device that has graphs of its own.

        Raises:
            ConfigError: The environment variable has a value that is none of the option's.
        """
        choice = self._choice()
        if choice == "auto":
            return "graph" if device_graphs else "off"
        return choice

    def _choice(self) -> Capture:
        choice: Any = os.environ.get(CAPTURE_VARIABLE) or self.capture
        _check_choice(CAPTURE_VARIABLE, choice, Capture)
        return choice  # type: ignore[no-any-return]


def _check_choice(option: str, value: Any, choices: Any) -> None:
    known = get_args(choices)
    if value in known:
        return
    near = difflib.get_close_matches(str(value), known, n=1, cutoff=0.4)
    meant = f" (did you mean {near[0]!r}?)" if near else ""
    raise ConfigError(f"{option}={value!r}: use one of {', '.join(map(repr, known))}{meant}.")
