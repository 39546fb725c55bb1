"""A loss or a metric is one number."""

import pytest
import torch

from tests.parity.harness import QUIET, Net
from zdtrain import Trainer
from zdtrain.errors import LossShapeError


def fit(tmp_path, module, **options):
    trainer = Trainer(**{**QUIET, "default_root_dir": tmp_path, "logger": False, "max_epochs": 1, **options})
    trainer.fit(module)
    return trainer


def returning(shape, wrap=lambda loss: loss):
    class Returns(Net):
        def training_step(self, batch, batch_idx):
            return wrap(self.loss(batch) * torch.ones(shape))

    return Returns()


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"profiler": "simple"}], ids=str)
@pytest.mark.parametrize("wrap", [lambda loss: loss, lambda loss: {"loss": loss, "extra": 1}], ids=["tensor", "dict"])
@pytest.mark.parametrize("shape", [(4,), (2, 3), (0,)])
def test_a_loss_that_is_not_one_number_names_its_shape_and_the_remedy(tmp_path, shape, wrap, options):
    message = rf"loss of shape \({', '.join(map(str, shape))},?\); a loss is one number.*loss\.mean\(\)"
    with pytest.raises(LossShapeError, match=message):
        fit(tmp_path, returning(shape, wrap), **options)


@pytest.mark.parametrize("shape", [(1,), (1, 1), ()])
def test_a_loss_of_one_element_trains(tmp_path, shape):
    torch.manual_seed(0)
    module = returning(shape)
    before = module.net[0].weight.clone()
    assert fit(tmp_path, module).global_step == 5
    assert not torch.equal(before, module.net[0].weight)


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("shape", [(3,), (2, 2), (0,)])
@pytest.mark.parametrize("options", [{}, {"profiler": "simple"}], ids=str)
def test_a_metric_of_several_numbers_is_refused_by_name(tmp_path, shape, at, options):
    class Logs(Net):
        def training_step(self, batch, batch_idx):
            self.log("accuracy", torch.ones(shape if batch_idx == at else ()))
            return self.loss(batch)

    with pytest.raises(ValueError, match=r"(?s)self\.log\(accuracy, .*must have a single element"):
        fit(tmp_path, Logs(), **options)


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_a_metric_of_one_element_becomes_0d(tmp_path, shape):
    class Logs(Net):
        def training_step(self, batch, batch_idx):
            self.log("accuracy", torch.full(shape, 0.5), on_step=True, on_epoch=True)
            return self.loss(batch)

    metrics = fit(tmp_path, Logs()).callback_metrics
    assert {tuple(metrics[name].shape) for name in ("accuracy", "accuracy_step", "accuracy_epoch")} == {()}
    assert metrics["accuracy_epoch"] == 0.5
