"""What the host hears of a monitor, and the row of values that a condition sees."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from zdtrain.errors import ConfigError, ZDTrainWarning

Action = Literal["warn", "skip", "clip", "stop"]


class MonitorWarning(ZDTrainWarning):
    """A monitor with ``then="warn"`` fired, or a monitor cannot do its work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitorEvent:
    """A monitor fired: what, when, on which values."""

    monitor: str
    """The condition in words, e.g. ``"loss > 100"``."""
    action: str
    """``"warn"``, ``"callback"``, ``"skip"``, ``"clip"`` or ``"stop"``."""
    step: int
    """Optimizer step, as loggers count it, from 0."""
    epoch: int | None
    """Epoch, from 0."""
    batch_idx: int | None
    """Last batch of the step within its epoch, from 0."""
    values: Mapping[str, float] = field(default_factory=dict)
    """Values of the step by metric, the loss, the gradient norm where it was measured and the learning rate among
    them."""
    first_nonfinite: str | None = None
    """The first metric, in the order in which they were logged, that is NaN or infinite; None if all are finite."""

    def __str__(self) -> str:
        bad = f"; first value that is not finite: {self.first_nonfinite}" if self.first_nonfinite else ""
        return f"step {self.step}: {self.monitor} ({self.action}){bad}"


# `Any` lets a configuration file's wrong value through to the constructor, which says what is right
Then = Action | Callable[[MonitorEvent], None] | Any
Number = float | Tensor | Any


class Row(dict[str, Tensor]):
    """The values of one step by name, 0-D tensors on the device.

    Holds what the step logged by the name it was logged under, ``"loss"`` (what training_step returned, where nothing
    of that name was logged), ``"lr"`` (of the first parameter group), ``"grad_norm"`` (before clipping) and the run's
    scalars.
    """

    def __missing__(self, name: str) -> Tensor:
        raise ConfigError(f"a monitor asks for {name!r}, which this step did not log; {nearest(name, self)}")


def nearest(name: str, known: Mapping[str, object] | list[str]) -> str:
    """Return a hint at what may have been meant by `name`."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(sorted(known)) or 'none'}"
