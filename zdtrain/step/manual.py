"""A training step that optimizes by hand, run eagerly."""

from collections import OrderedDict
from contextlib import nullcontext
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor
from torch.optim import Optimizer

from zdtrain.monitor.guard import StepGuard
from zdtrain.monitor.masking import Copies
from zdtrain.step.eager import EagerStep
from zdtrain.step.hooks import Hooks


class ManualStep(EagerStep):
    """Runs a ``training_step`` that calls backward and its optimizers itself.

    Args:
        trainer: The Trainer, with its module attached.
        hooks: The overridden step hooks.
    """

    def __init__(self, trainer: Trainer, hooks: Hooks) -> None:
        self._manual = trainer.fit_loop.epoch_loop.manual_optimization
        super().__init__(trainer, hooks)
        self._schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self._scale_before = Copies()

    def _prepare_guard(self, guard: StepGuard) -> None:
        guard.prepare_by_hand(self._strategy._optimizers, self._schedulers)

    def _use(self, optimizer: Optimizer) -> None:
        self._optimizer, self._zeroes_its_own_way = optimizer, True

    def _run(self, accumulate: bool) -> None:  # noqa: ARG002 - accumulation, too, is the module's own affair
        if self._guard is None:
            self._by_hand()
        else:
            self._guarded(self._guard)

    def _guarded(self, guard: StepGuard) -> None:
        """Let the module do what it does, then judge it and take all of it back where a monitor says so."""
        guard.begin_window()
        guard.begin_update()
        scaling = self._scaling
        if scaling is not None and guard.holds:
            self._scale_before.save({"scale": scaling.scale, "tracker": scaling.tracker})
        self._by_hand()
        guard.judge_by_hand(self._returned_loss())
        guard.after_update()
        if scaling is not None and guard.holds:  # a skipped overflow lowers the scale, what lies behind a stop does not
            self._scale_before.put_back({"scale": scaling.scale, "tracker": scaling.tracker}, guard.stopped)

    def _returned_loss(self) -> Tensor | None:
        loss = self._output.get("loss")
        return loss if isinstance(loss, Tensor) and loss.numel() == 1 else None

    def _by_hand(self) -> None:
        arguments: Any = OrderedDict(batch=self._batch)
        if self._takes_batch_idx:
            arguments["batch_idx"] = self._batch_idx
        with nullcontext() if self._scaling is None else self._scaling.by_hand():
            self._output = self._hooks.run_own(self._manual.run, arguments)
        self._ran = True

    def _outputs(self) -> dict[str, Any]:
        output, self._output, self._batch = self._output, None, None
        return {} if "on_train_batch_end" in self._hooks.nobody else output
