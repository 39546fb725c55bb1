"""Steps and hooks under a Lightning profiler: each part has the name that it has in stock Lightning's loop."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer import call
from torch import Tensor
from torch.optim import Optimizer

from zdtrain.step.eager import EagerStep
from zdtrain.step.hooks import STEP_HOOKS, Hooks


class Parts:
    """Names the parts of a run for its profiler.

    Args:
        trainer: The Trainer, with its module attached.
    """

    def __init__(self, trainer: Trainer) -> None:
        profiler: Any = trainer.profiler  # type: ignore[attr-defined]
        self.profile: Callable[[str], AbstractContextManager[Any]] = profiler.profile
        self._module, self._strategy = type(trainer.lightning_module).__name__, type(trainer.strategy).__name__

    def of_module(self, name: str) -> AbstractContextManager[Any]:
        """Return a context that counts as the module's method `name`."""
        return self.profile(f"[LightningModule]{self._module}.{name}")

    def of_strategy(self, name: str) -> AbstractContextManager[Any]:
        """Return a context that counts as the strategy's method `name`."""
        return self.profile(f"[Strategy]{self._strategy}.{name}")


def is_profiled(trainer: Trainer) -> bool:
    """Return whether a profiler wants to know of the parts of steps."""
    return type(trainer.profiler) is not PassThroughProfiler  # type: ignore[attr-defined]


class ProfiledHooks(Hooks):
    """Calls the hooks of all callbacks and of the module, overridden or not, as stock Lightning does."""

    def __init__(self, trainer: Trainer, names: Any = STEP_HOOKS) -> None:
        super().__init__(trainer, names)
        self._parts = Parts(trainer)

    def __call__(self, name: str, *args: Any) -> Any:
        """Call hook `name` of everybody; return what the module's own returned."""
        call._call_callback_hooks(self._trainer, name, *args)
        output = call._call_lightning_module_hook(self._trainer, name, *args)
        if name == "on_train_batch_start":
            call._call_strategy_hook(self._trainer, name, *args)
        return output

    def run_as(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `function` as hook `name` of the module."""
        if name == "training_step":  # a part of the strategy's
            return super().run_as(name, function, *args, **kwargs)
        with self._parts.of_module(name):
            return super().run_as(name, function, *args, **kwargs)


class ProfiledStep(EagerStep):
    """An `EagerStep` whose parts are known to the profiler.

    Args:
        trainer: The Trainer, with its module attached.
        hooks: The step hooks.
    """

    def __init__(self, trainer: Trainer, hooks: ProfiledHooks) -> None:
        self._parts = Parts(trainer)
        super().__init__(trainer, hooks)
        self._clips_its_own_way = True  # the hook is called in every step

    def _use(self, optimizer: Optimizer) -> None:
        super()._use(optimizer)
        self._zeroes_its_own_way = True  # by its hook

    def _step_optimizer(self) -> None:
        with self._parts.of_module("optimizer_step"):
            super()._step_optimizer()

    def _training_step(self) -> Any:
        with self._parts.of_strategy("training_step"):
            return super()._training_step()

    def _backward(self, loss: Tensor) -> None:
        with self._parts.of_strategy("backward"):
            super()._backward(loss)
