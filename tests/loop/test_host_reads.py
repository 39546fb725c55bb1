"""How often the host reads a tensor does not depend on the number of steps."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, RichProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import zdtrain

READS = {
    "aten::_local_scalar_dense",  # item, bool, float, int, format
    "aten::item",  # what inference mode leaves of the above
    "aten::is_nonzero",
    "aten::equal",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
}


class HostReads(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name in READS
        return func(*args, **(kwargs or {}))


class Net(pl.LightningModule):
    """Four metrics; its optimizer reads nothing by itself."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        (x,) = batch
        y = self.net(x)
        loss = y.square().mean()
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log("largest", y.max(), prog_bar=True, reduce_fx="max", on_step=True, on_epoch=True)
        self.log("sum", y.sum(), on_step=True, on_epoch=True, reduce_fx="sum")
        self.log("smallest", y.min(), prog_bar=True, on_step=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net(batch[0]).square().mean(), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 50), "interval": "step"}]


class ByHand(Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.lr_schedulers().step()


def reads_of(trainer_class, steps, folder, module=Net, **options):
    data = DataLoader(TensorDataset(torch.randn(steps, 4)), batch_size=1)
    trainer = trainer_class(
        accelerator="cpu",
        max_epochs=1,
        log_every_n_steps=10,
        num_sanity_val_steps=0,
        enable_model_summary=False,
        logger=CSVLogger(folder),
        callbacks=[
            RichProgressBar(),
            LearningRateMonitor("step"),
            EarlyStopping("val_loss"),
            ModelCheckpoint(monitor="val_loss", dirpath=folder),
        ],
        **options,
    )
    with HostReads() as reads:
        trainer.fit(module(), data, DataLoader(TensorDataset(torch.randn(4, 4)), batch_size=2))
    assert trainer.global_step == steps // options.get("accumulate_grad_batches", 1)
    return reads.count


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.1}, {"accumulate_grad_batches": 2}], ids=str)
def test_a_fit_reads_as_often_for_400_steps_as_for_200(tmp_path, capsys, options, precision):
    def half():  # what 16-mixed is on a GPU
        return [MixedPrecision(precision, "cpu")] if precision == "16-mixed" else []

    counts = [
        reads_of(zdtrain.Trainer, steps, tmp_path / str(steps), plugins=half(), **options) for steps in (200, 400)
    ]
    assert counts[0] == counts[1]
    assert 0 < counts[0] < 200  # what is read at the end of the epoch


def test_a_fit_that_optimizes_by_hand_reads_as_often_for_400_steps_as_for_200(tmp_path, capsys):
    counts = [reads_of(zdtrain.Trainer, steps, tmp_path / str(steps), ByHand) for steps in (200, 400)]
    assert counts[0] == counts[1]


def test_the_count_sees_what_stock_lightning_reads(tmp_path, capsys):
    short, long = (reads_of(pl.Trainer, steps, tmp_path / str(steps)) for steps in (20, 40))
    assert (long - short) / 20 > 3


def test_the_records_of_every_step_cost_no_read(tmp_path, capsys):
    counts = [
        reads_of(zdtrain.Trainer, steps, tmp_path / str(steps), records=tmp_path / "runs") for steps in (100, 200)
    ]
    assert counts[0] == counts[1]


class Validated(Net):
    def validation_step(self, batch, batch_idx):
        y = self.net(batch[0])
        self.log("val_loss", y.square().mean(), prog_bar=True, on_step=True, on_epoch=True)
        self.log("val_largest", y.max(), reduce_fx="max", on_step=True, on_epoch=True)
        self.log("val_sum", y.sum(), prog_bar=True, reduce_fx="sum")

    test_step = validation_step


def reads_of_evaluation(trainer_class, entry, size, folder):
    loader = DataLoader(TensorDataset(torch.randn(size, 4)), batch_size=1)
    trainer = trainer_class(
        accelerator="cpu",
        max_epochs=1,
        num_sanity_val_steps=2,
        enable_model_summary=False,
        logger=CSVLogger(folder),
        callbacks=[RichProgressBar(), EarlyStopping("val_loss"), ModelCheckpoint(monitor="val_loss", dirpath=folder)],
    )
    with HostReads() as reads:
        if entry == "fit":
            trainer.fit(Validated(), DataLoader(TensorDataset(torch.randn(4, 4))), loader)
        else:
            getattr(trainer, entry)(Validated(), loader)
    return reads.count


@pytest.mark.parametrize("entry", ["fit", "validate", "test"])
def test_an_evaluation_reads_as_often_for_400_batches_as_for_200(tmp_path, capsys, entry):
    counts = [reads_of_evaluation(zdtrain.Trainer, entry, size, tmp_path / str(size)) for size in (200, 400)]
    assert counts[0] == counts[1] < 100
    short, long = (reads_of_evaluation(pl.Trainer, entry, size, tmp_path / f"stock{size}") for size in (10, 20))
    assert (long - short) / 10 > 1
