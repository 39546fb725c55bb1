"""One planted fault each: what a capture freezes, rebinds or keeps."""

import itertools
import random
import time
from random import random as draw
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import torchmetrics
from torch import nn

from zdtrain.optim import SimpleAdam

from .case import CLASSES, Base, Case
from .clean import ManualTwoOptimizers

FIXABLE = "capturable with changes"


class UsesBatchIndex(Base):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss / (1 + batch_idx)  # fault


class UsesGlobalStep(Base):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.global_step / 1000 > 1:  # fault
            loss = loss * 0.5
        return loss


class UsesTrainerGlobalStep(Base):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss / (1 + self.trainer.global_step // 1000)  # fault


class UsesEpoch(Base):
    """A capture per epoch is right: a note."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * 0.9**self.current_epoch  # fault


class LogsConstant(Base):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("rate", 0.1)  # fault
        return super().training_step(batch, batch_idx)


class LogsNumberAroundTheStep(Base):
    """Read anew each time: a note."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("index", float(batch_idx))  # fault


class LogsChangingNumber(Base):
    def __init__(self) -> None:
        super().__init__()
        self.started = [0]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.started[0] += 1

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("started", self.started[0])  # fault
        return super().training_step(batch, batch_idx)


class BakesChangingNumber(Base):
    """The number changes outside the step and is used inside."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 1.0

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.temperature *= 0.99

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self(x) / self.temperature, y)  # fault


class ChangesDropout(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, CLASSES))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[1].p = min(0.5, 0.1 + 0.01 * batch_idx)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)  # fault


_SWITCH = itertools.cycle([False, True])


class BranchesInPython(Base):
    """The branch depends on state outside the module."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if next(_SWITCH):
            loss = loss.abs() + loss.square()  # fault
        return loss


class DrawsRandom(Base):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        scale = random.uniform(0.5, 1.5)  # fault
        return super().training_step(batch, batch_idx) * scale  # fault


class DrawsNumpy(Base):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * float(np.random.rand())  # fault


class DrawsTorchOnCpu(Base):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * torch.rand((), device="cpu", dtype=loss.dtype)  # fault


class DrawsThroughAlias(Base):
    """`from random import random`: only the comparison of two steps can see it."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * draw()  # fault


class ReadsClock(Base):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.perf_counter()  # fault
        return super().training_step(batch, batch_idx)


class Prints(Base):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        print("step", end="\r")  # fault
        return super().training_step(batch, batch_idx)


class CountsInPython(Base):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.calls += 1  # fault
        return super().training_step(batch, batch_idx)


class _Tally:
    def __init__(self) -> None:
        self.seen = 0


class CountsInObject(Base):
    def __init__(self) -> None:
        super().__init__()
        self.tally = _Tally()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.tally.seen += len(x)  # fault
        return self.net(x)


class CountsInSubmodule(Base):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _Counting()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.inner(x))


class _Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.histogram = {"calls": 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.histogram["calls"] += 1  # fault
        return x


class RebindsBuffer(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.average = 0.9 * self.average + 0.1 * loss.detach()  # fault
        return loss


class RebindsHiddenState(Base):
    """A tuple of tensors, carried from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 8)
        self.hidden = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, c = self.cell(x, self.hidden)
        self.hidden = (h.detach(), c.detach())  # fault
        return self.net(h)


class KeepsLosses(Base):
    def __init__(self) -> None:
        super().__init__()
        self.losses = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss)  # fault
        return loss


class KeepsLastLoss(Base):
    def __init__(self) -> None:
        super().__init__()
        self.last = None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.last = loss  # fault
        return loss


class KeepsOutputs(Base):
    def __init__(self) -> None:
        super().__init__()
        self.outputs = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        logits = self(x)
        self.outputs.append(logits.detach())  # fault
        return F.cross_entropy(logits, y)


class ReplacesLearningRate(Base):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = group["lr"] * 0.99  # fault
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:  # fault
        return torch.optim.SGD(self.parameters(), lr=0.01)


class FillsLearningRate(Base):
    """SimpleAdam's rate is a tensor that is filled in place, which is captured like any operation."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = group["lr"] * 0.99
        return super().training_step(batch, batch_idx)


class StepsScheduler(Base):
    """The rate changes only every hundredth time."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule = None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.schedule.step()  # fault
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = SimpleAdam(self.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
        return optimizer


class ListMetric(Base):
    """An exact AUROC keeps every prediction."""

    def __init__(self) -> None:
        super().__init__()
        self.auroc = torchmetrics.AUROC("multiclass", num_classes=CLASSES, validate_args=False)  # fault

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        logits = self(x)
        self.auroc.update(logits.detach().softmax(-1), y)
        return F.cross_entropy(logits, y)


class UsesLBFGS(Base):
    def configure_optimizers(self) -> Any:  # fault
        return torch.optim.LBFGS(self.parameters(), lr=0.01, max_iter=2)


class AdamWithStepHook(Base):
    def configure_optimizers(self) -> Any:  # fault
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        optimizer.register_step_post_hook(lambda *arguments: None)
        return optimizer


class ManualWithHookedAdam(ManualTwoOptimizers):
    def configure_optimizers(self) -> Any:  # fault
        optimizers = [torch.optim.Adam(part.parameters(), lr=0.01) for part in (self.net, self.discriminator)]
        for optimizer in optimizers:
            optimizer.register_step_post_hook(lambda *arguments: None)
        return optimizers


def _fault(make: Any, *expected: str, **options: Any) -> Case:
    options.setdefault("verdict", FIXABLE)
    return Case(make=make, expected=frozenset(expected), **options)


CASES = [
    _fault(UsesBatchIndex, "step-counter"),
    _fault(UsesGlobalStep, "step-counter"),
    _fault(UsesTrainerGlobalStep, "step-counter"),
    Case(make=UsesEpoch, notes=frozenset({"epoch-counter"})),
    Case(make=LogsConstant, notes=frozenset({"logged-number"})),
    Case(make=LogsNumberAroundTheStep, notes=frozenset({"logged-number"})),
    _fault(LogsChangingNumber, "baked-value", notes=frozenset({"logged-number"})),
    _fault(BakesChangingNumber, "baked-value"),
    _fault(ChangesDropout, "baked-value"),
    _fault(BranchesInPython, "python-branch"),
    _fault(DrawsRandom, "host-random", "baked-value"),
    _fault(DrawsNumpy, "host-random"),
    _fault(DrawsTorchOnCpu, "host-random", notes=frozenset({"cpu-scalar"}), device_only=True),
    _fault(DrawsThroughAlias, "baked-value"),
    _fault(ReadsClock, "host-clock"),
    _fault(Prints, "side-effect"),
    _fault(CountsInPython, "python-state"),
    _fault(CountsInObject, "python-state"),
    _fault(CountsInSubmodule, "python-state"),
    _fault(RebindsBuffer, "rebound-tensor", verdict="capturable"),
    _fault(RebindsHiddenState, "rebound-tensor"),
    _fault(KeepsLosses, "kept-graph"),
    _fault(KeepsLastLoss, "kept-graph", verdict="capturable"),
    _fault(KeepsOutputs, "kept-tensor"),
    _fault(ReplacesLearningRate, "lr-replaced"),
    Case(make=FillsLearningRate),
    _fault(StepsScheduler, "scheduler-by-hand"),
    Case(make=AdamWithStepHook, notes=frozenset({"optimizer-outside"})),
    _fault(ManualWithHookedAdam, "optimizer-by-hand"),
    _fault(ListMetric, "metric-list-state"),
    _fault(UsesLBFGS, "optimizer-not-capturable", "library-host-read", verdict="capturable"),
]
