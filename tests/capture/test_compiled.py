"""Steps lowered by Inductor agree with eager ones within the tolerance that verification states."""

import pytest
import torch
from torch import nn

import zdtrain.capture.tape
from zdtrain.capture.tape import LoweredTape, record
from zdtrain.capture.verify import first_mismatch
from zdtrain.optim import SimpleAdam

from .runs import CLASSES, FEATURES, Classifier, codes, fit


class Scheduled(Classifier):
    def configure_optimizers(self):
        optimizer = SimpleAdam(self.parameters(), lr=0.01, weight_decay=0.1, max_norm=1.0)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Fused(Classifier):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES)
        )

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)


class Momentum(Scheduled):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("module", [Scheduled, Fused, Momentum])
def test_a_lowered_step_trains_as_an_eager_one_within_tolerance(tmp_path, module):
    eager, lowered = (fit(tmp_path, module, capture) for capture in ("off", "compile"))
    (program,) = lowered.report.programs
    assert program.verification == "within tolerance"
    assert program.captures == 1
    assert program.replays > 30
    assert program.includes_optimizer
    assert codes(lowered) == set()
    assert first_mismatch(eager.weights, lowered.weights, exact=False) is None
    assert first_mismatch(eager.metrics, lowered.metrics, exact=False) is None
    assert torch.equal(eager.rng, lowered.rng)
    groups = lowered.optimizers[0]["param_groups"][0]
    assert groups.get("fused") is eager.optimizers[0]["param_groups"][0].get("fused")


@pytest.mark.slow
def test_a_lowered_tape_writes_in_place_to_views_of_one_buffer():
    total, scale = torch.zeros(4), torch.tensor(2.0)
    cell, rest = total[1], total[2:]

    def step():
        cell.copy_(scale * 3)
        rest.add_(cell)
        total.mul_(2)
        return [total.sum(), None]

    expected = [step()[0]]
    total.zero_()
    tape = record(step, [], LoweredTape)
    total.zero_()
    first, nothing = tape.run([])
    assert torch.equal(first, expected[0])
    assert nothing is None
    scale.fill_(4.0)
    tape.run([])
    assert total.tolist() == [0.0, 24.0, 48.0, 48.0]


@pytest.mark.parametrize("verify", [True, False])
def test_a_step_that_cannot_be_lowered_runs_eagerly(tmp_path, monkeypatch, verify):
    def refuse(graph, arguments):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(zdtrain.capture.tape, "lower", refuse)
    eager = fit(tmp_path, Scheduled, "off")
    lowered = fit(tmp_path, Scheduled, "compile", verify_capture=verify)
    (reason,) = lowered.report.fallbacks
    assert reason.code == "untraceable"
    assert "no such kernel" in reason.message
    assert first_mismatch(eager.weights, lowered.weights, exact=False) is None
    assert lowered.report.steps_replayed == 1  # that which was recorded while it ran


class Tiny(Classifier):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(FEATURES, CLASSES)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


@pytest.mark.slow
def test_blocks_of_lowered_steps_train_as_eager_steps_within_tolerance(tmp_path):
    eager = fit(tmp_path, Tiny, "off")
    lowered = fit(tmp_path, Tiny, "compile", steps_per_replay=4)
    one, block = lowered.report.programs
    assert (one.capture, one.verification) == ("compile", "within tolerance")
    assert block.key == f"4 steps of {one.key}"
    assert block.verification == "within tolerance"
    assert (block.captures, block.replays % 4) == (1, 0)
    assert block.replays > 16
    assert codes(lowered) == set()
    assert first_mismatch(eager.weights, lowered.weights, exact=False) is None
    assert first_mismatch(eager.metrics, lowered.metrics, exact=False) is None
    for state in (eager.optimizers[0]["state"], lowered.optimizers[0]["state"]):
        assert all(of_parameter["step"] == 48 for of_parameter in state.values())
