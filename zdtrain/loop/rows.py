"""What a training step logged, as a row for the step stream."""

import time

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from torch import Tensor

from zdtrain.consumers.steps import RowLayout, Stamp, StepStream
from zdtrain.slots import SlotBank
from zdtrain.step.results import MetricSlot, StepResults


class StepRows:
    """Turns the results of a training step into a row of the stream.

    Args:
        results: The training results.
        stream: Where rows go.
    """

    def __init__(self, results: StepResults, stream: StepStream) -> None:
        self._results = results
        self.stream = stream
        self._known = 0
        self._banks: list[SlotBank] = []
        self._slots: list[MetricSlot] = []  # by column; only those logged on_step have a name that is shown
        self._metrics: list[_ResultMetric] = []  # torchmetrics objects, one column each
        self._layout = RowLayout(names=(), widths=())
        self._shown: tuple[bool, ...] = ()

    def push(self, step: int, epoch: int, batch_idx: int) -> None:
        """Send the step's values on their way; call it before the step is closed."""
        if len(self._results) != self._known or sum(bank.size for bank in self._banks) != len(self._slots):
            self._lay_out()
        if not self._layout.names:
            return
        cached: list[Tensor | None] = [metric._forward_cache for metric in self._metrics]
        present = self._present(cached)
        if True not in present:
            return
        parts = [bank.values for bank in self._banks]
        if cached:
            parts.append(torch.stack([torch.zeros(()) if v is None else v.detach().reshape(()) for v in cached]))
        self.stream.push(
            self._layout,
            parts,
            Stamp(step=step, epoch=epoch, batch_idx=batch_idx, present=present, wall_time=time.time()),
        )

    def _present(self, cached: list[Tensor | None]) -> tuple[bool, ...]:
        if all(len(bank.fresh) == bank.size for bank in self._banks) and not any(v is None for v in cached):
            return self._shown
        fresh = [index in bank.fresh for bank in self._banks for index in range(bank.size)]
        fresh += [value is not None for value in cached]
        return tuple(shown and new for shown, new in zip(self._shown, fresh, strict=True))

    def _lay_out(self) -> None:
        results = self._results
        self._known = len(results)
        self._banks = [bank for bank in results.banks if bank.size]
        by_cell = {
            (id(m.bank), m.index): m for m in results.values() if isinstance(m, MetricSlot) and m.bank is not None
        }
        self._slots = [by_cell[id(bank), index] for bank in self._banks for index in range(bank.size)]
        self._metrics = [m for m in results.values() if not m.is_tensor and m.meta.on_step]
        entries = [*self._slots, *self._metrics]
        self._shown = tuple(entry.meta.on_step for entry in entries)
        widths = [bank.size for bank in self._banks] + ([len(self._metrics)] if self._metrics else [])
        self._layout = RowLayout(
            names=tuple(results._forked_name(entry, on_step=True)[1] for entry in entries), widths=tuple(widths)
        )
