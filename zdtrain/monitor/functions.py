"""Functions as monitors, and the option that takes monitors and functions."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zdtrain.errors import ConfigError
from zdtrain.monitor.base import Monitor, RowMonitor, timing_of
from zdtrain.monitor.events import Number, Row, Then
from zdtrain.monitor.statistics import Statistics


class When(RowMonitor):
    """Any function of the row holds.

    Args:
        condition: Takes the row of a step (names to 0-D tensors on the device) and returns a 0-D bool tensor, by
            tensor operations only: inside a step that acts on the device it may be captured.
        then: ``"warn"``, ``"skip"``, ``"clip"``, ``"stop"``, or a function that takes the `MonitorEvent`.
        name: What the condition is called; the function's name by default.
        patience: Steps in a row in which the condition has to hold.
        cooldown: Steps after an action in which no other follows.
        after_step: First step that may act, counted from 0.
        clip_norm: With ``then="clip"``: gradient norm to clip to.

    Raises:
        ConfigError: An argument cannot be used.

    Example:
        >>> monitor = When(lambda row: row["loss"] > 2 * row["val"], then="skip", name="loss > 2 val")
        >>> monitor.describe()
        'loss > 2 val'
    """

    def __init__(
        self,
        condition: Callable[[Row], Tensor],
        *,
        then: Then = "warn",
        name: str | None = None,
        patience: int = 1,
        cooldown: int = 0,
        after_step: int = 0,
        clip_norm: Number | None = None,
    ) -> None:
        option = str(name or getattr(condition, "__name__", type(condition).__name__))
        timing = timing_of(option, patience, cooldown, after_step)
        super().__init__(None, then=then, timing=timing, clip_norm=clip_norm, option=option)
        if not callable(condition):
            raise ConfigError(f"When: {condition!r} is no function of the row.")
        self._function = condition

    def condition(self, row: Row) -> Tensor:
        """Return what the function says."""
        holds = self._function(row)
        if not isinstance(holds, Tensor) or holds.dtype != torch.bool or holds.numel() != 1:
            got = f"{tuple(holds.shape)} {holds.dtype}" if isinstance(holds, Tensor) else repr(holds)
            raise ConfigError(f"monitor {self._option!r} must return a 0-D bool tensor, got {got}.")
        return holds.reshape(())


def as_monitors(given: Any, option: str = "trainer.monitors") -> list[Monitor | Statistics]:
    """Return what an option asks for: monitors and statistics as they are, plain functions as warnings.

    Raises:
        ConfigError: There is something else in it.
    """
    if given is None:
        return []
    if isinstance(given, Monitor | Statistics) or callable(given):
        given = [given]
    if isinstance(given, str | Mapping) or not isinstance(given, Sequence):
        raise ConfigError(f"{option}={given!r}: use a list of monitors, e.g. [NonFinite('loss', then='skip')].")
    found: list[Monitor | Statistics] = []
    for index, item in enumerate(given):
        if isinstance(item, Monitor | Statistics):
            found.append(item)
        elif callable(item) and not isinstance(item, type):
            found.append(When(item))
        else:
            raise ConfigError(f"{option}[{index}]={item!r}: use a monitor, or a function from the row to a bool.")
    return found
