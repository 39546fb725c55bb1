"""Validation and test: stock Lightning's loop with a short path through each batch."""

from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.utilities.exceptions import SIGTERMException

from zdtrain.capture.session import CaptureSession
from zdtrain.loop.connector import LoggerConnector
from zdtrain.loop.plan import EvaluationPlan, reasons_for_stock_evaluation
from zdtrain.step.results import StepResults


class EvaluationLoop(_EvaluationLoop):
    """Runs a validation or test; loaders, counters, hooks around the run and results stay stock.

    Args:
        trainer: The Trainer.
        stock: The loop it replaces.
    """

    def __init__(self, trainer: Trainer, stock: _EvaluationLoop) -> None:
        super().__init__(
            trainer, stock._trainer_fn, stock._stage, verbose=stock.verbose, inference_mode=stock.inference_mode
        )
        self._results = self.results = StepResults(training=False)
        self.captures: CaptureSession | None = None  # the Trainer's, while it captures steps
        self.plan: EvaluationPlan | None = None
        self.num_runs = 0

    def on_run_start(self) -> None:
        """Prepare the run, and resolve once what its steps need."""
        super().on_run_start()
        self.num_runs += 1
        reasons = list(reasons_for_stock_evaluation(self.trainer, self))
        self.plan = None if reasons else EvaluationPlan(self.trainer, self)
        if self.captures is not None:
            for reason in reasons:
                self.captures.note(reason)

    def on_run_end(self) -> Any:
        """End the run; what it needed is made anew for the next."""
        self.plan = None
        return super().on_run_end()

    def _evaluation_step(
        self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Iterator[Any] | None
    ) -> None:
        plan, trainer, progress = self.plan, self.trainer, self.batch_progress
        if plan is None:
            super()._evaluation_step(batch, batch_idx, dataloader_idx, dataloader_iter)
            return
        batch = plan.feed.move(batch, dataloader_idx)
        loader = dataloader_idx if plan.several_loaders else None
        arguments = (batch, batch_idx) if loader is None else (batch, batch_idx, loader)
        progress.increment_ready()
        connector: LoggerConnector = trainer._logger_connector  # type: ignore[assignment]
        connector.start_step(self.results, batch, loader)
        plan.hooks(plan.batch_start, *arguments)
        progress.increment_started()
        output = plan.run(*arguments)
        progress.increment_processed()
        plan.hooks(plan.batch_end, output, *arguments)
        connector.end_step(self.results)
        progress.increment_completed()
        if not trainer.sanity_checking:
            self._has_run = True
            connector.update_eval_step_metrics(self._seen_batches_per_dataloader[dataloader_idx])
            self._seen_batches_per_dataloader[dataloader_idx] += 1
        if not progress.is_last_batch and trainer.received_sigterm:
            raise SIGTERMException


# The profiler names its actions after the class.
EvaluationLoop.__name__ = "_EvaluationLoop"
