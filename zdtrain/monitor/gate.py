"""From "the condition holds" to "the monitor acts": patience, cooldown, first step; on the device and on the host."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from zdtrain.monitor.numbers import values_at


@dataclass(frozen=True, kw_only=True)
class Timing:
    """When a monitor whose condition holds acts."""

    patience: int = 1
    """Steps in a row in which the condition has to hold."""
    cooldown: int = 0
    """Steps after an action in which no other follows."""
    after_step: int = 0
    """First step that may act, counted from 0."""


class StepGates:
    """Decides for several conditions at once, inside the step: in tensor operations, or in numbers that the host sees.

    Args:
        timings: The rules of each.
        device: The training device.
    """

    def __init__(self, timings: Sequence[Timing], device: torch.device) -> None:
        def whole(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        self._patience = whole([timing.patience for timing in timings])
        self._after = whole([timing.after_step for timing in timings])
        self._pause = whole([1 + timing.cooldown for timing in timings])
        self._one, self._none = whole([1] * len(timings)), whole([0] * len(timings))
        self._waits = any(timing.patience > 1 for timing in timings)
        self._starts_late = any(timing.after_step for timing in timings)
        self._pauses = any(timing.cooldown for timing in timings)
        self.in_row = whole([0] * len(timings))  # shape=(n,), steps in which the condition held so far
        self.next_step = whole([0] * len(timings))  # shape=(n,), end of the cooldown
        self.step = whole([0] * len(timings))  # shape=(n,), number of the step
        self._open = torch.zeros(len(timings), dtype=torch.bool, device=device)
        self._timings = list(enumerate(timings))
        self._timed = [(i, timing) for i, timing in self._timings if timing != Timing()]
        self._of_others = values_at([i for i, timing in self._timings if timing == Timing()])
        self._others_held = True  # in the step before, as far as is known
        on_host = device.type == "cpu"
        self._here = [t.numpy().data for t in (self.in_row, self.next_step)] if on_host else None
        self._step_here = 0

    def decide(self, holds: Tensor) -> None:
        """Turn whether each condition holds, shape=(n,), bool, into whether to act, in place."""
        if self._starts_late:
            holds.logical_and_(torch.ge(self.step, self._after, out=self._open))
        if self._waits:
            torch.where(holds, self.in_row.add_(self._one), self._none, out=self.in_row)
            torch.ge(self.in_row, self._patience, out=holds)
        if self._pauses:
            holds.logical_and_(torch.ge(self.step, self.next_step, out=self._open))
            torch.where(holds, self.step + self._pause, self.next_step, out=self.next_step)
        if self._starts_late or self._pauses:
            self.step.add_(self._one)

    def start(self, step: int) -> None:
        """Take note of the number of the next step."""
        self.step.fill_(step)
        self._step_here = step

    def decide_here(self, holds: list[bool]) -> list[bool]:
        """Return what `decide` writes, on a CPU, where the host sees the counts for nothing."""
        step = self._step_here
        self._step_here += 1
        if not self._timed:
            return holds
        assert self._here is not None
        acts, (in_row, next_step) = list(holds), self._here
        others_hold = True in self._of_others(holds)
        timings = self._timings if others_hold or self._others_held else self._timed
        self._others_held = others_hold
        for i, timing in timings:
            if not holds[i] or step < timing.after_step:
                acts[i] = False
                if in_row[i]:
                    in_row[i] = 0
                continue
            if self._waits:
                in_row[i] += 1
            acts[i] = (timing.patience == 1 or in_row[i] >= timing.patience) and step >= next_step[i]
            if acts[i] and self._pauses:
                next_step[i] = step + 1 + timing.cooldown
        return acts

    def state(self) -> dict[str, Tensor]:
        """Return what a run that goes on needs to know, by name, each of shape=(n,)."""
        return {"in_row": self.in_row, "next_step": self.next_step}

    def tensors(self) -> dict[str, Tensor]:
        """Return what a step writes."""
        return {**self.state(), "step": self.step, "open": self._open}


class HostGate:
    """Decides on the host, about conditions whose outcome has arrived.

    Args:
        timing: The rules.
    """

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._in_row = 0
        self._next_step = timing.after_step

    def decide(self, holds: bool, step: int) -> bool:
        """Return whether to act."""
        if step < self._timing.after_step:
            return False
        self._in_row = self._in_row + 1 if holds else 0
        if self._in_row < self._timing.patience or step < self._next_step:
            return False
        self._next_step = step + 1 + self._timing.cooldown
        return True

    def acting(self, holds: Sequence[float], steps: Sequence[int]) -> list[int]:
        """Decide about steps in a row; return the indices of those to act in."""
        if not self._in_row and not any(holds):
            return []
        if self._in_row + len(steps) < self._timing.patience and steps and steps[0] >= self._timing.after_step:
            held = list(takewhile(bool, reversed(holds)))  # too few in a row, whichever they are
            self._in_row = len(held) + (self._in_row if len(held) == len(steps) else 0)
            return []
        return [i for i, (held, step) in enumerate(zip(holds, steps, strict=True)) if self.decide(bool(held), step)]

    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        return {"in_row": self._in_row, "next_step": self._next_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over counts."""
        self._in_row, self._next_step = state["in_row"], max(state["next_step"], self._timing.after_step)
