"""What monitors look at: the values that a step logged, and whether a checkpoint may follow it."""

import time
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from zdtrain.slots import SlotBank
from zdtrain.step.results import MetricSlot, StepResults


class Logged:
    """What a step logged, by name.

    Args:
        results: The training results.
        wanted: Names of interest; None for all.
    """

    def __init__(self, results: StepResults, wanted: set[str] | None) -> None:
        self._results = results
        self._wanted = wanted
        self._layout = -1
        self._entries: list[tuple[str, Any]] = []
        self._indices: list[tuple[SlotBank, set[int]]] = []  # where all entries lie
        self._all: dict[str, Tensor] | None = None  # cells of all entries, where that is all there is

    def cells(self) -> dict[str, Tensor]:
        """Return the values that were logged since the step began, 0-D.

        The dictionary of steps that log everything is the same one, and so are its tensors, until others are logged.
        """
        if self._results.layout != self._layout:
            self._look_around()
        if self._all is not None:
            for bank, indices in self._indices:
                if not indices <= bank.fresh:
                    break
            else:
                return self._all
        found = {}
        for name, entry in self._entries:
            if isinstance(entry, MetricSlot):
                if entry.bank is not None and entry.index in entry.bank.fresh:
                    found[name] = entry.cell
            elif entry._forward_cache is not None:
                found[name] = entry._forward_cache.detach().reshape(())
        return found

    def _look_around(self) -> None:
        results = self._results
        self._layout = results.layout
        self._entries = [(name, entry) for entry in results.values() for name in self._names(entry)]
        indices: dict[SlotBank, set[int]] = {}
        self._all = None
        for _, entry in self._entries:
            if not isinstance(entry, MetricSlot) or entry.bank is None:
                return
            indices.setdefault(entry.bank, set()).add(entry.index)
        self._indices = list(indices.items())
        self._all = {name: entry.cell for name, entry in self._entries}

    def _names(self, entry: Any) -> list[str]:
        names = dict.fromkeys((entry.meta.name, self._results._forked_name(entry, on_step=True)[1]))
        return [name for name in names if self._wanted is None or name in self._wanted]


def may_save_now(callback: Any, trainer: Trainer) -> bool:
    """Return False where `callback` certainly saves no checkpoint after this batch, in any process."""
    if not isinstance(callback, ModelCheckpoint):
        return True
    every = callback._every_n_train_steps
    interval, checked = callback._train_time_interval, callback._last_time_checked
    if interval is not None and trainer.world_size > 1:
        return True  # the clocks of the processes differ
    if interval is not None and checked is not None and time.monotonic() - checked >= interval.total_seconds():
        return True
    return every >= 1 and trainer.global_step % every == 0
