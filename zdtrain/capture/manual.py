"""A training step that optimizes by hand, captured as one program."""

from lightning.pytorch import Trainer
from torch.optim import Optimizer

from zdtrain.capture.captured import CapturedStep
from zdtrain.capture.session import CaptureSession
from zdtrain.errors import FallbackReason
from zdtrain.step.hooks import Hooks
from zdtrain.step.manual import ManualStep


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
        found = [self._session.inside(one) for one in optimizers]
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
