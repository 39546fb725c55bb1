"""Options of the Trainer that stock Lightning does not have."""

import difflib
import os
from dataclasses import dataclass
from typing import Any, Literal, get_args

from zdtrain.errors import ConfigError

Capture = Literal["auto", "off", "graph", "compile"]
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
    ``"compile"`` (the same, lowered by Inductor), or ``"auto"``: ``"graph"`` on CUDA, ``"off"`` elsewhere. The
    environment variable ZDTRAIN_CAPTURE, where it is set, wins."""
    verify_capture: bool = True
    """Compare every recorded step with an eager one before it is trusted, and again once an epoch."""
    lightning_quirks: bool = False
    """Keep stock Lightning's behaviour in the two places where zdtrain trains differently on purpose: the partial last
    accumulation window, and an early stop that was requested before ``min_epochs`` (docs/differences.md)."""

    def __post_init__(self) -> None:
        for name in ("lightning_quirks", "verify_capture"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ConfigError(f"trainer.{name}={value!r}: use True or False.")
        _check_capture("trainer.capture", self.capture)

    def capture_on(self, device_type: str) -> Capture:
        """Return how steps are captured on a device: ``"off"``, ``"graph"`` or ``"compile"``.

        Raises:
            ConfigError: The environment variable has a value that is none of the option's.
        """
        choice: Any = os.environ.get(CAPTURE_VARIABLE) or self.capture
        _check_capture(CAPTURE_VARIABLE, choice)
        if choice == "auto":
            return "graph" if device_type == "cuda" else "off"
        return choice  # type: ignore[no-any-return]


def _check_capture(option: str, value: Any) -> None:
    known = get_args(Capture)
    if value in known:
        return
    near = difflib.get_close_matches(str(value), known, n=1, cutoff=0.4)
    meant = f" (did you mean {near[0]!r}?)" if near else ""
    raise ConfigError(f"{option}={value!r}: use one of {', '.join(map(repr, known))}{meant}.")
