"""Measures contenders side by side on a machine that drifts: each in a process of its own, in turns of a few steps.

A turn is some ten milliseconds, so that what slows the machine down meets all contenders alike; only one of them runs
at a time, in an order that changes. Time is the processor time of the contender's process.
"""

import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

TURN_STEPS = 32


class Over(BaseException):
    """Ends a contender that would go on for ever."""


class Turn:
    """A contender's place in the order: it calls this before every step, and waits there until it is its turn again."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._steps_left = 1
        self._start = 0.0

    def __call__(self) -> None:
        self._steps_left -= 1
        if self._steps_left == 0:
            self._connection.send(time.process_time() - self._start)
            if not self._connection.recv():
                raise Over
            self._steps_left = TURN_STEPS
            self._start = time.process_time()


Contender = Callable[[Turn], None]
"""Takes steps, calling its turn before each, until it is stopped."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a step costs."""

    us_per_step: float
    """Median over rounds."""
    ratio: float
    """Median over rounds of the multiple of the first contender in the same round."""
    ratio_low: float
    ratio_high: float
    """First and last quartile of that."""


Costs = Mapping[str, Cost]


def show(costs: Costs, title: str, *, base: str) -> None:
    """Print a table."""
    print(f"\n{title:30} {'us/step':>9}  x {base} (quartiles)")
    for name, cost in costs.items():
        print(f"{name:30} {cost.us_per_step:9.1f} {cost.ratio:7.3f}  ({cost.ratio_low:.3f}-{cost.ratio_high:.3f})")


def as_json(results: Mapping[str, Costs]) -> dict[str, Any]:
    """Return results as plain values."""
    return {title: {name: asdict(cost) for name, cost in costs.items()} for title, costs in results.items()}


def measure(contenders: Mapping[str, Contender], *, rounds: int, turns: int, warm_up: int = 3) -> Costs:
    """Return the cost of a step of each contender, compared with the first one.

    Args:
        contenders: What to measure, by name.
        rounds: How many figures to take the median of.
        turns: Turns of each contender per round; a round should hold all that is done once in so many steps.
        warm_up: Turns that are not counted.
    """
    context = multiprocessing.get_context("fork")
    ends: dict[str, Connection] = {}
    processes = []
    try:
        for name, contender in contenders.items():
            ends[name], theirs = context.Pipe()
            processes.append(context.Process(target=_contend, args=(contender, theirs), daemon=True))
            processes[-1].start()
            theirs.close()
            ends[name].recv()  # it is ready to take its first step
        for _ in range(warm_up):
            _take_turns(ends)
        seconds: dict[str, list[float]] = {name: [] for name in ends}
        for _ in range(rounds):
            for name, spent in _round(ends, turns).items():
                seconds[name].append(spent)
    finally:
        for end, process in zip(ends.values(), processes, strict=True):
            with suppress(OSError):  # it failed
                end.send(False)
            process.join()
    base = next(iter(seconds.values()))
    return {name: _cost(spent, base, turns * TURN_STEPS) for name, spent in seconds.items()}


def _contend(contender: Contender, connection: Connection) -> None:
    with suppress(Over):
        contender(Turn(connection))


def _take_turns(ends: Mapping[str, Connection]) -> dict[str, float]:
    spent = {}
    for name in random.sample(list(ends), len(ends)):  # each leaves the caches to the next one
        ends[name].send(True)
        spent[name] = ends[name].recv()
    return spent


def _round(ends: Mapping[str, Connection], turns: int) -> dict[str, float]:
    spent = [_take_turns(ends) for _ in range(turns)]
    return {name: sum(turn[name] for turn in spent) for name in ends}


def _cost(seconds: list[float], base: list[float], steps: int) -> Cost:
    ratios = [own / other for own, other in zip(seconds, base, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return Cost(us_per_step=statistics.median(seconds) / steps * 1e6, ratio=middle, ratio_low=low, ratio_high=high)
