"""Running statistics of a metric, kept inside the step."""

import torch
from torch import Tensor

from zdtrain.monitor.events import Row
from zdtrain.stats import RunningStats


class Statistics:
    """Keeps mean, variance, extremes, count, last value and moving average of a metric on the device.

    Goes into ``Trainer(monitors=[...])``. The numbers are 0-D tensors at fixed addresses, also inside the step:
    ``self.trainer.statistics["loss"].mean`` is the mean over the steps so far, this one not included. Steps whose
    update is held back do not count. At the end of an epoch they go to `epochs.json`, under ``"device"``.

    Args:
        metric: Name of a logged metric or scalar, ``"loss"``, ``"grad_norm"`` or ``"lr"``.
        ema_decay: Decay of the moving average, at least 0 and less than 1.
        per_epoch: Start anew with every epoch; otherwise with the run.

    Raises:
        ConfigError: `ema_decay` cannot be used.

    Example:
        >>> statistics = Statistics("loss", per_epoch=False)
        >>> statistics.update(Row(loss=torch.tensor(2.0)), None)
        >>> statistics.mean, statistics.last
        (tensor(2., dtype=torch.float64), tensor(2., dtype=torch.float64))
    """

    def __init__(self, metric: str, *, ema_decay: float = 0.99, per_epoch: bool = True) -> None:
        self.metric = metric
        self.per_epoch = per_epoch
        self._stats = RunningStats(ema_decay=ema_decay, dtype=torch.float64)
        self.last = torch.full((), float("nan"), dtype=torch.float64)  # shape=(), device-resident

    def update(self, row: Row, hold: Tensor | None) -> None:
        """Take in the step's value, where there is one and `hold`, 0-D bool, is not set."""
        if self.metric not in row:
            return
        value = row[self.metric].detach().to(self.last.dtype)
        self._stats.update(value, where=None if hold is None else ~hold)
        self.last.copy_(value if hold is None else torch.where(hold, self.last, value))

    @property
    def mean(self) -> Tensor:
        """Mean, 0-D."""
        return self._stats.mean

    @property
    def var(self) -> Tensor:
        """Unbiased variance, 0-D; NaN before the second value."""
        return self._stats.var

    @property
    def min(self) -> Tensor:
        """Smallest value, 0-D."""
        return self._stats.min

    @property
    def max(self) -> Tensor:
        """Largest value, 0-D."""
        return self._stats.max

    @property
    def count(self) -> Tensor:
        """Number of values, 0-D, int64."""
        return self._stats.count

    @property
    def ema(self) -> Tensor:
        """Exponential moving average corrected for its start, 0-D; NaN before the first value."""
        return self._stats.ema

    def as_dict(self) -> dict[str, Tensor]:
        """Return mean, var, min, max, count, ema and last, 0-D."""
        return {**self._stats.as_dict(), "last": self.last}

    def to(self, device: torch.device) -> None:
        """Move the numbers; the tensor objects stay the same."""
        self._stats.to(device)
        if self.last.device != device:
            self.last.data = self.last.data.to(device)

    def reset(self) -> None:
        """Forget every value, in place."""
        self._stats.reset()
        self.last.fill_(float("nan"))

    def tensors(self) -> dict[str, Tensor]:
        """Return what `update` writes."""
        return {**dict(self._stats.named_buffers()), "last": self.last}
