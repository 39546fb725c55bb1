"""Conditions with a memory, followed on the host: for monitors that only inform, from the numbers that have arrived."""

import math
from typing import Any, Protocol

from zdtrain.monitor.base import Monitor
from zdtrain.monitor.conditions import INF, Plateau, Spike


class Follower(Protocol):
    """The memory of one monitor; the same rules as those of its panel."""

    def decide(self, value: float, limit: float) -> bool:
        """Take in a value; return whether the condition holds against the limit that it is compared with."""

    def state_dict(self) -> dict[str, Any]:
        """Return the memory."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a memory."""


class PlateauFollower:
    """See `Plateau`."""

    def __init__(self, monitor: Plateau) -> None:
        self._sign, self._best = monitor.sign, INF

    def decide(self, value: float, limit: float) -> bool:
        """See `Follower`."""
        value *= self._sign
        better = value < self._best - limit
        if better:
            self._best = value
        return not better

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

    def decide(self, value: float, limit: float) -> bool:
        """See `Follower`."""
        ceiling = self._mean + limit * math.sqrt(self._variance)
        spike = value > ceiling and self._count >= self._min_steps
        delta = (ceiling if spike else value) - self._mean
        if not math.isfinite(delta):
            delta = 0.0
        self._count += 1
        weight = max(1 / self._count, self._least_weight)
        shift = weight * delta
        self._mean += shift
        self._variance = (self._variance + delta * shift) * (1 - weight)
        return spike

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
