"""The ring of per-step metric rows: device memory allocated once, written round and round."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

RING_ROWS = 256


class MetricRing:
    """Rows of float64 values, each put together from vectors of fixed lengths.

    Args:
        widths: Lengths of the vectors that make up a row, in order.
        device: The training device.
        rows: Rows before the first is written again.
    """

    def __init__(self, widths: Sequence[int], device: torch.device, rows: int = RING_ROWS) -> None:
        self.rows = rows
        # shape=(rows, sum(widths)), dtype=float64: float32 and narrower fit exactly
        self.storage = torch.zeros(rows, sum(widths), dtype=torch.float64, device=device)
        self._parts = [row.split(list(widths)) for row in self.storage.unbind()]
        is_on_host = _is_on_host(self.storage)
        self._arrays = [[part.numpy() for part in row] for row in self._parts] if is_on_host else None
        self._known: list[Tensor] | None = None
        self._sources: list[Any] | None = None  # arrays of what is known: copying one costs a third of an operation
        self._next = 0

    def write(self, parts: list[Tensor]) -> int:
        """Copy `parts` side by side into the next row; return the row's index.

        Args:
            parts: The vectors. A list that is handed over again has to hold the same ones.
        """
        index = self._next
        if parts is not self._known:
            self._known, self._sources = parts, None
            if self._arrays is not None and all(map(_is_on_host, parts)):
                self._sources = [part.numpy() for part in parts]
        if self._arrays is None or self._sources is None:
            torch._foreach_copy_(self._parts[index], parts, non_blocking=True)
        else:
            for array, source in zip(self._arrays[index], self._sources, strict=True):
                array[:] = source
        self._next = (index + 1) % self.rows
        return index


def _is_on_host(tensor: Tensor) -> bool:
    """Return whether numpy can look at the memory of `tensor`."""
    return type(tensor) is Tensor and tensor.is_cpu and tensor.dtype != torch.bfloat16
