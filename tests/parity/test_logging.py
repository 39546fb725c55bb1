"""What `self.log` brings to callbacks, progress bars and loggers equals stock Lightning's."""

import itertools

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from tests.parity.harness import MemoryLogger, Net, assert_parity, run
from zdtrain import Trainer

FLAGS = [
    {"on_step": on_step, "on_epoch": on_epoch, "prog_bar": prog_bar, "logger": logger}
    for on_step, on_epoch in ((True, False), (False, True), (True, True), (None, None))
    for prog_bar, logger in ((False, True), (True, False), (True, None))
]


def logging(write, *, val=None):
    """Make a module whose training step calls `write(module, loss, batch_idx)` and whose validation step `val`."""

    class Logging(Net):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            write(self, loss, batch_idx)
            return loss

        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            (val or write)(self, self.loss(batch), batch_idx)

    return Logging


@pytest.mark.parametrize("spy", [True, False])
@pytest.mark.parametrize("lr", [0.1, float("nan")])
def test_flags(tmp_path, spy, lr):
    def write(module, loss, batch_idx):
        for i, flags in enumerate(FLAGS):
            module.log(f"a{i}", loss * (i + 1), **flags)

    module = logging(write)
    module.lr = lr
    assert_parity(tmp_path, module, spy=spy)


@pytest.mark.parametrize("batch_size", [None, 3, 1])
@pytest.mark.parametrize("on_step", [True, False])
def test_reductions(tmp_path, batch_size, on_step):
    def write(module, loss, batch_idx):
        for i, reduction in enumerate(["mean", "sum", "min", "max", "avg", torch.mean, torch.sum, max, min]):
            flags = {"on_step": on_step, "on_epoch": True, "reduce_fx": reduction, "batch_size": batch_size}
            module.log(f"a{i}", loss, **flags)
            module.log(f"b{i}", -loss, **flags)

    assert_parity(tmp_path, logging(write), spy=on_step)


VALUES = {
    "float": lambda i: 0.1 * i,
    "int": lambda i: 2**24 + i,
    "bool": lambda i: i % 2 == 0,
    "float16": lambda i: torch.tensor(0.1 * i, dtype=torch.float16),
    "bfloat16": lambda i: torch.tensor(0.1 * i, dtype=torch.bfloat16),
    "float64": lambda i: torch.tensor(0.1 * i, dtype=torch.float64),
    "int64": lambda i: torch.tensor(2**24 + i),
    "uint8": lambda i: torch.tensor(i, dtype=torch.uint8),
    "bool-tensor": lambda i: torch.tensor(i % 2 == 0),
    "one-element": lambda i: torch.tensor([0.1 * i]),
    "one-element-2d": lambda i: torch.tensor([[0.1 * i]], dtype=torch.float64),
    "with-graph": lambda i: torch.tensor(0.1 * i, requires_grad=True) * 3,
    "parameter": lambda i: torch.nn.Parameter(torch.tensor(0.1 * i)),
    "nan-and-inf": lambda i: [float("nan"), float("inf"), 1.0, float("-inf")][i % 4],
    "float-then-tensor": lambda i: 0.1 if i % 2 else torch.tensor(0.1 * i),
    "half-then-int": lambda i: i if i % 2 else torch.tensor(0.1 * i, dtype=torch.float16),
    "changing-shape": lambda i: torch.full((1,) * (i % 3), 0.1 * i),
}


@pytest.mark.parametrize("kind", VALUES)
def test_kinds_of_values(tmp_path, kind):
    def write(module, loss, batch_idx):
        for reduction in ("mean", "max", "min", "sum"):
            flags = {"on_step": True, "on_epoch": True, "reduce_fx": reduction, "prog_bar": True}
            module.log(reduction, VALUES[kind](batch_idx), **flags)
        module.log("last", VALUES[kind](batch_idx), on_step=True, on_epoch=False)

    assert_parity(tmp_path, logging(write), spy=True)


@pytest.mark.parametrize("in_float64", [0, 1])
def test_a_key_logged_in_two_dtypes_keeps_its_numbers_and_stays_in_the_wider_one(tmp_path, in_float64):
    def write(module, loss, batch_idx):
        value = 1.1 * batch_idx
        dtype = torch.float64 if batch_idx % 2 == in_float64 else torch.float32
        module.log("sum", torch.tensor(value, dtype=dtype), on_step=True, on_epoch=True, reduce_fx="sum")
        module.log("number", torch.tensor(value, dtype=dtype) if dtype == torch.float64 else value, on_step=True)

    stock, _ = run(pl.Trainer, tmp_path / "stock", logging(write, val=lambda *args: None))
    ours, _ = run(Trainer, tmp_path / "ours", logging(write, val=lambda *args: None))
    assert ours.rows == stock.rows
    assert {dict(ours.metrics["callback_metrics"])[name].dtype for name in ("sum", "number")} == {torch.float64}


@pytest.mark.parametrize("value", [torch.ones(2), torch.ones(0), "text", {"a": {"b": 1.0}}, None], ids=repr)
@pytest.mark.parametrize("at", [0, 2])
def test_values_that_are_refused(tmp_path, value, at):
    def write(module, loss, batch_idx):
        module.log("a", loss)
        module.log("b", value if batch_idx == at else loss)

    assert assert_parity(tmp_path, logging(write), spy=True).error


def only_even(module, loss, batch_idx):
    if batch_idx % 2 == 0:
        module.log("a", loss, on_step=True, on_epoch=True, prog_bar=True)
    module.log("b", loss, on_epoch=True)


def only_odd(module, loss, batch_idx):
    if batch_idx % 2:
        module.log("a", loss, on_step=True, on_epoch=True, prog_bar=True)


def only_in_the_second_epoch(module, loss, batch_idx):
    if module.current_epoch == 1:
        module.log("a", loss, on_step=True, on_epoch=True, prog_bar=True)
    module.log("b", loss)


def only_in_the_first_epoch(module, loss, batch_idx):
    if module.current_epoch == 0:
        module.log("a", loss, on_step=True, on_epoch=True, prog_bar=True)
    module.log("b", loss)


def in_another_order_each_step(module, loss, batch_idx):
    for name in ("ab", "ba")[batch_idx % 2]:
        module.log(name, loss, on_step=True, on_epoch=True)


def twice_in_a_step(module, loss, batch_idx):
    module.log("a", loss, on_step=True, on_epoch=True, prog_bar=True)
    module.log("a", loss * 2, on_step=True, on_epoch=True, prog_bar=True)
    module.log("b", loss, on_epoch=True, reduce_fx="max")
    module.log("b", loss * 2, on_epoch=True, reduce_fx="max")


def twice_with_other_flags(module, loss, batch_idx):
    module.log("a", loss)
    module.log("a", loss, prog_bar=batch_idx == 3)


def changed_afterwards(module, loss, batch_idx):
    value = loss.detach()
    module.log("a", value, on_step=True, on_epoch=True, prog_bar=True)
    value.mul_(2)


def one_buffer_again_and_again(module, loss, batch_idx):
    if not hasattr(module, "buffer_"):
        module.buffer_ = torch.zeros(())
    module.buffer_.add_(1)
    module.log("a", module.buffer_, on_step=True, on_epoch=True)
    module.buffer_.mul_(2)


def read_back(module, loss, batch_idx):
    module.log("a", loss, on_step=True, on_epoch=True, prog_bar=True)
    module.seen.append(
        {k: float(v) for k, v in module.trainer.callback_metrics.items()} | dict(module.trainer.progress_bar_metrics)
    )
    module.log("b", loss, on_step=True)
    module.seen.append({k: float(v) for k, v in module.trainer.logged_metrics.items()})


def growing(module, loss, batch_idx):
    for name in "abcdefg"[: batch_idx + 1]:
        module.log(name, loss, on_step=True, on_epoch=True)


def many(module, loss, batch_idx):
    for i in range(70):
        module.log(f"m{i}", loss + i, on_step=i % 2 == 0, on_epoch=True, prog_bar=i % 5 == 0)


def step_key(module, loss, batch_idx):
    module.log("step", 10.0 * batch_idx)
    module.log("a", loss)


def epoch_key(module, loss, batch_idx):
    module.log("epoch", 7.0, on_step=True, on_epoch=True)


def changing_batch_size(module, loss, batch_idx):
    module.log("a", loss, on_step=True, on_epoch=True, batch_size=batch_idx + 1)
    module.log("b", loss, on_epoch=True, batch_size=torch.tensor(batch_idx + 1))
    module.log("c", loss, on_epoch=True)


def as_dict(module, loss, batch_idx):
    module.log_dict({"a": loss, "b": 0.5, "c": batch_idx}, on_step=True, on_epoch=True, prog_bar=True)


def value_that_is_a_dict(module, loss, batch_idx):
    module.log("a", {"x": loss, "y": 2 * loss})


def with_graph(module, loss, batch_idx):
    module.log("a", loss, enable_graph=True, on_step=True, on_epoch=True)


def no_dataloader_idx(module, loss, batch_idx):
    module.log("a", loss, add_dataloader_idx=False, on_epoch=True)


def positional(module, loss, batch_idx):
    module.log("a", loss, True, None, True, True, "sum")


def synced(module, loss, batch_idx):
    module.log("a", loss, sync_dist=True, rank_zero_only=True, on_step=True, on_epoch=True)


@pytest.mark.parametrize(("window", "spy"), [(1, False), (5, True)])
@pytest.mark.parametrize(
    "write",
    [
        only_even,
        only_odd,
        only_in_the_second_epoch,
        only_in_the_first_epoch,
        in_another_order_each_step,
        twice_in_a_step,
        changed_afterwards,
        one_buffer_again_and_again,
        read_back,
        growing,
        many,
        step_key,
        epoch_key,
        changing_batch_size,
        as_dict,
        value_that_is_a_dict,
        with_graph,
        no_dataloader_idx,
        positional,
        synced,
    ],
)
def test_ways_of_logging(tmp_path, write, window, spy):
    assert_parity(tmp_path, logging(write), accumulate_grad_batches=window, spy=spy)


@pytest.mark.parametrize("window", [1, 5])
def test_the_same_key_with_other_flags_is_refused(tmp_path, window):
    assert assert_parity(tmp_path, logging(twice_with_other_flags), accumulate_grad_batches=window, spy=True).error


IN_HOOKS = (
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_test_epoch_end",
    "on_fit_start",
    "on_train_end",
    "on_before_batch_transfer",
)


@pytest.mark.parametrize(
    ("by", "hook"),
    [*(("module", hook) for hook in IN_HOOKS), *(("callback", hook) for hook in IN_HOOKS if hasattr(Callback, hook))],
)
def test_logging_in_every_hook(tmp_path, by, hook):
    count = itertools.count()

    def note(module, *args):
        module.log("here", 0.1 * next(count))
        module.log("more", 0.1 * next(count), prog_bar=True, on_epoch=True)
        module.log("loss", 3.0)  # as in the training step

    def make():
        nonlocal count
        count = itertools.count()

        class Logging(Net):
            pass

        if by == "module":

            def method(self, *args):
                note(self)
                return args[0] if hook == "on_before_batch_transfer" else None

            setattr(Logging, hook, method)
        return Logging()

    def callbacks():
        class Logs(Callback):
            pass

        if by == "callback":
            setattr(Logs, hook, lambda self, trainer, module, *args, **kwargs: note(module))
        return [Logs()]

    assert_parity(tmp_path, make, callbacks=callbacks, spy=True)


class WithMetrics(Net):
    def __init__(self):
        super().__init__()
        self.mae, self.val_mae = torchmetrics.MeanAbsoluteError(), torchmetrics.MeanAbsoluteError()
        self.mean = torchmetrics.MeanMetric()
        self.collection = torchmetrics.MetricCollection(
            [torchmetrics.MeanSquaredError(), torchmetrics.R2Score()], prefix="c/"
        )


class AsObjects(WithMetrics):
    def training_step(self, batch, batch_idx):
        x, y = batch
        y_hat = self.net(x)
        self.mae(y_hat, y)
        self.log("mae", self.mae, on_step=True, on_epoch=True, prog_bar=True)
        loss = torch.nn.functional.mse_loss(y_hat, y)
        self.mean.update(loss)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.val_mae.update(self.net(batch[0]), batch[1])
        self.log("val_mae", self.val_mae)


class AsValues(WithMetrics):
    def training_step(self, batch, batch_idx):
        x, y = batch
        y_hat = self.net(x)
        self.log("mae", self.mae(y_hat, y), on_step=True, on_epoch=True)
        self.log_dict(self.collection(y_hat, y), on_step=True)
        return torch.nn.functional.mse_loss(y_hat, y)

    def on_train_epoch_end(self):
        self.log("mae_epoch_value", self.mae.compute())
        self.mae.reset()


class AsCollection(WithMetrics):
    def training_step(self, batch, batch_idx):
        x, y = batch
        y_hat = self.net(x)
        self.collection(y_hat, y)
        self.log_dict(self.collection, on_step=True, on_epoch=True, prog_bar=True)
        return torch.nn.functional.mse_loss(y_hat, y)


class SometimesUpdated(WithMetrics):
    def training_step(self, batch, batch_idx):
        x, y = batch
        y_hat = self.net(x)
        if batch_idx % 2 == 0:
            self.mae(y_hat, y)
            self.log("mae", self.mae, on_step=True, on_epoch=True)
        elif batch_idx == 3:
            self.mae.update(y_hat, y)
        return torch.nn.functional.mse_loss(y_hat, y)


class AnotherObject(WithMetrics):
    def training_step(self, batch, batch_idx):
        x, y = batch
        y_hat = self.net(x)
        metric = self.mae if batch_idx % 2 == 0 else self.val_mae
        metric(y_hat, y)
        self.log("mae", metric, on_step=True, on_epoch=True)
        return torch.nn.functional.mse_loss(y_hat, y)


class NotAnAttribute(WithMetrics):
    def training_step(self, batch, batch_idx):
        metric = torchmetrics.MeanMetric()
        metric(1.0)
        self.log("mean", metric)
        return self.loss(batch)


@pytest.mark.parametrize("spy", [True, False])
@pytest.mark.parametrize("module", [AsObjects, AsValues, AsCollection, SometimesUpdated, AnotherObject, NotAnAttribute])
def test_torchmetrics(tmp_path, module, spy):
    assert_parity(tmp_path, module, spy=spy)


@pytest.mark.parametrize("every", [1, 3, 50, 0])
@pytest.mark.parametrize("window", [1, 2])
def test_logging_interval(tmp_path, every, window):
    assert_parity(tmp_path, Net, log_every_n_steps=every, accumulate_grad_batches=window, lightning_quirks=True)


def test_several_loggers_get_the_same_calls(tmp_path):
    def make(folder):
        return [CSVLogger(folder, name="one", version=0), MemoryLogger(), CSVLogger(folder, name="two", version=0)]

    assert_parity(tmp_path, Net, loggers=make)


def test_tensorboard_events(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def fit_and_read(trainer, module):
        trainer.fit(module)
        trainer.logger.experiment.flush()
        events = event_accumulator.EventAccumulator(trainer.logger.log_dir)
        events.Reload()
        return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in sorted(events.Tags()["scalars"])}

    ours = assert_parity(tmp_path, Net, loggers=lambda folder: TensorBoardLogger(folder), do=fit_and_read)
    assert len(ours.result["loss_step"]) == 5


def test_no_logger(tmp_path):
    assert_parity(tmp_path, Net, loggers=lambda folder: False, spy=True)


def test_barebones(tmp_path):
    quiet = ("num_sanity_val_steps", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    options = dict.fromkeys((*quiet, "log_every_n_steps"))
    assert_parity(tmp_path, Net, loggers=lambda folder: None, barebones=True, **options)


def test_calls_to_the_logger_itself_keep_their_place(tmp_path):
    def write(module, loss, batch_idx):
        module.log("a", loss)
        module.logger.log_metrics({"direct": float(batch_idx)}, step=module.global_step)

    assert_parity(tmp_path, logging(write), log_every_n_steps=1)


class OwnLog(Net):
    def log(self, name, value, **kwargs):
        super().log(f"own/{name}", value, **kwargs)


def test_a_module_with_a_log_of_its_own(tmp_path):
    assert_parity(tmp_path, OwnLog, spy=True)


def test_several_validation_loaders(tmp_path):
    class Several(Net):
        def val_dataloader(self):
            return [super().val_dataloader(), super().train_dataloader()]

        def validation_step(self, batch, batch_idx, dataloader_idx):
            self.log("val_loss", self.loss(batch), prog_bar=True)
            self.log(f"both_{dataloader_idx}", self.loss(batch), add_dataloader_idx=False, on_step=True)

    assert_parity(tmp_path, Several, spy=True)
