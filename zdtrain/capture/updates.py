"""The updates of ``torch.optim`` as functions of tensors only: every number they take is a 0-D tensor.

Each is torch's own single-tensor update with its Python numbers handed over: ``add_(x, alpha=a)`` is written
``addcmul_(x, a)``, and so on, which for float32 and float64 on a CPU computes the same bits. What torch computes from
a count or a learning rate in Python is computed here in Python too, before the update, by the `Rule.numbers`.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from zdtrain.capture.normed import adafactor, adafactor_numbers, muon, muon_numbers
from zdtrain.capture.rounded import scaled
from zdtrain.capture.rule import Group, Numbers, Rule, Scalars, State, adds_decay


def _ascent(grad: Tensor, group: Group) -> Tensor:
    return -grad if group["maximize"] else grad


def _decayed(grad: Tensor, param: Tensor, decay: Tensor, group: Group) -> Tensor:
    """Add weight decay to the gradient, if there is any."""
    return torch.addcmul(grad, param, decay) if group["weight_decay"] != 0 else grad


def _sgd_numbers(group: Group) -> tuple[Numbers, Numbers]:
    return (), (-group["lr"], group["weight_decay"], group["momentum"], 1 - group["dampening"])


def _sgd(param: Tensor, grad: Tensor, state: State, group: Group, scalars: Scalars) -> None:
    rate, decay, momentum, fresh = scalars
    grad = _decayed(_ascent(grad, group), param, decay, group)
    if group["momentum"] != 0:
        buffer = state["momentum_buffer"]
        buffer.mul_(momentum).addcmul_(grad, fresh)
        grad = torch.addcmul(grad, buffer, momentum) if group["nesterov"] else buffer
    param.addcmul_(grad, rate)


def _moments_(grad: Tensor, state: State, fresh1: Tensor, beta2: Tensor, fresh2: Tensor) -> None:
    state["exp_avg"].lerp_(grad, fresh1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(scaled(grad, fresh2), grad)


def _decay(group: Group) -> float:
    """Return what decays the weights: their factor if decoupled, else what of them is added to the gradient."""
    decay: float = group["weight_decay"]
    return 1 - group["lr"] * decay if group["decoupled_weight_decay"] else decay


def _decay_(param: Tensor, grad: Tensor, decay: Tensor, group: Group) -> Tensor:
    if group["weight_decay"] == 0:
        return grad
    if group["decoupled_weight_decay"]:
        param.mul_(decay)
        return grad
    return torch.addcmul(grad, param, decay)


def _adam_numbers(group: Group, step: float) -> tuple[Numbers, Numbers]:
    step += 1
    beta1, beta2 = group["betas"]
    rate = group["lr"] / (1 - beta1**step)
    correction = (1 - beta2**step) ** 0.5
    return (step,), (-rate, _decay(group), 1 - beta1, beta2, 1 - beta2, correction, group["eps"])


def _adam(param: Tensor, grad: Tensor, state: State, group: Group, scalars: Scalars) -> None:
    rate, decay, fresh1, beta2, fresh2, correction, eps = scalars
    grad = _decay_(param, _ascent(grad, group), decay, group)
    _moments_(grad, state, fresh1, beta2, fresh2)
    square = state["exp_avg_sq"]
    if group["amsgrad"]:
        square = state["max_exp_avg_sq"].copy_(torch.maximum(state["max_exp_avg_sq"], square))
    param.addcdiv_(scaled(state["exp_avg"], rate), (square.sqrt() / correction).add_(eps))


def _nadam_numbers(group: Group, step: float, product: float) -> tuple[Numbers, Numbers]:
    step += 1
    beta1, beta2 = group["betas"]
    momentum = beta1 * (1.0 - 0.5 * (0.96 ** (step * group["momentum_decay"])))
    following = beta1 * (1.0 - 0.5 * (0.96 ** ((step + 1) * group["momentum_decay"])))
    single = torch.get_default_dtype() is not torch.float64  # the dtype of the product, and of torch's arithmetic
    product = float(np.float32(product) * np.float32(momentum)) if single else product * momentum
    of_grad = -group["lr"] * (1.0 - momentum) / (1.0 - product)
    of_average = (-group["lr"] * following) / (1.0 - product * following)
    fixed = (_decay(group), 1 - beta1, beta2, 1 - beta2, 1 - beta2**step, group["eps"])
    return (step, product), (of_grad, of_average, *fixed)


def _nadam(param: Tensor, grad: Tensor, state: State, group: Group, scalars: Scalars) -> None:
    of_grad, of_average, decay, fresh1, beta2, fresh2, correction, eps = scalars
    grad = _decay_(param, _ascent(grad, group), decay, group)
    _moments_(grad, state, fresh1, beta2, fresh2)
    denominator = state["exp_avg_sq"].div(correction).sqrt().add_(eps)
    param.addcdiv_(scaled(grad, of_grad), denominator)
    param.addcdiv_(scaled(state["exp_avg"], of_average), denominator)


def _radam_numbers(group: Group, step: float) -> tuple[Numbers, Numbers]:
    step += 1
    beta1, beta2 = group["betas"]
    correction2 = 1 - beta2**step
    longest = 2 / (1 - beta2) - 1
    length = longest - 2 * step * (beta2**step) / correction2
    rectified = length > 5.0
    factor = 1.0
    if rectified:
        factor = ((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)) ** 0.5
    moments = (_decay(group), 1 - beta1, beta2, 1 - beta2, group["eps"])
    return (step,), (group["lr"], 1 - beta1**step, correction2**0.5, float(rectified), factor, *moments)


def _radam(param: Tensor, grad: Tensor, state: State, group: Group, scalars: Scalars) -> None:
    rate, correction1, correction2, rectified, factor, decay, fresh1, beta2, fresh2, eps = scalars
    grad = _decay_(param, _ascent(grad, group), decay, group)
    _moments_(grad, state, fresh1, beta2, fresh2)
    adaptive = state["exp_avg_sq"].sqrt().add_(eps).reciprocal() * correction2  # as torch divides a number
    step = state["exp_avg"] / correction1 * rate
    param.sub_(step * torch.where(rectified != 0, adaptive, 1.0) * factor)


def _adamax_numbers(group: Group, step: float) -> tuple[Numbers, Numbers]:
    step += 1
    beta1, beta2 = group["betas"]
    return (step,), (-(group["lr"] / (1 - beta1**step)), group["weight_decay"], 1 - beta1, beta2, group["eps"])


def _adamax(param: Tensor, grad: Tensor, state: State, group: Group, scalars: Scalars) -> None:
    rate, decay, fresh1, beta2, eps = scalars
    grad = _decayed(_ascent(grad, group), param, decay, group)
    state["exp_avg"].lerp_(grad, fresh1)
    state["exp_inf"].copy_(torch.maximum(state["exp_inf"] * beta2, grad.abs().add_(eps)))
    param.addcdiv_(scaled(state["exp_avg"], rate), state["exp_inf"])


def _adadelta_numbers(group: Group, step: float) -> tuple[Numbers, Numbers]:
    return (step + 1,), (-group["lr"], group["weight_decay"], group["rho"], 1 - group["rho"], group["eps"])


def _adadelta(param: Tensor, grad: Tensor, state: State, group: Group, scalars: Scalars) -> None:
    rate, decay, kept, fresh, eps = scalars
    grad = _decayed(_ascent(grad, group), param, decay, group)
    state["square_avg"].mul_(kept).addcmul_(scaled(grad, fresh), grad)
    spread = state["square_avg"].add(eps).sqrt_()
    delta = state["acc_delta"].add(eps).sqrt_().div_(spread).mul_(grad)
    state["acc_delta"].mul_(kept).addcmul_(scaled(delta, fresh), delta)
    param.addcmul_(delta, rate)


def _adagrad_numbers(group: Group, step: float) -> tuple[Numbers, Numbers]:
    step += 1
    rate = group["lr"] / (1 + (step - 1) * group["lr_decay"])
    return (step,), (-rate, group["weight_decay"], group["eps"])


def _adagrad(param: Tensor, grad: Tensor, state: State, group: Group, scalars: Scalars) -> None:
    rate, decay, eps = scalars
    grad = _decayed(_ascent(grad, group), param, decay, group)
    state["sum"].addcmul_(grad, grad)
    param.addcdiv_(scaled(grad, rate), state["sum"].sqrt().add_(eps))


def _rmsprop_numbers(group: Group, step: float) -> tuple[Numbers, Numbers]:
    alpha = group["alpha"]
    return (step + 1,), (-group["lr"], group["weight_decay"], alpha, 1 - alpha, group["momentum"], group["eps"])


def _rmsprop(param: Tensor, grad: Tensor, state: State, group: Group, scalars: Scalars) -> None:
    rate, decay, kept, fresh, momentum, eps = scalars
    grad = _decayed(_ascent(grad, group), param, decay, group)
    square = state["square_avg"]
    square.mul_(kept).addcmul_(scaled(grad, fresh), grad)
    if group["centered"]:
        mean = state["grad_avg"].lerp_(grad, fresh)
        spread = square.addcmul(mean, mean, value=-1).sqrt_().add_(eps)
    else:
        spread = square.sqrt().add_(eps)
    if group["momentum"] > 0:
        buffer = state["momentum_buffer"]
        buffer.mul_(momentum).addcdiv_(grad, spread)
        param.addcmul_(buffer, rate)
    else:
        param.addcdiv_(scaled(grad, rate), spread)


def _rprop_numbers(group: Group, step: float) -> tuple[Numbers, Numbers]:
    return (step + 1,), (*group["etas"], *group["step_sizes"])


def _rprop(param: Tensor, grad: Tensor, state: State, group: Group, scalars: Scalars) -> None:
    less, more, smallest, largest = scalars
    grad = _ascent(grad, group)
    direction = grad * state["prev"]
    factor = torch.where(direction < 0, less, torch.where(direction == 0, torch.ones_like(less), direction))
    factor = torch.where(direction > 0, more, factor)  # NaN stays NaN
    state["step_size"].copy_((state["step_size"] * factor).clamp(smallest, largest))
    kept = torch.where(factor == less, torch.zeros_like(less), grad)
    param.addcmul_(kept.sign(), state["step_size"], value=-1)
    state["prev"].copy_(kept)


def _asgd_numbers(group: Group, step: float, eta: float, mu: float) -> tuple[Numbers, Numbers]:
    step += 1
    following = group["lr"] / ((1 + group["lambd"] * group["lr"] * step) ** group["alpha"])
    numbers = (-eta, group["weight_decay"], 1 - group["lambd"] * eta, mu)
    return (step, following, 1 / max(1, step - group["t0"])), numbers


def _asgd(param: Tensor, grad: Tensor, state: State, group: Group, scalars: Scalars) -> None:
    rate, decay, shrink, mu = scalars
    grad = _decayed(_ascent(grad, group), param, decay, group)
    param.mul_(shrink).addcmul_(grad, rate)
    average = state["ax"]
    average.copy_(torch.where(mu == 1, param, average + (param - average) * mu))


def _names(*always: str, **where: str) -> Callable[[Group], tuple[str, ...]]:
    """Return which state there is: names, and those that an option of the group adds."""
    return lambda group: (*always, *(name for option, name in where.items() if group[option]))


def _always(group: Group) -> bool:  # noqa: ARG001
    return True


RULES: dict[type[Optimizer], Rule] = {
    SGD: Rule(
        numbers=_sgd_numbers,
        update=_sgd,
        counts=(),
        state=_names(momentum="momentum_buffer"),
        adds_multiples=_always,
    ),
    Adam: Rule(numbers=_adam_numbers, update=_adam, state=_names("exp_avg", "exp_avg_sq", amsgrad="max_exp_avg_sq")),
    NAdam: Rule(
        numbers=_nadam_numbers,
        update=_nadam,
        counts=("step", "mu_product"),
        state=_names("exp_avg", "exp_avg_sq"),
        foreach_alike=False,
    ),
    RAdam: Rule(numbers=_radam_numbers, update=_radam, state=_names("exp_avg", "exp_avg_sq"), foreach_alike=False),
    Adamax: Rule(numbers=_adamax_numbers, update=_adamax, state=_names("exp_avg", "exp_inf")),
    Adadelta: Rule(
        numbers=_adadelta_numbers, update=_adadelta, state=_names("square_avg", "acc_delta"), adds_multiples=_always
    ),
    Adafactor: Rule(
        numbers=adafactor_numbers,
        update=adafactor,
        state=_names(),  # depends on the number of dimensions, and is made together with the count
        held=("eps", "d"),
        in_double=True,
        foreach_alike=False,
    ),
    Adagrad: Rule(numbers=_adagrad_numbers, update=_adagrad, state=_names("sum")),
    Muon: Rule(
        numbers=muon_numbers,
        update=muon,
        counts=(),
        state=_names("momentum_buffer"),
        held=("ns_coefficients", "ns_steps", "eps", "adjust_lr_fn"),
        in_double=True,
    ),
    RMSprop: Rule(
        numbers=_rmsprop_numbers,
        update=_rmsprop,
        state=_names("square_avg", momentum="momentum_buffer", centered="grad_avg"),
        adds_multiples=lambda group: group["momentum"] > 0 or adds_decay(group),
    ),
    Rprop: Rule(numbers=_rprop_numbers, update=_rprop, state=_names("prev", "step_size")),
    ASGD: Rule(
        numbers=_asgd_numbers,
        update=_asgd,
        counts=("step", "eta", "mu"),
        state=_names("ax"),
        adds_multiples=_always,
        foreach_alike=False,
    ),
}
RULES[AdamW] = RULES[Adam]
