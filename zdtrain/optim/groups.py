"""Param groups whose tensors are written in place, so that a scheduler's write reaches a captured step."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from zdtrain.errors import ConfigError

SCALAR_DTYPES = (torch.float32, torch.float64)
HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay")


def check_scalar(name: str, value: Tensor) -> None:
    """Refuse a hyperparameter tensor that is not a 0-D float32 or float64.

    Raises:
        ConfigError: The shape is not ``()`` or the dtype cannot hold a learning rate exactly enough.
    """
    if value.dim() != 0:
        raise ConfigError(f"{name} must be a 0-D tensor, got shape {tuple(value.shape)}: pass {name}.reshape(())")
    if value.dtype not in SCALAR_DTYPES:
        raise ConfigError(f"{name} must be float32 or float64, got {value.dtype}: pass {name}.float()")
    if value.requires_grad:
        raise ConfigError(f"{name} must not require a gradient: pass {name}.detach()")


def _write_(name: str, current: Tensor, value: float | Tensor) -> None:
    with torch.no_grad():
        if not isinstance(value, Tensor):
            current.fill_(value)
        elif value.numel() == 1:
            current.copy_(value.reshape(()))
        else:
            raise ConfigError(f"{name} must be one number, got a tensor of shape {tuple(value.shape)}")


def _number_becomes_tensor(name: str) -> ConfigError:
    return ConfigError(
        f"{name} is a Python number in this param group: write a number, or give the optimizer a tensor when it is made"
    )


def _written_betas(current: tuple[Any, ...], value: Iterable[Any]) -> tuple[Any, ...]:
    written = []
    for old, new in zip(current, value, strict=True):
        if not isinstance(old, Tensor):
            if isinstance(new, Tensor):
                raise _number_becomes_tensor("betas")
            written.append(new)
            continue
        if new is not old:
            _write_("betas", old, new)
        written.append(old)
    return tuple(written)


class TensorGroup(dict[str, Any]):
    """A param group in which assigning to a tensor hyperparameter fills that tensor.

    ``group["lr"] = 0.1`` and ``group["lr"] = torch.tensor(0.1)`` both write into the tensor that is already there, and
    so do the members of ``betas``. Everything else behaves as in a ``dict``.

    Example:
        >>> group = TensorGroup(lr=torch.tensor(1.0))
        >>> lr = group["lr"]
        >>> group["lr"] = 0.5
        >>> lr.item(), group["lr"] is lr
        (0.5, True)
    """

    def __setitem__(self, key: str, value: Any) -> None:
        current = self.get(key)
        if isinstance(current, Tensor):
            if value is not current:
                _write_(key, current, value)
        elif key == "betas" and isinstance(current, tuple):
            super().__setitem__(key, _written_betas(current, value))
        elif key in HYPERPARAMETERS and current is not None and isinstance(value, Tensor):
            raise _number_becomes_tensor(key)
        elif key == "initial_lr" and isinstance(value, Tensor):
            super().__setitem__(key, value.detach().clone())  # must not follow lr when lr is written in place
        else:
            super().__setitem__(key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """As ``dict.update``, through the in-place assignment."""
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __ior__(self, other: Any) -> "TensorGroup":  # type: ignore[override,misc]
        self.update(other)
        return self

    def setdefault(self, key: str, default: Any = None) -> Any:
        """As ``dict.setdefault``, through the in-place assignment."""
        if key not in self:
            self[key] = default
        return self[key]


def hyperparameter_tensors(group: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors among a group's lr, betas, eps and weight decay, by name."""
    betas = group["betas"]
    named = {"lr": group["lr"], "betas[0]": betas[0], "betas[1]": betas[1], "eps": group["eps"]}
    named["weight_decay"] = group["weight_decay"]
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def check_options(group: dict[str, Any]) -> None:
    """Refuse options that Adam cannot use or SimpleAdam does not have; makes ``betas`` a tuple.

    Raises:
        ConfigError: Names the option, the value and what to do.
    """
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ConfigError(f"SimpleAdam.betas must be a pair, got {betas!r}")
    group["betas"] = tuple(betas)
    for name in ("lr", "eps", "weight_decay"):
        if not isinstance(group[name], Tensor) and not group[name] >= 0:
            raise ConfigError(f"SimpleAdam.{name} must not be negative, got {group[name]}")
    for i, beta in enumerate(betas):
        if not isinstance(beta, Tensor) and not 0 <= beta < 1:
            raise ConfigError(f"SimpleAdam.betas[{i}] must be at least 0 and less than 1, got {beta}")
    for name, value in hyperparameter_tensors(group).items():
        check_scalar(name, value)
    for flag in ("amsgrad", "maximize", "differentiable"):
        if group[flag]:
            raise ConfigError(f"SimpleAdam has no {flag}: use torch.optim.AdamW({flag}=True)")


def host_numbers(group: Mapping[str, Any]) -> tuple[float | None, ...]:
    """Return the hyperparameters that are Python numbers, ``None`` where a tensor stands.

    A captured step holds these by value, so they belong into whatever decides that a capture is still valid.
    """
    values = (*group["betas"], group["eps"], group["weight_decay"])
    return tuple(None if isinstance(value, Tensor) else value for value in values)
