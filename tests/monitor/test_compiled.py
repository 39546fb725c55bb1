"""Monitors inside a lowered step."""

import pytest
import torch
from torch import nn

from zdtrain.monitors import NonFinite, Spike, Threshold

from .runs import Net, loader, run


class Smooth(Net):
    """Without batch normalization, whose vanishing gradients make rounding visible."""

    def __init__(self, optimizer="SGD"):
        super().__init__(optimizer)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


@pytest.mark.slow
def test_a_norm_and_a_running_mean_are_lowered_with_the_step():
    monitors = [Threshold("grad_norm", above=1e9, then="clip"), Spike("loss", factor=1e6, then="skip")]
    lowered = run(Smooth(), loader(30), monitors=monitors, capture="compile")
    assert not lowered.capture_report.fallbacks
    assert lowered.capture_report.steps_replayed > 20


@pytest.mark.parametrize("optimizer", ["SGD", "fused AdamW"])
@pytest.mark.parametrize(("then", "steps", "skipped"), [("skip", 30, 1), ("stop", 17, 0)])
def test_a_lowered_step_acts_where_an_eager_one_does(optimizer, then, steps, skipped):
    lowered, eager = (
        run(Smooth(optimizer), loader(30, {17: "nan"}), monitors=[NonFinite("loss", then=then)], capture=capture)
        for capture in ("compile", "off")
    )
    assert lowered.capture_report.steps_replayed > 10
    assert lowered.capture_report.fallbacks == ()
    assert (lowered.global_step, lowered.skipped_steps) == (eager.global_step, eager.skipped_steps) == (steps, skipped)
    for got, want in zip(lowered.lightning_module.parameters(), eager.lightning_module.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    counts = [[state.get("step") for state in one.optimizers[0].state.values()] for one in (lowered, eager)]
    assert counts[0] == counts[1]
