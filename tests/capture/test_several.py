"""`steps_per_replay`: k steps in one program train, log and count what k steps one by one do."""

import pytest
import torch
from torch import nn
from torchmetrics import MeanSquaredError

from zdtrain.optim import SimpleAdam

from .runs import FEATURES, Classifier, assert_equal, assert_same, batches, fit


class Fused(Classifier):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)


class Simple(Classifier):
    def configure_optimizers(self):
        return SimpleAdam(self.parameters(), lr=0.01)


class Metrics(Classifier):
    """Logs in every way, returns more than a loss, has batch norm."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3)
        )
        self.error = MeanSquaredError()
        self.register_buffer("mean", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        self.error.update(logits[:, 0].contiguous(), x[:, 0].contiguous())
        self.log("mean", self.mean)
        self.log("error", self.error, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("largest", x.max(), on_step=True, on_epoch=True, reduce_fx="max")
        self.log("total", x.sum(), on_step=False, on_epoch=True, reduce_fx="sum")
        return {"loss": loss, "logits": logits.detach()}

    def configure_optimizers(self):
        return SimpleAdam(self.parameters(), lr=0.01)


class Scheduled(Simple):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 2}}


class ScheduledFused(Fused):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        first = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=7)
        second = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
        scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [first, second], [9])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Clipped(Simple):
    pass


def several(tmp_path, make, k=4, capture="graph", **options):
    """Train one step per replay and k, compare bit for bit, and return the latter."""
    one = fit(tmp_path, make, capture, **options)
    many = fit(tmp_path, make, capture, steps_per_replay=k, **options)
    assert_same(one, many)
    assert_equal(one.trainer.fit_loop.state_dict(), many.trainer.fit_loop.state_dict(), "loops")
    return many


def block_of(outcome):
    """Return the report of the program for several steps."""
    (program,) = [program for program in outcome.report.programs if " steps of " in program.key]
    return program


def reasons(outcome):
    return [str(reason) for reason in outcome.report.fallbacks if reason.code == "steps-per-replay"]


@pytest.mark.parametrize("make", [Fused, Simple, Metrics, Scheduled, ScheduledFused])
@pytest.mark.parametrize("k", [2, 4, 5])
def test_blocks_train_log_and_count_like_single_steps(tmp_path, make, k):
    many = several(tmp_path, make, k, loader=lambda: batches(16, rest=3))
    program = block_of(many)
    assert program.verification == "equal"
    assert program.verifications == 4 if k < 5 else program.verifications >= 3
    assert program.replays >= 3 * k
    assert program.replays % k == 0
    assert not reasons(many)
