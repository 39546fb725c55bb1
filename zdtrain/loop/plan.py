"""Whether an epoch's steps can take the short path, and if not, why."""

from collections.abc import Callable, Iterator
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.fetchers import _DataFetcher, _DataLoaderIterDataFetcher
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy

from zdtrain.errors import FallbackReason
from zdtrain.loop.ahead import copy_ahead, reasons_against
from zdtrain.loop.feed import Feed
from zdtrain.step.captured import CapturedStep
from zdtrain.step.eager import EagerStep
from zdtrain.step.hooks import Hooks, overrides
from zdtrain.step.manual import CapturedManualStep
from zdtrain.step.optimization import WindowedOptimization

# Methods that the short path does not call: whoever replaces one of them gets stock Lightning's loop.
_STRATEGY = (
    "training_step",
    "post_training_step",
    "backward",
    "pre_backward",
    "post_backward",
    "optimizer_step",
    "on_train_batch_start",
    "batch_to_device",
)
_PRECISION = (
    "backward",
    "pre_backward",
    "post_backward",
    "optimizer_step",
    "_after_closure",
    "_wrap_closure",
    "_clip_gradients",
)
_MODULE = ("optimizer_step", "_on_before_batch_transfer", "_apply_batch_transfer_handler", "_call_batch_hook")
_AS_IMPORTED: dict[type, dict[str, Any]] = {
    base: {name: getattr(base, name) for name in names}
    for base, names in (
        (Strategy, _STRATEGY),
        (SingleDeviceStrategy, _STRATEGY),
        (Precision, _PRECISION),
        (MixedPrecision, _PRECISION),
        (LightningModule, _MODULE),
    )
}


class StepPlan:
    """What one epoch's steps need, resolved once.

    Args:
        trainer: The Trainer, with its module attached.
        fetcher: The epoch's data fetcher.
        say: Tells why an option has no effect.
    """

    def __init__(self, trainer: Trainer, fetcher: _DataFetcher, say: Callable[[FallbackReason], None]) -> None:
        self.hooks = Hooks(trainer)
        copies = None
        if trainer.options.prefetch:  # type: ignore[attr-defined]
            reasons = list(reasons_against(trainer, fetcher, "prefetch"))
            for reason in reasons:
                say(reason)
            copies = None if reasons else copy_ahead(trainer, say)
        self.feed = Feed(trainer, fetcher, copies)
        captures = trainer.fit_loop.epoch_loop.captures
        if captures is None:
            self.step = EagerStep(trainer, self.hooks)
        elif trainer.lightning_module.automatic_optimization:
            self.step = CapturedStep(trainer, self.hooks, captures)
        else:
            self.step = CapturedManualStep(trainer, self.hooks, captures)
        configs = trainer.lr_scheduler_configs
        self.step_schedulers = any(c.interval == "step" and not c.reduce_on_plateau for c in configs)
        self.step_plateaus = any(c.interval == "step" and c.reduce_on_plateau for c in configs)
        self.epoch_schedulers = any(c.interval == "epoch" and not c.reduce_on_plateau for c in configs)
        self.validates = trainer.fit_loop.epoch_loop._should_check_val_epoch()


def reasons_for_stock(trainer: Trainer, fetcher: _DataFetcher) -> Iterator[FallbackReason]:
    """Yield what keeps this epoch's steps on stock Lightning's own loop."""
    module, strategy, precision = trainer.lightning_module, trainer.strategy, trainer.precision_plugin
    profiler: object = trainer.profiler  # type: ignore[attr-defined]
    optimization = trainer.fit_loop.epoch_loop.automatic_optimization
    if type(profiler) is not PassThroughProfiler:
        yield FallbackReason(
            code="profiler",
            message=f"{type(profiler).__name__} times stock Lightning's own loop; drop profiler= to lift this",
        )
    loop = trainer.fit_loop.epoch_loop
    by_hand = not module.automatic_optimization
    if by_hand and (not strategy._optimizers or loop.captures is None or loop.guard is not None):
        yield FallbackReason(
            code="manual-optimization", message="the module optimizes by hand (automatic_optimization=False)"
        )
    if isinstance(fetcher, _DataLoaderIterDataFetcher):
        yield FallbackReason(code="dataloader-iter", message="training_step takes the data loader's iterator")
    if type(strategy) is not SingleDeviceStrategy or trainer.world_size > 1:
        yield FallbackReason(
            code="strategy", message=f"strategy {type(strategy).__name__} runs the step in its own way"
        )
    elif replaced := replaced_method(strategy, SingleDeviceStrategy):
        yield FallbackReason(code="strategy", message=f"{type(strategy).__name__}.{replaced} is replaced")
    scales = isinstance(precision, MixedPrecision) and precision.scaler is not None
    base = MixedPrecision if isinstance(precision, MixedPrecision) else Precision
    if scales:
        yield FallbackReason(
            code="loss-scaler", message="16-mixed precision scales the loss and may skip steps on the host"
        )
    elif replaced := replaced_method(precision, base):
        yield FallbackReason(code="precision", message=f"{type(precision).__name__}.{replaced} is its own")
    if replaced := replaced_method(module, LightningModule):
        yield FallbackReason(
            code="module-hook",
            message=f"{type(module).__name__}.{replaced} is overridden and may drive the step itself",
        )
    if type(optimization) is not WindowedOptimization or overrides(optimization, "run", WindowedOptimization):
        yield FallbackReason(
            code="optimization-loop", message="fit_loop.epoch_loop.automatic_optimization was replaced"
        )
    elif optimization._skip_backward:
        yield FallbackReason(code="skip-backward", message="a callback skips the backward pass of this epoch")


def replaced_method(instance: object, base: type) -> str | None:
    """Return the name of a bypassed method of `instance` that is not `base`'s own, as imported; None if all are."""
    for name, function in _AS_IMPORTED[base].items():
        if name in getattr(instance, "__dict__", {}) or getattr(type(instance), name) is not function:
            return name
    return None
