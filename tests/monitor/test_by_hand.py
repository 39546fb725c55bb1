"""Monitors and averaged weights where the module optimizes by hand: a batch is a step, and all of it is taken back."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from zdtrain.errors import ConfigError
from zdtrain.monitors import MonitorWarning, NonFinite, Statistics, Threshold, When
from zdtrain.optim import Cosine, SimpleAdam

from .runs import OPTIMIZERS, OneRowAtATime, differences, loader, run
from .test_loss_scaling import half

LATE = {"lag": 10_000, "max_lag_steps": 5, "callbacks": [OneRowAtATime()]}
COUNTED = ("weights", "optimizers", "schedules", "gradients", "average", "epoch")


class GAN(pl.LightningModule):
    """Two networks with an optimizer each; a spoiled batch spoils the loss of the one that is updated last."""

    logs_generator_loss = True

    def __init__(self, optimizer="AdamW"):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
        self.make = OPTIMIZERS[optimizer]

    def losses(self, batch):
        x, y, extra, _ = batch
        generate, discriminate = self.optimizers()
        fake = self.generator(x)
        loss = (self.discriminator(fake.detach()) - y).square().mean()
        yield discriminate, loss
        self.log("discriminator_loss", loss, on_step=True, on_epoch=True)
        loss = self.discriminator(fake).square().mean() * (1 + extra.mean()) + extra.mean()
        yield generate, loss
        if self.logs_generator_loss:
            self.log("generator_loss", loss, on_step=True, on_epoch=True)

    def training_step(self, batch, batch_idx):
        for optimizer, loss in self.losses(batch):
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self):
        return [self.make(self.generator.parameters()), self.make(self.discriminator.parameters())]


class Silent(GAN):
    """Tells nobody of the generator's loss, and keeps no gradients."""

    logs_generator_loss = False

    def training_step(self, batch, batch_idx):
        for optimizer, loss in self.losses(batch):
            self.manual_backward(loss)
            optimizer.step()
            self.zero_grad()


class Scheduled(GAN):
    """Steps its schedulers and writes an option by hand."""

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        for scheduler in self.lr_schedulers():
            scheduler.step()
        self.optimizers()[0].param_groups[0]["weight_decay"] *= 0.9

    def configure_optimizers(self):
        optimizers = super().configure_optimizers()
        return optimizers, [
            torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 0.9),
            {"scheduler": torch.optim.lr_scheduler.StepLR(optimizers[1], 3, 0.5), "interval": "step"},
        ]


class ScheduledOnDevice(GAN):
    """Its optimizers count their updates, and write their learning rates, themselves."""

    def __init__(self, optimizer="SimpleAdam"):
        super().__init__(optimizer)
        self.make = lambda p: SimpleAdam(p, lr=0.01, schedule=Cosine(num_steps=20))


class Accumulating(GAN):
    """Steps its optimizers in every third batch, by its own count of good ones."""

    def __init__(self, optimizer="AdamW"):
        super().__init__(optimizer)
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch, batch_idx):
        self.batches += 1
        for optimizer, loss in self.losses(batch):
            self.manual_backward(loss)
            if self.batches % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()


class Follows(GAN):
    """Keeps a slow copy of the generator that no optimizer knows."""

    def __init__(self, optimizer="AdamW"):
        super().__init__(optimizer)
        self.slow = nn.Linear(8, 2).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        self.slow.weight.data.lerp_(self.generator[-1].weight.data, 0.1)


def left_behind(trainer):
    module, loop = trainer.lightning_module, trainer.fit_loop.epoch_loop
    return {
        "weights": dict(module.state_dict()),
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "schedules": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "gradients": {name: parameter.grad for name, parameter in module.named_parameters()},
        "average": {} if trainer.ema is None else trainer.ema.state_dict(),
        "epoch": {k: v for k, v in trainer.callback_metrics.items() if not k.endswith("_step")},
        "steps": trainer.global_step,
        "counts": loop.manual_optimization.state_dict(),
        "batches": loop.batch_progress.state_dict(),
    }


def assert_skips_exactly(make, *, steps=(7,), batches=14, cause="nan", monitors=None, **options):
    shared = {"ema_decay": 0.9, "num_sanity_val_steps": 0}
    watch = {"nonfinite": "skip"} if monitors is None else {"monitors": monitors}
    skipped = run(make(), loader(batches, dict.fromkeys(steps, cause)), **shared, **watch, **options)
    without = run(make(), loader(batches, without=steps), **shared)
    got, want = left_behind(skipped), left_behind(without)
    assert differences({k: got[k] for k in COUNTED}, {k: want[k] for k in COUNTED}) == []
    assert skipped.skipped_steps == len(steps)
    assert skipped.fit_loop.epoch_loop.batch_progress.current.completed == batches
    return skipped, without


@pytest.mark.parametrize("late", [{}, LATE], ids=["at once", "late"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_with_a_skipped_batch_equals_a_run_without_it(optimizer, late):
    skipped, without = assert_skips_exactly(lambda: GAN(optimizer), steps=(4, 9), **late)
    assert skipped.global_step == without.global_step + 4, "its optimizer steps stay counted"


@pytest.mark.parametrize("late", [{}, LATE], ids=["at once", "late"])
@pytest.mark.parametrize("make", [Silent, Scheduled, ScheduledOnDevice, Accumulating, Follows])
def test_all_that_a_skipped_batch_did_is_taken_back(make, late):
    for steps in ((4, 5), (3, 6), (1, 13)):
        assert_skips_exactly(make, steps=steps, **late)


@pytest.mark.parametrize("late", [{}, LATE], ids=["at once", "late"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_first_batch_can_be_skipped_though_it_makes_the_optimizers_state(optimizer, late):
    assert_skips_exactly(lambda: GAN(optimizer), steps=(0,), batches=5, **late)


def test_a_threshold_skips_a_batch_whose_values_are_finite():
    monitors = [Threshold("generator_loss", above=100.0, then="skip")]
    assert_skips_exactly(GAN, cause="large", monitors=monitors)


@pytest.mark.parametrize("late", [{}, LATE], ids=["at once", "late"])
@pytest.mark.parametrize("optimizer", ["SGD momentum", "AdamW", "SimpleAdam"])
def test_a_stop_leaves_what_a_run_leaves_that_ended_right_before(optimizer, late):
    for make in (GAN, Scheduled, Accumulating, Follows):
        stopped = run(make(optimizer), loader(20, {7: "nan"}), nonfinite="stop", ema_decay=0.9, **late)
        ended = run(make(optimizer), loader(20), limit_train_batches=7, ema_decay=0.9)
        got, want = left_behind(stopped), left_behind(ended)
        assert (
            differences(got.pop("batches")["current"]["completed"], want.pop("batches")["current"]["completed"]) == []
        )
        assert differences(got, want) == []
        assert stopped._monitor_state.state_dict()["stopped"]["step"] == 7
        assert (len(stopped.ended) > 8) is bool(late), "batches behind the latch"


class WritesLate(Callback):
    """Writes an option of the second optimizer between batches."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        trainer.optimizers[1].param_groups[0]["weight_decay"] = 0.01 * batch_idx


def test_what_callbacks_write_into_any_optimizer_behind_a_stop_is_taken_back():
    late = {**LATE, "callbacks": [OneRowAtATime(), WritesLate()]}
    stopped = run(GAN(), loader(20, {7: "nan"}), nonfinite="stop", **late)
    ended = run(GAN(), loader(20), limit_train_batches=7, callbacks=[WritesLate()])
    got, want = left_behind(stopped), left_behind(ended)
    assert differences(got["optimizers"], want["optimizers"]) == []


def test_ten_bad_batches_in_a_row_end_the_run():
    stopped = run(GAN(), loader(20, dict.fromkeys(range(5, 20), "nan")), nonfinite="skip")
    assert (stopped.skipped_steps, stopped._monitor_state.state_dict()["stopped"]["step"]) == (9, 14)
    ended = run(GAN(), loader(20), limit_train_batches=5)
    assert differences(left_behind(stopped)["weights"], left_behind(ended)["weights"]) == []


def test_a_resumed_run_averages_and_skips_as_an_uninterrupted_one(tmp_path):
    bad = loader(8, {3: "nan", 6: "nan"})
    options = {"nonfinite": "skip", "ema_decay": 0.9}
    first = run(GAN(), bad, **options)
    first.save_checkpoint(tmp_path / "run.ckpt")
    resumed = run(GAN(), bad, max_epochs=2, ckpt_path=tmp_path / "run.ckpt", **options)
    whole = run(GAN(), bad, max_epochs=2, **options)
    got, want = left_behind(resumed), left_behind(whole)
    assert differences({k: got[k] for k in COUNTED}, {k: want[k] for k in COUNTED}) == []
    assert resumed.skipped_steps == 4


def test_batches_that_step_no_optimizer_do_not_enter_the_average():
    trainer = run(Accumulating(), loader(7), ema_decay=0.5)
    module = Accumulating()
    followed = []

    class Look(Callback):
        def on_train_batch_end(self, trainer, module, *_):
            followed.append(module.generator[0].weight.detach().clone())

    run(module, loader(7), callbacks=[Look()])
    start, first, second = followed[0], followed[2], followed[5]
    want = (start / 2 + first / 2) / 2 + second / 2
    torch.testing.assert_close(trainer.ema.state_dict()["generator.0.weight"], want)


class Returns(GAN):
    """Returns one of its losses."""

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        return batch[0].square().mean() + batch[2].mean()


def test_the_loss_that_training_step_returns_is_watched():
    trainer = run(Returns(), loader(5, {3: "nan"}), monitors=[NonFinite("loss", then="skip")])
    assert trainer.skipped_steps == 1


def test_monitors_that_inform_see_a_batch_s_values():
    seen, events, norms = [], [], []

    class Look(GAN):
        def on_before_optimizer_step(self, optimizer):
            norms.append([p.grad.clone() for group in optimizer.param_groups for p in group["params"]])

    monitors = [
        When(lambda row: row["generator_loss"] > -1, then=lambda event: seen.append(event.step), name="always"),
        NonFinite("generator_loss"),
        Threshold("grad_norm", above=-1.0, then=events.append),
        Statistics("discriminator_loss", per_epoch=False),
    ]
    with pytest.warns(MonitorWarning, match="generator_loss"):
        trainer = run(Look(), loader(5, {3: "nan"}), monitors=monitors)
    assert seen == [0, 1, 2], "nothing holds back the update that spoils the next batch"
    assert trainer.statistics["discriminator_loss"].count == 5
    want = torch.stack([gradient.norm() for pair in norms[:2] for gradient in pair]).norm()
    assert events[0].values["grad_norm"] == pytest.approx(float(want))
    assert trainer.skipped_steps == 0


def test_a_loss_that_is_not_returned_is_no_value():
    events, returned = [], []
    monitors = [NonFinite(then=events.append), NonFinite("grad_norm", then=events.append)]
    run(Silent(), loader(5), monitors=monitors)
    assert events == []
    run(Silent(), loader(5), monitors=[Threshold("grad_norm", above=-1.0, then=events.append)])
    assert set(events[0].values) == {"discriminator_loss", "grad_norm", "lr"}
    run(Returns(), loader(5), monitors=[Threshold("grad_norm", above=-1.0, then=returned.append)])
    assert "loss" in returned[0].values
    with pytest.warns(MonitorWarning, match=r"'loss > 100': training_step logged no 'loss'; there are: disc"):
        run(Silent(), loader(5), monitors=[Threshold("loss", above=100.0, then="skip")])


@pytest.mark.parametrize(
    ("monitor", "message"),
    [
        (
            Threshold("grad_norm", above=1.0, then="clip"),
            r"Threshold\('grad_norm > 1', then='clip'\) can't clip.*self\.cl",
        ),
        (NonFinite("loss", then="stop", find_module=True), r"find_module=True, which runs training_step again"),
    ],
)
def test_what_needs_automatic_optimization_is_refused(monitor, message):
    with pytest.raises(ConfigError, match=message):
        run(GAN(), loader(2), monitors=[monitor])


@pytest.mark.parametrize("options", [{"nonfinite": "skip"}, {"ema_decay": 0.9}])
def test_watched_batches_run_eagerly_where_others_are_captured_and_the_report_says_so(options):
    trainer = run(GAN("SimpleAdam"), loader(20), capture="graph", **options)
    (reason,) = trainer.capture_report.fallbacks
    assert reason.code == "monitors-by-hand"
    assert "drop monitors=, nonfinite= and ema_decay= to capture" in reason.message
    assert trainer.capture_report.steps_replayed == 0
    assert run(GAN("SimpleAdam"), loader(20), capture="graph").capture_report.steps_replayed > 10


@pytest.mark.parametrize("optimizer", ["SGD momentum", "fused AdamW", "SimpleAdam"])
def test_an_overflow_lowers_the_scale_though_its_batch_is_skipped_and_not_behind_a_stop(optimizer, caplog):
    skipped = run(GAN(optimizer), loader(10, {5: "nan"}), plugins=half(), nonfinite="skip")
    without = run(GAN(optimizer), loader(10, without=(5,)), plugins=half())
    assert differences(left_behind(skipped)["weights"], left_behind(without)["weights"]) == []
    assert skipped.precision_plugin.scaler.get_scale() == 512.0
    assert "waits to know whether to update" not in caplog.text
    stopped = run(GAN(optimizer), loader(10, {5: "nan"}), plugins=half(), nonfinite="stop", **LATE)
    ended = run(GAN(optimizer), loader(10), limit_train_batches=5, plugins=half())
    assert differences(left_behind(stopped)["weights"], left_behind(ended)["weights"]) == []
    assert stopped.precision_plugin.scaler.state_dict() == ended.precision_plugin.scaler.state_dict()


def test_optimizers_are_left_as_they_were_found():
    trainer = run(GAN(), loader(3), nonfinite="skip", ema_decay=0.9)
    assert [len(optimizer._optimizer_step_post_hooks) for optimizer in trainer.optimizers] == [0, 0]
