"""Which optimizers' updates a program can hold, and what has to be arranged for that."""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import optimizer as torch_optimizer

from zdtrain.errors import FallbackReason
from zdtrain.optim import SimpleAdam
from zdtrain.step.key import frozen

NOT_BAKED = ("params", "lr", "initial_lr", "param_names")  # lr is handed over as a tensor


class InsideSimpleAdam:
    """SimpleAdam: all it changes from step to step is in tensors already.

    Args:
        optimizer: The optimizer.
        lowered: The program is compiled, which takes list operations instead of fused kernels.
    """

    def __init__(self, optimizer: SimpleAdam, *, lowered: bool) -> None:
        self._optimizer = optimizer
        self._lowered = lowered

    def key(self) -> Hashable:
        """Return what a program would hold by value."""
        return self._optimizer.capture_key()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Arrange the optimizer for watching and recording."""
        optimizer = self._optimizer
        before = optimizer.implementation
        if not self._lowered or before in ("foreach", "compiled"):
            yield
            return
        optimizer.implementation = "foreach"
        try:
            yield
        finally:
            optimizer.implementation = before

    def refill(self) -> None:
        """Do nothing: writing ``group["lr"]`` fills the tensor."""

    def count(self) -> None:
        """Note that the optimizer stepped: schedulers ask."""
        self._optimizer._opt_called = True  # type: ignore[attr-defined]


class InsideFused:
    """torch's fused Adam, AdamW and SGD: the kernel takes the learning rate as a tensor.

    ``group["lr"]`` is that tensor only while a step is watched or recorded, so checkpoints, schedulers and callbacks
    see the number they wrote. A float64 tensor holds the number exactly, so the kernel computes the same bits.

    Args:
        optimizer: The optimizer; all groups fused.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._rates: list[Tensor] = []  # shape=(), float64, one per group

    def key(self) -> Hashable:
        """Return what a program would hold by value, and where the state lies."""
        groups = self._optimizer.param_groups
        numbers = tuple([tuple([v for k, v in g.items() if k not in NOT_BAKED]) for g in groups])
        state: Any = self._optimizer.state
        first: dict[str, Any] = next(iter(state.values()), {})  # loading a checkpoint replaces all of them
        return (numbers, len(state), tuple([id(value) for value in first.values()]))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Put tensors in the place of the learning rates."""
        groups = self._optimizer.param_groups
        numbers = [group["lr"] for group in groups]
        while len(self._rates) < len(groups):
            self._rates.append(torch.zeros((), dtype=torch.float64))
        self.refill()
        for group, rate in zip(groups, self._rates, strict=True):
            group["lr"] = rate
        try:
            yield
        finally:
            for group, rate, number in zip(groups, self._rates, numbers, strict=False):
                if group["lr"] is not rate or float(rate) != number:  # the step set it
                    number = float(group["lr"])
                group["lr"] = number

    def refill(self) -> None:
        """Bring the learning rates that schedulers wrote into the tensors."""
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=False):
            rate.fill_(group["lr"])

    def count(self) -> None:
        """Note that the optimizer stepped: schedulers ask."""
        self._optimizer._opt_called = True  # type: ignore[attr-defined]


Inside = InsideSimpleAdam | InsideFused


def inside(optimizer: Optimizer, *, lowered: bool) -> Inside | FallbackReason:
    """Return how the optimizer's step becomes part of a program, or why it runs eagerly behind it."""
    kind = type(optimizer)
    name = kind.__name__
    if has_step_hooks(optimizer):
        return _outside(f"{name} has hooks on its step, which have to be called")
    if kind is SimpleAdam:
        return InsideSimpleAdam(optimizer, lowered=lowered)  # type: ignore[arg-type]
    if kind in (Adam, AdamW, SGD):
        fused = all(group.get("fused") for group in optimizer.param_groups)
        if fused and lowered:
            return _outside(f"{name}'s fused kernel can't be lowered; use zdtrain.optim.SimpleAdam")
        on_host = all(p.device.type == "cpu" for group in optimizer.param_groups for p in group["params"])
        if fused and not on_host:
            return _outside(f"{name}'s CUDA kernel rounds a tensor learning rate; use zdtrain.optim.SimpleAdam")
        if fused and not any(isinstance(group["lr"], Tensor) for group in optimizer.param_groups):
            return InsideFused(optimizer)
        if kind is SGD:
            return _outside("SGD takes its learning rate as a Python number; SGD(fused=True) takes a tensor")
        return _outside(f"{name} counts its steps on the host; use {name}(fused=True) or zdtrain.optim.SimpleAdam")
    return _outside(f"{name} computes with Python numbers; zdtrain.optim.SimpleAdam does not")


def outside_reason(optimizer: Optimizer) -> FallbackReason | None:
    """Return why the optimizer's step is no part of a captured step; None where it is.

    Args:
        optimizer: The optimizer, with its parameters on the device that they are trained on.
    """
    found = inside(optimizer, lowered=False)
    return found if isinstance(found, FallbackReason) else None


def options_of(optimizer: Optimizer) -> Hashable:
    """Return the options of all groups, comparable.

    Tensors count by identity and version, but for SimpleAdam's, whose changes are recorded like any others.
    """
    by_version = not isinstance(optimizer, SimpleAdam)
    groups = []
    for group in optimizer.param_groups:
        options = [(name, _comparable(value, by_version)) for name, value in group.items() if name != "params"]
        groups.append((len(group["params"]), *options))
    return tuple(groups)


def _comparable(value: Any, by_version: bool) -> Hashable:
    return (id(value), value._version) if by_version and isinstance(value, Tensor) else frozen(value)


def schedule_state(scheduler: Any) -> Hashable:
    """Return how far a learning-rate scheduler is, and those that it chains, comparable."""
    chained = getattr(scheduler, "_schedulers", ())
    return (frozen(vars(scheduler)), *(schedule_state(one) for one in chained))


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether anybody but a learning-rate scheduler is to be told of the optimizer's steps."""
    patched = "step" in optimizer.__dict__ and not hasattr(optimizer.step, "_wrapped_by_lr_sched")
    hooks: Any = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    everywhere = (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)
    return patched or any(hooks) or any(everywhere)


def _outside(message: str) -> FallbackReason:
    return FallbackReason(code="optimizer-outside", message=f"the optimizer steps outside the program: {message}")
