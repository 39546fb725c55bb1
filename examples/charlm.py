"""A character-level GPT on the source text of Python's own standard library."""

import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

VOCABULARY = 256  # bytes


class Windows(Dataset):
    """Consecutive windows of `length` bytes and the byte that follows each position."""

    def __init__(self, text: Tensor, length: int) -> None:
        self.text, self.length = text, length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.length
        window = self.text[start : start + self.length + 1].long()
        return window[:-1], window[1:]


class StandardLibraryText(LightningDataModule):
    """The modules at the top of the standard library, the last tenth of their text for validation."""

    def __init__(self, length: int = 64, batch_size: int = 32) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)
        cut = len(text) * 9 // 10
        self.train, self.val = Windows(text[:cut], self.hparams.length), Windows(text[cut:], self.hparams.length)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.hparams.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.hparams.batch_size, drop_last=True)


class Block(nn.Module):
    """Pre-norm causal self-attention and a feed-forward layer, shape=(batch, length, width) in and out."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_attention, self.norm_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + self.out(attended)
        return x + self.feed(self.norm_feed(x))


class CharGPT(LightningModule):
    """A small GPT over bytes."""

    def __init__(
        self, width: int = 128, num_layers: int = 2, num_heads: int = 4, length: int = 64, lr: float = 2e-3
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten()), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
