"""From "the condition holds" to "the monitor acts": patience, cooldown, first step; on the device and on the host."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Timing:
    """When a monitor whose condition holds acts."""

    patience: int = 1
    """Steps in a row in which the condition has to hold."""
    cooldown: int = 0
    """Steps after an action in which no other follows."""
    after_step: int = 0
    """First step that may act, counted from 0."""


class DeviceGate:
    """Decides in tensor operations, inside the step.

    Args:
        timing: The rules.
        device: The training device.
    """

    def __init__(self, timing: Timing, device: torch.device) -> None:
        self._timing = timing
        self.in_row = torch.zeros((), dtype=torch.int64, device=device)  # shape=(), steps the condition held so far
        self.next_step = torch.zeros((), dtype=torch.int64, device=device)  # shape=(), end of the cooldown

    @property
    def counts_steps(self) -> bool:
        """Whether `decide` needs the step number."""
        return bool(self._timing.cooldown or self._timing.after_step)

    def decide(self, holds: Tensor, step: Tensor) -> Tensor:
        """Return whether to act.

        Args:
            holds: Whether the condition holds in this step, 0-D bool.
            step: The step number, 0-D int64.
        """
        timing = self._timing
        if timing.after_step:
            holds = holds & (step >= timing.after_step)
        if timing.patience > 1:
            self.in_row.add_(1).mul_(holds)
            holds = self.in_row >= timing.patience
        if timing.cooldown:
            holds = holds & (step >= self.next_step)
            self.next_step.copy_(torch.where(holds, step + 1 + timing.cooldown, self.next_step))
        return holds

    def tensors(self) -> dict[str, Tensor]:
        """Return what a step writes."""
        return {"in_row": self.in_row, "next_step": self.next_step}


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
