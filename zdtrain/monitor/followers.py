"""Conditions with a memory, followed on the host: for monitors that only inform, from the numbers that have arrived."""

import math
from collections.abc import Sequence
from typing import Any, Protocol

from zdtrain.monitor.base import Monitor
from zdtrain.monitor.conditions import INF, Plateau, Spike


class Follower(Protocol):
    """The memory of one monitor; the same rules as those of its panel."""

    def decide(self, values: Sequence[float], limit: float) -> list[bool]:
        """Take in successive values; return for each whether the condition holds against the limit."""

    def state_dict(self) -> dict[str, Any]:
        """Return the memory."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a memory."""


class PlateauFollower:
    """See `Plateau`."""

    def __init__(self, monitor: Plateau) -> None:
        self._sign, self._best = monitor.sign, INF

    def decide(self, values: Sequence[float], limit: float) -> list[bool]:
        """See `Follower`."""
        sign, best, holds = self._sign, self._best, []
        for number in values:
            value = number * sign
            better = value < best - limit
            if better:
                best = value
            holds.append(not better)
        self._best = best
        return holds

    def state_dict(self) -> dict[str, Any]:
        """See `Follower`."""
        return {"best": self._best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Follower`."""
        self._best = state["best"]


class SpikeFollower:
    """See `Spike`."""

    def __init__(self, monitor: Spike) -> None:
        self._min_steps, self._least_weight = monitor.min_steps, monitor.least_weight
        self._mean = self._variance = 0.0
        self._count = 0

    def decide(self, values: Sequence[float], limit: float) -> list[bool]:
        """See `Follower`."""
        mean, variance, count, holds = self._mean, self._variance, self._count, []
        for value in values:
            ceiling = mean + limit * math.sqrt(variance)
            spike = value > ceiling and count >= self._min_steps
            delta = (ceiling if spike else value) - mean
            if not math.isfinite(delta):
                delta = 0.0
            count += 1
            weight = max(1 / count, self._least_weight)
            shift = weight * delta
            mean += shift
            variance = (variance + delta * shift) * (1 - weight)
            holds.append(spike)
        self._mean, self._variance, self._count = mean, variance, count
        return holds

    def state_dict(self) -> dict[str, Any]:
        """See `Follower`."""
        return {"mean": self._mean, "variance": self._variance, "count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Follower`."""
        self._mean, self._variance, self._count = state["mean"], state["variance"], state["count"]


def follower_of(monitor: Monitor) -> Follower | None:
    """Return what follows the monitor; None for a condition without a memory."""
    if isinstance(monitor, Plateau):
        return PlateauFollower(monitor)
    return SpikeFollower(monitor) if isinstance(monitor, Spike) else None
