"""Reasons for eager steps tell what to write instead."""

import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.nn import functional as F

from .runs import Classifier, both, fit
from .test_traps import Deterministic


def distribution(module, x, y):
    return torch.distributions.Normal(module.net(x), 1.0, validate_args=True).rsample().mean()


def one_hot(module, x, y):
    return (module.net(x).softmax(-1) * F.one_hot(y)).sum(-1).mean()


def mask(module, x, y):
    return module.net(x)[y > 0].mean()


def packed(module, x, y):
    lengths = torch.full((len(x),), 2)
    rows = nn.utils.rnn.pack_padded_sequence(module.net(x).unsqueeze(1).expand(-1, 2, -1), lengths, batch_first=True)
    return rows.data.mean()


def item(module, x, y):
    loss = module.net(x).mean()
    module.log("loss", loss.item())
    return loss


def number(module, x, y):
    loss = module.net(x).mean()
    return loss * float(loss.detach())


def branch(module, x, y):
    loss = module.net(x).mean()
    return loss if loss > 0 else -loss


def text(module, x, y):
    loss = module.net(x).mean()
    return loss * len(f"{loss.detach()}")


def stacked(module, x, y):
    loss = module.net(x).mean()
    return loss * torch.tensor([loss.detach(), loss.detach() + 1]).mean()


def bins(module, x, y):
    return (module.net(x).mean(0) * torch.bincount(y, minlength=3)).mean()


REMEDIES = {
    distribution: "validate_args=False",
    one_hot: "num_classes",
    mask: "torch.where or masked_fill",
    packed: "mask what lies past the lengths",
    item: "self.log takes it as it is",
    number: "self.log takes it as it is",
    branch: "torch.where",
    text: "in a hook around the step",
    stacked: "torch.stack",
    bins: "index_add_",
}


@pytest.mark.parametrize("step", REMEDIES, ids=lambda step: step.__name__)
def test_a_host_read_is_named_with_what_helps(tmp_path, step):
    class Net(Deterministic):
        def training_step(self, batch, batch_idx):
            return step(self, *batch)

    reasons = both(tmp_path, Net, max_epochs=1).report.fallbacks
    reason = next(reason for reason in reasons if reason.code == "host-read" and reason.file)
    assert reason.file == __file__
    assert step.__code__.co_firstlineno < reason.line < step.__code__.co_firstlineno + 5
    assert REMEDIES[step] in reason.message


def test_distributions_without_checks_are_captured(tmp_path):
    class Net(Deterministic):
        def training_step(self, batch, batch_idx):
            x, y = batch
            normal = torch.distributions.Normal(self.net(x), 1.0, validate_args=False)
            return normal.rsample().mean() - normal.log_prob(y[:, None]).mean()

    assert both(tmp_path, Net).report.steps_replayed >= 39


def test_norms_of_gradients_by_lightnings_utility_are_named_with_what_helps(tmp_path):
    class Net(Classifier):
        def on_before_optimizer_step(self, optimizer):
            self.log_dict(grad_norm(self.net, 2))

    (reason,) = both(tmp_path, Net).report.fallbacks
    assert (reason.code, reason.file) == ("host-read", __file__)
    assert "get_total_norm" in reason.message
    assert "monitors" in reason.message


def test_norms_that_never_change_are_still_no_constants(tmp_path):
    class Net(Deterministic):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            return loss * torch.tensor([self.net[0].bias.detach().sum() * 0]).sum()

    assert both(tmp_path, Net).report.steps_replayed == 0


class KeepsOutputs(Deterministic):
    """As in Lightning's guide to version 2."""

    def __init__(self):
        super().__init__()
        self.outputs = []

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.outputs.append(loss.detach())
        return loss

    def on_train_epoch_end(self):
        self.log("mean", torch.stack(self.outputs).mean())
        self.outputs.clear()


def test_kept_outputs_are_named_with_what_helps(tmp_path):
    reasons = {reason.code: reason.message for reason in both(tmp_path, KeepsOutputs).report.fallbacks}
    assert {"python-state", "kept-tensor"} <= reasons.keys()
    for code in ("python-state", "kept-tensor"):
        assert "self.log(..., on_epoch=True)" in reasons[code]
        assert "on_train_batch_end" in reasons[code]


@pytest.mark.parametrize("way", ["log", "on_train_batch_end"])
def test_what_helps_against_kept_outputs_is_captured(tmp_path, way):
    class Net(Deterministic):
        def __init__(self):
            super().__init__()
            self.outputs = []

        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            if way == "log":
                self.log("mean", loss, on_step=False, on_epoch=True)
            return loss

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.outputs.append(outputs["loss"])

        def on_train_epoch_end(self):
            if way != "log":
                self.log("mean", torch.stack(self.outputs).mean())
            self.outputs.clear()

    run = both(tmp_path, Net)
    assert run.report.steps_replayed >= 39
    assert "mean" in run.metrics


def test_a_plain_counter_is_named_without_advice_for_tensors(tmp_path):
    class Net(Deterministic):
        n = 0

        def training_step(self, batch, batch_idx):
            self.n += 1
            return self.loss(batch) * self.n

    reasons = [one for one in fit(tmp_path, Net, "graph").report.fallbacks if one.code == "python-state"]
    assert reasons
    assert not any("self.log" in reason.message for reason in reasons)
