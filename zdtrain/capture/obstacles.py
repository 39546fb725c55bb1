"""What in a module or its callbacks keeps steps from being captured, known without running one."""

from collections.abc import Hashable, Iterable, Iterator
from types import FunctionType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import LambdaCallback

from zdtrain.capture.frozen import frozen
from zdtrain.capture.modules import HOOKS_EVERYWHERE, hooks_of, hooks_on
from zdtrain.capture.watch import reason_at
from zdtrain.errors import FallbackReason
from zdtrain.source.definitions import class_location, method_location
from zdtrain.source.location import Location, code_kind
from zdtrain.step.hooks import Hooks, callback_hook, overrides
from zdtrain.step.log import can_replace_log

HOOKS_INSIDE = frozenset({"on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"})
HOOKS_OUTSIDE = ("on_train_batch_start", "on_train_batch_end")
_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_OURS = ("lightning.pytorch.", "zdtrain.")


def callbacks_inside(callbacks: Iterable[Callback], hooks: Hooks) -> Iterator[FallbackReason]:
    """Yield which callbacks override a hook between forward and optimizer step, where a replay calls nobody."""
    for name in sorted(HOOKS_INSIDE - hooks.nobody):
        for callback in callbacks:
            if callback_hook(callback, name) is not None:
                what = (
                    f"the callback {type(callback).__name__} overrides {name}, which lies inside the captured step: "
                    "move it to the module, whose hooks are captured"
                )
                yield reason_at(method_location(callback, name), "hook-inside", what)


def own_hooks_inside(module: LightningModule) -> tuple[Hashable, ...]:
    """Return which hooks the module overrides inside the step, comparable by equality; they are part of programs."""
    names = (*sorted(HOOKS_INSIDE), "configure_gradient_clipping")
    return tuple([(n, frozen(getattr(module, n))) for n in names if overrides(module, n, LightningModule)])


def module_obstacles(module: LightningModule) -> Iterator[FallbackReason]:
    """Yield Python code that torch calls in the middle of a step and that a replay would not call."""
    if not can_replace_log(module):
        yield reason_at(method_location(module, "log"), "log-override", f"{type(module).__name__} has a log of its own")
    for hook in [hook for hooks in HOOKS_EVERYWHERE for hook in hooks.values() if not _is_torchs(hook)]:
        yield _hook_reason(hook, "every module has a hook")
    for path, part in module.named_modules():
        for hooks in hooks_of(part):
            for hook in hooks.values():
                if not _is_torchs(hook):
                    yield _hook_reason(hook, f"module {path or type(part).__name__!r} has a hook")
    for path, parameter in module.named_parameters():
        for hook in [hook for hooks in hooks_on(parameter) for hook in (hooks or {}).values()]:
            yield _hook_reason(hook, f"parameter {path!r} has a hook")


def replaced_functions() -> Iterator[FallbackReason]:
    """Yield which functions of torch are replaced by somebody's own.

    Torch looks a function up by its name when it tells a watch of a call, and would call a replacement that calls the
    original twice.
    """
    for owner in (torch.nn.functional, torch.Tensor):
        for name, function in vars(owner).items():
            if isinstance(function, FunctionType):
                code = function.__code__
                if code_kind(code) in ("user", "third-party"):
                    place = Location(code.co_filename, code.co_firstlineno, code.co_qualname)
                    what = f"{owner.__name__}.{name} is replaced, which a step cannot be watched with"
                    yield reason_at(place, "torch-replaced", what)


def _hook_reason(hook: Any, who: str) -> FallbackReason:
    code = getattr(hook, "__code__", None)
    place = Location(code.co_filename, code.co_firstlineno, code.co_name) if code else class_location(type(hook))
    return reason_at(place, "tensor-hook", f"{who} that runs Python inside the step")


def _is_torchs(hook: Any) -> bool:
    return (getattr(hook, "__module__", None) or type(hook).__module__).startswith("torch.")


def changes_between_steps(
    module: LightningModule, callbacks: Iterable[Callback], hooks: Iterable[str] = HOOKS_OUTSIDE
) -> bool:
    """Return whether code of the user runs between two steps, where it may change what a program holds by value.

    Args:
        module: The module.
        callbacks: The callbacks.
        hooks: What is called between two steps.
    """
    data = getattr(module.trainer, "datamodule", None)
    if any(overrides(module, name, LightningModule) for name in (*hooks, *_TRANSFERS, "lr_scheduler_step")):
        return True
    if data is not None and any(overrides(data, name, LightningDataModule) for name in _TRANSFERS):
        return True
    users = [one for one in callbacks if type(one) is LambdaCallback or not type(one).__module__.startswith(_OURS)]
    return any(overrides(callback, name, Callback) for callback in users for name in hooks)
