"""Python numbers among logged values: part of the program where they are constant, named where they are not."""

import itertools

import numpy as np
import pytest
import torch

import zdtrain.capture.tape
from zdtrain.capture.verify import first_mismatch
from zdtrain.optim import SimpleAdam

from .runs import Classifier, batches, both, codes, fit, trap_line
from .test_traps import Deterministic

NUMBERS = itertools.count()
WEIGHT = 0.5


class LogsConstants(Classifier):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters({"weight": 0.1})

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("weight", self.hparams["weight"], on_step=True, on_epoch=True)
        self.log("batch_size", float(len(batch[0])), reduce_fx="sum", on_epoch=True)
        self.log("count", len(batch[0]), on_epoch=True, batch_size=3)
        self.log("large", 2**24 + 1)
        self.log("flag", True, reduce_fx="max", on_epoch=True)
        self.log("nan", float("nan"), on_epoch=True)
        self.log_dict({"global": WEIGHT, "numpy": np.float32(0.1), "integer": np.int64(7)}, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))
        self.log("val_count", len(batch[0]), reduce_fx="sum")
        self.log("val_weight", self.hparams["weight"])


@pytest.mark.parametrize("window", [1, 2])
def test_constant_numbers_are_part_of_the_program(tmp_path, window):
    class Net(LogsConstants):
        def val_dataloader(self):
            return batches(8)

    run = both(tmp_path, Net, loader=lambda: batches(12, rest=3), accumulate_grad_batches=window)
    assert not codes(run) - {"many-keys"}
    assert run.report.steps_replayed > 20
    assert run.report.evaluation_replayed > 20
    assert run.metrics["batch_size_epoch"] == 12 * 8 + 3
    assert run.metrics["val_count"] == 64


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "64-true"])
def test_numbers_are_rounded_as_stock_lightning_rounds_them(tmp_path, precision):
    class Net(Deterministic):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            self.log("wide", loss.double(), on_epoch=True)
            self.log("wide", 0.1, on_epoch=True)  # of the default precision, in a place for float64
            self.log("rate", 0.1, on_epoch=True)
            return loss

        def configure_optimizers(self):
            return SimpleAdam(self.parameters(), lr=0.01)

    run = both(tmp_path, Net, precision=precision)
    assert codes(run) == set()
    assert run.report.steps_replayed >= 39
    dtype = torch.float64 if precision == "64-true" else torch.float32
    assert torch.equal(run.metrics["wide_step"], torch.tensor(0.1, dtype=dtype).double())


@pytest.mark.usefixtures("device_graphs")
@pytest.mark.parametrize("capture", ["graph", "compile"])
def test_constant_numbers_are_part_of_device_graphs(tmp_path, monkeypatch, capture):
    monkeypatch.setattr(zdtrain.capture.tape, "lower", lambda graph, arguments: graph.forward)
    eager, captured = (fit(tmp_path, LogsConstants, how) for how in ("off", capture))
    assert codes(captured) == set()
    assert captured.report.steps_replayed >= 39
    assert first_mismatch(eager.metrics, captured.metrics, exact=True) is None
    assert eager.rows == captured.rows


def test_a_repeated_number_is_written_without_a_copy_from_the_host():
    """A copy of a number that lies on the host is what a device graph refuses."""

    class Copies(torch.utils._python_dispatch.TorchDispatchMode):
        names = set()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.add(func._schema.name)
            return func(*args, **(kwargs or {}))

    class Net(Deterministic):
        def training_step(self, batch, batch_idx):
            self.log("first", 0.5)
            if batch_idx:
                with Copies():
                    self.log("first", 0.5)
            return self.loss(batch)

    import zdtrain

    zdtrain.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False).fit(Net(), batches(4))
    assert Copies.names == {"aten::fill_"}


class FromIterator(Deterministic):
    def training_step(self, batch, batch_idx):
        self.log("number", next(NUMBERS))  # trap
        return self.loss(batch)


class SizeFromIterator(Deterministic):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True, batch_size=1 + next(NUMBERS))  # trap
        return loss


class IndexOfBatch(Deterministic):
    def training_step(self, batch, batch_idx):
        self.log("index", batch_idx)  # trap
        return self.loss(batch)


class RateOfSchedule(Deterministic):
    def training_step(self, batch, batch_idx):
        self.log("rate", self.optimizers().param_groups[0]["lr"])  # trap
        return self.loss(batch)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class ChangedByHook(Deterministic):
    number = 0.0

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.number += 0.5  # trap

    def training_step(self, batch, batch_idx):
        self.log("number", self.number, on_epoch=True)
        return self.loss(batch)


CHANGING = {
    FromIterator: ("logged-number", "(2.0 -> 3.0)"),
    SizeFromIterator: ("logged-number", "batch_size"),
    IndexOfBatch: ("batch-idx", "batch_idx"),
    RateOfSchedule: ("python-state", "LearningRateMonitor"),
    ChangedByHook: ("python-state", "'number'"),
}


@pytest.mark.parametrize("module", CHANGING, ids=lambda cls: cls.__name__)
def test_a_number_that_changes_is_logged_right_and_named(tmp_path, module):
    def make():
        global NUMBERS
        NUMBERS = itertools.count()
        return module()

    run = both(tmp_path, make)
    assert run.report.steps_replayed == 0
    code, says = CHANGING[module]
    (reason,) = [reason for reason in run.report.fallbacks if reason.code == code]
    assert (reason.file, reason.line) == (__file__, trap_line(module))
    assert says in reason.message


def test_a_number_of_the_epoch_makes_a_program_per_epoch(tmp_path):
    class Net(Deterministic):
        def training_step(self, batch, batch_idx):
            self.log("epoch_number", float(self.current_epoch), on_epoch=True)
            return self.loss(batch)

    run = both(tmp_path, Net)
    assert codes(run) == set()
    assert len(run.report.programs) == 4


def test_a_number_that_is_another_one_after_a_while_makes_another_program(tmp_path):
    class Net(Deterministic):
        number = 1

        def on_train_epoch_start(self):
            self.number = 1 + self.current_epoch // 2

        def training_step(self, batch, batch_idx):
            self.log("number", self.number, on_epoch=True)
            return self.loss(batch)

    run = both(tmp_path, Net)
    assert codes(run) == set()
    assert len(run.report.programs) == 2


def test_the_learning_rate_of_a_schedule_by_epochs_is_logged_by_replays(tmp_path):
    class Net(RateOfSchedule):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

    run = both(tmp_path, Net)
    assert codes(run) == set()
    assert run.report.steps_replayed > 30


def test_a_learning_rate_that_is_a_tensor_is_logged_by_replays(tmp_path):
    class Net(RateOfSchedule):
        def configure_optimizers(self):
            optimizer = SimpleAdam(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    run = both(tmp_path, Net)
    assert codes(run) == set()
    assert [program.captures for program in run.report.programs] == [1]
    assert run.report.steps_replayed > 39
