"""Which steps each monitor objects to."""

import math

import pytest
import torch
from lightning.pytorch import Callback

from zdtrain import Trainer
from zdtrain.errors import ConfigError
from zdtrain.monitors import MonitorEvent, MonitorWarning, NonFinite, Plateau, Row, Spike, Threshold, When

from .runs import QUIET, Net, loader, run

NAN, INF = math.nan, math.inf


class Values(Net):
    """Logs given values, one per step."""

    def __init__(self, values):
        super().__init__(scheduler=False)
        self.given = torch.tensor(values)

    def training_step(self, batch, batch_idx):
        self.log("value", self.given[batch_idx % len(self.given)])
        return super().training_step(batch, batch_idx)


def steps_of(make, values, *, lag=None, **options):
    """Return the steps at which a monitor calls its function, in a run whose metric takes `values`."""
    heard = []
    trainer = run(Values(values), loader(len(values)), monitors=[make(heard.append)], lag=lag, **options)
    return [event.step for event in heard], heard, trainer


def device_steps_of(make, values, **options):
    """Return the steps that the same monitor skips."""
    held = []

    class Held(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            self.before = [p.detach().clone() for p in module.parameters()]

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if all(map(torch.equal, module.parameters(), self.before)):
                held.append(batch_idx)

    run(Values(values), loader(len(values)), monitors=[make("skip")], callbacks=[Held()], **options)
    return held


CASES = {
    "above": (lambda then: Threshold("value", above=2.0, then=then), [1, 3, 2, NAN, INF, 2.5], [1, 4, 5]),
    "below": (lambda then: Threshold("value", below=0.0, then=then), [1, -1, 0, NAN, -INF], [1, 4]),
    "either": (lambda then: Threshold("value", above=2, below=-2, then=then), [0, 3, -3, 0], [1, 2]),
    "patience": (lambda then: Threshold("value", above=0, patience=3, then=then), [1, 1, 0, 1, 1, 1, 1], [5, 6]),
    "cooldown": (lambda then: Threshold("value", above=0, cooldown=2, then=then), [1] * 7, [0, 3, 6]),
    "rests": (lambda then: Threshold("value", above=0, cooldown=3, then=then), [1, 0, 0, 1, 0, 1, 0, 0], [0, 5]),
    "starts anew": (lambda then: Threshold("value", above=0, patience=2, then=then), [1, 0, 1, 1, 0, 0, 1], [3]),
    "late and rests": (
        lambda then: Threshold("value", above=0, after_step=2, cooldown=1, patience=2, then=then),
        [1, 1, 1, 0, 1, 1, 1, 1],
        [5, 7],
    ),
    "after": (lambda then: Threshold("value", above=0, after_step=3, then=then), [1] * 5, [3, 4]),
    "never": (lambda then: Threshold("value", above=2.0, below=-2.0, then=then), [1, NAN, 2, -2, 0], []),
    "never infinite": (lambda then: NonFinite(["value", "loss"], then=then), [1e38, 3e38, 3e38, -3e38], []),
    "not finite": (lambda then: NonFinite("value", then=then), [0, NAN, INF, 1e38, -INF], [1, 2, 4]),
    "one of two": (lambda then: NonFinite(["value", "train_loss", "first"], then=then), [0, NAN, 1], [1]),
    "plateau": (lambda then: Plateau("value", patience=3, then=then), [5, 4, 4, 4, 4, 3, 3, 3, 3, 3, 3, 3], [4, 8]),
    "plateau max": (lambda then: Plateau("value", patience=2, mode="max", then=then), [1, 2, 3, 3, 2.9, 4], [4]),
    "min delta": (lambda then: Plateau("value", patience=2, min_delta=0.5, then=then), [5, 4.8, 4.6, 4.4, 4.3], [2]),
    "spike": (lambda then: Spike("value", min_steps=8, then=then), [1, 2] * 5 + [9, 1, 2, 9, NAN, 1, 20], [10, 13, 16]),
    "function": (lambda then: When(lambda row: row["value"] > row["lr"] * 100, then=then), [0.5, 2, 0.5, 2], [1, 3]),
    "late function": (
        lambda then: When(lambda row: row["value"] > 0, after_step=2, patience=2, cooldown=1, then=then),
        [1] * 8,
        [3, 5, 7],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_monitor_that_informs_hears_of_the_right_steps(case):
    make, values, expected = CASES[case]
    assert steps_of(make, [float(value) for value in values])[0] == expected


@pytest.mark.parametrize("lag", [None, 30])
@pytest.mark.parametrize("case", CASES)
def test_a_monitor_that_acts_does_so_in_the_same_steps_whether_or_not_the_host_sees_them(case, lag):
    make, values, expected = CASES[case]
    assert device_steps_of(make, [float(value) for value in values], lag=lag) == expected


class SometimesThere(Values):
    """Logs one value in every step and another one in some."""

    def training_step(self, batch, batch_idx):
        if batch_idx % 3:
            self.log("other", self.given[-1 - batch_idx])
        return super().training_step(batch, batch_idx)


MIXES = {
    "skip": lambda: [
        Spike("value", factor=1.0, min_steps=3, decay=0.5, then="skip"),
        Threshold("other", above=1.0, below=-1.0, then="skip", patience=2),
        Plateau("other", patience=2, then="skip", cooldown=1),
        NonFinite(["other", "loss"], then="skip"),
        When(lambda row: row["value"] > 0.0, then="skip", after_step=4, cooldown=2),
    ],
    "clip": lambda: [
        Spike("grad_norm", factor=0.5, min_steps=2, clip_norm=0.1, then="clip"),
        Threshold("grad_norm", above=0.5, then="clip"),
        Plateau("value", patience=3, mode="max", then="skip"),
    ],
    "stop": lambda: [
        Threshold("value", above=1.0, then="skip", cooldown=3),
        NonFinite("value", then="skip", stop_after=2),
        Plateau("other", patience=12, then="stop", after_step=12),
    ],
}


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("mix", MIXES)
def test_monitors_of_all_kinds_decide_on_the_host_as_on_the_device(mix, accumulate):
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(45, generator=generator)
    values[20] = NAN
    left = []
    for lag in (None, 2):
        module = SometimesThere(values.tolist())
        trainer = run(module, loader(45), monitors=MIXES[mix](), lag=lag, accumulate_grad_batches=accumulate)
        weights = torch.cat([value.double().flatten() for value in module.state_dict().values()])
        left.append((trainer.skipped_steps, trainer.global_step, weights))
    (skipped, steps, weights), (skipped_late, steps_late, weights_late) = left
    assert (skipped, steps) == (skipped_late, steps_late)
    assert torch.equal(weights, weights_late)
    assert 0 < skipped < steps


def test_a_lagging_device_changes_nothing_in_what_is_heard():
    make, values, expected = CASES["spike"]
    assert steps_of(make, [float(value) for value in values], lag=30)[0] == expected


def test_an_event_says_what_happened_when_on_which_values():
    _, (event,), _ = steps_of(lambda then: Threshold("value", above=5.0, then=then), [1.0, 2.0, 9.0])
    assert isinstance(event, MonitorEvent)
    assert (event.monitor, event.action, event.step, event.epoch, event.batch_idx) == ("value > 5", "callback", 2, 0, 2)
    assert event.values["value"] == 9.0
    assert event.values["lr"] == pytest.approx(0.01)
    assert list(event.values)[:2] == ["value", "train_loss"], "in the order in which they were logged"


def test_a_warning_names_the_step():
    with pytest.warns(MonitorWarning, match=r"step 2: value > 5 \(warn\)"):
        steps_of(lambda _: Threshold("value", above=5.0), [1.0, 2.0, 9.0, 1.0])


def test_a_plain_function_warns():
    def value_is_large(row: Row) -> torch.Tensor:
        return row["train_loss"] > 100

    with pytest.warns(MonitorWarning, match="step 3: value_is_large"):
        run(Net(), loader(6, {3: "large"}), monitors=[value_is_large])


@pytest.mark.parametrize("capture", ["off", "graph"])
def test_a_threshold_can_be_changed_while_training_and_stays_at_its_address(capture):
    monitor = Threshold("train_loss", above=1e9, then="stop")
    address = monitor.above.data_ptr()

    class Lower(Net):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 20:
                monitor.above = 100.0

    stopped = run(Lower("SimpleAdam"), loader(40, {9: "large", 25: "large"}), monitors=[monitor], capture=capture)
    assert (stopped.global_step, monitor.above.data_ptr(), monitor.describe()) == (25, address, "train_loss > 100")
    assert capture == "off" or stopped.capture_report.steps_replayed > 10


def test_a_run_s_scalar_can_be_a_threshold_and_can_be_watched():
    class Raises(Net):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 5:
                self.trainer.scalars.alarm = 1.0

    stopped = run(Raises(), loader(20), scalars={"alarm": 0.0}, monitors=[Threshold("alarm", above=0.5, then="stop")])
    assert stopped.global_step == 5


def test_the_learning_rate_can_be_watched():
    heard = []
    run(Net("SimpleAdam"), loader(20), monitors=[Threshold("lr", below=0.0095, then=heard.append)])
    assert heard[0].step == 6  # 0.01 * 0.99**6
    assert heard[0].values["lr"] == pytest.approx(0.01 * 0.99**6)


def test_names_with_a_suffix_of_lightning_work_too():
    stopped = run(Net(), loader(20, {7: "large"}), monitors=[Threshold("train_loss_step", above=100.0, then="stop")])
    assert stopped.global_step == 7


WRONG = {
    "then": (lambda: Threshold("loss", above=1.0, then="stopp"), r"then='stopp' is no action; did you mean 'stop'\?"),
    "no then": (lambda: Threshold("loss", above=1.0, then=None), r"then=None is no action; there are: clip, .* warn"),
    "clip to nothing": (lambda: Spike("loss", then="clip", clip_norm=-1.0), r"clip_norm=-1.0; use a number above 0"),
    "factor": (lambda: Spike("loss", factor=0), r"Spike\('loss'\): factor=0; use a number above 0"),
    "text": (lambda: Threshold("loss", above="1e2"), r"Threshold\('loss'\): above='1e2' is no number: .* write 100.0"),
    "bool": (lambda: Threshold("loss", above=True), r"above=True is no number"),
    "nan": (lambda: Threshold("loss", below=NAN), r"below=nan compares with nothing; use NonFinite"),
    "vector": (lambda: Threshold("loss", above=torch.ones(2)), r"above must be one number, got shape \(2,\)"),
    "nothing": (lambda: Threshold("loss"), r"has no threshold: give it above=, below= or both"),
    "metric": (lambda: Threshold(3, above=1.0), r"3 is no name of a metric"),
    "patience": (lambda: NonFinite(patience=0), r"patience=0; use a whole number that is at least 1"),
    "clip": (lambda: Spike("loss", then="clip"), r"then='clip' needs clip_norm="),
    "no clip": (lambda: Spike("loss", clip_norm=1.0), r"clip_norm=1.0 does nothing without then='clip'"),
    "in a row": (lambda: NonFinite(then="stop", stop_after=3), r"stop_after=3 does nothing without then='skip'"),
    "mode": (lambda: Plateau("loss", mode="least"), r"mode='least'; use 'min' or 'max'"),
    "decay": (lambda: Spike("loss", decay=1.0), r"decay=1.0; use a number that is at least 0 and less than 1"),
    "list": (lambda: Trainer(**QUIET, monitors="loss"), r"trainer.monitors='loss': use a list of monitors"),
    "item": (lambda: Trainer(**QUIET, monitors=[3]), r"trainer.monitors\[0\]=3: use a monitor, or a function"),
    "class": (lambda: Trainer(**QUIET, monitors=[NonFinite]), r"trainer.monitors\[0\]=.*NonFinite.*: use a monitor"),
    "guard": (lambda: Trainer(**QUIET, nonfinite="skipp"), r"trainer.nonfinite='skipp': .*did you mean 'skip'\?"),
    "lag": (lambda: Trainer(**QUIET, max_lag_steps=0), r"trainer.max_lag_steps=0: use a whole number"),
    "average": (lambda: Trainer(**QUIET, ema_decay=1.5), r"trainer.ema_decay=1.5: use a number between 0 and 1"),
    "no average": (lambda: Trainer(**QUIET, ema_validation=True), r"does nothing without trainer.ema_decay"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_option_gets_one_clear_line(case):
    make, message = WRONG[case]
    with pytest.raises(ConfigError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_threshold_that_was_not_given_cannot_be_set_later():
    with pytest.raises(ConfigError, match=r"has no below to change: give it one, e.g. below=float\('inf'\)"):
        Threshold("loss", above=1.0).below = 0.0


def test_a_metric_that_never_appears_is_reported_at_the_end_of_the_first_epoch_with_the_nearest_name():
    with pytest.warns(MonitorWarning, match=r"'train_los > 1'.* logged no 'train_los'; did you mean 'train_loss'\?"):
        run(Net(), loader(5), monitors=[Threshold("train_los", above=1.0, then="stop")], max_epochs=2)


def test_a_metric_that_only_validation_logs_is_reported_as_logged_elsewhere():
    class Validates(Net):
        def validation_step(self, batch, batch_idx):
            self.log("val_acc", batch[0].mean())

    def fit():
        trainer = Trainer(**QUIET, monitors=[Plateau("val_acc", patience=2, mode="max")])
        trainer.fit(Validates(), loader(5), loader(2))

    with pytest.warns(MonitorWarning, match=r"training_step logged no 'val_acc'; it is logged outside.*EarlyStopping"):
        fit()


def test_a_function_that_asks_for_an_unknown_metric_gets_the_nearest_name():
    monitor = When(lambda row: row["trainloss"] > 1, then="skip", name="mine")
    with pytest.raises(ConfigError, match=r"asks for 'trainloss', which this step did not log; did you mean 'train_l"):
        run(Net(), loader(5), monitors=[monitor])


def test_a_function_has_to_return_a_bool_tensor():
    with pytest.raises(ConfigError, match=r"monitor 'mine' must return a 0-D bool tensor, got \(\) torch.float32"):
        run(Net(), loader(5), monitors=[When(lambda row: row["first"], then="skip", name="mine")])


def test_an_optimizer_that_counts_on_the_host_is_refused_with_a_remedy():
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            loss = super().step(closure)
            for p in self.param_groups[0]["params"]:
                self.state[p]["count"] = self.state[p].get("count", 0) + 1
            return loss

    class Counts(Net):
        def configure_optimizers(self):
            return Counting(self.parameters(), lr=0.1)

    with pytest.raises(
        ConfigError, match=r"Counting keeps 'count' as a Python number, .* Use zdtrain.optim.SimpleAdam"
    ):
        run(Counts(), loader(5), nonfinite="skip")


def test_steps_on_lightning_s_own_loop_cannot_be_watched_and_say_so():
    class Drives(Net):
        def optimizer_step(self, *args, **kwargs):
            super().optimizer_step(*args, **kwargs)

    for option, value in (("nonfinite", "skip"), ("monitors", [NonFinite(then="warn")]), ("ema_decay", 0.9)):
        message = rf"^trainer\.{option}=.*{value if isinstance(value, str | float) else 'NonFinite'}.* needs steps on "
        with pytest.raises(ConfigError, match=rf"{message}zdtrain's own loop, but Drives\.optimizer_step is .*; "):
            run(Drives(), loader(5), **{option: value})
