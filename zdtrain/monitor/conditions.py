"""Conditions on the values of a step, and what follows when one holds."""

import math
from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from zdtrain.errors import ConfigError
from zdtrain.monitor.base import Monitor, RowMonitor, check_whole, metric_names, plain, timing_of
from zdtrain.monitor.events import Number, Row, Then

INF = math.inf


class Threshold(RowMonitor):
    """A metric is above, or below, a threshold.

    The thresholds are tensors on the device: ``monitor.above = 5.0`` fills one in place, while training goes on and
    inside captured steps. NaN is neither above nor below anything; `NonFinite` notices it.

    Args:
        metric: Name of a logged metric or scalar, ``"loss"``, ``"grad_norm"`` or ``"lr"``.
        above: Holds above this: a number, or a 0-D tensor, which is the threshold from then on.
        below: Holds below this.
        then: ``"warn"``, ``"skip"``, ``"clip"``, ``"stop"``, or a function that takes the `MonitorEvent`.
        patience: Steps in a row in which the condition has to hold.
        cooldown: Steps after an action in which no other follows.
        after_step: First step that may act, counted from 0.
        clip_norm: With ``then="clip"``: gradient norm to clip to; `above` for ``"grad_norm"``.

    Raises:
        ConfigError: An argument cannot be used.

    Example:
        >>> monitor = Threshold("loss", above=100.0, then="stop")
        >>> monitor.above = 50.0
        >>> monitor.describe()
        'loss > 50'
    """

    elementwise = True

    def __init__(
        self,
        metric: str,
        *,
        above: Number | None = None,
        below: Number | None = None,
        then: Then = "warn",
        patience: int = 1,
        cooldown: int = 0,
        after_step: int = 0,
        clip_norm: Number | None = None,
    ) -> None:
        option = f"Threshold({metric!r})"
        if above is None and below is None:
            raise ConfigError(f"{option} has no threshold: give it above=, below= or both.")
        if then == "clip" and clip_norm is None and metric == "grad_norm" and not isinstance(above, Tensor):
            clip_norm = above
        super().__init__(
            metric_names(option, metric),
            then=then,
            timing=timing_of(option, patience, cooldown, after_step),
            clip_norm=clip_norm,
            option=option,
        )
        self._metric = metric
        self._above = None if above is None else self._scalar("above", above)
        self._below = None if below is None else self._scalar("below", below)
        self._shown.update(
            (name, value) for name, value in (("above", above), ("below", below)) if isinstance(value, int | float)
        )

    @property
    def above(self) -> Tensor | None:
        """The upper threshold, 0-D; assigning a number fills it in place."""
        return self._above

    @above.setter
    def above(self, value: float | Tensor) -> None:
        self._assign("above", self._above, value)

    @property
    def below(self) -> Tensor | None:
        """The lower threshold, 0-D; assigning a number fills it in place."""
        return self._below

    @below.setter
    def below(self, value: float | Tensor) -> None:
        self._assign("below", self._below, value)

    def condition(self, row: Row) -> Tensor:
        """Return whether the metric is outside the thresholds."""
        value = row[self._metric]
        if self._below is None:
            assert self._above is not None
            return value > self._above
        low = value < self._below
        return low if self._above is None else low | (value > self._above)

    def describe(self) -> str:
        """Return the condition in words."""
        sides = (("above", ">", self._above), ("below", "<", self._below))
        return " or ".join(
            f"{self._metric} {sign} {plain(self._shown.get(name, 'a tensor'))}"
            for name, sign, tensor in sides
            if tensor is not None
        )


class NonFinite(RowMonitor):
    """A metric is NaN or infinite.

    Args:
        metric: Name of a metric, or several; the loss and the gradient norm by default.
        then: ``"warn"``, ``"skip"``, ``"clip"``, ``"stop"``, or a function that takes the `MonitorEvent`.
        patience: Steps in a row in which the condition has to hold.
        cooldown: Steps after an action in which no other follows.
        after_step: First step that may act, counted from 0.
        stop_after: With ``then="skip"``: stop the run when this many steps in a row were bad.
        find_module: When the run stops, run the bad step again with hooks and name the first module whose output is
            not finite. Keeps the batches of the last `max_lag_steps` steps.

    Raises:
        ConfigError: An argument cannot be used.

    Example:
        >>> NonFinite("loss", then="skip", stop_after=10).describe()
        'loss is not finite'
    """

    elementwise = True

    def __init__(
        self,
        metric: str | Sequence[str] = ("loss", "grad_norm"),
        *,
        then: Then = "warn",
        patience: int = 1,
        cooldown: int = 0,
        after_step: int = 0,
        stop_after: int | None = None,
        find_module: bool = False,
    ) -> None:
        option = f"NonFinite({metric!r})"
        timing = timing_of(option, patience, cooldown, after_step)
        super().__init__(metric_names(option, metric), then=then, timing=timing, option=option)
        if stop_after is not None:
            check_whole(option, "stop_after", stop_after, 1)
            if then != "skip":
                raise ConfigError(f"{option}: stop_after={stop_after} does nothing without then='skip'.")
        if find_module and self.action not in ("skip", "stop"):
            raise ConfigError(f"{option}: find_module=True does nothing without then='skip' or 'stop'.")
        self.stop_after = stop_after
        self.find_module = find_module

    def condition(self, row: Row) -> Tensor:
        """Return whether one of the metrics is not finite."""
        assert self.metrics is not None
        values = [row[metric] for metric in self.metrics if metric in row]
        gap = values[0] - values[0]  # 0 where finite, else NaN; isfinite takes three times as long
        for value in values[1:-1]:
            gap = gap + (value - value)
        return gap != (values[-1] - values[-1] if len(values) > 1 else 0)

    def describe(self) -> str:
        """Return the condition in words."""
        assert self.metrics is not None
        return f"{' or '.join(self.metrics)} is not finite"


class Plateau(Monitor):
    r"""A metric has not improved for `patience` steps.

    Args:
        metric: Name of a logged metric or scalar, ``"loss"``, ``"grad_norm"`` or ``"lr"``.
        patience: Steps in a row without improvement.
        min_delta: Least change that counts as an improvement.
        mode: ``"min"`` where lower is better, ``"max"`` where higher is.
        then: ``"warn"``, ``"skip"``, ``"clip"``, ``"stop"``, or a function that takes the `MonitorEvent`.
        cooldown: Steps after an action in which no other follows; `patience` if None.
        after_step: First step that may act, counted from 0.

    Raises:
        ConfigError: An argument cannot be used.

    Example:
        >>> Plateau("loss", patience=500, then="stop").describe()
        'loss has not improved for 500 steps'
    """

    def __init__(
        self,
        metric: str,
        *,
        patience: int = 100,
        min_delta: Number = 0.0,
        mode: Literal["min", "max"] = "min",
        then: Then = "warn",
        cooldown: int | None = None,
        after_step: int = 0,
    ) -> None:
        option = f"Plateau({metric!r})"
        if mode not in ("min", "max"):
            raise ConfigError(f"{option}: mode={mode!r}; use 'min' or 'max'.")
        timing = timing_of(option, patience, patience if cooldown is None else cooldown, after_step)
        super().__init__(metric_names(option, metric), then=then, timing=timing, option=option)
        self._metric = metric
        self.sign = 1.0 if mode == "min" else -1.0
        self.limit = self._scalar("min_delta", min_delta)  # shape=(), least change that counts

    def describe(self) -> str:
        """Return the condition in words."""
        return f"{self._metric} has not improved for {self.timing.patience} steps"


class Spike(Monitor):
    r"""A metric is far above its running mean.

    .. math::
        x > \mu + k \sigma, \qquad
        d = x - \mu, \quad \mu \leftarrow \mu + a d, \quad
        \sigma^2 \leftarrow (1 - a) (\sigma^2 + a d^2), \quad a = \max(1/n, 1 - \beta)

    A value enters the mean and the deviation after it was judged, limited to :math:`\mu + k \sigma`, so that one spike
    does not hide the next and a lasting change becomes the new normal. One that is not finite counts as the mean.

    Args:
        metric: Name of a logged metric or scalar, ``"loss"``, ``"grad_norm"`` or ``"lr"``.
        factor: Deviations :math:`k` above the mean.
        decay: Decay :math:`\beta` of the mean and the deviation, at least 0 and less than 1.
        min_steps: Values that have to be known before the condition may hold.
        then: ``"warn"``, ``"skip"``, ``"clip"``, ``"stop"``, or a function that takes the `MonitorEvent`.
        patience: Steps in a row in which the condition has to hold.
        cooldown: Steps after an action in which no other follows.
        after_step: First step that may act, counted from 0.
        clip_norm: With ``then="clip"``: gradient norm to clip to.

    Raises:
        ConfigError: An argument cannot be used.

    References:
        West, *Updating mean and variance estimates: an improved method* (1979).
    """

    def __init__(
        self,
        metric: str,
        *,
        factor: Number = 6.0,
        decay: Number = 0.98,
        min_steps: int = 20,
        then: Then = "warn",
        patience: int = 1,
        cooldown: int = 0,
        after_step: int = 0,
        clip_norm: Number | None = None,
    ) -> None:
        option = f"Spike({metric!r})"
        timing = timing_of(option, patience, cooldown, after_step)
        super().__init__(metric_names(option, metric), then=then, timing=timing, clip_norm=clip_norm, option=option)
        check_whole(option, "min_steps", min_steps, 2)
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay < 1:
            raise ConfigError(f"{option}: decay={decay!r}; use a number that is at least 0 and less than 1.")
        self._metric, self.least_weight, self.min_steps = metric, 1 - decay, min_steps
        self.limit = self._positive("factor", factor)  # shape=(), in deviations
        self._shown.update({"factor": factor} if isinstance(factor, int | float) else {})

    @property
    def factor(self) -> Tensor:
        """Deviations above the mean, 0-D; assigning a number fills it in place."""
        return self.limit

    @factor.setter
    def factor(self, value: float | Tensor) -> None:
        self._assign("factor", self.limit, value)

    def describe(self) -> str:
        """Return the condition in words."""
        return f"{self._metric} > mean + {plain(self._shown.get('factor', 'a tensor'))} deviations"
