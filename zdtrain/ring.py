"""Rows of per-step metrics, kept until they are sent: on the device, or as numbers on the host that sees them.

Both kinds take a row as vectors of fixed lengths and give the rows away in the order of the steps.
"""

from collections.abc import Sequence
from itertools import chain
from operator import methodcaller
from typing import Any, Protocol

import torch
from torch import Tensor

RING_ROWS = 256

Rows = Tensor | list[list[float]]
"""Rows on the device, shape=(rows, columns), dtype=float64, that nobody writes to again; or on the host."""
_numbers = methodcaller("tolist")


class RowKeeper(Protocol):
    """Keeps rows until they are sent."""

    def write(self, parts: list[Tensor]) -> bool:
        """Keep `parts` side by side as the next row; return whether the rows have to be taken now.

        Args:
            parts: The vectors. A list that is handed over again has to hold the same ones.
        """

    def take(self) -> Rows:
        """Return the rows written since the last time."""


class MetricRing:
    """Rows on the device: memory allocated once, written round and round.

    Args:
        widths: Lengths of the vectors that make up a row, in order.
        device: The training device.
        rows: Rows before the first is written again.
    """

    def __init__(self, widths: Sequence[int], device: torch.device, rows: int = RING_ROWS) -> None:
        # shape=(rows, sum(widths)), dtype=float64: float32 and narrower fit exactly
        self._storage = torch.zeros(rows, sum(widths), dtype=torch.float64, device=device)
        self._parts = [row.split(list(widths)) for row in self._storage.unbind()]
        self._first = self._next = 0

    def write(self, parts: list[Tensor]) -> bool:
        """See `RowKeeper`."""
        torch._foreach_copy_(self._parts[self._next], parts, non_blocking=True)
        self._next += 1
        return self._next == len(self._parts)

    def take(self) -> Tensor:
        """See `RowKeeper`; a copy on the device, so that the ring may go on whatever the host does."""
        rows = self._storage[self._first : self._next].clone()
        self._first = self._next = self._next % len(self._parts)
        return rows


class SeenRows:
    """Rows whose values the host sees for nothing, kept as numbers."""

    def __init__(self) -> None:
        self._rows: list[list[float]] = []
        self._known: list[Tensor] = []
        self._looks: list[Any] = []  # what the known parts hold; to look there costs less than any operation

    def write(self, parts: list[Tensor]) -> bool:
        """See `RowKeeper`."""
        if parts is not self._known:
            self._known, self._looks = parts, [look_at(part) for part in parts]
        self._rows.append(list(chain.from_iterable(map(_numbers, self._looks))))
        return False

    def take(self) -> list[list[float]]:
        """See `RowKeeper`."""
        rows, self._rows = self._rows, []
        return rows


def look_at(tensor: Tensor) -> Any:
    """Return a view of the numbers of a float32, float64 or bool tensor in the host's memory; else of a copy."""
    if tensor.dtype not in (torch.float32, torch.float64, torch.bool):
        tensor = tensor.double()
    return tensor.detach().numpy().data
