"""A training step of a module that the strategy wraps, as DDP does, to reduce gradients over processes."""

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from zdtrain.step.eager import EagerStep
from zdtrain.step.hooks import Hooks
from zdtrain.step.profiled import ProfiledStep
from zdtrain.step.results import StepResults


class WrappedStep(EagerStep):
    """An `EagerStep` whose forward and backward passes go through the strategy's wrapper of the module.

    Gradients are reduced in the backward pass of a window's last batch only, and what the step logs with sync_dist when
    ``training_step`` has returned.

    Args:
        trainer: The Trainer, with its module attached and wrapped.
        hooks: The overridden step hooks.
    """

    _strategy: DDPStrategy

    def __init__(self, trainer: Trainer, hooks: Hooks) -> None:
        super().__init__(trainer, hooks)
        self._forward_context = None  # the strategy enters it
        self._results: StepResults = trainer.fit_loop.epoch_loop._results  # type: ignore[assignment]

    def _accumulate(self) -> None:
        with self._strategy.block_backward_sync():
            super()._accumulate()

    def _training_step(self) -> Any:
        arguments = (self._batch, self._batch_idx) if self._takes_batch_idx else (self._batch,)
        with self._results.reduced_together():
            output = self._strategy.training_step(*arguments)
            if output is None and self._trainer.world_size > 1:
                raise RuntimeError(
                    "Skipping the `training_step` by returning None in distributed training is not supported."
                    " It is recommended that you rewrite your training logic to avoid having to skip the step in the"
                    " first place."
                )
        return output

    def _backward(self, loss: Tensor) -> None:
        self._strategy.pre_backward(loss)
        super()._backward(loss)
        self._strategy.post_backward(loss)


class ProfiledWrappedStep(ProfiledStep, WrappedStep):
    """A `WrappedStep` whose parts are known to the profiler."""
