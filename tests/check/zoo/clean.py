"""Modules whose steps read nothing back and can be captured; at most their optimizer steps behind it."""

from typing import Any

import torch
import torch.nn.functional as F
import torchmetrics
from torch import nn
from torch.utils.checkpoint import checkpoint

from zdtrain.optim import SimpleAdam

from .case import CLASSES, Base, Case, images, sequences, tokens


class Classifier(Base):
    """Nothing but the base."""


class DropoutAndNorms(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.2), nn.LayerNorm(16), nn.Linear(16, CLASSES)
        )


class AdamWithSchedule(Base):
    def configure_optimizers(self) -> Any:  # fault
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class FusedAdamW(Base):
    def configure_optimizers(self) -> Any:  # fault
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)


class RMSPropMomentum(Base):
    def configure_optimizers(self) -> Any:  # fault
        return torch.optim.RMSprop(self.parameters(), lr=0.01, momentum=0.9)


class ConvNet(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, groups=2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, CLASSES),
        )


class Attention(Base):
    """Scaled dot-product attention, embeddings, a registered causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.position = nn.Parameter(torch.zeros(6, 8))
        self.qkv = nn.Linear(8, 24)
        self.net = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, CLASSES))
        self.register_buffer("causal", torch.ones(6, 6).tril().bool())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) + self.position
        q, k, v = self.qkv(x).view(4, 6, 3, 2, 4).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=self.causal)
        scores = (q @ k.transpose(-1, -2)).masked_fill(~self.causal, float("-inf"))
        mixed = attended + scores.softmax(-1) @ v
        return self.net(mixed.transpose(1, 2).reshape(4, 6, 8).mean(1))


class TransformerEncoder(Base):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.net = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.encoder(x).mean(1))


class Recurrent(Base):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.net = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lstm, _ = self.lstm(x)
        gru, _ = self.gru(x)
        return self.net(torch.cat([lstm[:, -1], gru[:, -1]], dim=1))


class Checkpointed(Base):
    """Activation checkpointing without saving the random state."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.net[:2], x, use_reentrant=False, preserve_rng_state=False)
        return self.net[2](hidden)


class _Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return grad * (s + x * s * (1 - s))


class CustomFunction(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net[2](_Swish.apply(self.net[0](x)))


class GradientPenalty(Base):
    """Double backward."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        x = x.requires_grad_()
        loss = F.cross_entropy(self(x), y)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.square().sum(1).mean()


class LoggedMetrics(Base):
    """torchmetrics in the step, and self.log with every flag that matters."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=CLASSES, validate_args=False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.accuracy(logits, y)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log_dict({"max": logits.detach().amax(), "scaled": loss.detach() * 2})
        return loss


class Validated(Base):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.log("val_loss", F.cross_entropy(logits, y), prog_bar=True)
        self.log("val_accuracy", (logits.argmax(1) == y).float().mean())


class AsksCounters(Base):
    """Decides by the loop's counters."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if (batch_idx + 1) % 3 == 0:
            loss = 2 * loss
        return loss if self.global_step < 1000 else loss * 0.5


class MovingAverageInPlace(Base):
    """State in buffers, changed in place; a counter on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(()))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.average.mul_(0.9).add_(loss.detach(), alpha=0.1)
        self.count += 1
        warm = (self.count > 10).float()
        return loss * (1.0 + 0.1 * warm)


class DeviceRandomness(Base):
    """Noise, masks and ranges made on the device, with dtype and device."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        noise = torch.randn_like(x) * 0.1
        keep = torch.rand(x.shape[0], 1, device=x.device, dtype=x.dtype) > 0.1
        weight = torch.arange(x.shape[1], device=x.device, dtype=x.dtype) / x.shape[1]
        x = torch.where(keep, x + noise, torch.zeros_like(x)) * weight
        return F.cross_entropy(self(x), y, label_smoothing=0.1)


class MaskedLoss(Base):
    """Masks with fixed shapes, comparisons that stay tensors, a scalar put through a mask."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        x = x.clone()
        x[x > 2.0] = 2.0
        losses = F.cross_entropy(self(x), y, reduction="none")
        mask = (y != 0).to(losses.dtype)
        losses = torch.minimum(losses, losses.new_full((), 10.0))
        return (losses * mask).sum() / mask.sum().clamp(min=1.0)


class GumbelOneHot(Base):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        target = F.one_hot(y, CLASSES).to(x.dtype)
        drawn = F.gumbel_softmax(self(x), tau=1.0)
        return F.binary_cross_entropy(drawn.clamp(1e-6, 1 - 1e-6), target)


class MetricsByDefault(Base):
    """torchmetrics that count, look at labels and look for NaN, which they do on the device here."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=CLASSES, average="macro")
        self.confusion = torchmetrics.ConfusionMatrix("binary")
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.accuracy.update(logits, y)
        self.confusion.update(logits[:, 0].contiguous(), (y == 0).long())
        self.mean.update(loss.detach())
        return loss


class ManualTwoOptimizers(Base):
    """Manual optimization: a generator and a discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Linear(8, 8)
        self.discriminator = nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        fake = self.net(x)
        loss = F.softplus(-self.discriminator(fake)).mean()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        loss = F.softplus(self.discriminator(fake.detach())).mean() + F.softplus(-self.discriminator(x)).mean()
        second.zero_grad()
        self.manual_backward(loss)
        second.step()
        self.untoggle_optimizer(second)
        self.log("d_loss", loss)

    def configure_optimizers(self) -> Any:
        return [SimpleAdam(self.net.parameters(), lr=0.01), SimpleAdam(self.discriminator.parameters(), lr=0.01)]


class ManualWithAdam(ManualTwoOptimizers):
    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), lr=0.01) for part in (self.net, self.discriminator)]


class ManualWithFusedAdam(ManualTwoOptimizers):
    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), lr=0.01, fused=True) for part in (self.net, self.discriminator)]


class AdagradWithDecay(Base):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=0.01, lr_decay=0.1)


class HostWorkAroundTheStep(Base):
    """Python counters and clocks are the host's business outside the captured part."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen += batch_idx

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += self.global_step


class LazyCache(Base):
    """What only the first step does (here a copy to the device) is not part of a captured step."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        if self.weights is None:
            self.weights = torch.tensor([1.0, 2.0, 1.0, 2.0], device=x.device)
        return F.cross_entropy(self(x), y, weight=self.weights)


class ScalarsOfTheRun(Base):
    """A weight and the step count from the device."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        scalars = self.trainer.scalars
        warm = (scalars.global_step > 2).float()
        return super().training_step(batch, batch_idx) * (scalars.weight + warm)


class FrozenBackbone(Base):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            features = self.backbone(x)
        return self.net(features)

    def configure_optimizers(self) -> Any:  # fault
        return torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.9)


CASES = [
    Case(make=Classifier),
    Case(make=DropoutAndNorms),
    Case(make=AdamWithSchedule, trainer_options={"gradient_clip_val": 1.0}),
    Case(make=FusedAdamW),
    Case(
        make=RMSPropMomentum,
        trainer_options={"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"},
    ),
    Case(make=ConvNet, batch=images),
    Case(make=Attention, batch=tokens),
    Case(make=TransformerEncoder, batch=sequences),
    Case(make=Recurrent, batch=sequences),
    Case(make=Checkpointed),
    Case(make=CustomFunction),
    Case(make=GradientPenalty),
    Case(make=LoggedMetrics, trainer_options={"precision": "bf16-mixed"}),
    Case(make=Validated, trainer_options={"accumulate_grad_batches": 2}),
    Case(make=AsksCounters),
    Case(make=MovingAverageInPlace),
    Case(make=DeviceRandomness),
    Case(make=MaskedLoss),
    Case(make=GumbelOneHot),
    Case(make=MetricsByDefault),
    Case(make=ManualTwoOptimizers),
    Case(make=ManualWithAdam),
    Case(make=ManualWithFusedAdam),
    Case(make=AdagradWithDecay),
    Case(make=HostWorkAroundTheStep),
    Case(make=LazyCache),
    Case(make=ScalarsOfTheRun, trainer_options={"scalars": {"weight": 0.5}}),
    Case(make=FrozenBackbone),
]
