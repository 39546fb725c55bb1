"""One validation or test step, captured and replayed."""

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils import _pytree as pytree

from zdtrain.capture.capturing import Capturing
from zdtrain.capture.fingerprints import Fingerprints
from zdtrain.capture.host import HostLooks, looks_of
from zdtrain.capture.items import BatchItems
from zdtrain.capture.observe import Observation
from zdtrain.capture.obstacles import changes_between_steps
from zdtrain.capture.session import CaptureSession, Entry
from zdtrain.capture.surroundings import Surroundings
from zdtrain.capture.watch import reason_at, storage_of
from zdtrain.errors import FallbackReason
from zdtrain.step.evaluation import EvaluationStep
from zdtrain.step.results import StepResults


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
