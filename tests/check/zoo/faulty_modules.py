"""One planted fault each: how the module, its parameters and its loss are set up."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .case import Base, Case

FIXABLE = "capturable with changes"
NOT = "not capturable"


class LateBuffer(Base):
    """Registered after the module has moved."""

    def on_train_start(self) -> None:
        self.register_buffer("offset", torch.zeros(8))  # fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x + self.offset)  # fault


class PlainTensor(Base):
    def __init__(self) -> None:
        super().__init__()
        self.offset = torch.zeros(8)  # fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x + self.offset.to(x.device))  # fault


class PlainTrainableTensor(Base):
    """Should be a parameter; it is not even used."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(8, requires_grad=True)  # fault


class ModulesInList(Base):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = [nn.Linear(8, 8, device="cpu") for _ in range(2)]  # fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block.to(x.device)(x)
        return self.net(x)


class ModulesInDict(Base):
    def __init__(self) -> None:
        super().__init__()
        self.heads = {"first": nn.Identity()}  # fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.heads["first"](self.net(x))


class ParametersInList(Base):
    def __init__(self) -> None:
        super().__init__()
        self.biases = [nn.Parameter(torch.zeros(8))]  # fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x + self.biases[0])  # fault


class UnusedParameter(Base):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(8, 8)  # fault


class DetachedBranch(Base):
    """The gradient is exactly zero."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 8)  # fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x + 0.0 * self.gate(x))


class NanGradient(Base):
    """The square root of zero: a finite loss with a gradient that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(8))  # fault

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) + (self.shift * 0.0).sqrt().sum()


class ForgottenByOptimizer(Base):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(8, 8)  # fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.extra(x))

    def configure_optimizers(self) -> Any:  # fault
        return torch.optim.SGD(self.net.parameters(), lr=0.01)


class LogsInWrongHook(Base):
    def on_fit_start(self) -> None:
        self.log("size", self.net[0].weight.detach().sum())  # fault


class VectorLoss(Base):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y, reduction="none")  # fault


class OneElementLoss(Base):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss.reshape(1)  # fault


class Raises(Base):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, _ = batch
        return self.net(x[:, :3]).sum()  # fault


def _fault(make: Any, *expected: str, **options: Any) -> Case:
    options.setdefault("verdict", "capturable")
    return Case(make=make, expected=frozenset(expected), **options)


CASES = [
    _fault(LateBuffer, "wrong-device", "cpu-tensor", verdict=FIXABLE, device_only=True),
    _fault(PlainTensor, "plain-tensor", "copy-to-device", verdict=FIXABLE, device_only=True),
    _fault(PlainTrainableTensor, "plain-tensor"),
    _fault(ModulesInList, "hidden-submodule", verdict=FIXABLE),
    _fault(ModulesInDict, "hidden-submodule"),
    _fault(ParametersInList, "hidden-parameter", "cpu-tensor", verdict=FIXABLE),
    _fault(UnusedParameter, "unused-parameter"),
    _fault(DetachedBranch, "zero-gradient"),
    _fault(NanGradient, "nonfinite-gradient"),
    _fault(ForgottenByOptimizer, "not-in-optimizer"),
    _fault(LogsInWrongHook, "log-outside-hook", verdict=FIXABLE),
    _fault(VectorLoss, "loss-shape", verdict=FIXABLE),
    _fault(OneElementLoss, "loss-shape"),
    _fault(Raises, "step-raised", verdict=NOT),
]
