"""What all monitors have in common."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from zdtrain.errors import ConfigError, yaml_hint
from zdtrain.monitor.events import Action, Number, Row, Then, nearest
from zdtrain.monitor.gate import Timing


class Monitor:
    """A condition on the values of a step, with an action.

    ``then="skip"``, ``"clip"`` and ``"stop"`` act on the device, inside the step that the condition holds in.
    ``then="warn"`` and callables act on the host, once the values have arrived there.

    Args:
        metrics: What the condition looks at; None for anything.
        then: What happens.
        timing: When.
        clip_norm: With ``then="clip"``: the gradient norm to clip to.
        option: How errors call the monitor.
    """

    def __init__(
        self,
        metrics: Sequence[str] | None,
        *,
        then: Then,
        timing: Timing,
        clip_norm: Number | None = None,
        option: str,
    ) -> None:
        if not callable(then) and then not in get_args(Action):
            hint = nearest(str(then), list(get_args(Action)))
            raise ConfigError(f"{option}: then={then!r} is no action; {hint} (or a function of the event)")
        if then == "clip" and clip_norm is None:
            raise ConfigError(f"{option}: then='clip' needs clip_norm=, the gradient norm to clip to.")
        if then != "clip" and clip_norm is not None:
            raise ConfigError(f"{option}: clip_norm={clip_norm!r} does nothing without then='clip'.")
        self.metrics = None if metrics is None else tuple(metrics)
        self.then = then
        self.timing = timing
        self._option = option
        self._values: dict[str, Tensor] = {}  # thresholds by name, 0-D
        self._shown: dict[str, float] = {}  # thresholds as the host wrote them
        self.clip_norm = None if clip_norm is None else self._positive("clip_norm", clip_norm)

    @property
    def action(self) -> str:
        """``"warn"``, ``"callback"``, ``"skip"``, ``"clip"`` or ``"stop"``."""
        return "callback" if callable(self.then) else self.then

    @property
    def acts_in_step(self) -> bool:
        """Whether the action belongs into the step."""
        return self.action in ("skip", "clip", "stop")

    def describe(self) -> str:
        """Return the condition in words."""
        return self._option

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.describe()!r}, then={self.action!r})"

    def to(self, device: torch.device) -> None:
        """Move thresholds; the tensor objects stay the same."""
        for value in self._values.values():
            if value.device != device:
                value.data = value.data.to(device)

    def _scalar(self, name: str, value: float | Tensor) -> Tensor:
        if isinstance(value, Tensor):
            if value.dim() != 0:
                raise ConfigError(f"{self._option}: {name} must be one number, got shape {tuple(value.shape)}.")
            return value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{self._option}: {name}={value!r} is no number{yaml_hint(value)}.")
        if math.isnan(value):
            raise ConfigError(f"{self._option}: {name}=nan compares with nothing; use NonFinite to notice NaN.")
        tensor = torch.full((), float(value))  # shape=(), dtype=float32, device-resident
        self._values[name] = tensor
        return tensor

    def _positive(self, name: str, value: float | Tensor) -> Tensor:
        scalar = self._scalar(name, value)
        if not isinstance(value, Tensor) and value <= 0:
            raise ConfigError(f"{self._option}: {name}={value!r}; use a number above 0.")
        return scalar

    def _assign(self, name: str, tensor: Tensor | None, value: float | Tensor) -> None:
        if tensor is None:
            raise ConfigError(f"{self._option} has no {name} to change: give it one, e.g. {name}=float('inf').")
        if isinstance(value, Tensor):
            tensor.copy_(value)
        elif isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{self._option}: {name}={value!r} is no number{yaml_hint(value)}.")
        else:
            tensor.fill_(value)
            self._shown[name] = value


class RowMonitor(Monitor, ABC):
    """A monitor whose condition is a function of the step's row, without a memory."""

    elementwise = False
    """Whether `condition` may be asked about the values of many steps at once."""

    @abstractmethod
    def condition(self, row: Row) -> Tensor:
        """Return whether the condition holds, 0-D bool."""


def metric_names(option: str, metric: Any) -> tuple[str, ...]:
    """Return the names that an argument stands for: one, or a sequence of them."""
    names = (metric,) if isinstance(metric, str) else tuple(metric) if isinstance(metric, Sequence) else (metric,)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f"{option}: {metric!r} is no name of a metric.")
    return names


def timing_of(option: str, patience: int, cooldown: int, after_step: int) -> Timing:
    """Return the rules of three checked arguments."""
    check_whole(option, "patience", patience, 1)
    check_whole(option, "cooldown", cooldown, 0)
    check_whole(option, "after_step", after_step, 0)
    return Timing(patience=patience, cooldown=cooldown, after_step=after_step)


def check_whole(option: str, name: str, value: Any, least: int) -> None:
    """Refuse what is no whole number, or a smaller one than `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{option}: {name}={value!r}; use a whole number that is at least {least}.")


def plain(value: Any) -> str:
    """Return a number as people write it."""
    return f"{value:g}" if isinstance(value, int | float) else str(value)
