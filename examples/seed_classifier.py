"""Which package of Python's standard library is this? Embeddings of 128 tokens, summed, and a linear layer."""

import re
import sysconfig
import zlib
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "xml")
VOCABULARY, NUM_TOKENS = 10_000, 128
TOKEN = re.compile(r"\w+|[^\w\s]")


def tokenize(package: str) -> Tensor:
    """Return the source of `package` as windows of token ids, shape=(n, 128); a word's id is its hash."""
    files = sorted((Path(sysconfig.get_path("stdlib")) / package).rglob("*.py"))
    text = "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
    ids = torch.tensor([zlib.crc32(word.encode()) % VOCABULARY for word in TOKEN.findall(text)])
    return ids[: len(ids) // NUM_TOKENS * NUM_TOKENS].view(-1, NUM_TOKENS)


class PackageSources(LightningDataModule):
    """Windows of 128 tokens and the package they come from, every fifth window for validation."""

    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        windows = [tokenize(package) for package in PACKAGES]
        labels = torch.cat([torch.full((len(part),), label) for label, part in enumerate(windows)])
        tokens = torch.cat(windows)
        is_val = torch.arange(len(tokens)) % 5 == 0
        self.train = TensorDataset(tokens[~is_val], labels[~is_val])
        self.val = TensorDataset(tokens[is_val], labels[is_val])

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.hparams.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, batch_size=256)


class EmbeddingSumClassifier(LightningModule):
    """logits = W · Σ_t E[token_t] + b, with E of shape (10 000, 768).

    Args:
        width: Width of the embeddings.
        lr: Learning rate of Adam.
    """

    def __init__(self, width: int = 768, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(VOCABULARY, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.head = nn.Linear(width, len(PACKAGES))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens).sum(dim=1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, labels = batch
        logits = self(tokens)
        loss = F.cross_entropy(logits, labels)
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_acc", (logits.argmax(dim=1) == labels).float().mean())
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        tokens, labels = batch
        logits = self(tokens)
        self.log("val_loss", F.cross_entropy(logits, labels))
        self.log("val_acc", (logits.argmax(dim=1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
