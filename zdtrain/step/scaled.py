"""How an optimizer's update is held back when the gradients of a scaled loss overflowed."""

import inspect
from collections.abc import Callable
from typing import Any, Protocol

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.optim import SGD, Optimizer

from zdtrain.monitor.masking import KeepAndPutBack, host_state
from zdtrain.step.hooks import has_step_hooks

Step = Callable[[], Any]


class Update(Protocol):
    """One way to update parameters unless gradients overflowed."""

    unscales: bool
    """Whether the update divides the gradients by the scale, if nobody did so before."""
    is_known: bool
    """Whether this is the way for good, and not only for the first update."""
    reads: str | None
    """Why the host has to wait for each update, in words; None where it does not."""

    def run(self, step: Step, found_inf: Tensor, scale: Tensor | None) -> "Update":
        """Update the parameters; return the way for the next update.

        Args:
            step: Calls the optimizer's `step`.
            found_inf: Nonzero after an overflow, shape=(), float32.
            scale: What the gradients are still to be divided by; None where they were.
        """

    def tensors(self) -> dict[str, Tensor]:
        """Return what an update writes to besides parameters and optimizer state."""


class InKernel:
    """The optimizer takes the scale and the flag as tensors, as torch's fused ones and SimpleAdam do.

    Args:
        optimizer: The optimizer.
    """

    unscales = is_known = True
    reads: str | None = None

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer: Any = optimizer

    def run(self, step: Step, found_inf: Tensor, scale: Tensor | None) -> Update:
        """Hand both over for the time of the step; a monitor's flag of the same name counts as well."""
        optimizer = self._optimizer
        held: Tensor | None = getattr(optimizer, "found_inf", None)
        # torch's fused kernels know no other flag than 1
        optimizer.found_inf = found_inf if held is None else torch.maximum(found_inf, held)
        if scale is not None:
            optimizer.grad_scale = scale
        try:
            step()
        finally:
            if scale is not None:
                del optimizer.grad_scale
            del optimizer.found_inf
            if held is not None:
                optimizer.found_inf = held
        return self

    def tensors(self) -> dict[str, Tensor]:
        """Return nothing."""
        return {}


class PutBack:
    """The update is made and put back after an overflow.

    Args:
        optimizer: An optimizer that keeps all it changes in tensors on the device.
    """

    is_known = True
    unscales = False
    reads: str | None = None

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._mask: KeepAndPutBack | None = None

    def run(self, step: Step, found_inf: Tensor, scale: Tensor | None) -> Update:  # noqa: ARG002
        """Keep parameters and state, update them, put them back."""
        if self._mask is None:
            self._mask = KeepAndPutBack(self._optimizer, found_inf)
        self._mask.before()
        self._mask.lift(False)
        step()
        self._mask.after()
        return self

    def tensors(self) -> dict[str, Tensor]:
        """Return the copies."""
        return {} if self._mask is None else self._mask.tensors()


class AskHost:
    """The host reads whether to update, as stock Lightning does.

    Args:
        reason: Why, in words.
    """

    is_known = True
    unscales = False

    def __init__(self, reason: str) -> None:
        self.reads: str | None = reason
        rank_zero_info(f"zdtrain: {reason}")

    def run(self, step: Step, found_inf: Tensor, scale: Tensor | None) -> Update:  # noqa: ARG002
        """Wait for the flag, and leave the optimizer alone if it is set."""
        if not found_inf.item():
            step()
        return self

    def tensors(self) -> dict[str, Tensor]:
        """Return nothing."""
        return {}


class FirstUpdate:
    """The host reads whether to update until the first update is made: what that one creates can't be put back.

    Args:
        optimizer: An optimizer without state.
    """

    is_known = False
    reads: str | None = "the first update makes the optimizer's state"

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.unscales = takes_scale(optimizer)

    def run(self, step: Step, found_inf: Tensor, scale: Tensor | None) -> Update:
        """Wait for the flag; where it is not set, make the update and find the way for the next ones."""
        if found_inf.item():
            return self
        if self.unscales:
            return InKernel(self._optimizer).run(step, found_inf, scale)
        step()
        return _later_update(self._optimizer)

    def tensors(self) -> dict[str, Tensor]:
        """Return nothing."""
        return {}


def first_update(optimizer: Optimizer) -> Update:
    """Return the way for the first update of `optimizer` that is made here."""
    if takes_scale(optimizer):
        # a fused SGD that overflows in its first step leaves its momentum unwritten
        return FirstUpdate(optimizer) if type(optimizer) is SGD and not optimizer.state else InKernel(optimizer)
    return _later_update(optimizer) if optimizer.state else FirstUpdate(optimizer)


def takes_scale(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's step takes the scale and the flag as tensor attributes."""
    supported = getattr(optimizer, "_step_supports_amp_scaling", False)
    return supported and "grad_scaler" not in inspect.signature(optimizer.step).parameters


def _later_update(optimizer: Optimizer) -> Update:
    reason = _host_reason(optimizer)
    if reason is None:
        return PutBack(optimizer)
    return AskHost(
        f"with 16-mixed precision every step waits to know whether to update: {reason}; use "
        "zdtrain.optim.SimpleAdam, or a torch optimizer with fused=True or capturable=True"
    )


def _host_reason(optimizer: Optimizer) -> str | None:
    name = type(optimizer).__name__
    if has_step_hooks(optimizer):
        return f"{name} has hooks on its step, which are for updates that are made"
    if not type(optimizer).__module__.startswith("torch.optim"):
        return f"{name} is not one of torch's optimizers, so what its step changes is not known"
    return host_state(optimizer)
