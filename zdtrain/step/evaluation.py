"""One validation or test step, run eagerly, or captured and replayed."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.utils import _pytree as pytree

from zdtrain.errors import FallbackReason
from zdtrain.step.capturing import Capturing
from zdtrain.step.eager import forward_context
from zdtrain.step.fingerprints import Fingerprints
from zdtrain.step.host import HostLooks, looks_of
from zdtrain.step.items import BatchItems
from zdtrain.step.log import StepLog, can_replace_log
from zdtrain.step.observe import Observation
from zdtrain.step.obstacles import changes_between_steps
from zdtrain.step.results import StepResults
from zdtrain.step.session import CaptureSession, Entry
from zdtrain.step.surroundings import Surroundings
from zdtrain.step.watch import reason_at, storage_of


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


class CapturedEvaluation(Capturing, EvaluationStep):
    """An `EvaluationStep` that records what it does once per key and replays it.

    Its programs outlive it: parameters change in place, so that a later validation replays them. They are compared with
    an eager step on the first batch of every run.

    Args:
        trainer: The Trainer, with its module attached.
        name: ``"validation_step"`` or ``"test_step"``.
        results: Where it logs.
        session: Programs and counts, kept for the whole fit.
        hooks: What is called between two steps.
        run_number: How often the loop has run.
    """

    _words = (*Capturing._words, "data loader", "grad mode")
    _loss = None
    _inside = ()

    def __init__(
        self,
        trainer: Trainer,
        name: str,
        results: StepResults,
        session: CaptureSession,
        *,
        hooks: tuple[str, ...],
        run_number: int,
    ) -> None:
        super().__init__(trainer, name, results)
        self._session = session
        self._run_number = run_number
        self._items = BatchItems(self._module, name)
        self._surroundings = Surroundings(module=self._module, results=results, connector=self._connector)
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        self._users_between = changes_between_steps(self._module, callbacks, hooks)
        self._fingerprints = Fingerprints(self._module, session)
        self._grad_mode = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())

    def _run(self) -> None:
        self._entry = self._find_entry()
        if self._entry is None:
            self._session.steps_eager += 1
        try:
            self._through(self._evaluate)
        finally:
            self._let_go()

    def _entry_of(self) -> Entry | None:
        loader = self._dataloader_idx
        return self._look_up(
            self._batch,
            self._batch_idx,
            lambda: "" if loader is None else f"data loader {loader}",
            loader,
            self._grad_mode,
        )

    def _evaluation_step(self) -> Any:
        with self._noted_index():
            return super()._evaluation_step()

    @property
    def _is_first(self) -> bool:
        return self._opens

    @property
    def _round(self) -> int:
        return self._run_number

    def _looks(self) -> HostLooks:
        return looks_of(self._trainer, self._trainer.optimizers)

    def _reasons_against(self, seen: Observation) -> Iterator[FallbackReason]:
        yield from super()._reasons_against(seen)
        gradients = {storage_of(p.grad) for p in self._module.parameters() if p.grad is not None}
        for storage, (_, operation) in seen.watch.outside.items():
            if storage in gradients:
                what = f"{operation.name} takes the gradient of a parameter, which is another tensor after each update"
                yield reason_at(operation.place, "gradient", what)

    def _handed_over(self) -> list[Any]:
        # Aliases take the place of what the step returned: an original that is left is kept by somebody else as well.
        self._output = pytree.tree_map_only(Tensor, Tensor.detach, self._output)
        return super()._handed_over()
