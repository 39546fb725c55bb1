"""Where the values of a training step lie on the device, by name."""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from zdtrain.monitor.events import Row
from zdtrain.monitor.gradients import ToGather

NAN, ZERO, LOWEST, HIGHEST = range(4)
"""Cells of the board that hold constants: NaN and 0 stand for values that are not there, then come the infinities."""
OWN = ("loss", "grad_norm", "lr")
Known = tuple[Any, ...]
_NOTHING: Mapping[str, Tensor] = MappingProxyType({})


class Filling(NamedTuple):
    """How the board is filled in steps that have certain values."""

    known: Known
    """Which values there are."""
    logged: Mapping[str, Tensor]
    """What was logged."""
    targets: list[Tensor]
    """Cells to write, the loss and the norm first where they are to be copied."""
    sources: list[Tensor]
    """What to write there behind loss and norm."""
    left: tuple[list[Tensor], list[Tensor]]
    """Cells that are written when somebody asks for them, and what belongs there."""
    seen: list[tuple[int, memoryview]]
    """The places of these cells, and where the host sees what belongs there."""


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
        own = HIGHEST + 1
        first, self.first_limit = own + len(self.names), own + len(self.names) + len(metrics)
        wide = torch.float32 if device.type == "mps" else torch.float64
        # shape=(constants + names + metrics + limits,)
        self.board = torch.full((self.first_limit + len(limits),), float("nan"), dtype=wide, device=device)
        self.board[ZERO:own] = torch.tensor([0.0, -math.inf, math.inf], dtype=wide)
        self._shown: Any = self.board.numpy().data if visible else None
        self.vector = self.board[own:first]  # shape=(names,), what belongs into a row besides the logged metrics
        cells = self.board.unbind()
        self._loss, self.grad_norm, self._lr = cells[own : own + 3]  # the norm is that before clipping
        self._own_places = {name: own + index for index, name in enumerate(self.names)}
        self._norm_place = self._own_places["grad_norm"]
        self._places = {name: first + index for index, name in enumerate(metrics)}
        self._metric_cells = dict(zip(metrics, cells[first : self.first_limit], strict=True))
        self._scalar_cells, self._limit_cells = list(cells[own + 3 : first]), list(cells[self.first_limit :])
        self._limits = list(limits)
        self._sees_limits = visible and all(_can_see(limit) for limit in limits)
        self._watches_lr = "lr" in metrics
        self.has_loss = self.has_norm = False
        self._lr_tensor: Tensor | None = None  # the optimizer's own, where it is one
        self._lr_number: Any = None
        self._sees_lr = False
        self._lr_address, self._lr_seen, self._lr_kept = 0, memoryview(b""), math.nan
        self._fillings: dict[Known, Filling] = {}  # the last one of its kind
        self._filling: Filling | None = None  # that of this step
        self._last_logged = _NOTHING

    def take_lr(self, optimizer: Optimizer) -> None:
        """Bring a learning rate that is a Python number to the device; before the step, outside anything captured."""
        lr = optimizer.param_groups[0]["lr"]
        if isinstance(lr, Tensor):
            if lr is not self._lr_tensor:
                self._lr_tensor, self._lr_address = lr, 0
                self._sees_lr = self._shown is not None and _can_see(lr)
                self._fillings.clear()
        elif lr != self._lr_number or self._lr_tensor is not None:
            if self._lr_tensor is not None:
                self._lr_tensor = None
                self._fillings.clear()
            self._lr_number = lr
            self._lr.fill_(lr)

    def keep_lr(self) -> None:
        """Keep the learning rate of the update that was made, before a scheduler writes the next one."""
        lr = self._lr_tensor
        if lr is None:
            return
        if self._sees_lr:
            if self._lr_address != lr.data_ptr():
                self._lr_address, self._lr_seen = lr.data_ptr(), _look_at(lr.reshape(1))
            elif self._lr_seen[0] == self._lr_kept:
                return
            self._lr_kept = self._lr_seen[0]
        self._lr.copy_(lr)

    def fill(self, loss: Tensor | None, norm: Tensor | ToGather | None, *, ends_window: bool) -> Known:
        """Write the step's values into the board.

        Args:
            loss: What training_step returned, 0-D or of one element.
            norm: Norm of the gradients, 0-D, where it was measured; or gradients to take along and norm here.
            ends_window: The gradients are complete.

        Returns:
            Which values there are; the same for all steps that have the same ones.
        """
        logged = self._logged() if self._metric_cells else _NOTHING
        is_visible = self._shown is not None and logged is self._last_logged
        self._last_logged = logged
        to_gather, measured = (norm, None) if isinstance(norm, ToGather) else (None, norm)
        key = (loss is not None, norm is not None, measured is not None, ends_window, is_visible)
        filling = self._fillings.get(key)
        if filling is None or filling.logged is not logged:
            filling = self._fillings[key] = self._plan(*key, logged)
        self._filling = filling
        targets, sources = filling.targets, filling.sources
        if norm is not None:
            self.has_norm = True
        if measured is not None:
            sources = [measured, *sources]
        if loss is not None:
            self.has_loss = True
            sources = [loss if loss.dim() == 0 else loss.reshape(()), *sources]
        if to_gather is not None:
            targets, sources = targets + to_gather.place.cells, sources + to_gather.gradients
        if sources:
            torch._foreach_copy_(targets, sources)
        if to_gather is not None:
            self._shown[self._norm_place] = to_gather.place.norm()
        return filling.known

    def _plan(
        self,
        has_loss: bool,
        has_norm: bool,
        copies_norm: bool,
        ends_window: bool,
        is_visible: bool,
        logged: Mapping[str, Tensor],
    ) -> Filling:
        """Return how to fill the board.

        Args:
            has_loss: There is a loss.
            has_norm: There is a gradient norm.
            copies_norm: It is copied like the loss.
            ends_window: See `fill`.
            is_visible: The host sees what was logged for nothing, where it was in the step before.
            logged: What was logged.
        """
        targets = [self._loss] * has_loss + [self.grad_norm] * copies_norm + self._scalar_cells
        sources = [*self._scalars.values()]
        if self._watches_lr and self._lr_tensor is not None:
            targets.append(self._lr)
            sources.append(self._lr_tensor)
        names = [name for name in logged if name in self._metric_cells]
        cells, values = [self._metric_cells[name] for name in names], [logged[name] for name in names]
        sees_limits = is_visible and self._sees_limits
        seen = [(self._places[name], _look_at(logged[name])) for name in names] if is_visible else []
        if sees_limits:
            seen += [(self.first_limit + index, _look_at(limit)) for index, limit in enumerate(self._limits)]
        left_cells = cells * is_visible + self._limit_cells * sees_limits
        left_values = values * is_visible + self._limits * sees_limits
        return Filling(
            known=(has_loss, has_norm, ends_window, *names),
            logged=logged,
            targets=targets + cells * (not is_visible) + self._limit_cells * (not sees_limits),
            sources=sources + values * (not is_visible) + self._limits * (not sees_limits),
            left=(left_cells, left_values),
            seen=seen,
        )

    def complete(self) -> None:
        """Write what `fill` left out, because the host saw it without."""
        if self._filling is not None and self._filling.left[0]:
            torch._foreach_copy_(*self._filling.left)

    def look(self) -> list[float]:
        """Return the numbers that belong on the board, where the host sees them for nothing."""
        numbers: list[float] = self._shown.tolist()
        if self._filling is not None:
            for place, number in self._filling.seen:
                numbers[place] = number[()]
        return numbers

    @property
    def found(self) -> list[str]:
        """Names of the values in `vector` that some step had."""
        missing = {"loss": not self.has_loss, "grad_norm": not self.has_norm}
        return [name for name in self.names if not missing.get(name, False)]

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


def _can_see(scalar: Tensor) -> bool:
    """Return whether the host can look at the memory of `scalar` on a CPU."""
    return type(scalar) is Tensor and scalar.is_cpu and scalar.dtype in (torch.float32, torch.float64)


def _look_at(scalar: Tensor) -> memoryview:
    return scalar.detach().numpy().data
