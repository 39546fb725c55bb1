"""The conditions of monitors as rules for Python numbers: for the host, where it sees a step's values or gets them.

The panels state the same rules in tensor operations, for a device.
"""

import math
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from itertools import repeat
from operator import gt, le, lt
from typing import Any

from zdtrain.monitor.base import Monitor, RowMonitor
from zdtrain.monitor.conditions import INF, NonFinite, Plateau, Spike, Threshold
from zdtrain.monitor.numbers import values_at

Rule = Callable[..., bool]
"""Takes in a step's values of the metrics that a monitor looks at, then its limits; returns if its condition holds."""
Memory = Mapping[str, MutableSequence[float]]
"""What rules remember from step to step: for each name a number per monitor."""
MEMORY: dict[type[Monitor], dict[str, float]] = {
    Threshold: {},
    NonFinite: {},
    Plateau: {"best": INF},
    Spike: {"mean": 0.0, "variance": 0.0, "count": 0.0},
}
"""What a rule for a kind of monitor remembers, and what it starts with."""


def kind_of(monitor: Monitor) -> type[Monitor] | None:
    """Return the kind of a monitor that there is a rule for; None for a function of the row.

    The condition of a subclass is a function of the row, too, since it may be another one.
    """
    kinds = (kind for kind in MEMORY if isinstance(monitor, kind))
    return next((kind for kind in kinds if type(monitor) is kind or not isinstance(monitor, RowMonitor)), None)


def rule_for(monitor: Monitor, memory: Memory, place: int = 0) -> Rule:
    """Return the rule of a monitor of a known kind.

    Args:
        monitor: The monitor.
        memory: What rules remember.
        place: The monitor's place there.
    """
    if isinstance(monitor, Threshold):
        return _threshold(monitor)
    if isinstance(monitor, Plateau):
        return _plateau(monitor, memory["best"], place)
    if isinstance(monitor, Spike):
        return _spike(monitor, memory, place)
    return _is_not_finite


def _threshold(monitor: Threshold) -> Rule:
    if monitor.below is None:
        return lambda x, above: x > above
    if monitor.above is None:
        return lambda x, below: x < below
    return lambda x, above, below: x > above or x < below


def _is_not_finite(*numbers: float) -> bool:
    return not all(map(math.isfinite, numbers))


def _plateau(monitor: Plateau, best: MutableSequence[float], place: int) -> Rule:
    sign = monitor.sign

    def has_not_improved(x: float, least: float) -> bool:
        x *= sign
        if x < best[place] - least:
            best[place] = x
            return False
        return True

    return has_not_improved


def _spike(monitor: Spike, memory: Memory, place: int) -> Rule:
    mean, variance, count = memory["mean"], memory["variance"], memory["count"]
    min_steps, least_weight = monitor.min_steps, monitor.least_weight

    def is_spike(x: float, factor: float) -> bool:
        before, spread = mean[place], variance[place]
        limit = before + factor * math.sqrt(spread)
        spike = x > limit and count[place] >= min_steps
        delta = (limit if spike else x) - before
        if not math.isfinite(delta):
            delta = 0.0
        count[place] += 1
        weight = max(1 / count[place], least_weight)
        shift = weight * delta
        mean[place] = before + shift
        variance[place] = (spread + delta * shift) * (1 - weight)
        return spike

    return is_spike


def never_holds(monitor: Monitor, columns: Sequence[Sequence[float]], limits: Sequence[float]) -> bool:
    """Return whether it shows at once that a condition without a memory holds in none of many steps.

    Args:
        monitor: The monitor.
        columns: The values that it looks at, of each metric those of all steps.
        limits: Its limits.
    """
    if isinstance(monitor, NonFinite):
        return math.isfinite(sum(map(sum, columns)))
    if not isinstance(monitor, Threshold):
        return False
    exceeds = [] if monitor.above is None else [gt]
    falls_below = [] if monitor.below is None else [lt]
    sides = zip(exceeds + falls_below, limits, strict=True)
    return not any(any(map(beyond, columns[0], repeat(limit))) for beyond, limit in sides)


def rules_out(
    conditions: Sequence[tuple[Threshold | NonFinite, Sequence[int], Sequence[int]]],
) -> Callable[[Sequence[float]], bool]:
    """Return what takes many numbers and returns whether one look shows that none of `conditions` holds.

    Args:
        conditions: Monitors, with the places of their metrics and of their limits among the numbers.
    """
    finite: list[int] = []
    least: list[int] = []
    greatest: list[int] = []  # no number at a place of `least` is above the one at the same place of `greatest`
    for monitor, places, limits in conditions:
        if isinstance(monitor, NonFinite):
            finite += places
            continue
        if monitor.above is not None:
            least.append(places[0])
            greatest.append(limits[0])
        if monitor.below is not None:
            least.append(limits[-1])
            greatest.append(places[0])
    finite_of, least_of, greatest_of = map(values_at, (finite, least, greatest))

    def shows_at_once(numbers: Sequence[float]) -> bool:
        return math.isfinite(sum(finite_of(numbers))) and all(map(le, least_of(numbers), greatest_of(numbers)))

    return shows_at_once


def limits_of(monitor: Monitor) -> list[Any]:
    """Return the limits that a rule compares with, 0-D tensors, in the order in which it takes them."""
    if isinstance(monitor, Threshold):
        return [limit for limit in (monitor.above, monitor.below) if limit is not None]
    return [monitor.limit] if isinstance(monitor, Plateau | Spike) else []
