"""However a run ends and however late copies arrive, every row that was logged reaches its logger, in order."""

import csv
import itertools
import os
import signal
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException

import zdtrain.trainer
from zdtrain.device import HostRuntime
from zdtrain.device.lagging import LaggingRuntime
from zdtrain.records import load_run

EPOCH, LAST = 6, 9  # batches per epoch, number of the batch that ends the run


class Net(BoringModel):
    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("number", float(self.trainer.fit_loop.epoch_loop.total_batch_idx))
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch).square().mean(), on_step=True)


def by_exception():
    raise RuntimeError("boom")


def by_keyboard():
    raise KeyboardInterrupt


def by_exit():
    raise SystemExit(3)


def by_sigterm():
    os.kill(os.getpid(), signal.SIGTERM)


def by_should_stop():
    return "should_stop"


ENDS = {
    by_exception: RuntimeError,
    by_keyboard: SystemExit,
    by_exit: SystemExit,
    by_sigterm: SIGTERMException,
    by_should_stop: None,
}


class End(Callback):
    """Ends the run in a hook of batch `LAST`."""

    def __init__(self, hook, end):
        def hook_of_callback(trainer, *args):
            if trainer.fit_loop.epoch_loop.total_batch_idx == LAST and not trainer.sanity_checking and end():
                trainer.should_stop = True

        setattr(self, hook, hook_of_callback)


@pytest.fixture(autouse=True)
def signals_as_before():
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def rows_of(trainer_class, folder: Path, end, hook, **options):
    """Return the rows of the CSV file of a run that `end` ends."""
    torch.manual_seed(1)
    trainer = trainer_class(
        accelerator="cpu",
        max_epochs=3,
        limit_train_batches=EPOCH,
        limit_val_batches=2,
        val_check_interval=2,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        logger=CSVLogger(folder, version=0),
        callbacks=[End(hook, end)],
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        **options,
    )
    expected = ENDS[end]
    if expected is None:
        trainer.fit(Net())
    else:
        with pytest.raises(expected):
            trainer.fit(Net())
    with open(Path(trainer.logger.log_dir, "metrics.csv"), newline="") as file:
        return list(csv.DictReader(file))


HOOKS = ("on_before_backward", "on_train_batch_end", "on_train_batch_start", "on_validation_batch_end")


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("end", ENDS)
def test_rows_equal_stock_lightnings_however_late_they_arrive(monkeypatch, tmp_path, end, hook):
    stock = rows_of(pl.Trainer, tmp_path / "stock", end, hook)
    assert [float(row["number"]) for row in stock if row["number"]][: LAST - 1] == list(range(LAST - 1))
    for runtime in (HostRuntime(), LaggingRuntime(lag=2), LaggingRuntime(lag=10_000)):
        monkeypatch.setattr(zdtrain.trainer, "runtime_for", lambda device, runtime=runtime: runtime)
        folder = tmp_path / f"{type(runtime).__name__}-{getattr(runtime, 'lag', 0)}"
        assert rows_of(zdtrain.Trainer, folder, end, hook) == stock


@pytest.mark.parametrize("lag", [0, 10_000])
@pytest.mark.parametrize("end", ENDS)
def test_records_hold_every_finished_step_however_the_run_ends(monkeypatch, tmp_path, end, lag):
    monkeypatch.setattr(zdtrain.trainer, "runtime_for", lambda device: LaggingRuntime(lag=lag))
    rows_of(zdtrain.Trainer, tmp_path, end, "on_before_backward", records=tmp_path / "runs")
    (folder,) = {path.parent for path in (tmp_path / "runs").rglob("metrics.jsonl")}
    _, numbers = load_run(folder).series("number")
    finished = LAST + (end in (by_sigterm, by_should_stop))  # these two let the step end
    assert list(itertools.islice(numbers, finished)) == [float(i) for i in range(finished)]


def test_an_error_of_a_logger_reaches_the_user(tmp_path):
    class Full(CSVLogger):
        def log_metrics(self, metrics, step=None):
            if step == 3:
                raise OSError("disk full")
            super().log_metrics(metrics, step)

    trainer = zdtrain.Trainer(
        accelerator="cpu",
        max_epochs=1,
        limit_train_batches=EPOCH,
        limit_val_batches=0,
        log_every_n_steps=1,
        logger=Full(tmp_path),
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    with pytest.raises(OSError, match="disk full"):
        trainer.fit(Net())
