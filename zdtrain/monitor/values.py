"""Where the values of a training step lie on the device, by name."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zdtrain.monitor.events import Row

NAN, ZERO, LOWEST, HIGHEST, LEAST, MOST = range(6)
"""Cells of the board that hold constants: NaN and 0 stand for values that are not there, then come the infinities and
the extreme finite numbers."""
OWN = ("loss", "grad_norm", "lr")
Known = tuple[Any, ...]


class StepValues:
    """Brings what a step's monitors look at side by side: one operation fills a *board* of cells.

    The board holds some constants, the step's own values, the run's scalars, the logged metrics that somebody looks at
    and the limits that they are compared with.

    Args:
        device: The training device.
        logged: Returns what the step logged by name, now.
        scalars: The run's scalars that belong into a row, by name.
        metrics: Names that monitors look at inside the step.
        limits: Limits that they are compared with, 0-D, wherever they are kept.
        visible: The host may look at tensors for nothing.
    """

    def __init__(
        self,
        device: torch.device,
        logged: Callable[[], Mapping[str, Tensor]],
        scalars: Mapping[str, Tensor],
        metrics: Sequence[str] = (),
        limits: Sequence[Tensor] = (),
        *,
        visible: bool = False,
    ) -> None:
        self.device = device
        self._logged = logged
        self._scalars = dict(scalars)
        self.names = (*OWN, *self._scalars)  # of the values in `vector`
        metrics = list(dict.fromkeys(metrics))
        own = MOST + 1
        first, self.first_limit = own + len(self.names), own + len(self.names) + len(metrics)
        wide = torch.float32 if device.type == "mps" else torch.float64
        # shape=(constants + names + metrics + limits,)
        self.board = torch.full((self.first_limit + len(limits),), float("nan"), dtype=wide, device=device)
        most = torch.finfo(wide).max
        self.board[ZERO:own] = torch.tensor([0.0, -math.inf, math.inf, -most, most], dtype=wide)
        self._shown: Any = self.board.numpy().data if visible else None
        self.vector = self.board[own:first]  # shape=(names,), what belongs into a row besides the logged metrics
        cells = self.board.unbind()
        self._loss, self.grad_norm, self._lr = cells[own : own + 3]  # the norm is that before clipping
        self._own_places = {name: own + index for index, name in enumerate(self.names)}
        self._places = {name: first + index for index, name in enumerate(metrics)}
        self._metric_cells = dict(zip(metrics, cells[first : self.first_limit], strict=True))
        self._fixed = [*self._scalars.values(), *limits]  # what every step takes over
        self._fixed_cells = [*cells[own + 3 : first], *cells[self.first_limit :]]
        self._watches_lr = "lr" in metrics
        self.has_norm = False
        self._lr_tensor: Tensor | None = None  # the optimizer's own, where it is one
        self._lr_number: Any = None

    def take_lr(self, optimizer: Optimizer) -> None:
        """Bring a learning rate that is a Python number to the device; before the step, outside anything captured."""
        lr = optimizer.param_groups[0]["lr"]
        if isinstance(lr, Tensor):
            self._lr_tensor = lr
        elif lr != self._lr_number:
            self._lr_tensor, self._lr_number = None, lr
            self._lr.fill_(lr)

    def keep_lr(self) -> None:
        """Keep the learning rate of the update that was made, before a scheduler writes the next one."""
        if self._lr_tensor is not None:
            self._lr.copy_(self._lr_tensor)

    def fill(self, loss: Tensor | None, norm: Tensor | None, *, ends_window: bool) -> Known:
        """Write the step's values into the board.

        Args:
            loss: What training_step returned, 0-D or of one element.
            norm: Norm of the gradients, 0-D, where it was measured.
            ends_window: The gradients are complete.

        Returns:
            Which values there are; the same for all steps that have the same ones.
        """
        targets, sources = self._fixed_cells.copy(), self._fixed.copy()
        if loss is not None:
            targets.append(self._loss)
            sources.append(loss if loss.dim() == 0 else loss.reshape(()))
        if norm is not None:
            self.has_norm = True
            targets.append(self.grad_norm)
            sources.append(norm)
        if self._watches_lr and self._lr_tensor is not None:
            targets.append(self._lr)
            sources.append(self._lr_tensor)
        logged = []
        if self._metric_cells:
            for name, value in self._logged().items():
                cell = self._metric_cells.get(name)
                if cell is not None:
                    logged.append(name)
                    targets.append(cell)
                    sources.append(value)
        if targets:
            torch._foreach_copy_(targets, sources)
        return (loss is not None, norm is not None, ends_window, *logged)

    def look(self) -> list[float] | None:
        """Return the numbers on the board; None where the host can't know them for nothing."""
        return None if self._shown is None else self._shown.tolist()

    def places(self, known: Known) -> dict[str, int]:
        """Return the cell of each value that there is in such a step: a logged metric comes before what is our own."""
        has_loss, has_norm, ends_window, *logged = known
        absent = {"loss": not has_loss, "grad_norm": not has_norm, "lr": not ends_window}
        found = {name: place for name, place in self._own_places.items() if not absent.get(name, False)}
        found.update((name, self._places[name]) for name in logged)
        return found

    def row(self, known: Known) -> Row:
        """Return the step's values by name, for conditions that are functions."""
        has_loss, has_norm, ends_window, *_ = known
        row = Row(self._scalars)
        if has_loss:
            row["loss"] = self._loss
        if has_norm:
            row["grad_norm"] = self.grad_norm
        if ends_window:
            row["lr"] = self._lr if self._lr_tensor is None else self._lr_tensor
        row.update(self._logged())
        return row
