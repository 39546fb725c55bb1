"""Running statistics and small helpers for 0-D metrics, without a host read."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from zdtrain.errors import ConfigError
from zdtrain.scalars import FixedBuffers


class RunningStats(FixedBuffers):
    r"""Mean, variance, extremes and exponential moving average of a 0-D metric, kept on the device.

    `update` writes fixed addresses in place and reads nothing back, so it may be part of a captured step. The variance
    is Welford's, which does not cancel as sums of squares do:

    .. math::
        n \leftarrow n + 1, \quad d = x - \mu, \quad \mu \leftarrow \mu + d / n, \quad M_2 \leftarrow M_2 + d (x - \mu)

    The moving average is corrected for its start at zero: :math:`e_n / (1 - \beta^n)`.

    Args:
        ema_decay: Decay :math:`\beta` of the moving average, at least 0 and less than 1.
        dtype: float32 or float64; does not change when the module is cast.
        device: Where the numbers are kept; they move with ``.to()``.

    Example:
        >>> stats = RunningStats()
        >>> for value in (1.0, 2.0, 3.0):
        ...     stats.update(torch.tensor(value))
        >>> stats.mean, stats.var, stats.count
        (tensor(2.), tensor(1.), tensor(3))

    References:
        Welford, *Note on a method for calculating corrected sums of squares and products* (1962).
    """

    mean: Tensor
    m2: Tensor
    min: Tensor
    max: Tensor
    count: Tensor
    ema_raw: Tensor
    ema_decay: Tensor

    def __init__(
        self,
        *,
        ema_decay: float = 0.99,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if dtype not in (torch.float32, torch.float64):
            raise ConfigError(f"RunningStats.dtype must be torch.float32 or torch.float64, got {dtype}")
        if not 0 <= ema_decay < 1:
            raise ConfigError(f"RunningStats.ema_decay must be at least 0 and less than 1, got {ema_decay}")
        start = {"mean": 0.0, "m2": 0.0, "min": float("inf"), "max": float("-inf"), "ema_raw": 0.0}
        for name, value in start.items():
            self.register_buffer(name, torch.full((), value, dtype=dtype, device=device))  # shape=()
        # float64: 1 - decay**n cancels in float32
        self.register_buffer("ema_decay", torch.full((), ema_decay, dtype=torch.float64, device=device))  # shape=()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64, device=device))  # shape=()

    @torch.no_grad()
    def update(self, value: Tensor, *, where: Tensor | None = None) -> None:
        """Take in one value.

        Args:
            value: 0-D tensor (or of one element) on the same device, any real dtype. NaN is taken in like any value.
            where: Take it in where this is set, 0-D bool.
        """
        x = zero_dim(value.detach()).to(self.mean.dtype)
        if where is None:
            self.count.add_(1)
            delta = x - self.mean
            low = high = average = x
        else:
            self.count.add_(where)
            x = torch.where(where, x, self.mean)
            delta = x - self.mean
            low, high, average = (torch.where(where, x, old) for old in (self.min, self.max, self.ema_raw))
        self.mean.add_(delta / self.count.clamp(min=1))
        self.m2.add_(delta * (x - self.mean))
        self.min.copy_(torch.minimum(self.min, low))
        self.max.copy_(torch.maximum(self.max, high))
        self.ema_raw.lerp_(average, (1 - self.ema_decay).to(x.dtype))

    @property
    def var(self) -> Tensor:
        """Unbiased variance, 0-D; NaN before the second value."""
        return self.m2 / (self.count - 1)

    @property
    def std(self) -> Tensor:
        """Unbiased standard deviation, 0-D; NaN before the second value."""
        return self.var.sqrt()

    @property
    def ema(self) -> Tensor:
        """Exponential moving average corrected for its start, 0-D; NaN before the first value."""
        return (self.ema_raw / (1 - self.ema_decay**self.count)).to(self.ema_raw.dtype)

    @torch.no_grad()
    def reset(self) -> None:
        """Forget every value, in place."""
        for name in ("mean", "m2", "ema_raw", "count"):
            getattr(self, name).zero_()
        self.min.fill_(float("inf"))
        self.max.fill_(float("-inf"))

    def as_dict(self) -> dict[str, Tensor]:
        """Return mean, var, min, max, count and ema as 0-D tensors, ready for ``self.log_dict``."""
        return {name: getattr(self, name) for name in ("mean", "var", "min", "max", "count", "ema")}


def zero_dim(value: Tensor, name: str = "metric") -> Tensor:
    """Return `value` as a 0-D tensor; a tensor of one element is reshaped, any other refused.

    Raises:
        ConfigError: `value` has more or fewer than one element.
    """
    if value.numel() != 1:
        raise ConfigError(
            f"{name} must be one number, got shape {tuple(value.shape)}: reduce it, e.g. with .mean() or .sum()"
        )
    return value.reshape(())


def stack_metrics(metrics: Mapping[str, Tensor] | Iterable[Tensor], *, dtype: torch.dtype | None = None) -> Tensor:
    """Put 0-D metrics side by side in one vector, so that they can be reduced, copied or read together.

    ``torch.cat`` refuses 0-D tensors; this is ``torch.stack`` with an error that names the metric that is not 0-D.

    Args:
        metrics: 0-D tensors on one device, with or without names. Gradients pass through.
        dtype: Dtype of the result; that of the metrics, promoted, if None.

    Returns:
        Shape ``(len(metrics),)``, in the order given.

    Example:
        >>> stack_metrics({"loss": torch.tensor(0.5), "accuracy": torch.tensor([1.0])})
        tensor([0.5000, 1.0000])
    """
    named = metrics if isinstance(metrics, Mapping) else {f"metrics[{i}]": value for i, value in enumerate(metrics)}
    values = [zero_dim(value, name) for name, value in named.items()]
    if not values:
        raise ConfigError("stack_metrics needs at least one metric")
    stacked = torch.stack(values)
    return stacked if dtype is None else stacked.to(dtype)


def combine_losses(losses: Mapping[str, Tensor], weights: Mapping[str, Tensor | float] | None = None) -> Tensor:
    r"""Return the weighted sum :math:`\sum_i w_i l_i` of named losses.

    Args:
        losses: 0-D losses by name.
        weights: Weights by the same names, numbers or device scalars; a loss without one counts once.

    Returns:
        The total, 0-D, with gradients to every loss.

    Raises:
        ConfigError: A weight has no loss, or a loss is not 0-D.

    Example:
        >>> combine_losses({"fit": torch.tensor(2.0), "penalty": torch.tensor(3.0)}, {"penalty": 0.1})
        tensor(2.3000)
    """
    weights = weights or {}
    unknown = [name for name in weights if name not in losses]
    if unknown:
        raise ConfigError(f"no loss called {unknown[0]!r} for its weight; there are: {', '.join(losses)}")
    parts = [zero_dim(loss, f"loss {name!r}") * weights.get(name, 1.0) for name, loss in losses.items()]
    return stack_metrics(parts).sum()
