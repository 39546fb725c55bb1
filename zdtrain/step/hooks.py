"""Which hooks somebody overrides, resolved once per epoch so that a step calls no others; who hooks into optimizers."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from zdtrain.consumers.progress import throttled
from zdtrain.monitor.by_hand import only_looks
from zdtrain.source.location import code_kind

STEP_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)

_MISSING = object()


def overrides(instance: object, name: str, base: type) -> bool:
    """Return whether hook `name` of `instance` is anything but its base class's own; instance attributes count."""
    if name in getattr(instance, "__dict__", {}):
        return True
    return getattr(type(instance), name, _MISSING) is not getattr(base, name)


class Hooks:
    """The overridden step hooks of the callbacks and the module, in stock Lightning's order.

    Args:
        trainer: The Trainer, with its module attached.
        names: The hooks.
    """

    def __init__(self, trainer: Trainer, names: Sequence[str] = STEP_HOOKS) -> None:
        self.log: Any = None  # what `self.log` is while hooks of the module run; None for Lightning's own
        self._trainer = trainer
        self._names = names
        self._module = module = trainer.lightning_module
        self._attributes = module.__dict__  # `_current_fx_name` is written past nn.Module's `__setattr__`
        self._own: dict[str, Callable[..., Any] | None] = {}
        for name in names:
            own = getattr(module, name)
            self._own[name] = own if overrides(module, name, LightningModule) and callable(own) else None
        self._resolve_callbacks()

    def _resolve_callbacks(self) -> None:
        self._callbacks: list[Callback] = list(self._trainer.callbacks)  # type: ignore[attr-defined]
        self._calls: dict[str, list[Callable[..., Any]]] = {}
        for name in self._names:
            calls = [callback_hook(callback, name) for callback in self._callbacks]
            self._calls[name] = [partial(call, self._trainer, self._module) for call in calls if call is not None]
        self.nobody = frozenset(n for n in self._names if not self._calls[n] and self._own[n] is None)

    def __call__(self, name: str, *args: Any) -> Any:
        """Call hook `name` of everybody who overrides it; return what the module's own returned."""
        if self._trainer.callbacks != self._callbacks:  # type: ignore[attr-defined]
            self._resolve_callbacks()  # a callback may bring another one
        if name in self.nobody:
            return None
        attributes = self._attributes
        previous = attributes["_current_fx_name"]
        attributes["_current_fx_name"] = name
        for call in self._calls[name]:
            call(*args)
        own = self._own[name]
        output = self.run_own(own, *args) if own is not None else None
        attributes["_current_fx_name"] = previous
        return output

    def run_as(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `function` as hook `name` of the module: that is where `self.log` then finds itself."""
        attributes = self._attributes
        previous = attributes["_current_fx_name"]
        attributes["_current_fx_name"] = name
        output = self.run_own(function, *args, **kwargs)
        attributes["_current_fx_name"] = previous
        return output

    def run_own(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call code of the module, to which `self.log` is `log`."""
        log, attributes = self.log, self._attributes
        if log is None:
            return function(*args, **kwargs)
        attributes["log"] = log
        try:
            return function(*args, **kwargs)
        finally:
            if attributes.get("log") is log:
                del attributes["log"]


def callback_hook(callback: Callback, name: str) -> Callable[..., Any] | None:
    """Return the hook to call, or None where there is nothing that it could do."""
    hook = getattr(callback, name)
    if not callable(hook) or not overrides(callback, name, Callback):
        return None
    if name == "on_train_batch_end":
        if checkpoints_by_epoch_only(callback):
            return None
        return throttled(callback)
    return hook  # type: ignore[no-any-return]


def checkpoints_by_epoch_only(callback: Callback) -> bool:
    """Return whether `callback` is a stock ModelCheckpoint that never saves between batches."""
    return (
        isinstance(callback, ModelCheckpoint)
        and not overrides(callback, "on_train_batch_end", ModelCheckpoint)
        and callback._every_n_train_steps < 1
        and callback._train_time_interval is None
    )


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether anybody but a learning-rate scheduler is to be told of the optimizer's steps, or replaced them."""
    patched = "step" in optimizer.__dict__ and not hasattr(optimizer.step, "_wrapped_by_lr_sched")
    code = getattr(inspect.unwrap(type(optimizer).step), "__code__", None)
    patched = patched or code is None or code_kind(code) != "library"
    everybody = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    )
    return patched or not all(only_looks(hook) for hooks in everybody for hook in hooks.values())


def is_hooked(optimizer: Optimizer) -> bool:
    """Return whether hooks are registered on the steps of the optimizer, or of all."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
    )
