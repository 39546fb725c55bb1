"""A step that optimizes by hand, with several optimizers, is captured as one program."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from examples.gan import GAN, ring

from .runs import both, codes


def points(n=12):
    return DataLoader(TensorDataset(ring(n * 16)), batch_size=16)


def test_a_gan_trains_to_the_same_bits(tmp_path):
    run = both(tmp_path, GAN, loader=lambda: points(40), max_epochs=5)
    (program,) = run.report.programs
    assert program.replays > 180
    assert program.includes_optimizer
    assert run.report.fallbacks == ()
    assert run.trainer.global_step == 2 * 200


@pytest.mark.parametrize("fused", [None, True])
def test_optimizers_of_torch_take_part(tmp_path, fused):
    class Net(GAN):
        def configure_optimizers(self):
            parts = (self.generator, self.discriminator)
            return [torch.optim.Adam(part.parameters(), lr=1e-3, fused=fused) for part in parts]

    assert both(tmp_path, Net, loader=points).report.steps_replayed > 35


def test_an_optimizer_that_steps_several_times_counts_every_update(tmp_path):
    class Net(GAN):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            super().training_step(batch, batch_idx)

        def configure_optimizers(self):
            return [torch.optim.Adam(self.generator.parameters()), torch.optim.NAdam(self.discriminator.parameters())]

    run = both(tmp_path, Net, loader=points, max_epochs=2)
    assert run.report.steps_replayed > 12
    assert next(iter(run.optimizers[1]["state"].values()))["step"] == 2 * 24


def test_an_optimizer_that_cannot_be_recorded_keeps_the_step_eager(tmp_path):
    class Net(GAN):
        def configure_optimizers(self):
            parts = (self.generator, self.discriminator)
            return [torch.optim.NAdam(part.parameters(), lr=1e-3, foreach=True) for part in parts]

    run = both(tmp_path, Net, loader=points)
    assert run.report.steps_replayed == 0
    assert "optimizer-by-hand" in codes(run)


def test_schedulers_that_the_module_steps_keep_the_step_eager(tmp_path):
    class Net(GAN):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            self.lr_schedulers().step()

        def configure_optimizers(self):
            optimizers = super().configure_optimizers()
            return optimizers, [torch.optim.lr_scheduler.StepLR(optimizers[0], 5, 0.5)]

    run = both(tmp_path, Net, loader=points)
    assert run.report.steps_replayed == 0
    assert "scheduler-by-hand" in codes(run)


def test_schedulers_that_a_hook_steps_do_not(tmp_path):
    class Net(GAN):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.lr_schedulers().step()

        def configure_optimizers(self):
            optimizers = super().configure_optimizers()
            return optimizers, [torch.optim.lr_scheduler.StepLR(optimizers[0], 5, 0.5)]

    assert both(tmp_path, Net, loader=points).report.steps_replayed > 35


def test_updates_that_happen_in_every_other_step_are_replayed(tmp_path):
    class Net(GAN):
        def training_step(self, batch, batch_idx):
            if batch_idx % 2:
                return
            super().training_step(batch, batch_idx)

    run = both(tmp_path, Net, loader=points, max_epochs=6)
    assert not codes(run)
    assert run.report.steps_replayed > 30
