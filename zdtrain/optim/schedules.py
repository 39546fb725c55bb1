"""Learning-rate schedules as functions of a step tensor, so that a captured step follows them by itself."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zdtrain.errors import ConfigError

Schedule = Callable[[Tensor], Tensor]
"""Maps the number of updates made so far (0-D float tensor) to a factor of the initial lr (0-D)."""


def _positive(owner: object, **values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ConfigError(f"{type(owner).__name__}.{name} must be greater than 0, got {value}")


@dataclass(frozen=True, kw_only=True)
class Constant:
    r"""Keep the lr: :math:`f(t) = c`.

    Example:
        >>> Constant()(torch.tensor(7.0))
        tensor(1.)
    """

    factor: float = 1.0
    """Factor of the initial lr."""

    def __call__(self, step: Tensor) -> Tensor:
        """Return the factor after `step` updates."""
        return torch.full_like(step, self.factor)


@dataclass(frozen=True, kw_only=True)
class Linear:
    r"""Go straight from one factor to another: :math:`f(t) = a + (b - a) \min(t / T, 1)`.

    Equal to ``torch.optim.lr_scheduler.LinearLR(start_factor=a, end_factor=b, total_iters=T)``.

    Example:
        >>> Linear(num_steps=10)(torch.tensor(5.0))
        tensor(0.5000)
    """

    num_steps: int
    """Updates from `start` to `end`."""
    start: float = 1.0
    """Factor of the first update."""
    end: float = 0.0
    """Factor after `num_steps` updates and from then on."""

    def __post_init__(self) -> None:
        _positive(self, num_steps=self.num_steps)

    def __call__(self, step: Tensor) -> Tensor:
        """Return the factor after `step` updates."""
        return self.start + (self.end - self.start) * (step / self.num_steps).clamp(max=1)


@dataclass(frozen=True, kw_only=True)
class Cosine:
    r"""Fall along half a cosine: :math:`f(t) = b + (1 - b) (1 + \cos(\pi \min(t / T, 1))) / 2`.

    Equal to ``torch.optim.lr_scheduler.CosineAnnealingLR(T_max=T, eta_min=b * lr)`` up to step `T`, constant after it.
    See Loshchilov and Hutter, *SGDR* (2017).

    Example:
        >>> Cosine(num_steps=10)(torch.tensor(10.0))
        tensor(0.)
    """

    num_steps: int
    """Updates until the factor reaches `end`."""
    end: float = 0.0
    """Factor after `num_steps` updates and from then on."""

    def __post_init__(self) -> None:
        _positive(self, num_steps=self.num_steps)

    def __call__(self, step: Tensor) -> Tensor:
        """Return the factor after `step` updates."""
        cosine = torch.cos((step / self.num_steps).clamp(max=1) * math.pi)
        return self.end + (1 - self.end) * (1 + cosine) / 2


@dataclass(frozen=True, kw_only=True)
class InverseSquareRoot:
    r"""Decay as :math:`f(t) = \sqrt{T / \max(t, T)}`: constant for `T` updates, then the inverse square root.

    Example:
        >>> InverseSquareRoot(num_steps=4)(torch.tensor(16.0))
        tensor(0.5000)
    """

    num_steps: int
    """Updates before the decay begins."""

    def __post_init__(self) -> None:
        _positive(self, num_steps=self.num_steps)

    def __call__(self, step: Tensor) -> Tensor:
        """Return the factor after `step` updates."""
        return (self.num_steps / step.clamp(min=self.num_steps)).sqrt()


@dataclass(frozen=True, kw_only=True)
class OneCycle:
    r"""Rise from ``1 / div_factor`` to 1 and fall to ``1 / (div_factor * final_div_factor)``, both along half a cosine.

    The initial lr is the peak. Equal to ``torch.optim.lr_scheduler.OneCycleLR(max_lr=lr, cycle_momentum=False)`` with
    the same numbers. See Smith and Topin, *Super-Convergence* (2018).

    Example:
        >>> OneCycle(num_steps=101, rise=0.5)(torch.tensor(49.5))
        tensor(1.)
    """

    num_steps: int
    """Updates in the cycle."""
    rise: float = 0.3
    """Share of the updates spent rising."""
    div_factor: float = 25.0
    """Peak over first lr."""
    final_div_factor: float = 1e4
    """First over last lr."""

    def __post_init__(self) -> None:
        _positive(self, div_factor=self.div_factor, final_div_factor=self.final_div_factor)
        if not 0 < self.rise < 1:
            raise ConfigError(f"OneCycle.rise must be between 0 and 1, got {self.rise}")
        if not self.rise * self.num_steps > 1:
            raise ConfigError(f"OneCycle.rise * num_steps must be more than 1, got {self.rise} * {self.num_steps}")

    def __call__(self, step: Tensor) -> Tensor:
        """Return the factor after `step` updates."""
        first, last = 1 / self.div_factor, 1 / (self.div_factor * self.final_div_factor)
        peak, final = self.rise * self.num_steps - 1, self.num_steps - 1
        rising = 1 + (first - 1) * (1 + torch.cos(step / peak * math.pi)) / 2
        falling = last + (1 - last) * (1 + torch.cos(((step - peak) / (final - peak)).clamp(max=1) * math.pi)) / 2
        return torch.where(step < peak, rising, falling)


@dataclass(frozen=True, kw_only=True)
class Warmup:
    r"""Rise linearly for some updates, then follow another schedule from its own step 0.

    .. math::
        f(t) = s + (1 - s)\, t / W \text{ for } t < W, \quad f(t) = \text{then}(t - W) \text{ from } W \text{ on}

    Example:
        >>> schedule = Warmup(lr_warmup_steps=10, then=Cosine(num_steps=90))
        >>> schedule(torch.tensor(5.0)), schedule(torch.tensor(10.0))
        (tensor(0.5000), tensor(1.))
    """

    lr_warmup_steps: int
    """Updates until the factor reaches that of `then`."""
    then: Schedule = Constant()
    """Schedule that follows; it sees step 0 when the warm-up is over."""
    start: float = 0.0
    """Factor of the first update."""

    def __post_init__(self) -> None:
        _positive(self, lr_warmup_steps=self.lr_warmup_steps)

    def __call__(self, step: Tensor) -> Tensor:
        """Return the factor after `step` updates."""
        rising = self.start + (1 - self.start) * step / self.lr_warmup_steps
        after = self.then((step - self.lr_warmup_steps).clamp(min=0))
        return torch.where(step < self.lr_warmup_steps, rising, after)


class DeviceLR(LRScheduler):
    """Follow device-resident schedules with any optimizer whose lr is a tensor; a Lightning ``lr_scheduler``.

    Each `step()` counts on the device and writes the lr tensor in place. It reads nothing back and may itself be part
    of a captured step. With `SimpleAdam` the shorter way is ``SimpleAdam(schedule=...)``, which needs no scheduler.

    Args:
        optimizer: Optimizer whose groups hold a 0-D tensor lr.
        schedule: A schedule for all groups, or one per group.

    Raises:
        ConfigError: A group's lr is a Python number, or the schedules are not as many as the groups.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = torch.optim.SGD([weight], lr=torch.tensor(0.1))
        >>> scheduler = DeviceLR(optimizer, Linear(num_steps=10))
    """

    def __init__(self, optimizer: Optimizer, schedule: Schedule | Sequence[Schedule]) -> None:
        groups = optimizer.param_groups
        self.schedules = [schedule] * len(groups) if callable(schedule) else list(schedule)
        if len(self.schedules) != len(groups):
            raise ConfigError(f"DeviceLR got {len(self.schedules)} schedules for {len(groups)} param groups")
        for i, group in enumerate(groups):
            if not isinstance(group["lr"], Tensor):
                raise ConfigError(
                    f"DeviceLR writes the lr in place, but param group {i} holds the number {group['lr']}: "
                    f"give the optimizer lr=torch.tensor({group['lr']}, device=...) or use SimpleAdam"
                )
        lr = groups[0]["lr"]
        self.count = torch.full((), -1.0, dtype=torch.float32, device=lr.device)  # shape=(), steps made
        super().__init__(optimizer)

    def _update_lr(self, epoch: int | None = None) -> None:
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        with torch.no_grad():
            if epoch is None:
                self.count.add_(1)
            else:
                self.count.fill_(epoch)
            for group, base, schedule in zip(self.optimizer.param_groups, self.base_lrs, self.schedules, strict=True):
                group["lr"].copy_(base * schedule(self.count))

    def get_lr(self) -> list[float | Tensor]:
        """Return the lr tensors of the groups, as copies."""
        return [group["lr"].clone() for group in self.optimizer.param_groups]

    def get_last_lr(self) -> list[float | Tensor]:
        """Return the lr tensors of the groups, as copies."""
        return self.get_lr()

    def state_dict(self) -> dict[str, Any]:
        """Return the step count and the initial lr of each group."""
        return {"last_epoch": self.last_epoch, "base_lrs": [torch.as_tensor(base).clone() for base in self.base_lrs]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved step count; the tensors keep their addresses."""
        self.last_epoch = state_dict["last_epoch"]
        self.count.fill_(self.last_epoch)
        for base, saved in zip(self.base_lrs, state_dict["base_lrs"], strict=True):
            torch.as_tensor(base).copy_(saved)
