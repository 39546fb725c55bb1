"""One module with what a check has to say about it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn

from zdtrain.optim import SimpleAdam

CLASSES = 4


def batch(size: int = 8, features: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(size, features, generator=generator),
        torch.randint(0, CLASSES, (size,), generator=generator),
    )


def images() -> tuple[torch.Tensor, torch.Tensor]:
    x, y = batch(4, 3 * 8 * 8)
    return x.view(4, 3, 8, 8), y


def sequences() -> tuple[torch.Tensor, torch.Tensor]:
    x, y = batch(4, 6 * 8)
    return x.view(4, 6, 8), y


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 16, (4, 6), generator=generator)
    return ids, torch.randint(0, CLASSES, (4,), generator=generator)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A module of the zoo."""

    make: Callable[[], LightningModule]
    """Makes the module."""
    batch: Callable[[], Any] = batch
    """Makes its batch, on the CPU."""
    trainer_options: dict[str, Any] = field(default_factory=dict)
    """Options that its Trainer needs."""
    expected: frozenset[str] = frozenset()
    """Codes of the findings that are errors or warnings; nothing else may be found."""
    notes: frozenset[str] = frozenset()
    """Codes of the findings that are notes."""
    verdict: str = "capturable"
    """The verdict on the training step."""
    device_only: bool = False
    """Whether the fault exists only where the device is not the CPU, so that a capture on the CPU works."""

    @property
    def captures_on_cpu(self) -> bool:
        """Whether a captured step can replace the training step on the CPU."""
        return self.verdict == "capturable" or self.device_only

    @property
    def name(self) -> str:
        """The class of the module."""
        return getattr(self.make, "__name__", "module")


class Base(LightningModule):
    """A clean classifier; the zoo's modules change one thing."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return SimpleAdam(self.parameters(), lr=0.01)
