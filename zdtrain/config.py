"""Options of the Trainer that stock Lightning does not have."""

from dataclasses import dataclass
from typing import Any

from zdtrain.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """What `zdtrain.Trainer` takes beyond the arguments of `lightning.pytorch.Trainer`."""

    records: Any = False
    """Write a run folder: ``True`` for ``runs/`` under `default_root_dir`, a path for elsewhere, or a `RunRecorder`."""
    scalars: Any = None
    """Numbers that live on the device as 0-D tensors, by name, or a `DeviceScalars`."""
    lightning_quirks: bool = False
    """Keep stock Lightning's behaviour in the two places where zdtrain trains differently on purpose: the partial last
    accumulation window, and an early stop that was requested before ``min_epochs`` (docs/differences.md)."""

    def __post_init__(self) -> None:
        if not isinstance(self.lightning_quirks, bool):
            raise ConfigError(f"trainer.lightning_quirks={self.lightning_quirks!r}: use True or False.")
