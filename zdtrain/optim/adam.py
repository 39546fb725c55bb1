"""AdamW with its state, its count and its learning rate on the device."""

from collections.abc import Callable, Iterable
from functools import cache
from operator import is_
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from zdtrain.device import is_capturing
from zdtrain.errors import ConfigError
from zdtrain.optim.buckets import Bucket, Selection
from zdtrain.optim.clipping import clip_divisor, total_norm
from zdtrain.optim.groups import (
    HYPERPARAMETERS,
    TensorGroup,
    check_options,
    check_scalar,
    host_numbers,
    hyperparameter_tensors,
)
from zdtrain.optim.interchange import (
    STOCK_FLAGS,
    check_saved,
    load_groups,
    plain_groups,
    plain_state,
    saved_step_count,
)
from zdtrain.optim.schedules import Schedule
from zdtrain.optim.updates import foreach_adamw_, fused_adamw_

Implementation = Literal["fused", "foreach", "compiled"]
Work = list[tuple[Bucket, Selection, list[Tensor]]]
_OWN_ATTRIBUTES = (
    "skip_nonfinite",
    "schedule",
    "skip_if",
    "grad_norm",
    "step_count",
    "skipped_count",
    "_implementation",
    "_max_norm",
    "_owned",
    "_layout",
)


@cache
def _compiled_adamw_() -> Callable[..., None]:
    return torch.compile(foreach_adamw_, fullgraph=True, dynamic=False)


class SimpleAdam(Optimizer):
    r"""AdamW whose every knob can be a 0-D tensor on the device; its step reads nothing back and can be captured.

    .. math::
        m_t = \beta_1 m_{t-1} + (1-\beta_1) g_t, \quad v_t = \beta_2 v_{t-1} + (1-\beta_2) g_t^2, \quad
        p_t = (1 - \gamma\lambda)\, p_{t-1}
              - \gamma\, \frac{m_t / (1-\beta_1^t)}{\sqrt{v_t / (1-\beta_2^t)} + \epsilon}

    The state is that of ``torch.optim.AdamW``: moments in the dtype of the parameter, a float32 count per parameter. It
    is created at the first step, stays at its address, and interchanges with ``AdamW`` and ``Adam`` through
    ``state_dict`` both ways. Weight decay is decoupled.

    Args:
        params: Parameters, or dicts of groups with options of their own. All on one device, real and floating point.
        lr: Learning rate. A number becomes a float32 tensor per group; a tensor given here *is* the lr from then on.
            Writing ``group["lr"] = x`` fills it.
        betas: Decay rates of the moments. Tensors can change during a run of a captured step (momentum cycling).
        eps: Added to the denominator.
        weight_decay: Decoupled weight decay. A number is folded into the fused kernel; a tensor can change during a run
            of a captured step and costs the fused implementation one more pass over the parameters.
        max_norm: Clip gradients to this total L2 norm, over all groups. The gradients are left clipped.
        skip_nonfinite: Leave everything as it is when the gradient norm is NaN or Inf, float32 overflow included.
        schedule: Function from the number of updates made (0-D float32) to a factor of the initial lr.
        implementation: ``"fused"`` (torch's kernels; default where they exist and betas and eps are numbers),
            ``"foreach"`` (list operations, traceable, every hyperparameter may be a tensor), or ``"compiled"``
            (``torch.compile`` of the latter). Can be assigned later.

    Attributes:
        grad_norm: Total norm before clipping in the last step; shape=(), float32, device-resident. NaN until measured,
            which needs `max_norm` or `skip_nonfinite`.
        step_count: Updates made, skipped ones not counted; shape=(), float32, device-resident.
        skipped_count: Updates skipped; shape=(), float32, device-resident.
        skip_if: A 0-D tensor of the caller's, or None. While it is nonzero steps are skipped on the device.

    Raises:
        ConfigError: A hyperparameter, a parameter or a gradient cannot be used; the message says what to do.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = SimpleAdam([weight], lr=0.1, max_norm=1.0)
        >>> weight.sum().backward()
        >>> optimizer.step()
        >>> weight
        Parameter containing:
        tensor([0.9000, 0.9000], requires_grad=True)

    References:
        Kingma and Ba, *Adam* (2015); Loshchilov and Hutter, *Decoupled Weight Decay Regularization* (2019).
    """

    _buckets: list[Bucket]
    _entries: list[dict[str, Any]]  # the state the buckets were made from
    _waiting: list[Tensor]  # parameters without state: frozen so far
    _step_supports_amp_scaling = True  # torch.amp.GradScaler hands over grad_scale and found_inf instead of reading

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float | Tensor = 1e-8,
        weight_decay: float | Tensor = 0.0,
        *,
        max_norm: float | Tensor | None = None,
        skip_nonfinite: bool = False,
        schedule: Schedule | None = None,
        implementation: Implementation | None = None,
    ) -> None:
        if max_norm is not None and not isinstance(max_norm, Tensor) and not max_norm > 0:
            raise ConfigError(f"SimpleAdam.max_norm must be greater than 0, got {max_norm}: use None for no clipping")
        self._implementation = _check_implementation(implementation)
        self.skip_nonfinite = skip_nonfinite
        self.schedule = schedule
        self.skip_if: Tensor | None = None
        self._forget_buckets()
        self._owned: list[Tensor] = []  # scalars made here, which follow the parameters to another device
        self._layout = 0
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **STOCK_FLAGS})
        device = self._device()
        self.grad_norm = self._own(torch.full((), float("nan"), dtype=torch.float32, device=device))
        self.step_count = self._own(torch.zeros((), dtype=torch.float32, device=device))
        self.skipped_count = self._own(torch.zeros((), dtype=torch.float32, device=device))
        self._max_norm = self._scalar("max_norm", max_norm) if max_norm is not None else None

    @property
    def max_norm(self) -> Tensor | None:
        """The clipping threshold, a 0-D tensor; assigning a number fills it."""
        return self._max_norm

    @max_norm.setter
    def max_norm(self, value: float | Tensor | None) -> None:
        if value is None or self._max_norm is None:
            self._max_norm = None if value is None else self._scalar("max_norm", value)
        else:
            self._max_norm.copy_(value) if isinstance(value, Tensor) else self._max_norm.fill_(value)

    @property
    def implementation(self) -> Implementation | None:
        """How updates are computed; None chooses the fused kernels where they can be used."""
        return self._implementation

    @implementation.setter
    def implementation(self, value: Implementation | None) -> None:
        self._implementation = _check_implementation(value)
        for group in self.param_groups:
            group["fused"] = self._choose(group) == "fused"

    def capture_key(self) -> tuple[object, ...]:
        """Return what a captured `step` holds by value or by address; a capture is valid while this is equal."""
        held = (id(self._max_norm), id(self.schedule), id(self.skip_if))
        numbers = (host_numbers(group) for group in self.param_groups)
        return (self._layout, self._implementation, self.skip_nonfinite, *held, *numbers)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, with options of its own or those of the optimizer."""
        super().add_param_group(param_group)
        added = self.param_groups.pop()
        self.param_groups.append(self._tensor_group(added))
        self._entries = []  # the next step looks at the groups again

    def _tensor_group(self, options: dict[str, Any]) -> TensorGroup:
        group = TensorGroup(options)
        for param in group["params"]:
            if not param.is_floating_point():
                raise ConfigError(
                    f"SimpleAdam needs real floating-point parameters, got {param.dtype} "
                    f"of shape {tuple(param.shape)}: use torch.view_as_real for complex ones"
                )
        check_options(group)
        if not isinstance(group["lr"], Tensor):
            device = next((p.device for p in group["params"]), None) or self._device()
            lr = torch.full((), group["lr"], dtype=torch.float32, device=device)  # shape=(), device-resident
            dict.__setitem__(group, "lr", self._own(lr))
        if self.schedule is not None:
            group["initial_lr"] = group["lr"]  # stored as a copy
            self._own(group["initial_lr"])
        group["fused"] = self._choose(group) == "fused"
        return group

    def _choose(self, group: dict[str, Any]) -> Implementation:
        tensors = [name for name in hyperparameter_tensors(group) if name not in ("lr", "weight_decay")]
        if self._implementation == "fused" and tensors:
            raise ConfigError(
                f"the fused kernels take {' and '.join(tensors)} as numbers: pass numbers, or implementation='foreach'"
            )
        if self._implementation is not None:
            return self._implementation
        return "foreach" if tensors or not _has_fused_kernel(group["params"]) else "fused"

    def _scalar(self, name: str, value: float | Tensor) -> Tensor:
        if isinstance(value, Tensor):
            check_scalar(name, value)
            return value
        return self._own(torch.full((), value, dtype=torch.float32, device=self._device()))

    def _own(self, scalar: Tensor) -> Tensor:
        self._owned.append(scalar)
        return scalar

    def _device(self) -> torch.device:
        return next((p.device for group in self.param_groups for p in group["params"]), torch.device("cpu"))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one update.

        Args:
            closure: Computes the loss and the gradients; called with gradients enabled.

        Returns:
            What `closure` returned, otherwise None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = self._collect()
        if work:
            grad_scale, skip = self._guard([grad for _, _, grads in work for grad in grads])
            self._advance(work, skip)
            for bucket, selection, grads in work:
                self._update(bucket, selection, grads, grad_scale, skip)
        return loss

    def _collect(self) -> Work:
        self.init_state()
        selected = [(bucket, bucket.select()) for bucket in self._buckets]
        return [(bucket, *chosen) for bucket, chosen in selected if chosen is not None]

    def _is_current(self) -> bool:
        """Whether the buckets still hold the optimizer's state and every parameter that has a gradient."""
        if len(self.state) != len(self._entries) or not all(map(is_, self.state.values(), self._entries)):
            return False
        if not self._buckets or any(p.grad is not None for p in self._waiting):
            return False
        return all(bucket.holds_current_state() for bucket in self._buckets)

    @torch.no_grad()
    def init_state(self) -> None:
        """Allocate the state of every parameter that takes gradients; `step` does so when it is first called.

        A captured step must not allocate it: memory made during a capture belongs to the capture. State that is there
        already stays where it is.
        """
        if self._is_current():
            return
        if _is_recording():
            raise ConfigError(
                "SimpleAdam would allocate its state while a step is being captured: "
                "run one step, or call optimizer.init_state(), before the capture"
            )
        self._place_scalars()
        kept = {tuple(map(id, bucket.params)): bucket for bucket in self._buckets if bucket.belongs_to(self.state)}
        self._buckets, self._waiting = [], []
        for group in self.param_groups:
            by_dtype: dict[torch.dtype, list[Tensor]] = {}
            for param in group["params"]:
                if param.requires_grad or param.grad is not None or param in self.state:
                    by_dtype.setdefault(param.dtype, []).append(param)
                else:
                    self._waiting.append(param)
            for params in by_dtype.values():
                bucket = kept.get(tuple(map(id, params)))
                self._buckets.append(bucket or Bucket(group, params, self.state))
        self._entries = list(self.state.values())
        self._layout += 1

    def _place_scalars(self) -> None:
        """Bring the scalars made here to the parameters' device, and refuse those of the caller that are elsewhere."""
        devices = sorted({str(p.device) for group in self.param_groups for p in group["params"]})
        if len(devices) > 1:
            raise ConfigError(
                f"SimpleAdam needs all parameters on one device, got {' and '.join(devices)}: "
                "make one optimizer per device"
            )
        device = self._device()
        for scalar in self._owned:
            if scalar.device != device:
                scalar.data = scalar.data.to(device)  # keeps the tensor that schedulers and callers hold
        named = [("max_norm", self._max_norm), ("skip_if", self.skip_if)]
        named += [item for group in self.param_groups for item in hyperparameter_tensors(group).items()]
        for name, value in named:
            if value is not None and value.device != device:
                raise ConfigError(
                    f"{name} is on {value.device} but the parameters are on {device}: make it with device='{device}'"
                )

    def _guard(self, grads: list[Tensor]) -> tuple[Tensor | None, Tensor | None]:
        """Return the divisor of the gradients and the flag that masks the update, each None where not needed."""
        divisor: Tensor | None = getattr(self, "grad_scale", None)  # set by torch.amp.GradScaler around step()
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        reasons = [flag != 0 for flag in (found_inf, self.skip_if) if flag is not None]
        if self._max_norm is not None or self.skip_nonfinite:
            norm = total_norm(grads)
            if divisor is not None:
                norm = norm / divisor
            self.grad_norm.copy_(norm)
            if self._max_norm is not None:
                clip = clip_divisor(norm, self._max_norm)
                divisor = clip if divisor is None else divisor * clip
            if self.skip_nonfinite:
                reasons.append(~norm.isfinite())
        if not reasons:
            return divisor, None
        skip = reasons[0]
        for reason in reasons[1:]:
            skip = skip | reason
        return divisor, skip.reshape(()).float()

    def _advance(self, work: Work, skip: Tensor | None) -> None:
        if self.schedule is not None:
            factor = self.schedule(self.step_count)
            for group in self.param_groups:
                group["lr"].copy_(group["initial_lr"] * factor)
        taken: float | Tensor = 1.0
        if skip is not None:
            taken = 1 - skip
            self.skipped_count.add_(skip)
        self.step_count.add_(taken)
        for bucket, selection, _ in work:
            bucket.steps.add_(selection.increment if skip is None else selection.increment * taken)

    def _update(
        self,
        bucket: Bucket,
        selection: Selection,
        grads: list[Tensor],
        grad_scale: Tensor | None,
        skip: Tensor | None,
    ) -> None:
        group = bucket.group
        tensors = (selection.params, grads, selection.exp_avgs, selection.exp_avg_sqs)
        hyperparameters = {name: group[name] for name in HYPERPARAMETERS}
        if group["fused"]:
            fused_adamw_(*tensors, selection.steps, **hyperparameters, grad_scale=grad_scale, skip=skip)
            return
        update = _compiled_adamw_() if self._implementation == "compiled" else foreach_adamw_
        update(*tensors, bucket.selected_steps(selection), **hyperparameters, grad_scale=grad_scale, skip=skip)

    def state_dict(self) -> dict[str, Any]:
        """Return state and options in the form of ``torch.optim.AdamW``; scalars are copies, moments are not."""
        packed = super().state_dict()
        groups = plain_groups(packed["param_groups"])
        if self.schedule is not None:
            groups[0]["schedule_step"] = self.step_count.clone()
        return {**packed, "state": plain_state(packed["state"]), "param_groups": groups}

    def _forget_buckets(self) -> None:
        self._buckets, self._entries, self._waiting = [], [], []

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in _OWN_ATTRIBUTES}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if set(state) != {"state", "param_groups"}:
            super().__setstate__(state)
            self._forget_buckets()
            return
        check_saved(self.param_groups, state)
        load_groups(self.param_groups, state["param_groups"])
        for param in state["state"]:
            self.state[param]  # makes room, which init_state fills
        self.init_state()
        for bucket in self._buckets:
            bucket.load(state["state"])
        self.step_count.copy_(torch.as_tensor(saved_step_count(state)))


def _check_implementation(value: Implementation | None) -> Implementation | None:
    if value is not None and value not in get_args(Implementation):
        known = ", ".join(get_args(Implementation))
        raise ConfigError(f"SimpleAdam.implementation must be one of {known}, got {value!r}")
    return value


def _has_fused_kernel(params: list[Tensor]) -> bool:
    return all(p.device.type in ("cpu", "cuda") for p in params)


def _is_recording() -> bool:
    return is_capturing() or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
