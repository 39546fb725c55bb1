"""The scalars of a run: the user's, and Lightning's counters kept up to date on the device."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info

from zdtrain.errors import ConfigError
from zdtrain.scalars import DeviceScalars

COUNTERS = ("global_step", "current_epoch")


def run_scalars(values: Mapping[str, Any] | DeviceScalars | None) -> DeviceScalars:
    """Return the run's scalars: `values`, and the counters ``global_step`` and ``current_epoch``, int64.

    Raises:
        ConfigError: `values` is no mapping, or names a counter.
    """
    if values is not None and not isinstance(values, Mapping | DeviceScalars):
        raise ConfigError(f"trainer.scalars={values!r}: use a mapping from names to numbers, e.g. {{'alpha': 0.5}}.")
    scalars = values if isinstance(values, DeviceScalars) else DeviceScalars(values)
    for counter in COUNTERS:
        if counter not in scalars:
            scalars.add(counter, 0)
        elif not isinstance(values, DeviceScalars):
            raise ConfigError(f"trainer.scalars: {counter!r} is kept by the Trainer; choose another name.")
    return scalars


class ScalarsState(Callback):
    """Saves the user's scalars in checkpoints, and says what it loads.

    Args:
        scalars: The run's scalars.
    """

    def __init__(self, scalars: DeviceScalars) -> None:
        self._scalars = scalars

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:  # noqa: ARG002
        """Move the scalars to the training device."""
        self._scalars.to(trainer.strategy.root_device)

    def state_dict(self) -> dict[str, Any]:
        """Return every scalar but the counters, which Lightning saves."""
        return {name: self._scalars[name].detach().clone() for name in self._scalars if name not in COUNTERS}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Write saved scalars in place; name those that the run does not have any more."""
        known = {name: value for name, value in state_dict.items() if name in self._scalars}
        for name, value in known.items():
            self._scalars[name] = value.item()
        dropped = sorted(state_dict.keys() - known.keys())
        rank_zero_info(
            f"scalars from the checkpoint: {', '.join(f'{n}={self._scalars.host(n)}' for n in known) or 'none'}"
            + (f"; not in this run: {', '.join(dropped)}" if dropped else "")
        )
