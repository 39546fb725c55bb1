"""A training step that optimizes by hand, run eagerly."""

from collections import OrderedDict
from contextlib import nullcontext
from typing import Any

from lightning.pytorch import Trainer
from torch.optim import Optimizer

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

    def _use(self, optimizer: Optimizer) -> None:
        self._optimizer, self._zeroes_its_own_way = optimizer, True

    def _run(self, accumulate: bool) -> None:  # noqa: ARG002 - accumulation, too, is the module's own affair
        self._by_hand()

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
