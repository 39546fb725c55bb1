"""What the host computes for each step of a block, ahead of all of them: schedules, numbers of updates."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from zdtrain.capture.program import Moved, Part, RecordedPart
from zdtrain.loop.rates import SCHEDULED, copied


class ScheduleAhead:
    """Steps schedulers as often as a block of batches would, and hands the options out step by step.

    The schedulers themselves are where they will be after the block; the optimizer's options follow with every step.

    Args:
        trainer: The Trainer.
        configs: The schedulers that follow steps.
        parts: The optimizers.
        recorded: Their share in the program.
        batch_idx: The block's first batch.
        count: Batches in the block.
    """

    def __init__(
        self,
        trainer: Any,
        configs: Sequence[Any],
        parts: Sequence[Part],
        recorded: Sequence[RecordedPart],
        batch_idx: int,
        count: int,
    ) -> None:
        self._groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        self._progress = trainer.fit_loop.epoch_loop.scheduler_progress
        self._moves: list[int] = []
        window, keys = trainer.accumulate_grad_batches, [[part.key() for part in parts]]
        self.rates: list[list[Tensor]] = []
        self._options = [self._read()]
        moved: Moved = {}
        for after in range(batch_idx + 1, batch_idx + count + 1):
            for part in recorded if after % window == 0 else ():
                part.refill(moved)
            self.rates.append([rate.clone() for part in recorded for rate in part.rates()])
            due = [config for config in configs if after % window == 0 and after % config.frequency == 0]
            for config in due:
                config.scheduler.step()
            self._moves.append(len(due))
            self._options.append(self._read())
            keys.append([part.key() for part in parts])
        self.is_constant = all(key == keys[0] for key in keys[:-1])
        self._write(self._options[0])

    def follow(self, index: int) -> None:
        """Bring the optimizer's options, and the count of scheduler steps, to where they are after step `index`."""
        self._write(self._options[index + 1])
        for _ in range(self._moves[index]):
            self._progress.increment_ready()
            self._progress.increment_completed()

    def _read(self) -> list[dict[str, Any]]:
        return [{name: copied(group[name]) for name in SCHEDULED if name in group} for group in self._groups]

    def _write(self, options: list[dict[str, Any]]) -> None:
        for group, values in zip(self._groups, options, strict=True):
            for name, value in values.items():
                group[name] = value
