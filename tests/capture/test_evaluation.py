"""Captured validation and test steps leave what eager ones leave, and what they cannot record runs eagerly."""

import ctypes
import itertools
import random
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.nn import functional as F
from torchmetrics import CatMetric
from torchmetrics.classification import MulticlassAccuracy

import zdtrain
import zdtrain.loop.capturing

from .runs import CLASSES, FEATURES, QUIET, Classifier, assert_equal, assert_same, batches, both, codes, fit, trap_line

UNSEEN = ctypes.c_double()  # what it holds is known to C only

KEPT = []


class Validated(Classifier):
    """Validates on full batches; subclasses change one thing each."""

    loaders = staticmethod(batches)

    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("val_loss", loss)
        return loss

    def val_dataloader(self):
        return self.loaders()


def program_of(report, step="validation_step"):
    """Return the one program of a step."""
    (program,) = [program for program in report.programs if program.step == step]
    return program


def test_programs_of_validation_live_as_long_as_the_fit(tmp_path):
    run = both(tmp_path, Validated, num_sanity_val_steps=2)
    program = program_of(run.report)
    assert program.captures == 1
    assert program.verification == "equal"
    assert program.verifications == 4  # in every run, since the weights have changed
    assert run.report.evaluation_eager == 8  # the first batches of two runs, two watched ones, the comparisons
    assert program.replays == 41
    assert run.report.evaluation_replayed == 42
    assert run.report.steps_replayed + run.report.steps_eager == 48
    assert "validation_step: (8, 8) float32, (8,) int64" in run.report.table()


class LogsEverything(Validated):
    def __init__(self):
        super().__init__()
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro", validate_args=False)

    def evaluate(self, batch, prefix):
        x, y = batch
        out = self.net(x)
        loss = F.cross_entropy(out, y)
        self.accuracy(out, y)
        self.log(f"{prefix}_accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log(f"{prefix}_step", loss, on_step=True, on_epoch=False)
        self.log(f"{prefix}_both", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log(f"{prefix}_unlogged", loss, logger=False, prog_bar=True)
        for reduce_fx in ("sum", "max", "min"):
            self.log(f"{prefix}_{reduce_fx}", out.mean(), reduce_fx=reduce_fx, on_step=True, on_epoch=True)
        self.log(f"{prefix}_synced", loss, sync_dist=True, rank_zero_only=True)
        self.log(f"{prefix}_sized", loss, batch_size=3)
        self.log(f"{prefix}_spread", out.std(), metric_attribute=None, batch_size=len(x))
        self.log(f"{prefix}_double", loss.double())
        self.log_dict({f"{prefix}_first": out[0, 0], f"{prefix}_last": out[-1, -1]}, add_dataloader_idx=True)

    def validation_step(self, batch, batch_idx):
        self.evaluate(batch, "val")

    def test_step(self, batch, batch_idx):
        self.evaluate(batch, "test")

    def test_dataloader(self):
        return batches(9)


def test_every_flag_of_log_in_validation(tmp_path):
    run = both(tmp_path, LogsEverything)
    assert program_of(run.report).replays > 30
    assert codes(run) == set()


class Several(LogsEverything):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        scale = (1.0, 2.0, 3.0)[dataloader_idx]
        self.evaluate((batch[0] * scale, batch[1]), "val")

    def val_dataloader(self):
        return [batches(7), batches(6, rest=3), batches(5)]


def test_each_of_several_loaders_has_programs_of_its_own(tmp_path):
    run = both(tmp_path, Several, max_epochs=6)
    names = [program.key for program in run.report.programs if program.step == "validation_step"]
    assert sum("data loader 1" in name for name in names) == 2
    assert len(names) == 4
    assert run.report.evaluation_replayed > 80
    assert codes(run) == set()


def test_more_loaders_than_programs_of_one_do_not_drive_each_other_out(tmp_path):
    class Net(Validated):
        def validation_step(self, batch, batch_idx, dataloader_idx):
            self.log("val_loss", self.loss(batch))

        def val_dataloader(self):
            return [batches(5) for _ in range(10)]

    run = both(tmp_path, Net, max_epochs=2)
    assert sum(program.captures for program in run.report.programs if program.step == "validation_step") == 10


@pytest.mark.parametrize("mode", ["max_size_cycle", "min_size"])
def test_loaders_that_are_combined(tmp_path, mode):
    class Net(Validated):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.loss(batch["a"]) + self.loss(batch["b"]))

        def val_dataloader(self):
            return CombinedLoader({"a": batches(7), "b": batches(9)}, mode)

    assert both(tmp_path, Net).report.evaluation_replayed > 15


def test_validation_in_the_middle_of_an_epoch(tmp_path):
    run = both(tmp_path, LogsEverything, val_check_interval=3, limit_val_batches=4)
    assert program_of(run.report).captures == 1
    assert run.report.evaluation_replayed > 40


@pytest.mark.parametrize("inference_mode", [True, False])
@pytest.mark.parametrize("entry", ["validate", "test"])
def test_validate_and_test_replay_their_steps(tmp_path, entry, inference_mode):
    outcomes = []
    for capture in ("off", "graph"):
        torch.manual_seed(0)
        module = LogsEverything()
        logger = CSVLogger(tmp_path, name=capture)
        trainer = zdtrain.Trainer(**QUIET, logger=logger, capture=capture, inference_mode=inference_mode)
        result = getattr(trainer, entry)(module, verbose=False)
        rows = Path(logger.log_dir, "metrics.csv").read_text()
        outcomes.append((result, rows, dict(trainer.callback_metrics)))
    assert_equal(*outcomes, entry)
    report = trainer.capture_report
    assert program_of(report, "validation_step" if entry == "validate" else "test_step").verification == "equal"
    assert report.fallbacks == ()
    assert report.evaluation_replayed >= 5
    assert (report.steps_eager, report.steps_replayed) == (0, 0)


class Keeps(Callback):
    def __init__(self):
        self.seen = []

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.seen.append((outputs, batch, batch_idx))


def outputs_stay_valid(folder):
    class Net(Validated):
        def validation_step(self, batch, batch_idx):
            out = self.net(batch[0])
            return {"out": out, "loss": F.cross_entropy(out, batch[1]), "names": ("a", 1), "batch": batch}

    keeps = {}
    for capture in ("off", "graph"):
        keeps[capture] = Keeps()
        run = fit(folder, Net, capture, callbacks=lambda kept=keeps[capture]: [kept])
    assert run.report.evaluation_replayed > 30
    assert_equal(keeps["off"].seen, keeps["graph"].seen, "outputs")


def test_outputs_that_a_callback_keeps_stay_valid(tmp_path):
    outputs_stay_valid(tmp_path)


@pytest.mark.usefixtures("device_graphs")
def test_outputs_of_device_graphs_stay_valid(tmp_path):
    outputs_stay_valid(tmp_path)


@pytest.mark.usefixtures("device_graphs")
def test_device_graphs_of_validation_leave_the_bits_of_an_eager_run(tmp_path):
    run = both(tmp_path, LogsEverything)
    assert run.report.evaluation_replayed > 30
    assert codes(run) == set()


@pytest.mark.usefixtures("device_graphs")
def test_device_graphs_in_inference_mode(tmp_path):
    results = []
    for capture in ("off", "graph"):
        torch.manual_seed(0)
        trainer = zdtrain.Trainer(**QUIET, logger=False, capture=capture)
        results.append(trainer.validate(LogsEverything(), verbose=False))
    assert results[0] == results[1]
    assert trainer.capture_report.evaluation_replayed > 5


def test_validation_with_averaged_weights(tmp_path):
    run = both(tmp_path, Validated, ema_decay=0.9, ema_validation=True, num_sanity_val_steps=2)
    plain = fit(tmp_path, Validated, "graph", num_sanity_val_steps=2)
    assert program_of(run.report).captures == 1
    assert run.report.evaluation_replayed > 30
    assert not torch.equal(run.metrics["val_loss"], plain.metrics["val_loss"])


def test_random_numbers_and_running_statistics_in_validation(tmp_path):
    class Net(Validated):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, CLASSES))

        def validation_step(self, batch, batch_idx):
            self.log("noisy", self.loss((batch[0] + torch.randn_like(batch[0]), batch[1])))

        def on_validation_model_eval(self):
            """Stay in training mode: statistics are updated, dropout is drawn."""

    assert both(tmp_path, Net).report.evaluation_replayed > 30


def test_a_run_that_goes_on_from_a_checkpoint(tmp_path):
    folders = {capture: tmp_path / capture for capture in ("off", "graph")}
    runs = []
    for capture, folder in folders.items():
        folder.mkdir()

        def save(folder=folder):
            return [ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1, monitor="val_both_epoch")]

        options = {"callbacks": save, "enable_checkpointing": True}
        fit(folder, LogsEverything, capture, **options)
        runs.append(fit(folder, LogsEverything, capture, ckpt_path=folder / "epoch=1.ckpt", **options))
    assert_same(*runs)
    assert runs[1].report.evaluation_replayed > 15


def test_what_stock_lightning_logs_and_returns(tmp_path):
    left = []
    for make in (pl.Trainer, lambda **options: zdtrain.Trainer(capture="graph", **options)):
        torch.manual_seed(0)
        module = Several()
        torch.manual_seed(7)
        logger = CSVLogger(tmp_path, name=str(len(left)))
        trainer = make(**{**QUIET, "num_sanity_val_steps": 1}, logger=logger, max_epochs=2, val_check_interval=5)
        trainer.fit(module, batches())
        metrics = dict(trainer.callback_metrics)
        rows = Path(logger.log_dir, "metrics.csv").read_text()
        left.append((metrics, rows, trainer.validate(module, verbose=False), trainer.test(module, verbose=False)))
    assert_equal(*left, "left")
    assert trainer.capture_report.evaluation_replayed > 4


def test_what_hooks_between_two_batches_change(tmp_path):
    class Net(Validated):
        scale = 1.0

        def on_validation_batch_start(self, batch, batch_idx, dataloader_idx=0):
            self.scale = float(batch_idx % 2)

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.loss(batch) * self.scale)

    run = both(tmp_path, Net)
    assert sum(program.step == "validation_step" for program in run.report.programs) == 2
    assert run.report.evaluation_replayed > 20


def test_what_changes_between_two_validations(tmp_path):
    class Net(Validated):
        def on_validation_start(self):
            self.scale = float(self.current_epoch // 2)

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.loss(batch) * self.scale)

    assert both(tmp_path, Net).report.evaluation_replayed > 20


def test_a_number_that_nobody_sees_change_is_found_by_the_comparison(tmp_path):
    class Net(Validated):
        def on_validation_start(self):
            UNSEEN.value = 1.0 + self.current_epoch // 3

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.loss(batch) * UNSEEN.value)

    run = both(tmp_path, Net)
    assert run.report.evaluation_replayed > 10
    assert "verification" in codes(run)


# Traps: what a recording would get wrong.


class UsesBatchIdx(Validated):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch) * (1 + batch_idx))  # trap


class AppendsOutputs(Validated):
    def __init__(self):
        super().__init__()
        self.outputs = []

    def validation_step(self, batch, batch_idx):
        out = self.net(batch[0])
        self.outputs.append(out)  # trap
        return out

    def on_validation_epoch_end(self):
        self.log("val_mean", torch.cat(self.outputs).mean())
        self.outputs.clear()


class AppendsWhatItReturns(Validated):
    def validation_step(self, batch, batch_idx):
        out = self.net(batch[0]).mean()  # trap
        KEPT.append(out)
        return out

    def on_validation_epoch_end(self):
        self.log("val_mean", torch.stack(KEPT).mean())
        KEPT.clear()


class ReadsItem(Validated):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch).item())  # trap


class BranchesOnTensor(Validated):
    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if loss > 1:  # trap
            loss = loss * 2
        self.log("val_loss", loss)


class DrawsFromRandom(Validated):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch) * (2 if random.random() < 0.5 else 1))  # trap


class DrawsFromNumpy(Validated):
    def validation_step(self, batch, batch_idx):
        noise = torch.from_numpy(np.random.standard_normal(1).astype("float32"))  # trap
        self.log("val_loss", self.loss(batch) * noise.sum())


class ReadsGlobalStep(Validated):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch) * (1 + self.global_step))  # trap


class LogsNumber(Validated):
    def __init__(self):
        super().__init__()
        self.pick = itertools.count().__next__

    def validation_step(self, batch, batch_idx):
        self.log("number", float(self.pick()))  # trap


class Counts(Validated):
    n = 0

    def validation_step(self, batch, batch_idx):
        self.n += 1  # trap
        self.log("val_loss", self.loss(batch) * self.n)


class SumsInList(Validated):
    def __init__(self):
        super().__init__()
        self.sums = [torch.zeros(())]

    def validation_step(self, batch, batch_idx):
        self.sums[0].add_(self.loss(batch))  # trap
        self.log("val_sum", self.sums[0])


class WritesWeights(Validated):
    def validation_step(self, batch, batch_idx):
        self.net[0].bias.mul_(0.9)  # trap
        self.log("val_loss", self.loss(batch))


TRAPS = {
    UsesBatchIdx: "batch-idx",
    AppendsOutputs: "python-state",
    AppendsWhatItReturns: "kept-tensor",
    ReadsItem: "host-read",
    BranchesOnTensor: "host-read",
    DrawsFromRandom: "host-randomness",
    DrawsFromNumpy: "host-randomness",
    ReadsGlobalStep: "trainer-state",
    LogsNumber: "logged-number",
    Counts: "python-state",
    SumsInList: "outside-write",
    WritesWeights: "outside-write",
}


@pytest.mark.parametrize("module", TRAPS, ids=lambda cls: cls.__name__)
def test_a_trap_in_validation_is_right_and_named_with_its_line(tmp_path, module):
    def make():
        random.seed(0)
        np.random.seed(0)
        KEPT.clear()
        return module()

    run = both(tmp_path, make, max_epochs=2)
    assert (run.report.evaluation_eager, run.report.evaluation_replayed) == (24, 0)
    found = {(reason.step, reason.code, reason.file, reason.line) for reason in run.report.fallbacks}
    assert ("validation_step", TRAPS[module], __file__, trap_line(module)) in found
    assert program_of(run.report, "training_step").replays > 0  # what validation cannot does not matter to training


def test_gradients_that_validation_reads_are_named(tmp_path):
    class Net(Validated):
        def validation_step(self, batch, batch_idx):
            gradient = self.net[0].weight.grad
            if gradient is not None:  # in the middle of a window
                self.log("val_norm", gradient.norm())

    run = both(tmp_path, Net, accumulate_grad_batches=5, val_check_interval=3)
    assert "gradient" in codes(run)


@pytest.mark.parametrize("inference_mode", [True, False])
def test_a_host_read_inside_a_composite_operation_is_named(inference_mode):
    class Net(Validated):
        def validation_step(self, batch, batch_idx):
            self.log("share", F.one_hot(batch[1]).float().mean())

    trainer = zdtrain.Trainer(**QUIET, logger=False, capture="graph", inference_mode=inference_mode)
    trainer.validate(Net(), verbose=False)
    assert {reason.code for reason in trainer.capture_report.fallbacks} == {"host-read"}


def test_a_metric_that_keeps_every_batch_is_named(tmp_path):
    class Net(Validated):
        def __init__(self):
            super().__init__()
            self.kept = CatMetric(nan_strategy="disable")

        def validation_step(self, batch, batch_idx):
            self.kept.update(self.net(batch[0]))

        def on_validation_epoch_end(self):
            self.log("val_mean", self.kept.compute().mean())
            self.kept.reset()

    run = both(tmp_path, Net)
    assert "metric-list-state" in codes(run)
    assert run.report.evaluation_replayed == 0


def test_profiled_steps_are_named(tmp_path):
    run = both(tmp_path, Validated, profiler="simple", max_epochs=1)
    assert [reason.code for reason in run.report.fallbacks if reason.step == "validation_step"] == ["profiler"]


@pytest.mark.slow
@pytest.mark.parametrize("entry", ["fit", "validate"])
def test_a_lowered_validation_agrees_within_tolerance(tmp_path, entry):
    if entry == "fit":
        eager, lowered = (fit(tmp_path, LogsEverything, capture) for capture in ("off", "compile"))
        metrics, report = (eager.metrics, lowered.metrics), lowered.report
    else:
        trainers = [zdtrain.Trainer(**QUIET, logger=False, capture=capture) for capture in ("off", "compile")]
        for trainer in trainers:
            torch.manual_seed(0)
            trainer.validate(LogsEverything(), verbose=False)
        metrics, report = tuple(dict(trainer.callback_metrics) for trainer in trainers), trainers[1].capture_report
    program = program_of(report)
    assert program.verification == "within tolerance"
    assert program.replays > 5
    for name, value in metrics[0].items():
        assert torch.allclose(metrics[1][name], value, rtol=1e-3, atol=1e-5), name
