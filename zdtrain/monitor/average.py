"""An exponential moving average of the weights, kept on the device inside the step."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class WeightAverage:
    r"""Averages the trained parameters of a module, :math:`\bar p \leftarrow \beta \bar p + (1-\beta) p`, every step.

    It starts at the weights it is made with. Parameters that are not floating point and those that are not trained
    are not averaged; buffers, such as the statistics of a normalization, are the module's own.

    Args:
        module: The module.
        decay: Decay :math:`\beta`, greater than 0 and less than 1.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self._module = module
        named = [(n, p) for n, p in module.named_parameters() if p.requires_grad and p.is_floating_point()]
        self._names = [name for name, _ in named]
        self._live = [parameter for _, parameter in named]
        # sixteen bits are too few for small changes
        self._average = [p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True) for p in self._live]
        device = self._live[0].device if self._live else torch.device("cpu")
        self._weight = torch.full((), 1 - decay, device=device)  # shape=(), dtype=float32, device-resident
        self._none = torch.zeros_like(self._weight)
        # one pass instead of three; elsewhere than on a CPU it would be a launch per parameter, because of the weight
        same = all(a.dtype == p.dtype for a, p in zip(self._average, self._live, strict=True))
        self._lerps = device.type == "cpu" and same
        self._kept: list[Tensor] = []  # the trained weights, while the module holds the averaged ones

    @torch.no_grad()
    def update(self, hold: Tensor | None = None) -> None:
        """Take in the current weights.

        Args:
            hold: Where set, 0-D bool, the average stays as it is.
        """
        if not self._live:
            return
        weight = self._weight if hold is None else torch.where(hold, self._none, self._weight)
        if self._lerps:
            torch._foreach_lerp_(self._average, self._live, [weight] * len(self._live))  # type: ignore
            return
        change = torch._foreach_sub(self._live, self._average)  # type: ignore[arg-type]
        torch._foreach_mul_(change, weight)
        torch._foreach_add_(self._average, change)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the module hold the averaged weights during the body."""
        self.apply()
        try:
            yield
        finally:
            self.restore()

    @torch.no_grad()
    def apply(self) -> None:
        """Put the averaged weights into the module, in place."""
        if not self._kept and self._live:
            self._kept = [parameter.detach().clone() for parameter in self._live]
            torch._foreach_copy_(self._live, self._average)  # type: ignore[arg-type]

    @torch.no_grad()
    def restore(self) -> None:
        """Put the trained weights back."""
        if self._kept:
            torch._foreach_copy_(self._live, self._kept)  # type: ignore[arg-type]
            self._kept = []

    def state_dict(self) -> dict[str, Tensor]:
        """Return the module's state with averaged weights, as copies; `nn.Module.load_state_dict` takes it."""
        averaged = dict(zip(self._names, self._average, strict=True))
        return {
            name: averaged.get(name, value).detach().clone()
            for name, value in self._module.state_dict().items()
            if isinstance(value, Tensor)
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over averaged weights in place; names that are missing keep the current average."""
        for name, average in zip(self._names, self._average, strict=True):
            if name in state:
                average.copy_(state[name])

    def tensors(self) -> dict[str, Tensor]:
        """Return what `update` writes."""
        return {f"average of {name}": average for name, average in zip(self._names, self._average, strict=True)}
