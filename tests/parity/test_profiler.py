"""A profiler sees the parts of a run under stock Lightning's names, as often as there."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler

import zdtrain
from zdtrain.monitors import NonFinite

from .harness import QUIET, Net, assert_parity
from .test_optimization import ByHand


class Several(Net):
    """Two validation loaders, a scheduler that follows steps, a hook of its own."""

    def val_dataloader(self):
        return [super().val_dataloader(), super().val_dataloader()]

    def validation_step(self, batch, batch_idx, dataloader_idx):
        super().validation_step(batch, batch_idx)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]


class Skips(Net):
    def training_step(self, batch, batch_idx):
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


def actions(make_trainer, folder, module, **options):
    torch.manual_seed(7)
    profiler = SimpleProfiler(dirpath=folder, filename="profile")
    callbacks = [EarlyStopping("val_loss", strict=False), ModelCheckpoint(folder / make_trainer.__module__)]
    options = {**QUIET, "logger": False, "callbacks": callbacks, "enable_checkpointing": True, **options}
    trainer = make_trainer(profiler=profiler, default_root_dir=folder, **options)
    trainer.fit(module())
    trainer.validate(verbose=False)
    counts = {name: len(durations) for name, durations in profiler.recorded_durations.items()}
    return {name.replace(str(folder / make_trainer.__module__), ""): count for name, count in counts.items()}


@pytest.mark.parametrize(
    ("module", "options"),
    [
        (Net, {}),
        (Net, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
        (Several, {"max_epochs": 1}),
        (Skips, {}),
        (ByHand, {}),
    ],
)
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_the_same_parts_are_timed_as_often(tmp_path, module, options):
    assert actions(zdtrain.Trainer, tmp_path, module, **options) == actions(pl.Trainer, tmp_path, module, **options)


@pytest.mark.parametrize("profiler", [SimpleProfiler, AdvancedProfiler, PyTorchProfiler])
def test_a_profiled_run_is_the_run_without_a_profiler(tmp_path, profiler):
    options = {"dirpath": tmp_path, "filename": "profile"}
    assert_parity(tmp_path, Net, do=lambda trainer, module: profile(trainer, module, profiler(**options)), spy=True)


def profile(trainer, module, profiler):
    trainer.profiler = profiler
    trainer.fit(module)


def test_a_profiled_run_can_be_watched(tmp_path):
    trainer = zdtrain.Trainer(
        **QUIET, logger=False, default_root_dir=tmp_path, profiler="simple", monitors=[NonFinite("loss", then="stop")]
    )
    trainer.fit(Net())
    assert trainer.profiler.recorded_durations["run_training_batch"]
