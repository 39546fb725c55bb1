"""Learning rates that schedulers on the host write, for a device whose skipped steps the host hears of later."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from zdtrain.errors import FallbackReason

SCHEDULED = ("lr", "betas", "momentum")  # what torch's schedulers write


class RatesByCount:
    """Lets each step use the rate that belongs to the number of updates that counted, which only the device knows.

    A scheduler on the host is ahead of the device by the updates that belong to skipped steps it has not heard of, so
    it has passed by every rate that a step still needs. The last ones are kept on the device. While the scheduler
    moves, the optimizer's tensors hold its own rate; at all other times that of the updates that counted.

    Args:
        optimizer: The optimizer, whose options are tensors on the device.
        hold: Whether the step's update is held back, shape=(), bool, device-resident.
        size: How many updates the scheduler can be ahead, and one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, hold: Tensor, size: int) -> None:
        self._optimizer = optimizer
        self._hold = hold
        self._size = size
        self._tensors: list[Tensor] = []
        self._passed = hold.new_empty(0)  # shape=(size, tensors), float64; by number of updates modulo size
        self._place = hold.new_zeros(1, dtype=torch.int64)  # shape=(1,), the row of the updates that counted
        self._zero = torch.zeros_like(self._place)

    def start(self, updates: int) -> None:
        """Go on from here: the host has heard of all steps, and so many updates counted."""
        self._tensors = list(tensors_of(self._optimizer))
        self._passed = self._hold.new_zeros((self._size, len(self._tensors)), dtype=torch.float64)
        self._place.fill_(updates % self._size)
        self._keep(updates)

    @contextmanager
    def moving(self, progress: Any) -> Iterator[None]:
        """Let schedulers move in the body.

        Args:
            progress: Counts the updates on the host, in `completed`.
        """
        before = progress.completed
        self._show(self._passed[before % self._size])
        yield
        moved = progress.completed - before
        if moved:
            self._keep(progress.completed)
            self._place.add_(torch.where(self._hold, self._zero, moved)).remainder_(self._size)
        self.show()

    def counted(self) -> Tensor:
        """Return the rates of the updates that counted, shape=(tensors,), float64."""
        return self._passed.index_select(0, self._place)[0]

    def show(self, rates: Tensor | None = None) -> None:
        """Write `rates`, shape=(tensors,), into the tensors; by default those of the updates that counted."""
        self._show(self.counted() if rates is None else rates)

    def _keep(self, updates: int) -> None:
        if self._tensors:
            self._passed[updates % self._size].copy_(torch.stack([tensor.double() for tensor in self._tensors]))

    def _show(self, rates: Tensor) -> None:
        if self._tensors:
            torch._foreach_copy_(self._tensors, list(rates.unbind()))


def tensors_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the tensors among the options that a scheduler writes."""
    for group in optimizer.param_groups:
        yield from (leaf for name in SCHEDULED for leaf in tree_leaves(group.get(name)) if isinstance(leaf, Tensor))


def reason_for_late_schedule(optimizer: torch.optim.Optimizer, schedulers: Sequence[Any]) -> FallbackReason | None:
    """Return why the steps behind a skipped one use another rate until the host hears of it; None where they do not."""
    cycles = any(getattr(scheduler, "cycle_momentum", False) for scheduler in schedulers)
    numbers = [
        name
        for name in (SCHEDULED if cycles else SCHEDULED[:1])
        if any(isinstance(leaf, float) for group in optimizer.param_groups for leaf in tree_leaves(group.get(name)))
    ]
    if not numbers:
        return None
    name = type(optimizer).__name__
    message = (
        f"{' and '.join(numbers)} of {name} are numbers on the host, which hears of a skipped step later: the steps in "
        "between are made with those of one update more. A schedule on the device is exact, "
        "SimpleAdam(schedule=...), and so is a learning rate that is a tensor, lr=torch.tensor(...)"
    )
    return FallbackReason(code="late-schedule", message=message)


def reason_for_several_schedules() -> FallbackReason:
    """Return why each step is waited for where schedulers move in different steps."""
    message = (
        "schedulers of different frequency follow the steps, and which of them move depends on the steps that are "
        "skipped: the host waits for each step to know. Give them the same frequency, or combine them, ChainedScheduler"
    )
    return FallbackReason(code="late-schedule", message=message)


def copied(value: Any) -> Any:
    """Return an option of an optimizer's group as a copy that nobody writes to."""
    if isinstance(value, tuple):
        return tuple([copied(item) for item in value])
    return value.clone() if isinstance(value, Tensor) else value
