"""Gradient norms and clipping that never leave the device."""

from collections.abc import Iterable
from operator import attrgetter

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from zdtrain.optim.updates import LOW_PRECISION

SMALL = 16_384  # elements; copying fewer costs less than an operation
_is_sparse = attrgetter("is_sparse")
EPS = 1e-6  # the same guard as torch.nn.utils.clip_grad_norm_


def total_norm(grads: list[Tensor]) -> Tensor:
    r"""Return the L2 norm over all gradients, :math:`\sqrt{\sum_i \lVert g_i \rVert^2}`.

    Args:
        grads: Gradients on one device. Sixteen-bit ones are accumulated in float32. Sparse ones are coalesced, for
            which a GPU waits.

    Returns:
        A 0-D tensor, float32 (float64 if a gradient is).

    Example:
        >>> total_norm([torch.tensor([3.0]), torch.tensor([4.0])])
        tensor(5.)
    """
    if any(map(_is_sparse, grads)):
        grads = [grad.coalesce().values() if grad.is_sparse else grad for grad in grads]
    if are_small(grads):
        return _norm_together(grads)
    norms: list[Tensor] = []
    for dtype in dict.fromkeys([grad.dtype for grad in grads]):
        accumulate = torch.float32 if dtype in LOW_PRECISION else dtype
        same = [grad for grad in grads if grad.dtype is dtype]
        small: list[Tensor] = []
        if same[0].is_cpu and type(same[0]) is Tensor:  # a CPU norms one tensor after the other
            small = [grad for grad in same if grad.numel() <= SMALL]
        if small:
            norms.append(torch.linalg.vector_norm(_flatten_dense_tensors(small), dtype=accumulate))
        if len(small) < len(same):
            large = [grad for grad in same if grad.numel() > SMALL] if small else same
            norms.extend(torch._foreach_norm(large, 2, dtype=accumulate))
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    if type(total) is not Tensor and hasattr(total, "full_tensor"):  # a DTensor's norm is spread over ranks
        total = total.full_tensor()
    return total


def are_small(grads: list[Tensor]) -> bool:
    """Return whether copying the gradients side by side costs less than norming one after the other."""
    return type(grads[0]) is Tensor and grads[0].is_cpu and max([grad.numel() for grad in grads]) <= SMALL


def _norm_together(grads: list[Tensor]) -> Tensor:
    together: Tensor = _flatten_dense_tensors(grads)
    accumulate = torch.float32 if together.dtype in LOW_PRECISION else together.dtype
    return torch.linalg.vector_norm(together, dtype=accumulate)  # type: ignore[no-any-return]


def clip_divisor(norm: Tensor, max_norm: float | Tensor) -> Tensor:
    r"""Return what clipped gradients are divided by, :math:`\max(1, (\lVert g \rVert + 10^{-6}) / c)`."""
    return ((norm + EPS) / max_norm).clamp(min=1)


@torch.no_grad()
def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float | Tensor) -> Tensor:
    """Scale the gradients so that their total L2 norm is at most `max_norm`, which may be a device scalar.

    ``torch.nn.utils.clip_grad_norm_`` converts its threshold to a Python number; this one reads nothing back, so the
    threshold can change between replays of a captured step.

    Args:
        parameters: Parameters on one device; those without a gradient are left out.
        max_norm: Number or 0-D tensor on the gradients' device.

    Returns:
        The norm before clipping, a 0-D tensor; 0 where no parameter has a gradient.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> clip_grad_norm_(weight, torch.tensor(1.0))
        tensor(5.)
        >>> weight.grad
        tensor([0.6000, 0.8000])
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return torch.zeros((), device=parameters[0].device if parameters else None)
    norm = total_norm(grads)
    torch._foreach_div_(grads, clip_divisor(norm, max_norm))
    return norm
