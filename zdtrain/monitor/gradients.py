"""The gradients of an update and their norm."""

from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from zdtrain.optim.clipping import are_small, total_norm
from zdtrain.optim.updates import LOW_PRECISION

_grad, _requires_grad = attrgetter("grad"), attrgetter("requires_grad")


class SideBySide:
    """Small gradients as one vector: whoever copies something anyway brings them there, and one operation norms them.

    The norm is that of `total_norm`, to the last bit, and the host sees it for nothing.

    Args:
        gradients: Gradients that the host sees, of one dtype; `cells` is where others of these shapes go.
    """

    def __init__(self, gradients: list[Tensor]) -> None:
        sizes = [gradient.numel() for gradient in gradients]
        self._together = gradients[0].new_zeros(sum(sizes))  # shape=(elements,)
        parts = self._together.split(sizes)
        self.cells = [part.view(gradient.shape) for part, gradient in zip(parts, gradients, strict=True)]
        self._wide = torch.float32 if self._together.dtype in LOW_PRECISION else self._together.dtype
        self._norm = torch.linalg.vector_norm(self._together, dtype=self._wide)  # shape=(), real
        self._seen: memoryview[float] = self._norm.numpy().data

    def norm(self) -> float:
        """Return the L2 norm over what `cells` hold."""
        torch.linalg.vector_norm(self._together, dtype=self._wide, out=self._norm)
        return self._seen[()]


class ToGather(NamedTuple):
    """Gradients whose norm is still to be measured."""

    gradients: list[Tensor]
    """The gradients."""
    place: SideBySide
    """Where to copy them first."""


class Gradients:
    """Finds the gradients of updates, step after step, and their norm.

    Args:
        visible: The host may look at tensors for nothing.
    """

    def __init__(self, *, visible: bool) -> None:
        self._visible = visible
        self._owners: list[Tensor] = []  # parameters that had a gradient
        self._place: SideBySide | None = None  # for gradients of theirs, where that is the cheapest way

    def of(self, optimizers: Sequence[Optimizer]) -> tuple[list[Tensor], Tensor | ToGather | None]:
        """Return the gradients that the optimizers are going to use, detached, and their norm; None without any."""
        parameters: list[Tensor] = []
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                parameters += group["params"]
        gradients = list(map(_grad, parameters))
        if any(map(is_, gradients, repeat(None))):
            parameters = [parameter for parameter in parameters if parameter.grad is not None]
            gradients = list(map(_grad, parameters))
            if not gradients:
                return gradients, None
        if any(map(_requires_grad, gradients)):
            gradients = [gradient.detach() for gradient in gradients]
        if self._visible and not (len(parameters) == len(self._owners) and all(map(is_, parameters, self._owners))):
            self._owners, self._place = parameters, SideBySide(gradients) if _suit(gradients) else None
        return gradients, total_norm(gradients) if self._place is None else ToGather(gradients, self._place)


def _suit(gradients: list[Tensor]) -> bool:
    alike = {(type(g), g.dtype, g.device, g.layout) for g in gradients}
    return len(alike) == 1 and gradients[0].layout is torch.strided and are_small(gradients)
