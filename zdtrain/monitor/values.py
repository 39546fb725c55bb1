"""Where the values of a training step lie on the device, by name."""

import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import methodcaller
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from zdtrain.monitor.events import Row
from zdtrain.monitor.gradients import ToGather
from zdtrain.ring import look_at

NAN, ZERO, LOWEST, HIGHEST = range(4)
"""Cells of the board that hold constants: NaN and 0 stand for values that are not there, then come the infinities."""
OWN = ("loss", "grad_norm", "lr")
Known = tuple[Any, ...]
_NOTHING: Mapping[str, Tensor] = MappingProxyType({})
_number = methodcaller("tolist")


class Filling(NamedTuple):
    """How the board is filled in steps that have certain values."""

    known: Known
    """Which values there are."""
    logged: Mapping[str, Tensor]
    """What was logged."""
    targets: list[Tensor]
    """Cells to write, the loss and the norm first."""
    sources: list[Tensor]
    """What to write there behind loss and norm."""


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
    """

    def __init__(
        self,
        device: torch.device,
        logged: Callable[[], Mapping[str, Tensor]],
        scalars: Mapping[str, Tensor],
        metrics: Sequence[str] = (),
        limits: Sequence[Tensor] = (),
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
        self.vector = self.board[own:first]  # shape=(names,), what belongs into a row besides the logged metrics
        self._cells = self.board.unbind()
        self._own_places = {name: own + index for index, name in enumerate(self.names)}
        self._loss_place, self._norm_place, self._lr_place = (self._own_places[name] for name in OWN)
        self._loss, self.grad_norm = self._cells[self._loss_place], self._cells[self._norm_place]  # before clipping
        self._places = {name: first + index for index, name in enumerate(metrics)}
        self._limits = list(limits)
        self._watches_lr = "lr" in metrics
        self.has_loss = self.has_norm = False
        self._lr_tensor: Tensor | None = None  # the optimizer's own, where it is one
        self._lr_number: Any = None
        self._fillings: dict[Known, Filling] = {}  # the last one of its kind

    def take_lr(self, optimizer: Optimizer) -> None:
        """Bring a learning rate that is a Python number to the device; before the step, outside anything captured."""
        lr = optimizer.param_groups[0]["lr"]
        if isinstance(lr, Tensor):
            if lr is not self._lr_tensor:
                self._lr_tensor = lr
                self._fillings.clear()
        elif lr != self._lr_number or self._lr_tensor is not None:
            if self._lr_tensor is not None:
                self._lr_tensor = None
                self._fillings.clear()
            self._lr_number = lr
            self._cells[self._lr_place].fill_(lr)

    def keep_lr(self) -> None:
        """Keep the learning rate of the update that was made, before a scheduler writes the next one."""
        if self._lr_tensor is not None:
            self._cells[self._lr_place].copy_(self._lr_tensor)

    def fill(self, loss: Tensor | None, norm: Tensor | ToGather | None, *, ends_window: bool) -> Known:
        """Write the step's values into the board.

        Args:
            loss: What training_step returned, 0-D or of one element.
            norm: Norm of the gradients, 0-D, where it was measured; the host may take gradients along and norm them.
            ends_window: The gradients are complete.

        Returns:
            Which values there are; the same for all steps that have the same ones.
        """
        assert not isinstance(norm, ToGather)
        filling = self._filling(loss, norm, ends_window=ends_window)
        own = [] if loss is None else [_as_scalar(loss)]
        if norm is not None:
            own.append(norm)
        if filling.targets:
            torch._foreach_copy_(filling.targets, own + filling.sources)
        return filling.known

    def _filling(self, loss: Tensor | None, norm: object | None, *, ends_window: bool) -> Filling:
        logged = self._logged() if self._places else _NOTHING
        key = (loss is not None, norm is not None, ends_window)
        filling = self._fillings.get(key)
        if filling is None or filling.logged is not logged:
            filling = self._fillings[key] = self._plan(*key, logged)
            self.has_loss, self.has_norm = self.has_loss or key[0], self.has_norm or key[1]
        return filling

    def _plan(self, has_loss: bool, has_norm: bool, ends_window: bool, logged: Mapping[str, Tensor]) -> Filling:
        found = dict(self._sources(logged))
        targets = [self._loss] * has_loss + [self.grad_norm] * has_norm + [self._cells[place] for place in found]
        names = [name for name in logged if name in self._places]
        return Filling((has_loss, has_norm, ends_window, *names), logged, targets, list(found.values()))

    def _sources(self, logged: Mapping[str, Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Yield the places of what is written besides loss and norm, and where it is found."""
        for name, scalar in self._scalars.items():
            yield self._own_places[name], scalar
        if self._watches_lr and self._lr_tensor is not None:
            yield self._lr_place, self._lr_tensor
        for name, value in logged.items():
            if name in self._places:
                yield self._places[name], value
        yield from enumerate(self._limits, self.first_limit)

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
            row["lr"] = self._cells[self._lr_place] if self._lr_tensor is None else self._lr_tensor
        row.update(self._logged())
        return row


class SeenValues(StepValues):
    """The same where the host sees tensors for nothing: it writes the board without operations, and reads it so."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: Any = self.board.numpy().data  # the numbers on the board
        self._seen_rest = self.seen[self._lr_place + 1 :]  # all but constants and OWN
        self._looks: list[Any] = []  # where the host finds what belongs there
        self._unseen: list[tuple[Tensor, Tensor]] = []  # cells, and what has to be copied there
        self._looking_for: Filling | None = None
        self._lr_address = 0
        self._lr_look: Any = None

    def fill(self, loss: Tensor | None, norm: Tensor | ToGather | None, *, ends_window: bool) -> Known:
        """See `StepValues`."""
        filling = self._filling(loss, norm, ends_window=ends_window)
        if filling is not self._looking_for:
            self._look_around(filling)
        if self._looks:
            self._seen_rest[:] = array("d", map(_number, self._looks))
        for cell, source in self._unseen:
            cell.copy_(source)
        if self._watches_lr:
            self.keep_lr()
        if isinstance(norm, ToGather):
            together, gradients = norm.place, norm.gradients
            if loss is None:
                torch._foreach_copy_(together.cells, gradients)
            else:
                torch._foreach_copy_([self._loss, *together.cells], [_as_scalar(loss), *gradients])
            self.seen[self._norm_place] = together.norm()
            return filling.known
        if loss is not None:
            self._loss.copy_(_as_scalar(loss))
        if norm is not None:
            self.grad_norm.copy_(norm)
        return filling.known

    def _look_around(self, filling: Filling) -> None:
        sources = dict(self._sources(filling.logged))
        sources.pop(self._lr_place, None)  # it may move
        self._looking_for = filling
        self._unseen = [(self._cells[place], source) for place, source in sources.items() if not _can_see(source)]
        seen = {place: look_at(source) for place, source in sources.items() if _can_see(source)}
        nothing = look_at(self._cells[NAN])
        self._looks = [seen.get(place, nothing) for place in range(self._lr_place + 1, len(self.board))]

    def keep_lr(self) -> None:
        """See `StepValues`."""
        lr = self._lr_tensor
        if lr is None:
            return
        if self._lr_address != lr.data_ptr():
            self._lr_address, self._lr_look = lr.data_ptr(), look_at(lr.reshape(1)) if _can_see(lr) else None
        if self._lr_look is None:
            super().keep_lr()
        else:
            self.seen[self._lr_place] = self._lr_look[0]


def _as_scalar(loss: Tensor) -> Tensor:
    return loss if loss.dim() == 0 else loss.reshape(())


def _can_see(scalar: Tensor) -> bool:
    """Return whether the host sees the memory of `scalar`, on a CPU."""
    return type(scalar) is Tensor and scalar.is_cpu and scalar.dtype in (torch.float32, torch.float64)
