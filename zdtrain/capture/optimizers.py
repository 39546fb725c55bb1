"""Which optimizers' updates a program can hold, and what has to be arranged for that."""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import ASGD, LBFGS, SGD, Adam, AdamW, Optimizer, SparseAdam
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from zdtrain.capture.frozen import frozen
from zdtrain.capture.guards import Guards
from zdtrain.capture.handed import NUMBERS, InsideByRule, guard_groups, rounds_apart, state_key, steps_outside
from zdtrain.capture.program import Moved
from zdtrain.capture.updates import RULES
from zdtrain.errors import FallbackReason
from zdtrain.optim import SimpleAdam
from zdtrain.optim.groups import hyperparameter_tensors
from zdtrain.step.hooks import has_step_hooks

NOT_BAKED = ("params", "lr", "initial_lr", "param_names")  # lr is handed over as a tensor
FUSED = (Adam, AdamW, SGD)  # whose fused kernel takes it
OUTSIDE = {  # by kind: why no program can hold it
    LBFGS: "evaluates the loss as often as its values ask for",
    SparseAdam: "updates as many rows as the batch has",
}


class InsideSimpleAdam:
    """SimpleAdam: all it changes from step to step is in tensors already.

    Args:
        optimizer: The optimizer.
        lowered: The program is compiled, which takes list operations instead of fused kernels.
    """

    exact = True
    counts_on_host = False
    refusal: FallbackReason | None = None

    def __init__(self, optimizer: SimpleAdam, *, lowered: bool) -> None:
        self._optimizer = optimizer
        self._lowered = lowered

    def key(self) -> Hashable:
        """Return what a program would hold by value."""
        return (self._optimizer.capture_key(), state_key(self._optimizer))

    def guard(self, guards: Guards) -> None:
        """Let `guards` look at what decides over `key`."""
        held = vars(self._optimizer)
        for name in ("_layout", "_implementation", "skip_nonfinite", "_max_norm", "schedule", "skip_if"):
            guards.hold(held, name)
        guard_groups(guards, self._optimizer)

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

    def recorded(self) -> "InsideSimpleAdam":
        """Return what replays need."""
        return self

    def refill(self, moved: Moved | None = None) -> None:
        """Do nothing: writing ``group["lr"]`` fills the tensor."""

    def ran(self) -> None:
        """Do nothing: counts are tensors on the device."""

    def rates(self) -> list[Tensor]:
        """Return the tensors, 0-D, that a schedule changes and the program reads."""
        return [tensor for group in self._optimizer.param_groups for tensor in hyperparameter_tensors(group).values()]

    def count(self) -> None:
        """Note that the optimizer stepped: schedulers ask."""
        self._optimizer._opt_called = True  # type: ignore[attr-defined]


class InsideWithRate:
    """torch's own step with its learning rates as tensors: fused kernels, and what is made capturable by its options.

    ``group["lr"]`` is that tensor only while a step is watched or recorded, so checkpoints, schedulers and callbacks
    see the number they wrote. On a CPU a float64 tensor holds the number exactly, so the kernel computes the same bits;
    other devices round it to float32.

    Args:
        optimizer: The optimizer.
        exact: The parameters are on a CPU.
    """

    counts_on_host = False
    refusal: FallbackReason | None = None

    def __init__(self, optimizer: Optimizer, *, exact: bool) -> None:
        self.exact = exact
        self._optimizer = optimizer
        self._rates: list[Tensor] = []  # shape=(), one per group

    def key(self) -> Hashable:
        """Return what a program would hold by value, and where the state lies."""
        groups = self._optimizer.param_groups
        numbers = tuple([tuple([v for k, v in g.items() if k not in NOT_BAKED]) for g in groups])
        return (numbers, state_key(self._optimizer))

    def guard(self, guards: Guards) -> None:
        """Let `guards` look at what decides over `key`."""
        guard_groups(guards, self._optimizer)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Put tensors in the place of the learning rates."""
        groups = self._optimizer.param_groups
        numbers = [group["lr"] for group in groups]
        dtype = torch.float64 if self.exact else torch.float32
        for group in groups[len(self._rates) :]:
            device = group["params"][0].device if group["params"] else None
            self._rates.append(torch.zeros((), dtype=dtype, device=device))
        self.refill()
        for group, rate in zip(groups, self._rates, strict=True):
            group["lr"] = rate
        try:
            yield
        finally:
            for group, rate, number in zip(groups, self._rates, numbers, strict=False):
                if group["lr"] is not rate or (self.exact and float(rate) != number):  # the step set it
                    number = float(group["lr"])
                group["lr"] = number

    def recorded(self) -> "InsideWithRate":
        """Return what replays need."""
        return self

    def ran(self) -> None:
        """Do nothing: counts are tensors on the device."""

    def rates(self) -> list[Tensor]:
        """Return the tensors, 0-D, that a schedule changes and the program reads."""
        return list(self._rates)

    def refill(self, moved: Moved | None = None) -> None:  # noqa: ARG002
        """Bring the learning rates that schedulers wrote into the tensors."""
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=False):
            rate.fill_(group["lr"])

    def count(self) -> None:
        """Note that the optimizer stepped: schedulers ask."""
        self._optimizer._opt_called = True  # type: ignore[attr-defined]


Inside = InsideSimpleAdam | InsideWithRate | InsideByRule


def inside(optimizer: Optimizer, *, lowered: bool) -> Inside | FallbackReason:
    """Return how the optimizer's step becomes part of a program, or why it runs eagerly behind it.

    Args:
        optimizer: The optimizer, with its parameters on the device that they are trained on.
        lowered: The program is compiled.
    """
    kind = type(optimizer)
    name = kind.__name__
    if has_step_hooks(optimizer):
        return steps_outside(f"{name} has hooks on its step or another step in its place, which have to be called")
    if kind is SimpleAdam:
        return InsideSimpleAdam(optimizer, lowered=lowered)  # type: ignore[arg-type]
    if kind not in RULES:
        return steps_outside(f"{name} {OUTSIDE.get(kind, 'is not one whose update zdtrain knows')}")
    groups = optimizer.param_groups
    if any(isinstance(value, Tensor) for group in groups for value in pytree.tree_leaves(_options(group))):
        return steps_outside(f"{name} has a tensor among its options; give numbers, or use zdtrain.optim.SimpleAdam")
    params = [param for group in groups for param in group["params"]]
    on_host = all(param.device.type == "cpu" for param in params)
    on_device = [bool(group.get("fused") or group.get("capturable")) for group in groups]  # where it counts
    if all(group.get("fused") for group in groups) and on_host and not lowered and kind in FUSED:
        return InsideWithRate(optimizer, exact=True)
    if any(on_device) and not on_host:
        if lowered or not all(on_device):
            return steps_outside(f"{name} counts on the device; leave out fused and capturable, or give both to all")
        return InsideWithRate(optimizer, exact=False)
    return _by_rule(optimizer, on_host=on_host, lowered=lowered)


def _by_rule(optimizer: Optimizer, *, on_host: bool, lowered: bool) -> Inside | FallbackReason:
    kind, groups = type(optimizer), optimizer.param_groups
    dtypes = {param.dtype for group in groups for param in group["params"]}
    if not dtypes <= set(NUMBERS):
        other = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes - set(NUMBERS))
        return steps_outside(f"{kind.__name__} updates {' and '.join(other)} parameters, in Python numbers")
    if any(group.get("differentiable") for group in groups):
        return steps_outside(f"{kind.__name__} has differentiable=True")
    if on_host and not lowered and any(group.get("fused") for group in groups):
        return steps_outside(f"{kind.__name__} has fused=True, which rounds in another order")
    if on_host and not lowered and (reason := rounds_apart(optimizer)):
        return reason
    if kind is ASGD and not on_host:
        return steps_outside("ASGD counts on the device")
    return InsideByRule(optimizer, exact=on_host and not lowered)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


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


def way_of(optimizer: Optimizer) -> Hashable:
    """Return what decides whether the optimizer's update is one that is known."""
    return (type(optimizer), has_step_hooks(optimizer))


def guard_way(guards: Guards, optimizer: Optimizer) -> None:
    """Let `guards` look at what decides over `way_of`."""
    guards.hold(vars(optimizer), "step", meaning=id)
    guards.read(lambda: type(optimizer).step)
    guards.read(lambda: RemovableHandle.next_id)  # counts every hook that is registered, on whatever
