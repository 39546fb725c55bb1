"""Embeddings with sparse gradients are watched as those with dense ones."""

import math

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import zdtrain
from zdtrain.monitors import Threshold
from zdtrain.optim.clipping import clip_grad_norm_

BAD_STEP = 2


class Embedded(pl.LightningModule):
    """Looks up rows, some of them twice in a batch; one of its steps has a loss that is NaN."""

    def __init__(self, *, sparse, has_bad_step=False):
        super().__init__()
        torch.manual_seed(3)
        self.embedding, self.head = nn.Embedding(12, 4, sparse=sparse), nn.Linear(4, 1)
        self.has_bad_step = has_bad_step

    def training_step(self, batch, batch_idx):
        loss = self.head(self.embedding(batch)).square().mean()
        return loss * math.nan if self.has_bad_step and batch_idx == BAD_STEP else loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def train_dataloader(self):
        return DataLoader(torch.tensor([1, 5, 1, 2, 7, 7, 0, 3, 5, 11, 4, 4, 2, 9, 9, 9]), batch_size=4)


def trained(*, sparse, has_bad_step=False, **options):
    module = Embedded(sparse=sparse, has_bad_step=has_bad_step)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = zdtrain.Trainer(accelerator="cpu", max_epochs=1, logger=False, **quiet, **options)
    trainer.fit(module)
    return module


def assert_alike(module, other):
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, other.state_dict()[name], rtol=1e-6, atol=1e-7, msg=name)


def test_their_norm_is_that_of_dense_ones():
    norms = {}
    for sparse in (True, False):
        norms[sparse] = []
        note = Threshold("grad_norm", above=0.0, then=lambda event, seen=norms[sparse]: seen.append(event.values))
        trained(sparse=sparse, monitors=[note])
    assert len(norms[True]) == 4
    for ours, dense in zip(norms[True], norms[False], strict=True):
        assert ours["grad_norm"] == pytest.approx(dense["grad_norm"], rel=1e-6)


def test_a_bad_step_is_skipped():
    initial = Embedded(sparse=True).state_dict()
    module = trained(sparse=True, has_bad_step=True, nonfinite="skip")
    assert all(value.isfinite().all() for value in module.state_dict().values())
    assert not torch.equal(module.head.weight, initial["head.weight"])
    assert_alike(module, trained(sparse=False, has_bad_step=True, nonfinite="skip"))


def test_a_bad_step_stops_the_run_with_the_weights_before_it():
    stopped = trained(sparse=True, has_bad_step=True, nonfinite="stop")
    before = trained(sparse=True, max_steps=BAD_STEP)
    assert all(torch.equal(value, before.state_dict()[name]) for name, value in stopped.state_dict().items())


def test_they_are_clipped():
    clipped = {
        sparse: trained(sparse=sparse, monitors=[Threshold("grad_norm", above=0.01, then="clip")])
        for sparse in (True, False)
    }
    assert_alike(clipped[True], clipped[False])
    with pytest.raises(AssertionError):
        assert_alike(clipped[True], trained(sparse=True))


def test_clipping_alone_takes_them():
    weights = [nn.Embedding(4, 2, sparse=sparse) for sparse in (True, False)]
    for embedding in weights:
        embedding.weight.data.fill_(1.0)
        embedding(torch.tensor([1, 1, 3])).sum().backward()
    norms = [clip_grad_norm_(embedding.weight, 1.0) for embedding in weights]
    torch.testing.assert_close(*norms)
    torch.testing.assert_close(weights[0].weight.grad.to_dense(), weights[1].weight.grad)
