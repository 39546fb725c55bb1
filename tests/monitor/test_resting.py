"""In an epoch that makes no updates of its own, monitors rest; they are back in the next."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import zdtrain
from tests.monitor.runs import QUIET
from zdtrain.monitors import NonFinite, Statistics, Threshold

BATCHES = 5


class Normed(pl.LightningModule):
    """Has a BatchNorm, whose statistics weight averaging collects in an epoch of its own at the end."""

    def __init__(self, bad_steps=()):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.bad_steps = bad_steps

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean()
        if self.trainer.global_step in self.bad_steps:
            loss = loss * float("nan")
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def train_dataloader(self):
        x = torch.randn(BATCHES * 4, 3, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(x), batch_size=4)


def averaging():
    return [StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2)]


@pytest.mark.parametrize(
    "options",
    [
        {"nonfinite": "skip"},
        {"monitors": [Threshold("loss", above=1e9, then="stop"), NonFinite(), Statistics("loss")], "records": True},
        {"ema_decay": 0.9},
    ],
    ids=["nonfinite", "monitors", "ema"],
)
def test_averaging_weights_ends_as_without_monitors(options, tmp_path):
    common = {**QUIET, "max_epochs": 4, "default_root_dir": tmp_path}
    del common["capture"]
    stock, watched = Normed(), Normed()
    pl.Trainer(**common, callbacks=averaging()).fit(stock)
    trainer = zdtrain.Trainer(**common, callbacks=averaging(), **options)
    trainer.fit(watched)
    assert all(torch.equal(value, watched.state_dict()[name]) for name, value in stock.state_dict().items())
    codes = [reason.code for reason in trainer.fit_loop.epoch_loop.fallbacks]
    assert codes.count("monitors-rest") == codes.count("skip-backward") == 1


def test_what_was_skipped_before_is_counted_once(tmp_path):
    module = Normed(bad_steps=(4 * BATCHES - 1,))  # the last step that is watched
    trainer = zdtrain.Trainer(
        **{**QUIET, "max_epochs": 4}, callbacks=averaging(), nonfinite="skip", records=tmp_path, max_lag_steps=50
    )
    trainer.fit(module)
    assert trainer.skipped_steps == 1
    assert all(value.isfinite().all() for value in module.state_dict().values())
