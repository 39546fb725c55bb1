"""The updates of ``Adafactor`` and ``Muon``, which scale a step by norms and shapes; see `zdtrain.capture.updates`.

Their numbers are handed over in float64, because that is what torch computes with in Python: norms, once they are
numbers, are divided, compared and multiplied in float64, and the result is rounded to the dtype of the parameter.
"""

import math

import torch
from torch import Tensor

from zdtrain.capture.rule import Group, Numbers, Scalars, State


def adafactor_numbers(group: Group, step: float) -> tuple[Numbers, Numbers]:
    """Return the count after the update; share of the new average, size of the step, factor of the weights."""
    step += 1
    rate = group["lr"]
    return (step,), (step ** group["beta2_decay"], min(rate, 1 / (step**0.5)), 1 - rate * group["weight_decay"])


def adafactor(param: Tensor, grad: Tensor, state: State, group: Group, scalars: Scalars) -> None:
    """Update a parameter; its second moments are factored if it has more than one dimension."""
    fresh, size, shrink = scalars
    smallest, least_scale = group["eps"]
    if smallest is None:  # torch takes the epsilon of the first parameter for the whole group
        smallest = torch.finfo(next(p for p in group["params"] if p.grad is not None).dtype).eps
    if group["maximize"]:
        grad = -grad
    size = size * _larger(_mean_square_root(param), least_scale)
    if group["weight_decay"] != 0:
        param.mul_(shrink.to(param.dtype))
    update = _second_moment(grad, state, fresh.to(grad.dtype), smallest)
    update = update.clamp_(min=smallest * smallest).rsqrt_().mul_(grad)
    size = -size / _larger(update.norm(2).double() / (update.numel() ** 0.5 * group["d"]), 1.0)
    param.addcmul_(update, size.to(param.dtype))


def _mean_square_root(tensor: Tensor) -> Tensor:
    root: Tensor = tensor.norm(2).double() / tensor.numel() ** 0.5
    return root


def _larger(value: Tensor, least: float) -> Tensor:
    return torch.where(value > least, value, least)  # as Python's max: `least` where `value` is NaN


def _second_moment(grad: Tensor, state: State, fresh: Tensor, smallest: float) -> Tensor:
    if grad.dim() <= 1:
        return state["variance"].lerp_(grad * grad, fresh).clone()
    row, column = state["row_var"], state["col_var"]
    row.lerp_(torch.norm(grad, dim=-1, keepdim=True).square_().div_(grad.size(-1)), fresh)
    column.lerp_(torch.norm(grad, dim=-2, keepdim=True).square_().div_(grad.size(-2)), fresh)
    return (row @ column).div_(row.mean(dim=-2, keepdim=True).clamp_(min=smallest))


def muon_numbers(group: Group) -> tuple[Numbers, Numbers]:
    """Return no count; learning rate, factor of the weights, momentum and its complement."""
    rate, momentum = group["lr"], group["momentum"]
    return (), (rate, 1 - rate * group["weight_decay"], momentum, 1 - momentum)


def muon(param: Tensor, grad: Tensor, state: State, group: Group, scalars: Scalars) -> None:
    """Update a matrix along its orthogonalized momentum."""
    rate, shrink, momentum, fresh = scalars
    average = state["momentum_buffer"].lerp_(grad, fresh.to(grad.dtype))
    direction = grad.lerp(average, momentum.to(grad.dtype)) if group["nesterov"] else average
    direction = _orthogonalized(direction, group["ns_coefficients"], group["ns_steps"], group["eps"])
    rate = -(rate * _adjustment(group["adjust_lr_fn"], *param.shape))
    param.mul_(shrink.to(param.dtype)).addcmul_(direction, rate.to(param.dtype))


def _adjustment(name: str | None, rows: int, columns: int) -> float:
    if name in (None, "original"):
        return math.sqrt(max(1, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


def _orthogonalized(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Bring the singular values of a matrix near 1, by a Newton-Schulz iteration in bfloat16."""
    of_itself, of_square, of_fourth = coefficients
    is_tall = matrix.size(0) > matrix.size(1)
    found = matrix.bfloat16()
    found = found.T if is_tall else found
    found.div_(found.norm().clamp(min=eps))
    for _ in range(steps):
        square = found @ found.T
        found = torch.addmm(
            found, torch.addmm(square, square, square, beta=of_square, alpha=of_fourth), found, beta=of_itself
        )
    return found.T if is_tall else found
