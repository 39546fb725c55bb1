"""Handwritten digits: the 1 797 images of 8 × 8 pixels that scikit-learn ships, as MLP and as convolutional network."""

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

NUM_CLASSES, NUM_PIXELS, LARGEST_PIXEL = 10, 64, 16


class Digits(LightningDataModule):
    """Images scaled to [0, 1], shape=(n, 64), a fifth of them for validation with every digit equally represented.

    Args:
        batch_size: Images in a batch.
        seed: Seed of the split.
    """

    def __init__(self, batch_size: int = 32, seed: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        images, labels = load_digits(return_X_y=True)
        split = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=self.hparams.seed)
        train_images, val_images = (torch.tensor(part / LARGEST_PIXEL, dtype=torch.float32) for part in split[:2])
        train_labels, val_labels = (torch.tensor(part, dtype=torch.int64) for part in split[2:])
        self.train, self.val = TensorDataset(train_images, train_labels), TensorDataset(val_images, val_labels)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.hparams.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, batch_size=len(self.val))

    test_dataloader = predict_dataloader = val_dataloader


class DigitsMLP(LightningModule):
    """Two hidden layers with dropout.

    Args:
        hidden: Width of the hidden layers.
        lr: Learning rate, cosine-annealed to 0 over the run.
        weight_decay: Decoupled weight decay.
        dropout: Share of hidden units dropped.
    """

    def __init__(self, hidden: int = 256, lr: float = 1e-3, weight_decay: float = 1e-2, dropout: float = 0.2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = self.build()

    def build(self) -> nn.Module:
        hidden, dropout = self.hparams.hidden, self.hparams.dropout
        return nn.Sequential(
            *(nn.Linear(NUM_PIXELS, hidden), nn.ReLU(), nn.Dropout(dropout)),
            *(nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(dropout)),
            nn.Linear(hidden, NUM_CLASSES),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels, label_smoothing=0.1)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        logits, labels = self(batch[0]), batch[1]
        self.log("val_loss", F.cross_entropy(logits, labels))
        self.log("val_acc", (logits.argmax(dim=1) == labels).float().mean(), prog_bar=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test_acc", (self.predict_step(batch, batch_idx) == batch[1]).float().mean())

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(dim=1)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=self.hparams.weight_decay)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class DigitsConvNet(DigitsMLP):
    """Two convolutions and a hidden layer, trained as the MLP is."""

    def build(self) -> nn.Module:
        return nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)),
            *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Dropout(self.hparams.dropout)),
            *(nn.Linear(64 * 16, self.hparams.hidden), nn.ReLU(), nn.Linear(self.hparams.hidden, NUM_CLASSES)),
        )
