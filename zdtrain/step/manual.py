"""A training step that optimizes by hand: run eagerly, or captured as one program."""

from collections import OrderedDict
from contextlib import nullcontext
from typing import Any

from lightning.pytorch import Trainer
from torch.optim import Optimizer

from zdtrain.errors import FallbackReason
from zdtrain.step.captured import CapturedStep
from zdtrain.step.eager import EagerStep
from zdtrain.step.hooks import Hooks
from zdtrain.step.session import CaptureSession


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


class CapturedManualStep(ManualStep, CapturedStep):
    """Records all that `training_step` does: backward passes, and the steps of its optimizers.

    Every optimizer has to be part of the program, because the module's Python that calls it is not run again.

    Args:
        trainer: The Trainer, with its module attached.
        hooks: The overridden step hooks.
        session: Programs and counts, kept for the whole fit.
    """

    _needs_loss = False
    _drops_gradients = False  # the module zeroes where it likes

    def __init__(self, trainer: Trainer, hooks: Hooks, session: CaptureSession) -> None:
        self._manual = trainer.fit_loop.epoch_loop.manual_optimization
        CapturedStep.__init__(self, trainer, hooks, session)

    def _use(self, optimizer: Optimizer) -> None:
        super()._use(optimizer)
        optimizers = list(self._strategy._optimizers)
        self._surround(optimizers, self._manual.optim_step_progress)
        found = [self._part_of(one) for one in optimizers]
        self._inside = [part for part in found if part is not None]
        self._outside = tuple(
            FallbackReason(
                code="optimizer-by-hand", message=f"{type(one).__name__} can't be recorded, so nothing of the step is"
            )
            for one, part in zip(optimizers, found, strict=True)
            if part is None
        )

    def _knows_updates(self) -> bool:
        known = super()._knows_updates()
        return known and len(self._inside) == len(self._surroundings.optimizers)

    def _run(self, accumulate: bool) -> None:  # noqa: ARG002 - see `ManualStep._run`
        self._through(self._by_hand, self._inside)

    def _by_hand(self) -> None:
        with self._noted_index():
            super()._by_hand()
