"""The batches of steps that the host has not heard of, kept to find the module that spoiled one."""

from collections import deque
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.rank_zero import rank_zero_info

from zdtrain.monitor.locate import locate_nonfinite


class Suspects:
    """Keeps batches until their step is heard of; runs a step again that turned out bad.

    Args:
        trainer: The Trainer, with its module attached.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._batches: deque[tuple[int, Any, int]] = deque()

    def keep(self, batch: Any, batch_idx: int, *, step: int, heard: int) -> None:
        """Keep a batch of `step`; drop those of steps up to `heard`, which were good."""
        self._batches.append((step, batch, batch_idx))
        while self._batches[0][0] <= heard:
            self._batches.popleft()

    def look_at(self, step: int) -> str:
        """Run `step` again, eagerly and with hooks; return which module spoiled it, in words, and say it."""
        trainer, module = self._trainer, self._trainer.lightning_module
        takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        said = "its batches are not known any more"
        for batch, batch_idx in [(batch, index) for number, batch, index in self._batches if number == step]:

            def run(batch: Any = batch, batch_idx: int = batch_idx) -> Any:
                with trainer.precision_plugin.train_step_context():
                    output = module.training_step(batch, batch_idx) if takes_index else module.training_step(batch)
                return output["loss"] if isinstance(output, Mapping) else output

            said = locate_nonfinite(module, batch, run)
            if "was finite when" not in said:
                break
        rank_zero_info(f"Step {step}, run again: {said}.")
        return said
