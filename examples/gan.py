"""A small GAN that optimizes by hand: generator and discriminator learn a ring of points in the plane.

    python examples/gan.py             # eager
    ZDTRAIN_CAPTURE=graph python examples/gan.py

Both optimizers keep all that changes in tensors, so the whole `training_step` is captured as one program.
"""

import math

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from zdtrain import Trainer
from zdtrain.optim import SimpleAdam

NOISE = 4


def ring(n: int, seed: int = 0) -> Tensor:
    """Return `n` points near the unit circle, shape (n, 2)."""
    generator = torch.Generator().manual_seed(seed)
    angle = 2 * math.pi * torch.rand(n, generator=generator)
    radius = 1 + 0.05 * torch.randn(n, generator=generator)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)


class GAN(pl.LightningModule):
    """Two networks, two optimizers, one training step."""

    def __init__(self, lr: float = 1e-3) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.lr = lr
        self.generator = nn.Sequential(nn.Linear(NOISE, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        (real,) = batch
        generate, discriminate = self.optimizers()
        fake = self.generator(torch.randn(real.shape[0], NOISE, device=self.device))

        self.toggle_optimizer(discriminate)
        loss = F.softplus(-self.discriminator(real)).mean() + F.softplus(self.discriminator(fake.detach())).mean()
        discriminate.zero_grad()
        self.manual_backward(loss)
        discriminate.step()
        self.untoggle_optimizer(discriminate)
        self.log("discriminator_loss", loss, prog_bar=True)

        self.toggle_optimizer(generate)
        loss = F.softplus(-self.discriminator(fake)).mean()
        generate.zero_grad()
        self.manual_backward(loss)
        generate.step()
        self.untoggle_optimizer(generate)
        self.log("generator_loss", loss, prog_bar=True, on_step=True, on_epoch=True)

    def configure_optimizers(self) -> list[SimpleAdam]:
        return [
            SimpleAdam(self.generator.parameters(), lr=self.lr, betas=(0.5, 0.999)),
            SimpleAdam(self.discriminator.parameters(), lr=self.lr, betas=(0.5, 0.999)),
        ]


def main() -> None:
    pl.seed_everything(0)
    loader = DataLoader(TensorDataset(ring(4096)), batch_size=64, shuffle=True, drop_last=True)
    trainer = Trainer(max_epochs=5, accelerator="auto", devices=1, logger=False, enable_checkpointing=False)
    trainer.fit(GAN(), loader)


if __name__ == "__main__":
    main()
