"""The ring of per-step metric rows: device memory allocated once, written round and round."""

from collections.abc import Sequence

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
        self._next = 0

    def write(self, parts: list[Tensor]) -> int:
        """Copy `parts` side by side into the next row; return the row's index."""
        index = self._next
        torch._foreach_copy_(self._parts[index], parts, non_blocking=True)
        self._next = (index + 1) % self.rows
        return index
