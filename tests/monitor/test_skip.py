"""``then="skip"``: a bad step leaves no trace but its row and its event."""

import math

import pytest
import torch
import torchmetrics
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from zdtrain.monitors import NonFinite, Spike, Threshold
from zdtrain.optim import Cosine, SimpleAdam
from zdtrain.records import load_run

from .runs import CAUSES, OPTIMIZERS, OPTIMIZERS_AND_CAUSES, Net, OneRowAtATime, differences, left_behind, loader, run

COUNTED = ("weights", "optimizer", "schedule", "updates", "epoch")


class Heard(Callback):
    """Notes how many skipped steps the host had heard of when each step ended."""

    def __init__(self):
        self.skipped = {}

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.skipped[batch_idx // trainer.accumulate_grad_batches] = trainer.skipped_steps


def assert_skips_exactly(make, cause, *, steps=(17,), batches=40, accumulate=1, capture="off", **options):
    spoiled = {step * accumulate: cause for step in steps}
    absent = tuple(step * accumulate + part for step in steps for part in range(accumulate))
    shared = {"accumulate_grad_batches": accumulate, "capture": capture}
    skipped = run(make(), loader(batches * accumulate, spoiled), monitors=[CAUSES[cause]("skip")], **shared, **options)
    without = run(make(), loader(batches * accumulate, without=absent), **shared)
    got, want = left_behind(skipped), left_behind(without)
    assert differences({k: got[k] for k in COUNTED}, {k: want[k] for k in COUNTED}) == []
    assert skipped.global_step == batches, "a skipped step is counted, as with Lightning's loss scaling"
    assert skipped.skipped_steps == len(steps)
    return skipped


@pytest.mark.parametrize("capture", ["off", "graph"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("optimizer", "cause"), OPTIMIZERS_AND_CAUSES)
def test_a_run_with_a_skipped_step_equals_a_run_without_its_batches(optimizer, cause, accumulate, capture):
    options = {"accumulate": accumulate, "capture": capture}
    skipped = assert_skips_exactly(lambda: Net(optimizer), cause, **options)
    if capture == "graph":
        assert skipped.capture_report.steps_replayed > 10


def test_the_first_step_can_be_skipped_in_a_window_of_several_batches():
    assert_skips_exactly(lambda: Net("SimpleAdam"), "nan", steps=(0,), batches=10, accumulate=3)


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "SGD"])
def test_the_first_step_can_be_skipped_though_it_makes_the_optimizer_s_state(optimizer):
    assert_skips_exactly(lambda: Net(optimizer), "nan", steps=(0,))


@pytest.mark.parametrize("steps", [(3, 4, 5), (0, 39), (9, 11, 30)])
def test_several_steps_can_be_skipped(steps):
    assert_skips_exactly(lambda: Net("AdamW"), "nan", steps=steps)


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize(
    ("optimizer", "accumulate", "capture"),
    [
        *(("SGD", accumulate, capture) for accumulate in (1, 2) for capture in ("off", "graph")),
        ("SimpleAdam", 2, "graph"),
        ("AdamW", 1, "graph"),
        ("fused AdamW", 1, "off"),
    ],
)
def test_a_skip_is_exact_though_the_host_hears_of_it_50_steps_later(cause, optimizer, accumulate, capture):
    options = {"batches": 200, "steps": (137, 139), "lag": 10_000, "max_lag_steps": 50}
    heard = Heard()
    options.update(accumulate=accumulate, capture=capture, callbacks=[OneRowAtATime(), heard])
    assert_skips_exactly(lambda: Net(optimizer, scheduler=False), cause, **options)
    assert heard.skipped[137 + 49] == 0, "the host is as late as it may be"
    assert heard.skipped[139 + 52] == 2


def test_the_schedule_catches_up_when_the_host_hears_of_a_skip():
    spoiled = run(Net("AdamW"), loader(60, {17: "nan", 30: "nan"}), nonfinite="skip", lag=10_000, max_lag_steps=20)
    scheduler = spoiled.lr_scheduler_configs[0].scheduler
    reference = run(Net("AdamW"), loader(58))
    assert differences(scheduler.state_dict(), reference.lr_scheduler_configs[0].scheduler.state_dict()) == []
    assert spoiled.optimizers[0].param_groups[0]["lr"] == reference.optimizers[0].param_groups[0]["lr"]


class HostSchedule(Net):
    """A learning rate that is a tensor on the device, written by a scheduler on the host."""

    def __init__(self, optimizer, frequency=2):
        super().__init__(optimizer)
        self.frequency = frequency

    def configure_optimizers(self):
        make = {
            "SimpleAdam": lambda: SimpleAdam(self.parameters(), lr=0.01),
            "fused AdamW": lambda: torch.optim.AdamW(self.parameters(), lr=torch.tensor(0.01), fused=True),
        }
        optimizer = make[self.optimizer]()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": self.frequency}]


@pytest.mark.parametrize("capture", ["off", "graph"])
@pytest.mark.parametrize(("optimizer", "accumulate"), [("SimpleAdam", 1), ("SimpleAdam", 2), ("fused AdamW", 1)])
def test_a_schedule_on_the_host_is_exact_at_any_lag_where_the_learning_rate_is_a_tensor(optimizer, accumulate, capture):
    shared = {"nonfinite": "skip", "accumulate_grad_batches": accumulate, "capture": capture}
    bad = loader(60 * accumulate, {step * accumulate: "nan" for step in (17, 19, 30)})
    late = run(HostSchedule(optimizer), bad, lag=10_000, max_lag_steps=20, callbacks=[OneRowAtATime()], **shared)
    heard_at_once = run(HostSchedule(optimizer), bad, **shared)
    assert differences(left_behind(late), left_behind(heard_at_once)) == []


def test_a_run_says_where_its_schedule_follows_a_skipped_step_late():
    spoiled = run(Net("AdamW"), loader(20, {7: "nan"}), nonfinite="skip", lag=10_000)
    (reason,) = spoiled.fit_loop.epoch_loop.fallbacks
    assert reason.code == "late-schedule"
    assert "lr of AdamW" in reason.message
    assert "SimpleAdam(schedule=...)" in reason.message
    for quiet in (
        run(HostSchedule("SimpleAdam"), loader(20), nonfinite="skip", lag=10_000),
        run(Net("AdamW"), loader(20), nonfinite="stop", lag=10_000),
        run(Net("AdamW"), loader(20), nonfinite="skip"),
    ):
        assert quiet.fit_loop.epoch_loop.fallbacks == []


class TwoSchedules(HostSchedule):
    """Schedulers of different frequency, of which not all move in a skipped step."""

    def configure_optimizers(self):
        (optimizer,), schedulers = super().configure_optimizers()
        slow = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return [optimizer], [*schedulers, {"scheduler": slow, "interval": "step", "frequency": 3}]


def test_schedulers_of_different_frequency_are_exact_as_the_host_waits_and_says_so():
    bad = loader(30, dict.fromkeys((5, 7, 8, 17), "nan"))
    late = run(TwoSchedules("SimpleAdam"), bad, lag=10_000, max_lag_steps=20, nonfinite="skip")
    heard_at_once = run(TwoSchedules("SimpleAdam"), bad, nonfinite="skip")
    assert differences(left_behind(late), left_behind(heard_at_once)) == []
    (reason,) = late.fit_loop.epoch_loop.fallbacks
    assert (reason.code, "waits for each step" in reason.message) == ("late-schedule", True)


class Plateaus(Net):
    """A learning rate that falls when the loss of a step is no better."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=2)
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "monitor": "train_loss"}]


@pytest.mark.parametrize("lag", [None, 10_000])
def test_a_scheduler_that_looks_at_the_loss_does_not_look_at_a_skipped_step(lag):
    skipped = run(Plateaus(), loader(30, {5: "nan", 6: "nan", 20: "nan"}), nonfinite="skip", lag=lag)
    without = run(Plateaus(), loader(30, without=(5, 6, 20)))
    got, want = left_behind(skipped), left_behind(without)
    assert differences({k: got[k] for k in COUNTED}, {k: want[k] for k in COUNTED}) == []


class WritesOptions(Callback):
    """Writes another learning rate and weight decay at the end of a batch."""

    def __init__(self, batch_idx):
        self.batch_idx = batch_idx

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        group = trainer.optimizers[0].param_groups[0]
        if batch_idx == self.batch_idx:
            group["weight_decay"] = 0.125
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(0.003)
            else:
                group["lr"] = 0.003


@pytest.mark.parametrize("steps", [(), (5,), (5, 9, 12)])
@pytest.mark.parametrize("lag", [None, 10_000])
@pytest.mark.parametrize("optimizer", [None, "SimpleAdam", "fused AdamW"])
def test_what_a_callback_writes_into_the_optimizer_survives_a_skip(optimizer, lag, steps):
    make = lambda: HostSchedule(optimizer, frequency=1) if optimizer else Net()  # noqa: E731
    bad, before = loader(30, dict.fromkeys(steps, "nan")), sum(step < 10 for step in steps)
    skipped = run(make(), bad, nonfinite="skip", lag=lag, callbacks=[WritesOptions(10)], max_lag_steps=20)
    without = run(make(), loader(30, without=steps), callbacks=[WritesOptions(10 - before)])
    got, want = left_behind(skipped), left_behind(without)
    names = ["optimizer", "schedule", "updates", "weights"]
    if optimizer is None and lag:  # a number follows late, but it gets there
        got["optimizer"], want["optimizer"] = (part["optimizer"]["param_groups"] for part in (got, want))
        names.remove("weights")
    assert differences({k: got[k] for k in names}, {k: want[k] for k in names}) == []


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01)], ids=["number", "tensor"])
def test_a_hook_inside_a_step_may_write_the_learning_rate(lr, optimizer):
    class WarmsUp(Net):
        def configure_optimizers(self):
            make = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}[optimizer]
            return make(self.parameters(), lr=lr.clone() if isinstance(lr, torch.Tensor) else lr, foreach=False)

        def on_before_optimizer_step(self, optimizer):
            (group,) = optimizer.param_groups
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].mul_(1.5)
            else:
                group["lr"] *= 1.5

    skipped = run(WarmsUp(), loader(5, {0: "nan", 3: "nan"}), nonfinite="skip")
    assert float(skipped.optimizers[0].param_groups[0]["lr"]) == pytest.approx(0.01 * 1.5**5)


@pytest.mark.parametrize("lag", [None, 10_000])
def test_a_step_of_the_scheduler_by_hand_is_not_taken_back_with_a_skipped_one(lag):
    class StepsIt(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 20:
                trainer.lr_scheduler_configs[0].scheduler.step()

    trainer = run(Net(), loader(30, {20: "nan"}), nonfinite="skip", lag=lag, callbacks=[StepsIt()])
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 30 - 1 + 1


class Epochs(Net):
    """A scheduler that follows epochs, and on request one that follows steps as well."""

    def __init__(self, optimizer, follows_steps):
        super().__init__(optimizer)
        self.follows_steps = follows_steps

    def configure_optimizers(self):
        optimizer = OPTIMIZERS[self.optimizer](self.parameters())
        schedulers = [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "epoch"}]
        if self.follows_steps:
            by_step = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
            schedulers.append({"scheduler": by_step, "interval": "step"})
        return [optimizer], schedulers


@pytest.mark.parametrize("follows_steps", [False, True])
@pytest.mark.parametrize("lag", [None, 10_000])
@pytest.mark.parametrize("step", [5, 19])
def test_a_skip_leaves_the_schedule_of_epochs_alone(step, lag, follows_steps):
    make = lambda: Epochs("SimpleAdam", follows_steps)  # noqa: E731
    skipped = run(make(), loader(20, {step: "nan"}), nonfinite="skip", max_epochs=2, lag=lag)
    without = run(make(), loader(20, without=(step,)), max_epochs=2)
    got, want = left_behind(skipped), left_behind(without)
    assert differences({k: got[k] for k in COUNTED}, {k: want[k] for k in COUNTED}) == []


@pytest.mark.parametrize("follows_steps", [False, True])
@pytest.mark.parametrize("lag", [None, 10_000])
@pytest.mark.parametrize("step", [5, 19])
def test_a_stop_keeps_the_schedule_of_epochs_from_moving(step, lag, follows_steps):
    make = lambda: Epochs("SGD", follows_steps)  # noqa: E731
    stopped = run(make(), loader(20, {step: "nan"}), nonfinite="stop", max_epochs=2, lag=lag)
    ended = run(make(), loader(20), max_steps=step, max_epochs=2)
    assert differences(left_behind(stopped), left_behind(ended)) == []


def test_a_checkpoint_of_a_skipped_step_holds_the_schedule_without_it(tmp_path):
    keep = ModelCheckpoint(tmp_path, every_n_train_steps=6, save_top_k=-1, filename="{step}")
    options = {"nonfinite": "skip", "lag": 10_000, "max_lag_steps": 20, "callbacks": [keep]}
    spoiled = run(Net("AdamW"), loader(40, {17: "nan"}), enable_checkpointing=True, **options)
    saved = torch.load(tmp_path / "step=18.ckpt", weights_only=False)  # right behind step 17, whose row is not sent yet
    assert saved["lr_schedulers"][0]["last_epoch"] == 17
    without = run(Net("AdamW"), loader(40, without=(17,)))
    got, want = left_behind(spoiled), left_behind(without)
    assert differences({k: got[k] for k in COUNTED}, {k: want[k] for k in COUNTED}) == []


class Evaluates(torch.optim.SGD):
    """Evaluates the loss several times, at last far away, before it updates."""

    @torch.no_grad()
    def step(self, closure):
        closure()
        loss = closure()
        parameters = [p for group in self.param_groups for p in group["params"]]
        torch._foreach_add_(parameters, 10.0)
        closure()
        torch._foreach_sub_(parameters, 10.0)
        super().step()
        return loss


def test_the_last_of_several_evaluations_decides():
    class Explores(Net):
        def configure_optimizers(self):
            return Evaluates(self.parameters(), lr=1e-6)

    def skipped(above):
        return run(Explores(), loader(10), monitors=[Threshold("loss", above=above, then="skip")])

    assert skipped(1e9).skipped_steps == 0
    held = skipped(100.0)
    assert held.skipped_steps == 10
    untrained = run(Net(), loader(1), max_steps=0)
    assert differences(*(dict(t.lightning_module.named_parameters()) for t in (held, untrained))) == []


class Scheduled(Net):
    def configure_optimizers(self):
        return SimpleAdam(self.parameters(), lr=0.01, schedule=Cosine(num_steps=200), max_norm=1.0)


@pytest.mark.parametrize("capture", ["off", "graph"])
def test_a_schedule_on_the_device_follows_the_steps_that_counted_at_any_lag(capture):
    options = {"batches": 60, "steps": (17, 30), "lag": 10_000, "max_lag_steps": 20, "capture": capture}
    assert_skips_exactly(Scheduled, "nan", **options)


class Measured(Net):
    """Logs a torchmetrics metric, whose state would keep the NaN of a bad step."""

    def __init__(self):
        super().__init__("AdamW")
        self.mean = torchmetrics.MeanMetric(nan_strategy="disable")

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.mean(loss.detach())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss


def test_the_state_of_a_metric_does_not_keep_a_skipped_step():
    skipped = run(Measured(), loader(40, {17: "nan"}), nonfinite="skip")
    without = run(Measured(), loader(40, without=(17,)))
    assert torch.equal(skipped.callback_metrics["mean"], without.callback_metrics["mean"])


def test_a_skipped_step_has_a_row_and_an_event_that_names_what_went_bad_first(tmp_path):
    skipped = run(Net(), loader(30, {11: "nan"}), nonfinite="skip", records=tmp_path)
    record = load_run(skipped.recorder.folder)
    steps, values = record.series("train_loss_step")
    assert steps == list(range(30))
    assert math.isnan(values[11])
    (event,) = [event for event in record.events if event["kind"] == "monitor"]
    assert (event["step"], event["action"], event["first_nonfinite"]) == (11, "skip", "train_loss")
    assert record.summary["skipped_steps"] == 1


def test_bad_steps_in_a_row_stop_the_run_before_the_last_of_them():
    spoiled = loader(60, {**dict.fromkeys(range(5, 9), "nan"), **dict.fromkeys(range(20, 30), "nan")})
    stopped = run(Net("AdamW"), spoiled, nonfinite="skip")
    assert (stopped.global_step, stopped.skipped_steps) == (29, 13)
    without = run(Net("AdamW"), loader(60, without=(5, 6, 7, 8)), max_steps=16)
    got, want = left_behind(stopped), left_behind(without)
    assert differences({k: got[k] for k in COUNTED}, {k: want[k] for k in COUNTED}) == []


@pytest.mark.parametrize("optimizer", [None, "SimpleAdam"])
def test_a_stop_that_is_heard_together_with_skips_before_it_is_exact(optimizer):
    make = lambda: HostSchedule(optimizer, frequency=1) if optimizer else Net()  # noqa: E731
    bad = loader(30, {4: "nan", 6: "nan", 10: "large"})
    monitors = [NonFinite("loss", then="skip"), Threshold("train_loss", above=100.0, then="stop")]
    stopped = run(make(), bad, monitors=monitors, lag=10_000, max_lag_steps=20)
    without = run(make(), loader(30, without=(4, 6)), max_steps=8)
    got, want = left_behind(stopped), left_behind(without)
    if optimizer is None:  # a number follows late, but it gets there
        got["optimizer"], want["optimizer"] = (part["optimizer"]["param_groups"] for part in (got, want))
    names = ["optimizer", "schedule", "updates", *(["weights", "epoch"] if optimizer else [])]
    assert differences({k: got[k] for k in names}, {k: want[k] for k in names}) == []


def test_a_spike_is_skipped_and_does_not_hide_the_next():
    monitor = Spike("train_loss", factor=8.0, min_steps=10, then="skip")
    skipped = run(Net("AdamW"), loader(60, {30: "large", 32: "large"}), monitors=[monitor])
    without = run(Net("AdamW"), loader(60, without=(30, 32)))
    assert skipped.skipped_steps == 2
    assert differences(left_behind(skipped)["weights"], left_behind(without)["weights"]) == []


def test_gradients_are_clipped_only_where_the_monitor_says_so():
    class Norms(Net):
        def __init__(self):
            super().__init__(scheduler=False)
            self.norms = []

        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            grads = [p.grad for p in self.parameters() if p.grad is not None]
            if grads:
                self.norms.append(float(nn.utils.get_total_norm(grads)))
            super().optimizer_zero_grad(epoch, batch_idx, optimizer)

    plain, clipped = Norms(), Norms()
    run(plain, loader(30))
    limit = sorted(plain.norms)[15]
    run(clipped, loader(30), monitors=[Threshold("grad_norm", above=limit, then="clip")])
    assert clipped.norms[0] == pytest.approx(min(plain.norms[0], limit), rel=1e-5)
    assert max(clipped.norms) <= limit * 1.00001 < max(plain.norms)
    assert len({round(norm, 6) for norm in clipped.norms}) > 5, "small gradients are left alone"
