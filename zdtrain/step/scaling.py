"""Loss scaling for float16: torch's scaler with all it counts on the device, and overflowed updates held back there."""

from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import LBFGS, Optimizer

from zdtrain.errors import FallbackReason
from zdtrain.step.scaled import Update, first_update

_METHODS = ("scale", "unscale_", "step", "update", "_unscale_grads_")
_AS_IMPORTED = {name: getattr(GradScaler, name) for name in _METHODS}


class LossScaling:
    """What a step does for the loss scaler of ``precision="16-mixed"``, without reading anything back.

    The scale and the growth tracker are the scaler's own tensors, so checkpoints and users find them where they are in
    stock Lightning. An update whose gradients overflowed is held back on the device.

    Args:
        plugin: Lightning's plugin, with torch's scaler.
        device: Where the loss is.
    """

    def __init__(self, plugin: MixedPrecision, device: torch.device) -> None:
        assert plugin.scaler is not None
        self.plugin = plugin
        self.scaler: GradScaler = plugin.scaler
        self.device = device
        self.found_inf = torch.zeros((), dtype=torch.float32, device=device)  # shape=(), nonzero after an overflow
        self.unscaled = False  # whether the gradients of the step that runs were divided by the scale
        self.lowered = False  # whether steps are compiled, which the scaler's own kernel can't be
        self._growth_factor = torch.zeros((), dtype=torch.float64, device=device)  # shape=()
        self._backoff_factor = torch.zeros((), dtype=torch.float64, device=device)  # shape=()
        self._growth_interval = torch.zeros((), dtype=torch.int32, device=device)  # shape=(), steps
        self._zero = torch.zeros((), dtype=torch.float32, device=device)  # shape=()
        self._one = torch.ones((), dtype=torch.float32, device=device)  # shape=()
        self._numbers: tuple[float, float, int] | None = None  # what the host last wrote to the three
        self._updates: dict[Optimizer, Update] = {}

    @property
    def scale(self) -> Tensor:
        """What the loss is multiplied by, shape=(), float32."""
        assert self.scaler._scale is not None
        return self.scaler._scale

    @property
    def tracker(self) -> Tensor:
        """Steps without an overflow since the scale last changed, shape=(), int32."""
        assert self.scaler._growth_tracker is not None
        return self.scaler._growth_tracker

    def prepare(self) -> None:
        """Do the host's share before a step: bring to the device what was set on the scaler."""
        scaler = self.scaler
        if scaler._scale is None:
            scaler._lazy_init_scale_growth_tracker(self.device)
        elif scaler._scale.device != self.device:
            scaler._scale, scaler._growth_tracker = self.scale.to(self.device), self.tracker.to(self.device)
        numbers = (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval())
        if numbers != self._numbers:
            self._numbers = numbers
            self._growth_factor.fill_(numbers[0])
            self._backoff_factor.fill_(numbers[1])
            self._growth_interval.fill_(numbers[2])

    def forget_all_but(self, optimizers: Collection[Optimizer]) -> None:
        """Let go of optimizers that are no longer in use."""
        self._updates = {one: update for one, update in self._updates.items() if one in optimizers}

    def update_of(self, optimizer: Optimizer) -> Update:
        """Return how updates of `optimizer` are held back.

        Raises:
            MisconfigurationException: It can't be used with a loss scaler.
        """
        update = self._updates.get(optimizer)
        if update is None:
            if isinstance(optimizer, LBFGS):
                raise MisconfigurationException("AMP and the LBFGS optimizer are not compatible.")
            update = self._updates[optimizer] = first_update(optimizer)
        return update

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale."""
        self.unscaled = False
        return loss * self.scale

    def after_backward(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale, unless the optimizer's kernel is going to."""
        if not self.update_of(optimizer).unscales:
            self.unscale(optimizer)

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale and note whether one is infinite or NaN; once per step."""
        if not self.unscaled:
            self.unscaled = True
            self._check(optimizer, self.scale.double().reciprocal().float(), allow_fp16=False)

    @torch.no_grad()
    def _check(self, optimizer: Optimizer, inverse: Tensor, *, allow_fp16: bool) -> None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not gradients:
            raise AssertionError("No inf checks were recorded for this optimizer.")  # torch's words
        if self.lowered and all(g.dtype in (torch.float32, torch.float64) and not g.is_sparse for g in gradients):
            self.found_inf.copy_(torch.stack([gradient.isfinite().all() for gradient in gradients]).all().logical_not())
            torch._foreach_mul_(gradients, inverse)
        else:
            found = self.scaler._unscale_grads_(optimizer, inverse, self._zero, allow_fp16)  # copies the zero
            self.found_inf.copy_(found[self.device])

    @contextmanager
    def clipping(self, optimizer: Optimizer) -> Iterator[None]:
        """Let the body clip gradients, also of optimizers that divide by the scale themselves: it is done before."""
        plugin = self.plugin
        own = "clip_gradients" in plugin.__dict__ or type(plugin).clip_gradients is not MixedPrecision.clip_gradients
        if own or self.unscaled or not self.update_of(optimizer).unscales:
            yield
            return

        def clip_gradients(plugin: Precision, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            self.unscale(optimizer)
            Precision.clip_gradients(plugin, optimizer, *args, **kwargs)

        plugin.__dict__["clip_gradients"] = MethodType(clip_gradients, plugin)
        try:
            yield
        finally:
            del plugin.__dict__["clip_gradients"]

    def step(self, optimizer: Optimizer, step: Callable[[], Any], stopped: Tensor | None = None) -> None:
        """Update the parameters unless gradients overflowed, then the scale.

        Args:
            optimizer: The optimizer.
            step: Calls its `step`.
            stopped: Once this is set, the scale stays as it is; shape=(), bool.
        """
        self._take_what_users_unscaled(optimizer)
        if not self.unscaled:
            self._check(optimizer, self._one, allow_fp16=True)
        update = self.update_of(optimizer)
        self._updates[optimizer] = update.run(step, self.found_inf, None if self.unscaled else self.scale)
        self._update_scale(stopped)

    def _take_what_users_unscaled(self, optimizer: Optimizer) -> None:
        """Notice that a hook called ``scaler.unscale_(optimizer)``, as it may where the kernel would do it."""
        state = self.scaler._per_optimizer_states.pop(id(optimizer), None)
        if state is not None and state["stage"] is OptState.UNSCALED:
            self.unscaled = True
            self.found_inf.copy_(state["found_inf_per_device"][self.device])

    def _update_scale(self, stopped: Tensor | None) -> None:
        # the arithmetic of torch._amp_update_scale_, which takes the factors as Python numbers
        scale, tracker = self.scale, self.tracker
        overflow = self.found_inf != 0
        steps = tracker + 1
        due = steps == self._growth_interval
        factor = torch.where(overflow, self._backoff_factor, torch.where(due, self._growth_factor, 1.0))
        new = (scale.double() * factor).float()
        kept = ~new.isfinite()
        if stopped is not None:
            kept = kept | stopped
            steps = torch.where(stopped, tracker, torch.where(overflow | due, 0, steps))
        else:
            steps = torch.where(overflow | due, 0, steps)
        scale.copy_(torch.where(kept, scale, new))
        tracker.copy_(steps)

    @contextmanager
    def by_hand(self) -> Iterator[None]:
        """Let ``optimizer.step()`` of a module that optimizes by hand come here instead of to Lightning's plugin."""

        def optimizer_step(
            plugin: MixedPrecision,
            optimizer: Optimizer,
            model: LightningModule,
            closure: Callable[[], Any],
            **kwargs: Any,
        ) -> None:
            self.update_of(optimizer)  # refuses what can't be scaled
            closure()
            self.unscaled = False
            self.after_backward(optimizer)
            plugin._after_closure(model, optimizer)
            self.step(optimizer, lambda: optimizer.step(**kwargs))

        self.plugin.__dict__["optimizer_step"] = MethodType(optimizer_step, self.plugin)
        try:
            yield
        finally:
            del self.plugin.__dict__["optimizer_step"]

    def key(self) -> Hashable:
        """Return what a program would hold by reference, and others may replace."""
        return (id(self.scaler._scale), id(self.scaler._growth_tracker))

    def tensors(self) -> dict[str, Tensor]:
        """Return all that a step writes to, by name."""
        found = {"scale": self.scale, "growth tracker": self.tracker, "found_inf": self.found_inf}
        for number, update in enumerate(self._updates.values()):
            found.update({f"optimizer {number} {name}": tensor for name, tensor in update.tensors().items()})
        return {f"loss scaler's {name}": tensor for name, tensor in found.items()}


def scaling_of(trainer: Trainer, known: LossScaling | None) -> LossScaling | None:
    """Return what steps do for the Trainer's loss scaler: `known` if that is it; None where there is no scaler."""
    plugin, device = trainer.precision_plugin, trainer.strategy.root_device
    if not isinstance(plugin, MixedPrecision) or plugin.scaler is None:
        return None
    if known is None or known.plugin is not plugin or known.scaler is not plugin.scaler or known.device != device:
        known = LossScaling(plugin, device)
    known.forget_all_but(trainer.strategy._optimizers)
    captures = trainer.fit_loop.epoch_loop.captures
    known.lowered = captures is not None and captures.capture == "compile"
    return known


def scaler_reason(plugin: Precision, device: torch.device) -> FallbackReason | None:
    """Return why the loss scaler can't be kept on the device; None where it can, or there is none."""
    scaler: Any = getattr(plugin, "scaler", None)
    if not isinstance(plugin, MixedPrecision) or scaler is None:
        return None
    name = type(scaler).__name__
    replaced = [m for m in _METHODS if m in vars(scaler) or getattr(type(scaler), m, None) is not _AS_IMPORTED[m]]
    if replaced:
        what = f"{name}.{replaced[0]} is not torch.amp.GradScaler's"
    elif not scaler.is_enabled():
        what = f"the {name} is disabled"
    elif device.type not in ("cpu", "cuda"):
        what = f"a loss scaler needs float64, which {device.type} has not"
    else:
        return None
    return FallbackReason(code="loss-scaler", message=what)
