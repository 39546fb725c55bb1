"""`capture="auto"`, the default: captured where the device has graphs, and quiet about it."""

import logging

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.profilers import SimpleProfiler

import zdtrain

from .runs import QUIET, Classifier, batches, fit, trap_line


class Validated(Classifier):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def val_dataloader(self):
        return batches(6)


class Reads(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if loss.item() > 100:  # trap
            raise RuntimeError("diverged")
        return loss


@pytest.fixture
def said(caplog):
    """Return what zdtrain told the user."""
    caplog.set_level(logging.INFO)
    ours = ("zdtrain", "Captured", "trainer.", "capture", "prefetch", "steps_per", "verify")
    return lambda: [record.getMessage() for record in caplog.records if record.getMessage().startswith(ours)]


def fit_by_default(folder, make, **options):
    """Train without a word on capture."""
    options = {"max_epochs": 4, **options}
    torch.manual_seed(0)
    module = make()
    torch.manual_seed(7)
    trainer = zdtrain.Trainer(**QUIET, logger=False, default_root_dir=folder, **options)
    trainer.fit(module, batches())
    return module, trainer


@pytest.mark.usefixtures("device_graphs")
def test_by_default_steps_are_captured_where_the_device_has_graphs_and_one_line_says_so(tmp_path, said):
    module, trainer = fit_by_default(tmp_path, Validated)
    (line,) = said()
    report = trainer.capture_report
    assert report.capture == "graph"
    assert (report.steps_replayed, report.evaluation_replayed) > (30, 10)
    assert line == (
        f"zdtrain: {report.steps_replayed} of 48 training steps were replays, "
        f"{report.evaluation_replayed} of {report.evaluation_replayed + report.evaluation_eager} evaluation steps were "
        'replays; trainer.capture_report has the details, capture="off" does without'
    )
    assert all(program.verification == "equal" for program in report.programs)
    eager = fit(tmp_path, Validated, "off")
    for name, weight in module.state_dict().items():
        assert torch.equal(weight, eager.weights[name]), name


@pytest.mark.usefixtures("device_graphs")
def test_a_step_that_cannot_be_captured_runs_eagerly_and_one_line_names_the_place(tmp_path, said):
    _, trainer = fit_by_default(tmp_path, Reads)
    (line,) = said()
    assert "not captured:" in line
    assert f"test_auto.py:{trap_line(Reads)})" in line
    assert trainer.capture_report.steps_replayed == 0


@pytest.mark.usefixtures("device_graphs")
def test_who_asks_for_captured_steps_gets_the_table(tmp_path, said):
    run = fit(tmp_path, Validated, "graph")
    assert said() == [run.report.table()]


@pytest.mark.usefixtures("device_graphs")
@pytest.mark.parametrize("how", ["option", "variable"])
def test_switched_off_nothing_is_captured_nor_said(tmp_path, said, monkeypatch, how):
    monkeypatch.delenv("ZDTRAIN_CAPTURE", raising=False)
    if how == "variable":
        monkeypatch.setenv("ZDTRAIN_CAPTURE", "off")
    _, trainer = fit_by_default(tmp_path, Classifier, **({"capture": "off"} if how == "option" else {}))
    assert trainer.capture_report == zdtrain.capture.report.CaptureReport(capture="off")
    assert said() == []


def test_without_graphs_nothing_is_captured_nor_said(tmp_path, said):
    _, trainer = fit_by_default(tmp_path, Classifier)
    assert trainer.capture_report.capture == "off"
    assert said() == []


@pytest.mark.usefixtures("device_graphs")
def test_a_short_validation_of_which_nothing_is_replayed_says_nothing(tmp_path, said):
    trainer = zdtrain.Trainer(**QUIET, logger=False, default_root_dir=tmp_path)
    trainer.validate(Validated(), batches(3), verbose=False)
    assert said() == []


# Settings that keep steps from being captured, or have no effect


@pytest.mark.usefixtures("device_graphs")
@pytest.mark.parametrize("how", ["option", "mode"])
def test_anomaly_detection_keeps_steps_eager_and_is_named_once(tmp_path, said, how):
    with torch.autograd.set_detect_anomaly(how == "mode"):
        _, trainer = fit_by_default(tmp_path, Validated, capture="graph", detect_anomaly=how == "option")
    assert [reason.code for reason in trainer.capture_report.fallbacks] == ["detect-anomaly"]
    assert trainer.capture_report.steps_replayed == 0
    assert "".join(said()).count("[detect-anomaly]") == 1


def test_a_profiler_keeps_steps_eager_and_is_named_once(tmp_path, said):
    _, trainer = fit_by_default(tmp_path, Classifier, capture="graph", profiler=SimpleProfiler())
    assert [reason.code for reason in trainer.capture_report.fallbacks] == ["profiler"]
    assert "".join(said()).count("[profiler]") == 1


def test_a_comparison_switched_off_where_nothing_is_compared_is_told_so(tmp_path, said):
    fit_by_default(tmp_path, Classifier, verify_capture=False)
    (line,) = said()
    assert "verify_capture=False has no effect here" in line


def test_options_that_have_no_effect_say_so_once(tmp_path, said):
    _, trainer = fit_by_default(tmp_path, Reads, capture="graph", prefetch=True, steps_per_replay=4, profiler="simple")
    text = "\n".join(said())
    assert text.count("[prefetch]") == 1
    assert text.count("[steps-per-replay]") == 1
    assert {"prefetch", "steps-per-replay"} <= {reason.code for reason in trainer.capture_report.fallbacks}


# Several processes


class Averaged(Classifier):
    """Says in every process how its steps ran."""

    def on_train_end(self):
        trainer = self.trainer
        if isinstance(trainer, zdtrain.Trainer):
            report = trainer.capture_report
            assert report.capture == ("off" if trainer.options.capture == "auto" else "graph")
            assert report.steps_replayed == 0
            assert "strategy" in {reason.code for reason in report.fallbacks}


@pytest.mark.usefixtures("device_graphs")
@pytest.mark.parametrize("capture", ["auto", "graph"])
def test_several_processes_train_like_stock_lightning_whatever_is_captured_on_one(tmp_path, capture):
    weights = []
    for kind, options in ((pl.Trainer, {}), (zdtrain.Trainer, {"capture": capture})):
        torch.manual_seed(0)
        module = Averaged()
        options = {**QUIET, "logger": False, "max_epochs": 2, "devices": 2, "strategy": "ddp_fork", **options}
        trainer = kind(**options, default_root_dir=tmp_path)
        pl.seed_everything(1)
        trainer.fit(module, batches())
        weights.append(module.state_dict())
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name]), name
