"""Accumulation windows, and stock Lightning's optimization loop taught to divide by the window's true size."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loops.optimization.automatic import ClosureResult, _AutomaticOptimization
from torch import Tensor

from zdtrain.errors import LossShapeError


class WindowedOptimization(_AutomaticOptimization):
    """Stock's `_AutomaticOptimization`, but an epoch's partial last window is averaged over the batches it holds.

    Args:
        trainer: The Trainer.
        lightning_quirks: Divide by ``accumulate_grad_batches`` there as well, as stock does.
    """

    def __init__(self, trainer: Trainer, *, lightning_quirks: bool) -> None:
        super().__init__(trainer)
        self.lightning_quirks = lightning_quirks

    def divisor(self, batch_idx: int) -> int:
        """Return what the loss of batch `batch_idx` is divided by."""
        window = self.trainer.accumulate_grad_batches
        if window == 1 or self.lightning_quirks:
            return window
        batches = self.trainer.num_training_batches
        if batches == float("inf"):
            return window  # the window's end is not known yet; `correct_gradients` makes up for it
        return min(window, int(batches) - batch_idx // window * window)

    def correct_gradients(self, optimizer: torch.optim.Optimizer, batch_idx: int) -> None:
        """Rescale the gradients of a partial last window whose size nobody could know: the loader has no length."""
        window = self.trainer.accumulate_grad_batches
        held = batch_idx % window + 1
        if held == window or self.lightning_quirks or self.trainer.num_training_batches != float("inf"):
            return
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, window / held)

    def _training_step(self, kwargs: OrderedDict[str, Any]) -> ClosureResult:
        results: Any = self.trainer.fit_loop.epoch_loop._results
        with results.reduced_together():
            result = self._normalized_step(kwargs)
        if result.closure_loss is not None:
            require_one_element(result.closure_loss)
        return result

    def _normalized_step(self, kwargs: OrderedDict[str, Any]) -> ClosureResult:
        batch_idx = self.trainer.fit_loop.epoch_loop.batch_idx
        window = self.trainer.accumulate_grad_batches
        divisor = self.divisor(batch_idx)
        if divisor == window:
            return super()._training_step(kwargs)
        self.trainer.accumulate_grad_batches = divisor
        try:
            return super()._training_step(kwargs)
        finally:
            self.trainer.accumulate_grad_batches = window

    def _make_backward_fn(self, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], None] | None:
        backward = super()._make_backward_fn(optimizer)
        if backward is None:
            return None

        def backward_fn(loss: Tensor) -> None:
            backward(loss)
            if not self.trainer.fit_loop._should_accumulate():
                self.correct_gradients(optimizer, self.trainer.fit_loop.epoch_loop.batch_idx)

        return backward_fn


# The profiler names its actions after the class.
WindowedOptimization.__name__ = "_AutomaticOptimization"


def require_one_element(loss: Tensor) -> None:
    """Refuse a loss that is not one number.

    Raises:
        LossShapeError: There is more than one element.
    """
    if loss.numel() != 1:
        raise LossShapeError(
            f"training_step returned a loss of shape {tuple(loss.shape)}; a loss is one number. "
            "Reduce it, e.g. `loss.mean()`, or `loss.sum()` where the batch size must not matter."
        )
