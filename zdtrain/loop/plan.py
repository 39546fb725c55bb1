"""Whether an epoch's steps can take the short path, and if not, why."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.fetchers import _DataFetcher, _DataLoaderIterDataFetcher
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch.nn.parallel import DistributedDataParallel

from zdtrain.capture.captured import CapturedStep
from zdtrain.capture.evaluation import CapturedEvaluation
from zdtrain.capture.manual import CapturedManualStep
from zdtrain.capture.session import CaptureSession
from zdtrain.capture.several import SeveralSteps
from zdtrain.errors import FallbackReason
from zdtrain.loop.ahead import copy_ahead, reasons_against
from zdtrain.loop.feed import Feed, ProfiledFeed
from zdtrain.loop.several import StepsAhead, reasons_against_several
from zdtrain.loop.sigterm import SharedSigterm
from zdtrain.step.eager import EagerStep
from zdtrain.step.evaluation import EvaluationStep
from zdtrain.step.hooks import Hooks, overrides
from zdtrain.step.manual import ManualStep
from zdtrain.step.optimization import WindowedOptimization
from zdtrain.step.profiled import Parts, ProfiledHooks, ProfiledStep, is_profiled
from zdtrain.step.scaling import scaler_reason
from zdtrain.step.wrapped import ProfiledWrappedStep, WrappedStep

# Methods that the short path does not call: whoever replaces one of them gets stock Lightning's loop.
_EVALUATION = ("validation_step", "test_step", "batch_to_device")
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
_WRAPPING = (*_STRATEGY, "block_backward_sync", "reduce")
_PRECISION = (
    "backward",
    "pre_backward",
    "post_backward",
    "optimizer_step",
    "_after_closure",
    "_wrap_closure",
    "_clip_gradients",
)
_TRANSFER = ("_on_before_batch_transfer", "_apply_batch_transfer_handler", "_call_batch_hook")
_MODULE = ("optimizer_step", *_TRANSFER)
_AS_IMPORTED: dict[type, dict[str, Any]] = {
    base: {name: getattr(base, name) for name in names}
    for base, names in (
        (Strategy, (*_STRATEGY, *_EVALUATION)),
        (SingleDeviceStrategy, (*_STRATEGY, *_EVALUATION)),
        (DDPStrategy, _WRAPPING),
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
        loop, profiled = trainer.fit_loop.epoch_loop, is_profiled(trainer)
        self.hooks = ProfiledHooks(trainer) if profiled else Hooks(trainer)
        copies = None
        if trainer.options.prefetch:  # type: ignore[attr-defined]
            reasons = list(reasons_against(trainer, fetcher, "prefetch"))
            for reason in reasons:
                say(reason)
            copies = None if reasons else copy_ahead(trainer, say)
        self.feed = (ProfiledFeed if profiled else Feed)(trainer, fetcher, copies)
        self.step = _step_of(trainer, self.hooks, _captures(trainer, say))
        several = trainer.world_size > 1
        self.sigterm = SharedSigterm(trainer, trainer.drain) if several else None  # type: ignore[attr-defined]
        automatic = trainer.lightning_module.automatic_optimization
        configs = trainer.lr_scheduler_configs if automatic else []  # else the module steps them itself
        self.step_schedulers = any(c.interval == "step" and not c.reduce_on_plateau for c in configs)
        self.step_plateaus = any(c.interval == "step" and c.reduce_on_plateau for c in configs)
        self.epoch_schedulers = any(c.interval == "epoch" and not c.reduce_on_plateau for c in configs)
        self.several: SeveralSteps | None = None
        if trainer.options.steps_per_replay > 1:  # type: ignore[attr-defined]
            self._take_several(trainer, fetcher, say)
        self.run: Callable[..., dict[str, Any]] = (self.several or self.step).run
        if profiled:
            self.run = _profiled(self.run, Parts(trainer).profile, "run_training_batch")
        self.validates = loop._should_check_val_epoch()

    def _take_several(self, trainer: Any, fetcher: _DataFetcher, say: Callable[[FallbackReason], None]) -> None:
        step, reasons = self.step, list(reasons_against_several(trainer, fetcher, self.step))
        for reason in reasons:
            say(reason)
        if not reasons and isinstance(step, CapturedStep):
            around = StepsAhead(trainer, self.feed, step)
            self.several = SeveralSteps(trainer, step, trainer.options.steps_per_replay, around)


def _step_of(trainer: Trainer, hooks: Hooks, captures: CaptureSession | None) -> EagerStep:
    """Return what runs the steps of the module: captured, profiled, by hand."""
    by_hand = not trainer.lightning_module.automatic_optimization
    if captures is not None:
        return (CapturedManualStep if by_hand else CapturedStep)(trainer, hooks, captures)
    if by_hand:
        return ManualStep(trainer, hooks)
    wraps = isinstance(trainer.strategy, DDPStrategy)
    if isinstance(hooks, ProfiledHooks):
        return (ProfiledWrappedStep if wraps else ProfiledStep)(trainer, hooks)
    return (WrappedStep if wraps else EagerStep)(trainer, hooks)


def _captures(trainer: Any, say: Callable[[FallbackReason], None]) -> CaptureSession | None:
    """Return what captures this epoch's steps, if anything; say why not, where it was asked for."""
    captures: CaptureSession | None = trainer.fit_loop.epoch_loop.captures
    if isinstance(trainer.strategy, DDPStrategy):
        if trainer.options.capture_in_effect(device_graphs=trainer.drain.runtime.has_graphs) != "off":
            what = "reduces gradients between processes, which a captured step can't do; steps run eagerly"
            say(FallbackReason(code="strategy", message=f"{type(trainer.strategy).__name__} {what}"))
        return None
    if captures is not None and is_profiled(trainer):
        say(_profiler_reason(trainer))
        return None
    by_hand = not trainer.lightning_module.automatic_optimization
    if captures is not None and by_hand and trainer.fit_loop.epoch_loop.guard is not None:
        say(_by_hand_reason())
        return None
    return captures


def _profiled(run: Callable[..., Any], profile: Callable[[str], Any], name: str) -> Callable[..., Any]:
    """Return `run` as a part of the profile with this name."""

    def profiled(*arguments: Any) -> Any:
        with profile(name):
            return run(*arguments)

    return profiled


class EvaluationPlan:
    """What one run of a validation or test needs, resolved once.

    Args:
        trainer: The Trainer, with its module attached.
        loop: The evaluation loop.
    """

    def __init__(self, trainer: Trainer, loop: Any) -> None:
        kind = "test" if trainer.testing else "validation"
        names = self.batch_start, self.batch_end = f"on_{kind}_batch_start", f"on_{kind}_batch_end"
        profiled, captures = is_profiled(trainer), loop.captures
        self.hooks = (ProfiledHooks if profiled else Hooks)(trainer, names)
        self.feed = (ProfiledFeed if profiled else Feed)(trainer, loop._data_fetcher)
        self.several_loaders = loop._is_sequential and loop.num_dataloaders > 1
        self.step: EvaluationStep
        if captures is not None and profiled:
            captures.note(_profiler_reason(trainer))
            captures = None
        if captures is None:
            self.step = EvaluationStep(trainer, _step_name(trainer), loop.results)
        else:
            captures.make_room(loop.num_dataloaders)
            self.step = CapturedEvaluation(
                trainer, _step_name(trainer), loop.results, captures, hooks=names, run_number=loop.num_runs
            )
        self.run: Callable[..., Any] = self.step.run
        if profiled:
            self.run = _profiled(self.run, Parts(trainer).of_strategy, _step_name(trainer))


def reasons_for_stock(trainer: Trainer, fetcher: _DataFetcher) -> Iterator[FallbackReason]:
    """Yield what keeps this epoch's steps on stock Lightning's own loop."""
    module, strategy, precision = trainer.lightning_module, trainer.strategy, trainer.precision_plugin
    optimization = trainer.fit_loop.epoch_loop.automatic_optimization
    yield from _reasons_of_fetcher(fetcher, "training_step")
    yield from _reasons_of_strategy(trainer)
    if not module.automatic_optimization and not strategy._optimizers:
        yield FallbackReason(
            code="manual-optimization",
            message="the module optimizes by hand (automatic_optimization=False) and has no optimizer",
        )
    if reason := scaler_reason(precision, strategy.root_device):
        yield reason
    base = MixedPrecision if isinstance(precision, MixedPrecision) else Precision
    if replaced := replaced_method(precision, base, _PRECISION):
        yield FallbackReason(code="precision", message=f"{type(precision).__name__}.{replaced} is its own")
    if replaced := replaced_method(module, LightningModule, _MODULE):
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


def reasons_for_stock_evaluation(trainer: Trainer, loop: Any) -> Iterator[FallbackReason]:
    """Yield what keeps the steps of `loop`, an evaluation loop, on stock Lightning's own."""
    module = trainer.lightning_module
    yield from _reasons_of_fetcher(loop._data_fetcher, _step_name(trainer))
    yield from _reasons_on_one_device(trainer, _EVALUATION)
    if trainer.strategy.model is not module:
        yield FallbackReason(code="strategy", message="the strategy wraps the module and drives its step itself")
    if replaced := replaced_method(module, LightningModule, _TRANSFER):
        yield FallbackReason(code="module-hook", message=f"{type(module).__name__}.{replaced} is overridden")


def _reasons_of_fetcher(fetcher: _DataFetcher, step: str) -> Iterator[FallbackReason]:
    if isinstance(fetcher, _DataLoaderIterDataFetcher):
        yield FallbackReason(code="dataloader-iter", message=f"{step} takes the data loader's iterator")


def _reasons_of_strategy(trainer: Any) -> Iterator[FallbackReason]:
    strategy = trainer.strategy
    if not isinstance(strategy, DDPStrategy):
        yield from _reasons_on_one_device(trainer, _STRATEGY)
    elif replaced := replaced_method(strategy, DDPStrategy, _WRAPPING):
        yield FallbackReason(code="strategy", message=f"{type(strategy).__name__}.{replaced} is replaced")
    elif not isinstance(strategy.model, DistributedDataParallel):
        yield FallbackReason(code="strategy", message=f"{type(strategy).__name__} wraps the module in its own way")
    elif strategy._model_averager is not None:
        yield FallbackReason(code="strategy", message="DDPStrategy averages weights over processes in its own way")
    elif trainer.fit_loop.epoch_loop.guard is not None and not trainer.lightning_module.automatic_optimization:
        yield FallbackReason(code="strategy", message="DDPStrategy trains a module that optimizes by hand")


def _reasons_on_one_device(trainer: Trainer, bypassed: Sequence[str]) -> Iterator[FallbackReason]:
    strategy = trainer.strategy
    if type(strategy) is not SingleDeviceStrategy or trainer.world_size > 1:
        yield FallbackReason(
            code="strategy", message=f"strategy {type(strategy).__name__} runs the step in its own way"
        )
    elif replaced := replaced_method(strategy, SingleDeviceStrategy, bypassed):
        yield FallbackReason(code="strategy", message=f"{type(strategy).__name__}.{replaced} is replaced")


def _profiler_reason(trainer: Trainer) -> FallbackReason:
    name = type(trainer.profiler).__name__  # type: ignore[attr-defined]
    message = f"{name} times the parts of a step, and a captured step has none; drop profiler= to capture"
    return FallbackReason(code="profiler", message=message)


def _by_hand_reason() -> FallbackReason:
    message = (
        "the module optimizes by hand and monitors or averaged weights watch its steps, which then run eagerly; drop "
        "monitors=, nonfinite= and ema_decay= to capture"
    )
    return FallbackReason(code="monitors-by-hand", message=message)


def _step_name(trainer: Trainer) -> str:
    return "test_step" if trainer.testing else "validation_step"


def replaced_method(instance: object, base: type, names: Sequence[str]) -> str | None:
    """Return which of the methods `names` of `instance` is not `base`'s own, as imported; None if all are."""
    as_imported = _AS_IMPORTED[base]
    for name in names:
        if name in getattr(instance, "__dict__", {}) or getattr(type(instance), name) is not as_imported[name]:
            return name
    return None
