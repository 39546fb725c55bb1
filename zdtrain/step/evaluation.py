"""One validation or test step, run eagerly."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from zdtrain.step.eager import forward_context
from zdtrain.step.log import StepLog, can_replace_log
from zdtrain.step.results import StepResults


class EvaluationStep:
    """Runs ``validation_step`` or ``test_step`` for one batch, as Lightning's strategy does on one device.

    Args:
        trainer: The Trainer, with its module attached.
        name: ``"validation_step"`` or ``"test_step"``.
        results: Where it logs.
    """

    def __init__(self, trainer: Trainer, name: str, results: StepResults) -> None:
        self._trainer = trainer
        self._module = trainer.lightning_module
        self._attributes = self._module.__dict__
        self._name = name
        self._results = results
        self._connector: Any = trainer._logger_connector
        self._takes_batch_idx = is_param_in_hook_signature(getattr(self._module, name), "batch_idx", min_args=2)
        context = "test_step_context" if name == "test_step" else "val_step_context"
        self._context: Callable[[], AbstractContextManager[None]]
        self._context = forward_context(trainer.precision_plugin, context) or nullcontext
        self._replaces_log = can_replace_log(self._module)
        self._logs: dict[int | None, StepLog | None] = {}  # by index of the data loader
        self._log: Any = None
        self._opens = False  # whether the batch is its loader's first in this run
        self._batch: Any = None
        self._batch_idx = 0
        self._dataloader_idx: int | None = None
        self._output: Any = None

    def run(self, batch: Any, batch_idx: int, dataloader_idx: int | None = None) -> Any:
        """Evaluate `batch`; return what the step returned.

        Args:
            batch: On the device.
            batch_idx: Its index.
            dataloader_idx: The index of its loader, where there are several.
        """
        self._batch, self._batch_idx, self._dataloader_idx = batch, batch_idx, dataloader_idx
        self._opens = dataloader_idx not in self._logs
        if self._opens:
            log = StepLog(self._module, self._results, self._connector, dataloader_idx)
            self._logs[dataloader_idx] = log if self._replaces_log else None
        self._log = self._logs[dataloader_idx]
        self._run()
        output, self._output, self._batch = self._output, None, None
        return output

    def _run(self) -> None:
        self._evaluate()

    def _evaluate(self) -> None:
        attributes = self._attributes
        previous = attributes["_current_fx_name"]
        attributes["_current_fx_name"] = self._name
        if self._log is not None:
            attributes["log"] = self._log
        try:
            with self._context():
                self._output = self._evaluation_step()
        finally:
            if self._log is not None:
                attributes.pop("log", None)
        attributes["_current_fx_name"] = previous

    def _evaluation_step(self) -> Any:
        arguments = [self._batch]
        if self._takes_batch_idx:
            arguments.append(self._batch_idx)
        if self._dataloader_idx is not None:
            arguments.append(self._dataloader_idx)
        return getattr(self._module, self._name)(*arguments)
