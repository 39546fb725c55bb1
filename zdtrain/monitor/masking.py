"""Taking an update back on the device: parameters and optimizer state keep their values while a flag is set."""

from collections.abc import Hashable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, Optimizer

from zdtrain.errors import ConfigError
from zdtrain.optim import SimpleAdam


class Copies:
    """Copies of tensors, kept at one address, to be put back while a flag is set."""

    def __init__(self) -> None:
        self._copies: dict[Hashable, Tensor] = {}

    def __getitem__(self, key: Hashable) -> Tensor:
        """Return the copy."""
        return self._copies[key]

    def save(self, live: Mapping[Hashable, Tensor]) -> None:
        """Copy every tensor of `live`; what is new, or of another layout, gets a new copy."""
        if not live:
            return
        known: list[Tensor] = []
        sources: list[Tensor] = []
        for key, tensor in live.items():
            copy = self._copies.get(key)
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype or copy.device != tensor.device:
                self._copies[key] = tensor.detach().clone()
            else:
                known.append(copy)
                sources.append(tensor.detach())
        if known:
            torch._foreach_copy_(known, sources)

    def save_new(self, live: Mapping[Hashable, Tensor]) -> None:
        """Copy the tensors of `live` that have no copy yet."""
        self.save({key: tensor for key, tensor in live.items() if key not in self._copies})

    def put_back(self, live: Mapping[Hashable, Tensor], hold: Tensor) -> None:
        """Write the copies into the tensors of `live` where `hold` is set; tensors without a copy stay."""
        for key, tensor in live.items():
            copy = self._copies.get(key)
            if copy is not None:
                tensor.copy_(torch.where(hold, copy, tensor))

    def tensors(self) -> dict[str, Tensor]:
        """Return the copies."""
        return {str(key): copy for key, copy in self._copies.items()}


class Mask(Protocol):
    """One way to hold an optimizer's update back."""

    def before(self) -> None:
        """Prepare for the update, before the optimizer's step is called."""

    def lift(self, is_lifted: bool) -> None:
        """Say before each update if it certainly happens, because the flag is known not to be set."""

    def after(self) -> None:
        """Take the update back where the flag is set."""

    def release(self) -> None:
        """Leave the optimizer as it was found."""

    def tensors(self) -> dict[str, Tensor]:
        """Return what `before` writes to."""


class SkipIf:
    """SimpleAdam's own mask; a schedule's learning rate, which is part of the optimizer's state, is put back.

    Args:
        optimizer: The optimizer.
        flag: Nonzero where the update is held back, shape=(), float32.
    """

    def __init__(self, optimizer: SimpleAdam, flag: Tensor) -> None:
        if optimizer.skip_if is not None and optimizer.skip_if is not flag:
            raise ConfigError(
                "trainer.monitors: the optimizer's skip_if is in use; express that condition as a monitor instead, "
                "When(lambda row: flag != 0, then='skip')."
            )
        self._optimizer = optimizer
        optimizer.skip_if = flag
        self._flag = flag
        self._is_lifted = False
        self._copies = Copies()

    def _rates(self) -> dict[Hashable, Tensor]:
        return {f"lr {index}": group["lr"] for index, group in enumerate(self._optimizer.param_groups)}

    def before(self) -> None:
        """Keep the learning rates."""
        if self._optimizer.schedule is not None:
            self._copies.save(self._rates())

    def lift(self, is_lifted: bool) -> None:
        """See `Mask`."""
        if is_lifted is not self._is_lifted:
            self._optimizer.skip_if, self._is_lifted = None if is_lifted else self._flag, is_lifted

    def after(self) -> None:
        """Put the learning rates back."""
        if not self._is_lifted and self._optimizer.schedule is not None:
            self._copies.put_back(self._rates(), self._flag != 0)

    def release(self) -> None:
        """Take the flag away."""
        self._optimizer.skip_if = None

    def tensors(self) -> dict[str, Tensor]:
        """Return the copies."""
        return self._copies.tensors()


class FreshState:
    """What an optimizer creates in its first step, which has to go again if that step was held back.

    Asking for the flag is a host read; it happens when the number of entries grows, in a run's first step.

    Args:
        optimizer: The optimizer.
        flag: Nonzero where the update is held back.
    """

    def __init__(self, optimizer: Optimizer, flag: Tensor) -> None:
        self._state: dict[Any, Any] = optimizer.state
        self._flag = flag
        self._known = set(self._state)

    def after(self, *, is_lifted: bool) -> None:
        """Drop entries that were made in a step that is held back.

        Args:
            is_lifted: The flag is known not to be set.
        """
        if len(self._state) == len(self._known):
            return
        if not is_lifted and bool(self._flag):
            for parameter in [parameter for parameter in self._state if parameter not in self._known]:
                del self._state[parameter]
        self._known = set(self._state)


class FoundInf:
    """The mask of torch's fused kernels, meant for gradient scaling.

    Args:
        optimizer: An optimizer whose groups are all fused.
        flag: Nonzero where the update is held back, shape=(), float32.
    """

    def __init__(self, optimizer: Optimizer, flag: Tensor) -> None:
        self._optimizer: Any = optimizer
        self._flag = flag
        self._fresh = FreshState(optimizer, flag)
        self._is_lifted = True

    def before(self) -> None:
        """Do nothing."""

    def lift(self, is_lifted: bool) -> None:
        """See `Mask`: without a flag the kernel's counts need no correction."""
        if is_lifted is not self._is_lifted:
            self._is_lifted = is_lifted
            if is_lifted:
                self.release()
            else:
                self._optimizer.found_inf = self._flag

    def after(self) -> None:
        """Drop state that was made while the flag was set: a fused SGD leaves its momentum unwritten then."""
        self._fresh.after(is_lifted=self._is_lifted)

    def release(self) -> None:
        """Take the flag away."""
        vars(self._optimizer).pop("found_inf", None)

    def tensors(self) -> dict[str, Tensor]:
        """Return nothing."""
        return {}


class KeepAndPutBack:
    """Any other optimizer: copies of parameters and state before the update, put back after it.

    Args:
        optimizer: The optimizer. What its steps change has to be in tensors on the parameters' device.
        flag: Nonzero where the update is held back.
    """

    def __init__(self, optimizer: Optimizer, flag: Tensor) -> None:
        refuse_lbfgs(optimizer)
        self._optimizer = optimizer
        self._flag = flag
        self._fresh = FreshState(optimizer, flag)
        self._copies = Copies()
        self._checked = self._is_lifted = False
        self._numbers: list[dict[str, Any]] = []
        self._versions: dict[Hashable, int] = {}  # of the options that are tensors, before the update

    def _options(self) -> dict[Hashable, Tensor]:
        return {
            (f"group {index}", name): value
            for index, group in enumerate(self._optimizer.param_groups)
            for name, value in group.items()
            if isinstance(value, Tensor)
        }

    def _live(self) -> dict[Hashable, Tensor]:
        found: dict[Hashable, Tensor] = {}
        for group in self._optimizer.param_groups:
            found.update((id(parameter), parameter) for parameter in group["params"] if not is_lazy(parameter))
        for parameter, state in self._optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    found[id(parameter), name] = value
        return found

    @torch.no_grad()
    def before(self) -> None:
        """Copy parameters and state."""
        self._copies.save(self._live())

    @torch.no_grad()
    def lift(self, is_lifted: bool) -> None:
        """See `Mask`; options that hooks have written by now are not the optimizer's doing."""
        self._is_lifted = is_lifted
        options = self._options()
        self._versions = {key: option._version for key, option in options.items()}
        self._copies.save(options)
        if not self._checked:
            self._numbers = self._group_numbers()

    @torch.no_grad()
    def after(self) -> None:
        """Put parameters and state back."""
        self._fresh.after(is_lifted=self._is_lifted)
        if not self._checked:
            self._refuse_host_state()
            self._checked = True
        if not self._is_lifted:
            written = {key: t for key, t in self._options().items() if t._version != self._versions.get(key)}
            self._copies.put_back({**written, **self._live()}, self._flag != 0)

    def _group_numbers(self) -> list[dict[str, Any]]:
        groups = self._optimizer.param_groups
        return [{k: v for k, v in g.items() if isinstance(v, bool | int | float)} for g in groups]

    def _refuse_host_state(self) -> None:
        """Refuse an optimizer that keeps on the host what a step changes.

        Raises:
            ConfigError: It does.
        """
        if self._group_numbers() != self._numbers:
            name = type(self._optimizer).__name__
            raise ConfigError(
                f"trainer.monitors, nonfinite: {name} counts in its parameter groups on the host, so "
                f"{_remedy(self._optimizer)}"
            )
        refuse_host_state(self._optimizer)

    def release(self) -> None:
        """Do nothing."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the copies."""
        return self._copies.tensors()


def refuse_lbfgs(optimizer: Optimizer) -> None:
    """Refuse an optimizer that evaluates the loss as often as it likes.

    Raises:
        ConfigError: It is one.
    """
    if isinstance(optimizer, LBFGS):
        raise ConfigError(
            "trainer.monitors, nonfinite: LBFGS evaluates the loss several times per step, so a single step can't be "
            "held back; use monitors with then='warn' or a function."
        )


def refuse_host_state(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose state is on the host.

    Raises:
        ConfigError: Some of it is.
    """
    kept = host_state(optimizer)
    if kept is not None:
        raise ConfigError(f"trainer.monitors, nonfinite: {kept}, so {_remedy(optimizer)}")


def _remedy(optimizer: Optimizer) -> str:
    return (
        f"an update of {type(optimizer).__name__} can't be held back on the device. Use zdtrain.optim.SimpleAdam, a "
        "torch optimizer with fused=True or capturable=True, or monitors with then='warn'."
    )


def host_state(optimizer: Optimizer) -> str | None:
    """Return what of the optimizer's state is not in tensors on its parameters' device, in words; None if all is."""
    name = type(optimizer).__name__
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.device != parameter.device:
                return f"{name} keeps {key!r} on {value.device}"
            if isinstance(value, int | float) and not isinstance(value, bool):
                return f"{name} keeps {key!r} as a Python number"
    return None


def mask_for(optimizer: Optimizer, flag: Tensor) -> Mask:
    """Return the cheapest way to hold the optimizer's updates back while `flag` is nonzero."""
    if isinstance(optimizer, SimpleAdam):
        return SkipIf(optimizer, flag)
    fused = all(group.get("fused") for group in optimizer.param_groups)
    if type(optimizer) in (Adam, AdamW, SGD, Adagrad) and fused:
        return FoundInf(optimizer, flag)
    return KeepAndPutBack(optimizer, flag)
