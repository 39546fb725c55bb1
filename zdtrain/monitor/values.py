"""Where the values of a training step lie on the device, by name."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zdtrain.monitor.events import Row


class StepValues:
    """Finds the cells of the step's values: what was logged, the loss, the gradient norm, lr, scalars.

    Args:
        device: The training device.
        logged: Returns what the step logged by name, now.
        scalars: The run's scalars, by name.
    """

    def __init__(
        self, device: torch.device, logged: Callable[[], Mapping[str, Tensor]], scalars: Mapping[str, Tensor]
    ) -> None:
        self.device = device
        self._logged = logged
        self._scalars = scalars
        wide = torch.float32 if device.type == "mps" else torch.float64
        nan = float("nan")
        self.vector = torch.full((3,), nan, dtype=wide, device=device)  # shape=(3,), the cells that follow
        self.loss = self.vector[0]  # shape=(), what training_step returned
        self.grad_norm = self.vector[1]  # shape=(), before clipping
        self._lr = self.vector[2]  # shape=()
        self.has_loss = self.has_norm = False
        self._lr_tensor: Tensor | None = None  # the optimizer's own, where it is one
        self._lr_number: Any = None

    @property
    def lr(self) -> Tensor:
        """Learning rate of the first parameter group, 0-D."""
        return self._lr if self._lr_tensor is None else self._lr_tensor

    def keep_lr(self) -> None:
        """Keep the learning rate of the update that was made, before a scheduler writes the next one."""
        if self._lr_tensor is not None:
            self._lr.copy_(self._lr_tensor)

    def take_lr(self, optimizer: Optimizer) -> None:
        """Bring a learning rate that is a Python number to the device; before the step, outside anything captured."""
        lr = optimizer.param_groups[0]["lr"]
        if isinstance(lr, Tensor):
            self._lr_tensor = lr
        elif lr != self._lr_number:
            self._lr_tensor, self._lr_number = None, lr
            self._lr.fill_(lr)

    def take_loss(self, loss: Tensor | None) -> None:
        """Keep the loss at a fixed address."""
        self.has_loss = loss is not None
        if loss is not None:
            self.loss.copy_(loss if loss.dim() == 0 else loss.reshape(()))

    def take_norm(self, norm: Tensor) -> None:
        """Keep the gradient norm at a fixed address."""
        self.has_norm = True
        self.grad_norm.copy_(norm)

    def row(self, *, ends_window: bool) -> Row:
        """Return the step's values.

        Args:
            ends_window: The gradients are complete; otherwise there is no gradient norm yet.
        """
        row = Row(self._scalars)
        if self.has_loss:
            row["loss"] = self.loss
        if ends_window and self.has_norm:
            row["grad_norm"] = self.grad_norm
        if ends_window:
            row["lr"] = self.lr
        row.update(self._logged())
        return row
