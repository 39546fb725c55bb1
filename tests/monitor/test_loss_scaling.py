"""Monitors beside the loss scaler of 16-mixed precision: both may hold an update back, and norms are unscaled ones."""

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from zdtrain.monitors import NonFinite, Threshold, When

from .runs import OPTIMIZERS, Net, differences, left_behind, loader, run


def half(**options):
    scaler = torch.amp.GradScaler("cpu", **{"init_scale": 1024.0, "growth_interval": 1000, **options})
    return [MixedPrecision("16-mixed", "cpu", scaler)]


@pytest.mark.parametrize("capture", ["off", "graph"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_monitor_skips_one_step_and_the_scaler_another(optimizer, capture):
    def train(batches, **options):
        return run(Net(optimizer), batches, plugins=half(), capture=capture, **options)

    large = [Threshold("train_loss", above=100.0, then="skip")]
    skipped = train(loader(30, {5: "nan gradient", 17: "large"}), monitors=large)
    without = train(loader(30, {5: "nan gradient"}, without=(17,)))
    assert skipped.fit_loop.epoch_loop.fallbacks == []
    assert skipped.skipped_steps == 1
    got, want = left_behind(skipped), left_behind(without)
    counted = ("weights", "optimizer", "schedule", "epoch")
    assert differences({k: got[k] for k in counted}, {k: want[k] for k in counted}) == []
    assert skipped.precision_plugin.scaler.get_scale() == without.precision_plugin.scaler.get_scale() == 512.0


@pytest.mark.parametrize("optimizer", ["SGD momentum", "fused AdamW", "SimpleAdam"])
def test_the_norm_is_the_one_that_clipping_sees(optimizer):
    norms = []

    def keep(row):
        norms.append(row["grad_norm"].clone())
        return row["grad_norm"] > 0.5

    clipped = run(Net(optimizer), loader(20, {5: "nan gradient"}), plugins=half(), gradient_clip_val=0.5)
    seen = [When(keep, then="clip", clip_norm=0.5)]
    monitored = run(Net(optimizer), loader(20, {5: "nan gradient"}), plugins=half(), monitors=seen)
    want, got = left_behind(clipped)["weights"], left_behind(monitored)["weights"]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)  # the factor is rounded in another place
    assert 0 < norms[0] < 100, "1024 times as much before it is unscaled"
    assert norms[5].isnan()


@pytest.mark.parametrize("action", ["skip", "stop"])
def test_an_overflow_counts_as_a_gradient_that_is_not_finite(action):
    options = {"plugins": half(), "nonfinite": action}
    trainer = run(Net("SimpleAdam"), loader(20, {5: "nan gradient"}), **options)
    assert trainer.skipped_steps == (action == "skip")
    assert trainer.should_stop is (action == "stop")
    trainer = run(
        Net("SimpleAdam"), loader(20, {5: "nan gradient"}), plugins=half(), monitors=[NonFinite("loss", then="stop")]
    )
    assert trainer.global_step == 20


@pytest.mark.parametrize("capture", ["off", "graph"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_that_overflows_and_that_a_monitor_skips_is_left_out_once(optimizer, capture):
    def train(**options):
        batches = loader(20, {5: "nan gradient"})
        return run(Net(optimizer, scheduler=False), batches, plugins=half(), capture=capture, **options)

    skipped, scaled = train(nonfinite="skip"), train()
    assert skipped.skipped_steps == 1
    trained = [
        {**dict(one.lightning_module.named_parameters()), **left_behind(one)["optimizer"]} for one in (skipped, scaled)
    ]
    assert differences(*trained) == []
    assert skipped.precision_plugin.scaler.get_scale() == 512.0


@pytest.mark.parametrize("optimizer", ["SGD", "fused AdamW"])
def test_behind_a_stop_the_scale_stays_as_it_is(optimizer):
    stop = {"monitors": [Threshold("train_loss", above=100.0, then="stop")], "lag": 10_000, "max_lag_steps": 20}
    stopped = run(Net(optimizer, scheduler=False), loader(40, {12: "large"}), plugins=half(growth_interval=5), **stop)
    reference = run(
        Net(optimizer, scheduler=False), loader(40, without=tuple(range(12, 40))), plugins=half(growth_interval=5)
    )
    assert differences(left_behind(stopped)["weights"], left_behind(reference)["weights"]) == []
    assert stopped.precision_plugin.scaler.state_dict() == reference.precision_plugin.scaler.state_dict()
