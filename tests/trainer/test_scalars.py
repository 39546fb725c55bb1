"""`Trainer(scalars=...)`: numbers on the device that a run shares."""

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from zdtrain import Trainer
from zdtrain.errors import ConfigError

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Scaled(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.seen = []
        self.counters = []
        self.addresses = set()

    def training_step(self, batch, batch_idx):
        scalars = self.trainer.scalars
        self.addresses.add((scalars.alpha.data_ptr(), scalars.global_step.data_ptr()))
        self.seen.append(scalars.alpha.clone())
        self.counters.append((scalars.global_step.clone(), self.global_step, scalars.current_epoch.clone()))
        return scalars.alpha * self.layer(batch[0]).square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.trainer.scalars.alpha = self.trainer.scalars.host("alpha") / 2

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(batches=3):
    return DataLoader(TensorDataset(torch.ones(batches, 2)), batch_size=1)


def trainer(tmp_path, **options):
    return Trainer(**{**QUIET, "default_root_dir": tmp_path, "max_epochs": 1, "enable_checkpointing": False, **options})


def test_a_scalar_written_between_steps_is_seen_by_the_next_at_the_same_address(tmp_path):
    module = Scaled()
    trainer(tmp_path, scalars={"alpha": 1.0}).fit(module, loader())
    assert torch.stack(module.seen).tolist() == [1.0, 0.5, 0.25]
    assert len(module.addresses) == 1


def test_counters_on_the_device_equal_lightnings(tmp_path):
    module = Scaled()
    trainer(tmp_path, scalars={"alpha": 1.0}, max_epochs=2, accumulate_grad_batches=2).fit(module, loader(4))
    on_device = [(int(step), int(epoch)) for step, _, epoch in module.counters]
    assert on_device == [(0, 0), (0, 0), (1, 0), (1, 0), (2, 1), (2, 1), (3, 1), (3, 1)]
    assert [step for step, _ in on_device] == [step for _, step, _ in module.counters]


def test_counters_are_not_written_while_nobody_reads_scalars(tmp_path):
    class Plain(Scaled):
        def training_step(self, batch, batch_idx):
            return self.layer(batch[0]).mean()

        def on_train_batch_end(self, outputs, batch, batch_idx):
            pass

    run = trainer(tmp_path)
    run.fit(Plain(), loader())
    assert not run.counters_on_device
    assert isinstance(run.scalars.global_step, Tensor)
    assert int(run.scalars.global_step) == 3


def test_scalars_come_back_from_a_checkpoint(tmp_path):
    first = trainer(tmp_path, scalars={"alpha": 1.0, "gone": 2.0})
    first.fit(Scaled(), loader())
    first.save_checkpoint(tmp_path / "run.ckpt")
    module = Scaled()
    second = trainer(tmp_path, scalars={"alpha": 9.0}, max_epochs=2)
    second.fit(module, loader(), ckpt_path=tmp_path / "run.ckpt")
    assert torch.stack(module.seen).tolist() == [0.125, 0.0625, 0.03125]


def test_stock_lightning_reads_a_checkpoint_with_scalars(tmp_path):
    class Plain(Scaled):
        def training_step(self, batch, batch_idx):
            return self.layer(batch[0]).mean()

        def on_train_batch_end(self, outputs, batch, batch_idx):
            pass

    first = trainer(tmp_path, scalars={"alpha": 1.0})
    first.fit(Plain(), loader())
    first.save_checkpoint(tmp_path / "run.ckpt")
    stock = pl.Trainer(**QUIET, default_root_dir=tmp_path, max_epochs=2, enable_checkpointing=False)
    with pytest.warns(UserWarning, match="ScalarsState"):
        stock.fit(Plain(), loader(), ckpt_path=tmp_path / "run.ckpt")
    assert stock.global_step == 6


@pytest.mark.parametrize(
    ("scalars", "message"),
    [
        (3.0, r"trainer\.scalars=3\.0: use a mapping"),
        ({"global_step": 1}, r"'global_step' is kept by the Trainer"),
        ({"alpha": torch.ones(2)}, "alpha"),
    ],
)
def test_scalars_that_cannot_be_used_are_refused_by_name(scalars, message):
    with pytest.raises(ConfigError, match=message):
        Trainer(**QUIET, scalars=scalars)


def test_scalars_that_validation_read_first_can_be_written_in_training(tmp_path):
    class Watching(Scaled):
        def validation_step(self, batch, batch_idx):
            self.log("alpha", self.trainer.scalars.alpha)

    module = Watching()
    run = trainer(tmp_path, scalars={"alpha": 1.0})
    run.validate(module, loader())
    run.fit(module, loader())
    assert torch.stack(module.seen).tolist() == [1.0, 0.5, 0.25]
