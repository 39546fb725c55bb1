"""The loaders inside a Lightning Trainer, alone and with two processes."""

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from zdtrain.data import BucketBatchSampler, DevicePrefetcher, InMemoryDataset, PadCollate, loader
from zdtrain.device import HostRuntime

LENGTHS = [1 + (7 * i) % 23 for i in range(41)]
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Recorder(pl.LightningModule):
    """Keeps the indices of each epoch, gathered over all processes."""

    def __init__(self, kind=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.kind = kind
        self.epochs, self.shares = [], []

    def train_dataloader(self):
        if self.kind == "whole batches":
            return loader(InMemoryDataset((torch.arange(41.0), torch.arange(41))), 4, shuffle=True)
        sampler = BucketBatchSampler(LENGTHS, 4)
        data = [(torch.ones(n), i) for i, n in enumerate(LENGTHS)]
        return DataLoader(data, batch_sampler=sampler, collate_fn=PadCollate(pad={0: 0}, boundaries=sampler.boundaries))

    def on_train_epoch_start(self):
        self.epochs.append([])

    def training_step(self, batch, batch_idx):
        self.epochs[-1].append(batch[1])
        return self.weight.sum()

    def on_train_epoch_end(self):
        counts = self.all_gather(torch.tensor(len(self.epochs[-1]))).flatten().tolist()
        assert len(set(counts)) == 1
        own = torch.cat(self.epochs[-1])
        padded = torch.full((64,), -1)
        padded[: len(own)] = own
        shares = self.all_gather(padded).view(-1, 64)
        self.shares.append([share[share >= 0].tolist() for share in shares])

    def on_train_end(self):
        first, second = self.shares
        assert first != second  # the samplers were told the epoch
        for shares in self.shares:
            assert len(shares) == self.trainer.world_size
            assert {index for share in shares for index in share} == set(range(41))
            assert sum(map(len, shares)) - 41 < len(shares)  # a share each, not the data each

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.parametrize("kind", ["whole batches", "buckets"])
def test_one_process_sees_each_sample_once_in_a_new_order_each_epoch(kind):
    model = Recorder(kind)
    pl.Trainer(max_epochs=2, **QUIET).fit(model)
    assert len(model.shares) == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["whole batches", "buckets"])
def test_two_processes_share_the_samples(kind):
    # The assertions run in both processes, in Recorder's hooks; a failure there fails fit().
    pl.Trainer(max_epochs=2, devices=2, strategy="ddp_fork", **QUIET).fit(Recorder(kind))


@pytest.mark.slow
def test_two_processes_share_buckets_made_outside_a_hook_without_lightnings_sampler():
    model = Recorder("buckets")
    batches = model.train_dataloader()
    trainer = pl.Trainer(max_epochs=2, devices=2, strategy="ddp_fork", use_distributed_sampler=False, **QUIET)
    trainer.fit(model, batches)


def test_the_order_in_fit_is_the_stock_loaders():
    orders = []
    for make in (loader, DataLoader):
        model = Recorder()
        pl.seed_everything(3, verbose=False)
        pl.Trainer(max_epochs=2, **QUIET).fit(
            model, make(TensorDataset(torch.zeros(41), torch.arange(41)), 4, shuffle=True)
        )
        orders.append(model.shares)
    assert orders[0] == orders[1]


def test_predict_returns_all_samples_in_order_whatever_drop_last_says():
    class Echo(Recorder):
        def predict_step(self, batch, batch_idx):
            return batch[0]

    batches = loader(InMemoryDataset([torch.arange(10.0)]), 4, drop_last=True)
    predicted = pl.Trainer(**QUIET).predict(Echo(), batches)
    assert torch.cat(predicted).tolist() == list(range(10))


def test_overfitting_switches_shuffling_off():
    model = Recorder()
    model.on_train_end = lambda: None
    batches = loader(TensorDataset(torch.zeros(41), torch.arange(41)), 4, shuffle=True)
    with pytest.warns(UserWarning, match="overfit"):
        pl.Trainer(max_epochs=1, overfit_batches=2, **QUIET).fit(model, batches)
    assert model.shares == [[[0, 1, 2, 3, 4, 5, 6, 7]]]


def test_a_prefetcher_trains_and_passes_the_epoch_on():
    model = Recorder()
    sampler = BucketBatchSampler(LENGTHS, 4)
    data = TensorDataset(torch.zeros(41), torch.arange(41))
    batches = DevicePrefetcher(loader(data, batch_sampler=sampler), runtime=HostRuntime())
    pl.Trainer(max_epochs=2, **QUIET).fit(model, batches)
    assert len(model.shares) == 2
