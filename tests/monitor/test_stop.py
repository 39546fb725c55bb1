"""``then="stop"``: the run ends right before the step that a monitor objects to, however late the host hears."""

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from zdtrain.monitors import NonFinite, Threshold, When
from zdtrain.records import load_run

from .runs import CAUSES, OPTIMIZERS_AND_CAUSES, Net, OneRowAtATime, differences, left_behind, loader, run


def assert_stops_exactly(cause, optimizer, *, step, batches, lag, accumulate=1, capture="off", **options):
    bad = loader(batches * accumulate, {step * accumulate: cause})
    shared = {"accumulate_grad_batches": accumulate, "capture": capture, **options}
    stopped = run(Net(optimizer), bad, monitors=[CAUSES[cause]("stop")], lag=lag, **shared)
    ended = run(Net(optimizer), loader(batches * accumulate), max_steps=step, **shared)
    assert stopped.global_step == step
    assert differences(left_behind(stopped), left_behind(ended)) == []
    return stopped


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize(
    ("optimizer", "accumulate", "capture"),
    [
        *(("SGD", accumulate, capture) for accumulate in (1, 2) for capture in ("off", "graph")),
        ("SimpleAdam", 1, "off"),
        ("SimpleAdam", 2, "graph"),
        ("fused AdamW", 1, "off"),
    ],
)
def test_a_stop_at_step_137_heard_50_steps_later_leaves_what_a_run_of_137_steps_leaves(
    cause, optimizer, accumulate, capture
):
    options = {"lag": 10_000, "max_lag_steps": 50, "accumulate": accumulate, "capture": capture}
    stopped = assert_stops_exactly(cause, optimizer, step=137, batches=200, callbacks=[OneRowAtATime()], **options)
    assert stopped._monitor_state.state_dict()["stopped"]["step"] == 137
    assert len(stopped.ended) // accumulate - 137 in (50, 51), "steps behind the latch"


@pytest.mark.parametrize("capture", ["off", "graph"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("optimizer", "cause"), OPTIMIZERS_AND_CAUSES)
def test_a_stop_is_exact_with_every_optimizer_captured_and_accumulating(optimizer, cause, accumulate, capture):
    options = {"max_lag_steps": 10, "accumulate": accumulate, "capture": capture}
    stopped = assert_stops_exactly(cause, optimizer, step=17, batches=40, lag=10_000, **options)
    if capture == "graph":
        assert stopped.capture_report.steps_replayed > 10


def test_the_second_batch_of_a_window_stops_the_step_as_well():
    bad = loader(40, {2 * 7 + 1: "nan"})
    stopped = run(Net(), bad, nonfinite="stop", accumulate_grad_batches=2)
    ended = run(Net(), loader(40), max_steps=7, accumulate_grad_batches=2)
    assert differences(left_behind(stopped), left_behind(ended)) == []


@pytest.mark.parametrize("step", [0, 1, 19])
def test_the_first_and_the_last_step_of_an_epoch_can_stop_it(step):
    stopped = run(Net("AdamW"), loader(20, {step: "nan"}), nonfinite="stop", max_epochs=3)
    torch.manual_seed(5)
    assert stopped.global_step == step
    if step:
        ended = run(Net("AdamW"), loader(20), max_steps=step)
        assert differences(left_behind(stopped), left_behind(ended)) == []


def test_without_lag_the_run_ends_in_the_step_itself():
    stopped = run(Net(), loader(40, {17: "nan"}), nonfinite="stop")
    assert stopped.ended == list(range(18))


def test_minimum_epochs_do_not_keep_a_stopped_run_alive():
    stopped = run(Net(), loader(20, {5: "nan"}), nonfinite="stop", min_epochs=2, max_epochs=4)
    assert (stopped.global_step, stopped.fit_loop.min_epochs) == (5, 2)


def test_a_run_that_was_stopped_can_be_fitted_again():
    stopped = run(Net("SimpleAdam"), loader(20, {5: "nan"}), nonfinite="stop", max_epochs=-1, max_steps=12)
    stopped.fit(stopped.lightning_module, loader(20))
    assert stopped.global_step == 12


def test_nothing_behind_a_stop_is_logged_and_the_record_says_why_the_run_ended(tmp_path):
    stopped = run(
        Net(),
        loader(100, {37: "large"}),
        monitors=[Threshold("train_loss", above=100.0, then="stop")],
        lag=10_000,
        max_lag_steps=30,
        records=tmp_path,
        logger=CSVLogger(tmp_path, name="csv"),
        log_every_n_steps=1,
    )
    record = load_run(stopped.recorder.folder)
    assert record.series("train_loss_step")[0] == list(range(37))
    (event,) = [event for event in record.events if event["kind"] == "monitor"]
    assert (event["action"], event["step"], event["monitor"]) == ("stop", 37, "train_loss > 100")
    assert event["values"]["train_loss"] > 1000
    assert 15 <= record.summary["monitor_lag_steps"] <= 30
    assert record.summary["stopped_by"] == {"monitor": "train_loss > 100", "step": 37}
    text = (tmp_path / "csv" / "version_0" / "metrics.csv").read_text().splitlines()
    steps = {line.split(",")[text[0].split(",").index("step")] for line in text[1:]}
    assert steps == {str(step) for step in range(37)}


class TellsLogger(Net):
    """Calls a logger itself, with a tensor that the next step overwrites."""

    def __init__(self):
        super().__init__("AdamW")
        self.kept = torch.zeros(())

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.kept.copy_(loss.detach())
        self.logger.log_metrics({"own": self.kept}, step=self.trainer.global_step)
        return loss


def csv_of(batches, folder, callbacks=(), **options):
    callbacks = [LearningRateMonitor("step"), OneRowAtATime(), *callbacks]
    run(TellsLogger(), batches, logger=CSVLogger(folder, name="csv"), callbacks=callbacks, **options)
    return (folder / "csv" / "version_0" / "metrics.csv").read_text()


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("lag", [None, 10_000])
def test_loggers_hear_what_they_hear_of_a_run_that_ended_before_the_step_whoever_tells_them(tmp_path, lag, every):
    options = {"log_every_n_steps": every}
    bad = loader(100, {37: "nan"})
    stopped = csv_of(bad, tmp_path / "stopped", nonfinite="stop", lag=lag, max_lag_steps=50, **options)
    assert stopped == csv_of(loader(100), tmp_path / "ended", max_steps=37, **options)


@pytest.mark.parametrize("lag", [None, 10_000])
def test_loggers_hear_nothing_of_the_step_that_a_checkpoint_was_due_after(tmp_path, lag):
    def keep(folder):
        return {"enable_checkpointing": True, "callbacks": [ModelCheckpoint(folder, every_n_train_steps=1)]}

    stopped = csv_of(loader(30, {7: "nan"}), tmp_path / "stopped", nonfinite="stop", lag=lag, **keep(tmp_path / "1"))
    assert stopped == csv_of(loader(30), tmp_path / "ended", max_steps=7, **keep(tmp_path / "2"))


class Decays(Callback):
    """Writes the learning rate before every step, as a number or into its tensor."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        group = trainer.optimizers[0].param_groups[0]
        group["lr"] = 0.9 * group["lr"]
        group["weight_decay"] = 0.001 * batch_idx


@pytest.mark.parametrize("scheduler", [False, True])
@pytest.mark.parametrize("lag", [None, 10_000])
@pytest.mark.parametrize("optimizer", ["SGD", "SimpleAdam"])
def test_what_callbacks_wrote_into_the_optimizer_behind_a_stop_is_taken_back(optimizer, lag, scheduler):
    stopped = run(Net(optimizer, scheduler), loader(30, {7: "nan"}), nonfinite="stop", lag=lag, callbacks=[Decays()])
    ended = run(Net(optimizer, scheduler), loader(30), max_steps=7, callbacks=[Decays()])
    assert differences(left_behind(stopped), left_behind(ended)) == []


def test_what_loggers_hear_and_in_which_order_does_not_depend_on_monitors(tmp_path):
    options = {"log_every_n_steps": 2, "max_epochs": 2}
    watched = csv_of(loader(30), tmp_path / "watched", nonfinite="stop", lag=10_000, **options)
    assert watched == csv_of(loader(30), tmp_path / "plain", **options)


def test_what_loggers_were_told_before_an_exception_reaches_them_and_they_are_left_as_they_were(tmp_path):
    class Fails(TellsLogger):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 7:
                raise RuntimeError("on purpose")
            return loss

    logger = CSVLogger(tmp_path, name="csv")
    with pytest.raises(RuntimeError, match="on purpose"):
        run(Fails(), loader(30), logger=logger, nonfinite="stop", lag=10_000)
    steps = [line.split(",")[-1] for line in (tmp_path / "csv" / "version_0" / "metrics.csv").read_text().splitlines()]
    assert steps == ["step", *map(str, range(8))]
    assert "log_metrics" not in vars(logger)


@pytest.mark.parametrize("every", [1, 5])
def test_no_checkpoint_holds_a_step_behind_the_latch(tmp_path, every):
    keep = ModelCheckpoint(tmp_path, every_n_train_steps=every, save_top_k=-1, save_last=True)
    options = {"callbacks": [keep], "enable_checkpointing": True, "monitors": [NonFinite("loss", then="stop")]}
    stopped = run(Net("AdamW"), loader(60, {17: "nan"}), lag=10_000, max_lag_steps=30, **options)
    saved = {int(torch.load(path, weights_only=False)["global_step"]) for path in tmp_path.glob("*.ckpt")}
    assert saved == {step for step in range(1, 18) if step % every == 0} | {max(saved)}
    assert max(saved) <= 17
    last = torch.load(keep.last_model_path, weights_only=False)
    reference = run(Net("AdamW"), loader(60), max_steps=last["global_step"])
    assert differences(dict(last["state_dict"]), dict(reference.lightning_module.state_dict())) == []
    assert differences(last["optimizer_states"][0], reference.optimizers[0].state_dict()) == []
    assert stopped.global_step == 17


def test_a_checkpoint_that_a_callback_saves_behind_the_latch_is_one_of_the_last_good_step(tmp_path):
    class Saver(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 25:
                trainer.save_checkpoint(tmp_path / "late.ckpt")

    options = {"callbacks": [Saver()], "monitors": [NonFinite("loss", then="stop")]}
    run(Net("AdamW"), loader(60, {17: "nan"}), lag=10_000, max_lag_steps=30, **options)
    saved = torch.load(tmp_path / "late.ckpt", weights_only=False)
    assert saved["global_step"] == 17
    assert saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["ready"] == 17
    assert saved["lr_schedulers"][0]["last_epoch"] == 17
    state = next(value for key, value in saved["callbacks"].items() if "MonitorState" in key)
    assert state["stopped"] == {"monitor": "loss is not finite", "step": 17}


def test_validation_never_sees_weights_from_behind_the_latch():
    class Weights(Callback):
        seen: list[float] = []

        def on_validation_start(self, trainer, module):
            self.seen.append(float(sum(p.sum() for p in module.parameters())))

    spy = Weights()
    torch.manual_seed(5)
    options = {"val_check_interval": 20, "num_sanity_val_steps": 0, "callbacks": [spy], "limit_val_batches": 1}
    module = Net()
    module.val_dataloader = lambda: loader(1)  # type: ignore[method-assign]
    stopped = run(module, loader(60, {35: "nan"}), monitors=[NonFinite(then="stop")], lag=10_000, **options)
    assert len(spy.seen) == 1
    assert all(value == value for value in spy.seen)
    assert stopped.global_step == 35


def test_a_function_of_the_row_can_stop():
    monitor = When(lambda row: (row["loss"] > 100.0) & (row["first"] == row["first"]), then="stop", name="too large")
    stopped = run(Net(), loader(30, {7: "large"}), monitors=[monitor])
    assert stopped.global_step == 7
