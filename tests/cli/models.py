"""A model that writes down what the configuration made of its arguments."""

import json
import os
import signal
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader


class Seen(pl.LightningModule):
    """Writes its arguments and their types to ``seen.json`` in the working directory."""

    def __init__(
        self,
        lr: float = 0.1,
        wd: float = 0.0,
        count: int = 1,
        sched: list[float] = (),
        extra: dict[str, Any] | None = None,
        fail: str = "",
    ) -> None:
        super().__init__()
        self.fail = fail
        self.layer = torch.nn.Linear(1, 1)
        with open("seen.json", "w") as file:
            json.dump({"lr": lr, "wd": wd, "count": count, "sched": sched, "extra": extra}, file)
        if fail == "init":
            raise ValueError("width 3 is not a multiple of 2")

    def training_step(self, batch, batch_idx):
        if self.fail == "step" and batch_idx == 1:
            raise RuntimeError("the step went wrong")
        if self.fail in ("SIGINT", "SIGTERM") and batch_idx == 1:
            os.kill(os.getpid(), getattr(signal, self.fail))
        loss = self.layer(batch).square().mean() + torch.rand(())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.layer(batch).square().mean())

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self.layer(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def _loader(self):
        return DataLoader(torch.ones(4, 1))

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = _loader
