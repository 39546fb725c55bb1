"""One planted fault each: host reads, copies, host tensors, shapes that depend on data."""

import math
from typing import Any

import torch
import torch.nn.functional as F
import torchmetrics
from torch import nn

from .case import Base, Case

FIXABLE = "capturable with changes"
NOT = "not capturable"


class ReadsItem(Base):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        loss.item()  # fault
        return loss


class ReadsNumpy(Base):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        loss.detach().numpy()  # fault
        return loss


class FormatsLoss(Base):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        str(f"{loss:.3f}")  # fault
        return loss


class PrintsLoss(Base):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        print(loss, end="\r", file=open("/dev/null", "w"))  # noqa: SIM115 # fault
        return loss


class TestsTruth(Base):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if loss > 1000:  # fault
            loss = loss * 0.5
        return loss


class BuiltinMax(Base):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return max(loss, loss * 0.5)  # fault


class MathSqrt(Base):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        math.sqrt(loss.detach())  # fault
        return loss


class ReadsInBackwardHook(Base):
    """The read happens in a function that autograd calls."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        logits = self(x)
        logits.register_hook(self._look)
        return F.cross_entropy(logits, y)

    def _look(self, gradient: torch.Tensor) -> None:
        float(gradient.abs().sum())  # fault


class ReadsInCustomBackward(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Clamped.apply(self.net(x))


class _Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad if grad.norm() < 1e9 else grad * 0.5  # fault


class MetricReads(Base):
    """MeanMetric looks for NaN on the host, to put a number in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric(nan_strategy=0.0)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.mean.update(loss.detach())  # fault
        return loss


class ClipsWithErrorCheck(Base):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 1.0, error_if_nonfinite=True)  # fault


class SingularValues(Base):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + 1e-3 * torch.linalg.svdvals(self.net[0].weight).amax()  # fault


class CopiesToHost(Base):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        loss.detach().cpu()  # fault
        return loss


class Synchronizes(Base):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if loss.is_cuda:
            torch.cuda.synchronize()  # fault
        return loss


class TensorFromList(Base):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        weight = torch.tensor([1.0, 2.0, 1.0, 2.0], device=self.device, dtype=x.dtype)  # fault
        return F.cross_entropy(self(x), y, weight=weight)


class MovesEachStep(Base):
    def __init__(self) -> None:
        super().__init__()
        self.scales = [0.5, 1.0, 1.5, 2.0]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        weight = torch.tensor(self.scales, device="cpu", dtype=x.dtype)
        return F.cross_entropy(self(x), y, weight=weight.to(x.device))  # fault


class PinnedCopyEachStep(Base):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        if not hasattr(self, "pinned"):
            weight = torch.ones(4, device="cpu", dtype=torch.float32)
            object.__setattr__(self, "pinned", weight.pin_memory() if x.is_cuda else weight)
        return F.cross_entropy(self(x), y, weight=self.pinned.to(x.device, non_blocking=True))  # fault


class CpuTensorInDeviceWork(Base):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        shift = torch.full((8,), 0.5, device="cpu", dtype=x.dtype)
        return F.cross_entropy(self(x + shift), y)  # fault


class DeviceLess(Base):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        shift = torch.zeros(8, dtype=x.dtype)  # fault
        return F.cross_entropy(self(x + shift.to(x.device)), y)  # fault


class IndexesByMask(Base):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        losses = F.cross_entropy(self(x), y, reduction="none")
        return losses[losses > 0.1].sum() * 0.1  # fault


class UsesNonzero(Base):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        (present,) = torch.nonzero(y >= 0, as_tuple=True)  # fault
        return F.cross_entropy(self(x)[present], y[present])


class UniqueLabels(Base):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        number = torch.unique(batch[1]).shape[0]  # fault
        return loss / number


class ChecksEqual(Base):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        assert not torch.equal(batch[0], self.net[0].weight)  # fault
        return loss


class SamplesMultinomial(Base):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        logits = self(x)
        drawn = torch.multinomial(logits.detach().softmax(-1), 1).squeeze(1)  # fault
        return F.cross_entropy(logits, torch.where(y == 0, drawn, y))


class ReadsInValidation(Base):
    """The training step is clean."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        (self(x).argmax(1) == y).sum().item()  # fault


class ReadsAfterTheStep(Base):
    """Outside the captured part, but the host waits all the same."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        float(outputs["loss"])  # fault


class EmptiesCache(Base):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        torch.cuda.empty_cache()  # fault
        return loss


class SavesRandomState(Base):
    """Activation checkpointing as it is by default."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.utils.checkpoint.checkpoint(self.net[:2], x, use_reentrant=False)  # fault
        return self.net[2](hidden)


class Churns(Base):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        for scale in range(20):
            loss = loss + torch.full((), scale * 1e-3, device=loss.device, dtype=loss.dtype)  # fault
        return loss


class ConstantCpuScalar(Base):
    """Harmless: a note."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * torch.full((), 0.5, device="cpu", dtype=loss.dtype)  # fault


class DtypeFromPython(Base):
    """Harmless here: a note."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + torch.zeros((), device=loss.device)  # fault


def _fault(make: Any, *expected: str, **options: Any) -> Case:
    options.setdefault("verdict", FIXABLE)
    return Case(make=make, expected=frozenset(expected), **options)


CASES = [
    _fault(ReadsItem, "host-read"),
    _fault(ReadsNumpy, "host-read"),
    _fault(FormatsLoss, "implicit-host-read"),
    _fault(PrintsLoss, "implicit-host-read"),
    _fault(TestsTruth, "implicit-host-read"),
    _fault(BuiltinMax, "implicit-host-read"),
    _fault(MathSqrt, "implicit-host-read"),
    _fault(ReadsInBackwardHook, "host-read"),
    _fault(ReadsInCustomBackward, "implicit-host-read"),
    _fault(MetricReads, "library-host-read"),
    _fault(ClipsWithErrorCheck, "library-host-read"),
    _fault(SingularValues, "kernel-host-read", verdict=NOT, device_only=True),
    _fault(CopiesToHost, "copy-to-host", device_only=True),
    _fault(Synchronizes, "device-synchronize", device_only=True),
    _fault(TensorFromList, "copy-to-device", device_only=True),
    _fault(MovesEachStep, "copy-to-device", device_only=True),
    _fault(PinnedCopyEachStep, "async-copy-to-device", device_only=True),
    _fault(CpuTensorInDeviceWork, "cpu-tensor", device_only=True),
    _fault(DeviceLess, "device-less-tensor", "copy-to-device", device_only=True),
    _fault(IndexesByMask, "data-dependent-shape"),
    _fault(UsesNonzero, "data-dependent-shape"),
    _fault(UniqueLabels, "data-dependent-shape"),
    _fault(ChecksEqual, "host-read"),
    _fault(SamplesMultinomial, "kernel-host-read", verdict=NOT, device_only=True),
    _fault(ReadsInValidation, "host-read", verdict="capturable"),
    _fault(ReadsAfterTheStep, "host-read", verdict="capturable"),
    _fault(EmptiesCache, "graph-refused", verdict=NOT, device_only=True),
    _fault(SavesRandomState, "rng-state-in-step", device_only=True),
    _fault(Churns, "churn", verdict="capturable"),
    Case(make=ConstantCpuScalar, notes=frozenset({"cpu-scalar"})),
    Case(make=DtypeFromPython, notes=frozenset({"dtype-less-tensor"})),
]
