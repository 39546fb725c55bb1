"""The `lightning.pytorch.Trainer` subclass that people import."""

from lightning.pytorch import Trainer as LightningTrainer


class Trainer(LightningTrainer):
    """Placeholder until the loop lands; see docs/architecture.md."""
