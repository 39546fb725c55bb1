"""One training step, run eagerly: Lightning's semantics and hook order without its layers."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch.optim import Optimizer

from zdtrain.monitor.guard import StepGuard
from zdtrain.step.hooks import Hooks, is_hooked, overrides
from zdtrain.step.log import StepLog, can_replace_log
from zdtrain.step.optimization import WindowedOptimization, require_one_element
from zdtrain.step.scaling import LossScaling


class EagerStep:
    """Runs ``training_step``, backward, clipping and the optimizer for one batch of automatic optimization.

    Args:
        trainer: The Trainer, with its module attached.
        hooks: The overridden step hooks.
    """

    def __init__(self, trainer: Trainer, hooks: Hooks) -> None:
        module = trainer.lightning_module
        epoch_loop = trainer.fit_loop.epoch_loop
        self._trainer = trainer
        self._module = module
        self._attributes = module.__dict__
        self._hooks = hooks
        self._optimization: WindowedOptimization = epoch_loop.automatic_optimization  # type: ignore[assignment]
        self._progress = self._optimization.optim_progress.optimizer
        self._strategy = trainer.strategy
        self._use(self._strategy._optimizers[0])
        self._takes_batch_idx = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        self._forward_context = forward_context(trainer.precision_plugin, "train_step_context")
        if can_replace_log(module):
            hooks.log = StepLog(module, epoch_loop._results, trainer._logger_connector)  # type: ignore[arg-type]
        self._clips_its_own_way = overrides(module, "configure_gradient_clipping", LightningModule)
        self._guard = epoch_loop.guard
        self._scaling = epoch_loop.scaling
        self._whole_loss: Tensor | None = None  # before the division by the window, for the guard, where there is one
        self._ran = False
        self._batch: Any = None
        self._batch_idx = 0
        self._loss: Tensor | None = None
        self._output: Any = None

    def run(self, batch: Any, batch_idx: int, accumulate: bool) -> dict[str, Any]:
        """Train on `batch`; step the optimizer unless the window goes on.

        Returns:
            What `on_train_batch_end` gets: the detached loss under ``"loss"`` and what else the step returned.
        """
        self._batch, self._batch_idx = batch, batch_idx
        self._ran = False
        self._follow_optimizers()
        if self._guard is not None:
            self._prepare_guard(self._guard)
        if self._scaling is not None:
            self._scaling.prepare()
        self._run(accumulate)
        if not self._ran:
            raise MisconfigurationException(
                "The closure hasn't been executed. HINT: did you call `optimizer_closure()` in your `optimizer_step`"
                " hook? It could also happen because the `optimizer.step(optimizer_closure)` call did not execute it"
                " internally."
            )
        return self._outputs()

    def _prepare_guard(self, guard: StepGuard) -> None:
        guard.prepare(self._optimizer)

    def _run(self, accumulate: bool) -> None:
        if accumulate:
            self._accumulate()
        else:
            progress = self._progress.step
            progress.increment_ready()
            self._step_optimizer()
            progress.increment_completed()

    def _outputs(self) -> dict[str, Any]:
        output, loss = self._output, self._loss
        self._batch = self._output = self._loss = None
        if loss is None or "on_train_batch_end" in self._hooks.nobody:
            return {}
        outputs = {"loss": loss}
        if output is not None:
            outputs.update((key, value) for key, value in output.items() if key != "loss")
        return outputs

    def _follow_optimizers(self) -> None:
        if self._strategy._optimizers[0] is not self._optimizer:  # a callback may replace it
            self._use(self._strategy._optimizers[0])

    def _use(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._zeroes_its_own_way = overrides(optimizer, "zero_grad", Optimizer) or overrides(
            self._module, "optimizer_zero_grad", LightningModule
        )

    def _accumulate(self) -> None:
        self._forward_backward()
        if self._guard is not None:
            self._guard.observe(self._taken_loss())

    def _step_optimizer(self) -> None:
        # The optimizer gets the whole step as its closure, as in stock: hooks registered on it, optimizers that
        # evaluate more than once and schedulers that count its calls all see what they would see there.
        if self._guard is not None:
            self._guard.begin_update()
        if self._scaling is not None:
            self._step_scaled(self._scaling)
        else:
            self._call_optimizer(closure=self._closure)
        if self._guard is not None:
            self._guard.after_update()

    def _step_scaled(self, scaling: LossScaling) -> None:
        scaling.update_of(self._optimizer)  # refuses what can't be scaled
        self._closure()  # not by the optimizer, which is not called at all in some steps
        if self._loss is not None:
            stopped = self._guard.stopped if self._guard is not None and self._guard.holds else None
            scaling.step(self._optimizer, self._call_optimizer, stopped)

    def _call_optimizer(self, **closure: Any) -> None:
        step = unobserved_step(self._optimizer)
        if step is None:
            self._optimizer.step(**closure)
        else:
            step(self._optimizer, **closure)

    def _closure(self) -> Tensor | None:
        if not torch.is_grad_enabled():  # some optimizers step under no_grad
            with torch.enable_grad():
                return self._closure()
        self._forward_backward()
        scaling = None if self._loss is None else self._scaling
        self._optimization.correct_gradients(self._optimizer, self._batch_idx)
        if scaling is not None:
            scaling.after_backward(self._optimizer)
        self._hooks("on_before_optimizer_step", self._optimizer)
        if self._guard is not None:
            if scaling is not None:
                scaling.unscale(self._optimizer)
            self._guard.judge(self._taken_loss(), accumulates=self._trainer.accumulate_grad_batches > 1)
        if self._clips_its_own_way or self._trainer.gradient_clip_val:
            with nullcontext() if scaling is None else scaling.clipping(self._optimizer):
                self._clip()
        return self._loss

    def _clip(self) -> None:
        self._hooks.run_as(
            "configure_gradient_clipping",
            self._module.configure_gradient_clipping,
            self._optimizer,
            gradient_clip_val=self._trainer.gradient_clip_val,
            gradient_clip_algorithm=self._trainer.gradient_clip_algorithm,
        )

    def _forward_backward(self) -> None:
        self._ran = True
        if self._guard is not None and self._batch_idx % self._trainer.accumulate_grad_batches == 0:
            self._guard.begin_window()
        loss = self._forward()
        if self._batch_idx % self._trainer.accumulate_grad_batches == 0:
            self._zero_grad()
        if loss is None:
            self._loss = None
            Closure.warning_cache.warn(
                "`training_step` returned `None`. If this was on purpose, ignore this warning..."
            )
            return
        # a copy: what `on_train_batch_end` keeps must not change with the loss
        self._loss = loss.detach() if "on_train_batch_end" in self._hooks.nobody else loss.detach().clone()
        if self._scaling is not None:
            loss = self._scaling.scaled(loss)
        self._backward(loss)

    def _backward(self, loss: Tensor) -> None:
        self._hooks("on_before_backward", loss)
        attributes = self._attributes
        previous = attributes["_current_fx_name"]
        attributes["_current_fx_name"] = "backward"
        self._module.backward(loss)
        attributes["_current_fx_name"] = previous
        self._hooks("on_after_backward")

    def _forward(self) -> Tensor | None:
        step = self._training_step if self._forward_context is None else self._step_in_context
        output = self._hooks.run_as("training_step", step)
        divisor = self._optimization.divisor(self._batch_idx)
        if type(output) is Tensor:
            loss = output
            self._output = None
        else:
            result = ClosureResult.from_training_step_output(output, 1)
            if result.closure_loss is None:
                return None
            loss = output["loss"] if not isinstance(output, Tensor) else output
            self._output = None if isinstance(output, Tensor) else output
        if loss.dim() != 0:
            require_one_element(loss)
        if divisor == 1:
            return loss
        if self._guard is not None:
            self._whole_loss = loss.detach()
        return loss / divisor

    def _step_in_context(self) -> Any:
        assert self._forward_context is not None
        with self._forward_context():
            return self._training_step()

    def _taken_loss(self) -> Tensor | None:
        whole, self._whole_loss = self._whole_loss, None
        return self._loss if whole is None else whole

    def _training_step(self) -> Any:
        if self._takes_batch_idx:
            return self._module.training_step(self._batch, self._batch_idx)
        return self._module.training_step(self._batch)

    @property
    def _epoch(self) -> int:
        return self._trainer.current_epoch

    def _zero_grad(self) -> None:
        progress = self._progress.zero_grad
        progress.increment_ready()
        self._hooks("on_before_zero_grad", self._optimizer)
        progress.increment_started()
        if not self._zeroes_its_own_way:
            for group in self._optimizer.param_groups:  # they may grow while training
                for parameter in group["params"]:
                    parameter.grad = None
        else:
            self._hooks.run_as(
                "optimizer_zero_grad",
                self._module.optimizer_zero_grad,
                self._epoch,
                self._batch_idx,
                self._optimizer,
            )
        progress.increment_completed()


# The code of the function that torch puts around every optimizer's `step`.
_WRAPPER = Optimizer.profile_hook_step(len).__code__


def unobserved_step(optimizer: Optimizer) -> Callable[..., Any] | None:
    """Return the optimizer's `step` without torch's wrapper; None where the wrapper, or another, has something to do.

    The wrapper runs step hooks and marks the step for a profiler, which costs as much as the update of a small model.
    """
    step = type(optimizer).step
    if getattr(step, "__code__", None) is not _WRAPPER or "step" in optimizer.__dict__:
        return None
    if is_hooked(optimizer) or _profiler_enabled():
        return None
    return step.__wrapped__  # type: ignore[attr-defined, no-any-return]


def forward_context(precision: Precision, name: str) -> Callable[[], AbstractContextManager[None]] | None:
    """Return the context that `precision` runs a step in, such as its `train_step_context`, or None."""
    plain = (
        getattr(type(precision), name) is getattr(Precision, name)
        and type(precision).forward_context is Precision.forward_context
    )
    return None if plain else getattr(precision, name)
