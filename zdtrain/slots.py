"""Device-resident storage of logged metrics: 0-D cells at fixed addresses, written in place."""

from typing import Any, Literal

import torch
from torch import Tensor

Reduction = Literal["step", "mean", "sum", "max", "min"]

IDENTITY: dict[Reduction, float] = {
    "step": 0.0,
    "mean": 0.0,
    "sum": 0.0,
    "max": float("-inf"),
    "min": float("inf"),
}
BANK_CAPACITY = 64


class SlotBank:
    """Cells of one device, dtype and reduction, side by side, so that one operation accumulates all of them.

    A bank never grows: its addresses hold for the whole run. Whoever needs more cells opens another bank.

    Args:
        device: Where the cells live: the training device.
        dtype: Dtype of values and accumulators, float32 or float64.
        reduction: How step values are combined over an epoch; ``"step"`` keeps none.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, reduction: Reduction) -> None:
        self.key = (device, dtype, reduction)
        self.reduction = reduction
        self.size = 0
        self.written: dict[int, Any] = {}  # slots whose value is not folded into the epoch yet, by index
        self.fresh: set[int] = set()  # indices written in the current step
        with torch.inference_mode(False):  # a bank made while validating is reset by the trainer afterwards
            self._values = torch.zeros(BANK_CAPACITY, dtype=dtype, device=device)  # shape=(64,), this step's values
            self._totals = torch.full_like(self._values, IDENTITY[reduction])  # shape=(64,), accumulated over the epoch
            self._scratch = torch.empty_like(self._values)
        self._narrow()

    @property
    def full(self) -> bool:
        """Whether no cell is left."""
        return self.size == BANK_CAPACITY

    def allocate(self) -> tuple[int, Tensor, Tensor]:
        """Return the index of a new cell, the cell and its accumulator, both 0-D views into the bank."""
        index = self.size
        self.size += 1
        self._narrow()
        return index, self._values[index], self._totals[index]

    def _narrow(self) -> None:
        self.values = self._values[: self.size]
        self._used_totals = self._totals[: self.size]
        self._used_scratch = self._scratch[: self.size]

    def accumulate_all(self, weight: int) -> None:
        """Fold every cell into its accumulator: the same operations, in the same order, that stock Lightning does."""
        if self.reduction == "mean":
            torch.mul(self.values, weight, out=self._used_scratch)
            self._used_totals.add_(self._used_scratch)
        else:
            fold(self.reduction, self._used_totals, self.values)


def fold(reduction: Reduction, total: Tensor, value: Tensor) -> None:
    """Combine `value` into `total` in place; a mean's value comes multiplied by its weight."""
    if reduction in ("mean", "sum"):
        total.add_(value)
    elif reduction == "max":
        torch.maximum(total, value, out=total)
    elif reduction == "min":
        torch.minimum(total, value, out=total)
