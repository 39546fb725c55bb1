"""The left-over batches of an epoch are averaged over their own number."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.utils.data import DataLoader, IterableDataset

from tests.parity.harness import QUIET
from zdtrain import Trainer

START = 10.0


class Constant(pl.LightningModule):
    """The gradient of every batch is the batch's value, so a step's size tells what was averaged."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor(START))
        self.sizes = []

    def training_step(self, batch, batch_idx):
        return self.w * batch.mean()

    def on_before_optimizer_step(self, optimizer):
        self.sizes.append(round(self.w.grad.item(), 6))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


class OnStockLoop(Constant):
    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)


class Stream(IterableDataset):
    def __init__(self, values):
        self.values = values

    def __iter__(self):
        return iter(torch.tensor(self.values))


def sized(values):
    return DataLoader(torch.tensor(values))


def unsized(values):
    return DataLoader(Stream(values))


def fit(tmp_path, data, window, make=Constant, **options):
    module = make()
    trainer = Trainer(
        **{
            **QUIET,
            "default_root_dir": tmp_path,
            "logger": False,
            "max_epochs": 1,
            "accumulate_grad_batches": window,
            **options,
        }
    )
    trainer.fit(module, data)
    assert module.w.item() == pytest.approx(START - sum(module.sizes))
    return module.sizes


@pytest.mark.parametrize("make", [Constant, OnStockLoop])
@pytest.mark.parametrize("load", [sized, unsized])
@pytest.mark.parametrize("window", [2, 3, 4, 7])
def test_each_window_is_the_mean_of_what_it_holds(tmp_path, load, window, make):
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    windows = [values[i : i + window] for i in range(0, len(values), window)]
    means = [round(sum(held) / len(held), 6) for held in windows]
    assert fit(tmp_path, load(values), window, make, max_epochs=2) == pytest.approx(2 * means, abs=1e-5)


@pytest.mark.parametrize("limit", [3, 0.6])
def test_a_limit_ends_the_epoch_as_well(tmp_path, limit):
    assert fit(tmp_path, sized([1.0] * 5), 2, limit_train_batches=limit) == [1.0, 1.0]


def test_a_limit_on_a_loader_without_length_ends_the_epoch_as_well(tmp_path):
    assert fit(tmp_path, unsized([1.0] * 5), 2, limit_train_batches=3) == [1.0, 1.0]


def test_clipping_sees_the_right_gradient(tmp_path):
    class Clipped(Constant):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            self.sizes.append(("clip", self.w.grad.item()))

    module = Clipped()
    trainer = Trainer(**QUIET, accumulate_grad_batches=4, default_root_dir=tmp_path, logger=False)
    trainer.fit_loop.max_epochs = 1
    trainer.fit(module, unsized([1.0] * 5))
    assert module.sizes == [1.0, ("clip", 1.0), 1.0, ("clip", 1.0)]


def test_a_window_that_the_schedule_changes(tmp_path):
    sizes = fit(tmp_path, sized([1.0] * 5), 1, max_epochs=2, callbacks=[GradientAccumulationScheduler({0: 2, 1: 4})])
    assert sizes == [1.0] * 5


@pytest.mark.parametrize("load", [sized, unsized])
@pytest.mark.parametrize("make", [Constant, OnStockLoop])
def test_quirks_divide_by_the_full_window_as_stock_does(tmp_path, load, make):
    assert fit(tmp_path, load([1.0] * 5), 4, make, lightning_quirks=True) == [1.0, 0.25]
