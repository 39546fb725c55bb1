"""What a training step logged, as a row for the step stream."""

import time

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from torch import Tensor

from zdtrain.consumers.steps import RowLayout, Stamp, StepStream
from zdtrain.monitor.listener import RowListener
from zdtrain.slots import SlotBank
from zdtrain.step.results import MetricSlot, StepResults


class StepRows:
    """Turns the results of a training step into a row of the stream.

    Args:
        results: The training results.
        stream: Where rows go.
        listener: Who wants more than what was logged in a row, and a row of every step.
    """

    def __init__(self, results: StepResults, stream: StepStream, listener: RowListener | None = None) -> None:
        self._results = results
        self.stream = stream
        self._listener = listener
        self._known = -1
        self._banks: list[SlotBank] = []
        self._slots: list[MetricSlot] = []  # by column; only those logged on_step have a name that is shown
        self._metrics: list[_ResultMetric] = []  # torchmetrics objects, one column each
        self._parts: list[Tensor] = []  # what a row is put together from, but for the torchmetrics objects
        self._layout = RowLayout(names=(), widths=())
        self._shown: tuple[bool, ...] = ()
        self._all: tuple[bool, ...] = ()

    def push(self, step: int, epoch: int, batch_idx: int) -> None:
        """Send the step's values on their way; call it before the step is closed."""
        row = self._row(step, epoch, batch_idx)
        if row is not None:
            self.stream.push(self._layout, *row)

    def look(self, step: int, epoch: int, batch_idx: int) -> tuple[Tensor, RowLayout, Stamp] | None:
        """Return the step's values as they are now, shape=(1, columns), unsent; None where there are none."""
        row = self._row(step, epoch, batch_idx)
        if row is None:
            return None
        parts, stamp = row
        return torch.cat([part.reshape(-1).to(torch.float64) for part in parts]).unsqueeze(0), self._layout, stamp

    def _row(self, step: int, epoch: int, batch_idx: int) -> tuple[list[Tensor], Stamp] | None:
        if self._results.behind is not None:
            self._results.catch_up()
        listener = self._listener
        if self._results.layout != self._known:
            self._lay_out()
        if not self._layout.names and listener is None:
            return None
        cached: list[Tensor | None] = [metric._forward_cache for metric in self._metrics] if self._metrics else []
        fresh = self._fresh(cached)
        present = self._shown
        if fresh is not self._all:
            present = tuple(shown and new for shown, new in zip(self._shown, fresh, strict=True))
        if listener is None and True not in present:
            return None
        parts = self._parts
        if cached:
            values = torch.stack([torch.zeros(()) if v is None else v.detach().reshape(()) for v in cached])
            parts = [*parts[: len(self._banks)], values, *parts[len(self._banks) :]]
        return parts, Stamp(step, epoch, batch_idx, present, fresh, time.time())

    def _fresh(self, cached: list[Tensor | None]) -> tuple[bool, ...]:
        if not (cached and any(v is None for v in cached)):
            for bank in self._banks:
                if len(bank.fresh) != bank.size:
                    break
            else:
                return self._all
        fresh = [index in bank.fresh for bank in self._banks for index in range(bank.size)]
        return (*fresh, *(value is not None for value in cached))

    def _lay_out(self) -> None:
        results = self._results
        self._known = results.layout
        self._banks = [bank for bank in results.banks if bank.size]
        by_cell = {
            (id(m.bank), m.index): m for m in results.values() if isinstance(m, MetricSlot) and m.bank is not None
        }
        self._slots = [by_cell[id(bank), index] for bank in self._banks for index in range(bank.size)]
        self._metrics = [m for m in results.values() if not m.is_tensor and m.meta.on_step]
        entries = [*self._slots, *self._metrics]
        self._shown = tuple(entry.meta.on_step for entry in entries)
        self._all = (True,) * len(entries)
        widths = [bank.size for bank in self._banks] + ([len(self._metrics)] if self._metrics else [])
        self._parts = [bank.values for bank in self._banks]
        if self._listener is not None:
            self._parts += self._listener.parts()
            widths += self._listener.widths()
        position = {id(metric): index for index, metric in enumerate(results.values())}
        self._layout = RowLayout(
            names=tuple(results._forked_name(entry, on_step=True)[1] for entry in entries),
            widths=tuple(widths),
            metrics=tuple(entry.meta.name for entry in entries),
            order=tuple(sorted(range(len(entries)), key=lambda column: position[id(entries[column])])),
        )
