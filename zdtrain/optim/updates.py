"""The AdamW update of a list of tensors: torch's fused kernel, and plain tensor maths that can be traced."""

from typing import Any

import torch
from torch import Tensor

LOW_PRECISION = (torch.bfloat16, torch.float16)
Number = float | Tensor


def fused_adamw_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    *,
    lr: Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: Number,
    grad_scale: Tensor | None = None,
    skip: Tensor | None = None,
) -> None:
    """Update in one pass with ``torch._fused_adamw_``.

    Args:
        params: Parameters of one device and dtype, written in place.
        grads: Their gradients; divided by `grad_scale` in place where one is given.
        exp_avgs: First moments, in the parameters' dtype.
        exp_avg_sqs: Second moments, in the parameters' dtype.
        steps: 0-D float32 counts of the updates, this one included.
        lr: 0-D learning rate.
        betas: Decay rates of the moments.
        eps: Added to the denominator.
        weight_decay: Decoupled decay. A number is folded into the kernel, a tensor costs a pass of its own.
        grad_scale: 0-D float32 divisor of the gradients.
        skip: 0-D float32; 1 leaves parameters and moments as they are.
    """
    if isinstance(weight_decay, Tensor):
        _decay_weights_(params, lr, weight_decay, skip)
        weight_decay = 0.0
    if grad_scale is not None and params[0].dtype is torch.float64:
        torch._foreach_div_(grads, grad_scale)  # the kernel reads its grad_scale as float32
        grad_scale = None
    elif grad_scale is not None:
        grad_scale = grad_scale.float()
    beta1, beta2 = betas
    torch._fused_adamw_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        grad_scale=grad_scale,
        found_inf=skip,
    )


def _decay_weights_(params: list[Tensor], lr: Tensor, weight_decay: Number, skip: Tensor | None) -> None:
    decay = lr * weight_decay
    if skip is not None:
        decay = decay * (skip == 0)
    torch._foreach_mul_(params, 1 - decay)


def foreach_adamw_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: Tensor,
    *,
    lr: Tensor,
    betas: tuple[Number, Number],
    eps: Number,
    weight_decay: Number,
    grad_scale: Tensor | None = None,
    skip: Tensor | None = None,
) -> None:
    r"""Update with list operations only, every hyperparameter a tensor if need be.

    .. math::
        m \leftarrow \beta_1 m + (1-\beta_1) g, \quad v \leftarrow \beta_2 v + (1-\beta_2) g^2, \quad
        p \leftarrow (1 - \gamma\lambda) p - \gamma \frac{m / (1-\beta_1^t)}{\sqrt{v / (1-\beta_2^t)} + \epsilon}

    Sixteen-bit parameters are widened to float32 for the arithmetic and rounded once on the way back. A skipped step
    runs the same operations with weights of zero, so nothing branches.

    Args:
        params: Parameters of one device and dtype, written in place.
        grads: Their gradients; divided by `grad_scale` in place where one is given.
        exp_avgs: First moments, in the parameters' dtype.
        exp_avg_sqs: Second moments, in the parameters' dtype.
        steps: Counts of the updates, this one included, shape ``(len(params),)``, float32.
        lr: 0-D learning rate.
        betas: Decay rates of the moments, numbers or 0-D tensors.
        eps: Added to the denominator, a number or a 0-D tensor.
        weight_decay: Decoupled decay, a number or a 0-D tensor.
        grad_scale: 0-D divisor of the gradients.
        skip: 0-D; nonzero leaves parameters and moments as they are.
    """
    dtype = params[0].dtype
    narrow = dtype in LOW_PRECISION
    wide = torch.float32 if narrow else dtype
    p, g, m, v = ([t.float() for t in ts] if narrow else ts for ts in (params, grads, exp_avgs, exp_avg_sqs))

    if grad_scale is not None:
        torch._foreach_div_(g, grad_scale.to(wide))
        if narrow:
            torch._foreach_copy_(grads, g)
    keep: Number = 1.0
    if skip is not None:
        taken = skip == 0
        keep = taken.double()
        g = [torch.where(taken, grad, 0) for grad in g]  # 0 * NaN would still reach the moments

    # 0-D and per-parameter arithmetic in float64: 1 - 0.999**t cancels in float32.
    rate = lr.double() * keep
    weight1, weight2 = (keep * (1 - _double(beta)) for beta in betas)
    t = steps.double().clamp(min=1)  # a first step that is skipped has count 0
    correction1, correction2_sqrt = 1 - _double(betas[0]) ** t, (1 - _double(betas[1]) ** t).sqrt()

    if isinstance(weight_decay, Tensor) or weight_decay != 0:
        torch._foreach_mul_(p, (1 - rate * weight_decay).to(wide))
    torch._foreach_mul_(m, _cast(1 - weight1, wide))
    torch._foreach_add_(m, torch._foreach_mul(g, _cast(weight1, wide)))
    torch._foreach_mul_(v, _cast(1 - weight2, wide))
    torch._foreach_add_(v, torch._foreach_mul(torch._foreach_mul(g, g), _cast(weight2, wide)))
    denominators = torch._foreach_sqrt(v)
    torch._foreach_div_(denominators, correction2_sqrt.to(wide).unbind())
    if isinstance(eps, Tensor):
        torch._foreach_add_(denominators, eps.to(wide), alpha=1)  # without alpha the tensor would be read as a number
    else:
        torch._foreach_add_(denominators, eps)
    torch._foreach_div_(denominators, (-rate / correction1).to(wide).unbind())
    torch._foreach_addcdiv_(p, m, denominators)

    if narrow:
        for stored, computed in ((params, p), (exp_avgs, m), (exp_avg_sqs, v)):
            torch._foreach_copy_(stored, computed)


def _double(value: Number) -> Number:
    return value.double() if isinstance(value, Tensor) else value


def _cast(value: Number, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) else value
