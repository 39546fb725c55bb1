"""Learning rates over a run equal stock Lightning's."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback, LearningRateMonitor
from torch.optim import lr_scheduler

from tests.parity.harness import MemoryLogger, Net, assert_parity


class Rates(Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        module.seen.append([group["lr"] for group in trainer.optimizers[0].param_groups])


SCHEDULERS = {
    "step": lambda o: {"scheduler": lr_scheduler.StepLR(o, 2, 0.5), "interval": "step"},
    "step-every-2": lambda o: {"scheduler": lr_scheduler.StepLR(o, 1, 0.5), "interval": "step", "frequency": 2},
    "epoch": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    "epoch-every-2": lambda o: {"scheduler": lr_scheduler.ExponentialLR(o, 0.5), "frequency": 2},
    "one-cycle": lambda o: {"scheduler": lr_scheduler.OneCycleLR(o, 0.2, total_steps=16), "interval": "step"},
    "cosine": lambda o: {"scheduler": lr_scheduler.CosineAnnealingWarmRestarts(o, 3), "interval": "step"},
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "sequential": lambda o: {
        "scheduler": lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.StepLR(o, 2)], [3]
        ),
        "interval": "step",
    },
    "plateau": lambda o: {
        "scheduler": lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.5),
        "monitor": "val_loss",
    },
    "plateau-of-step": lambda o: {
        "scheduler": lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.5),
        "monitor": "loss",
        "interval": "step",
    },
    "plateau-of-epoch-mean": lambda o: {
        "scheduler": lr_scheduler.ReduceLROnPlateau(o, patience=0, mode="max"),
        "monitor": "loss_epoch",
    },
    "plateau-every-2-steps": lambda o: {
        "scheduler": lr_scheduler.ReduceLROnPlateau(o, patience=0, mode="max"),
        "monitor": "loss",
        "interval": "step",
        "frequency": 2,
    },
    "plateau-not-there": lambda o: {"scheduler": lr_scheduler.ReduceLROnPlateau(o), "monitor": "nothing"},
    "plateau-not-there-lenient": lambda o: {
        "scheduler": lr_scheduler.ReduceLROnPlateau(o),
        "monitor": "nothing",
        "strict": False,
    },
}


@pytest.mark.parametrize(
    ("name", "window"), [*((name, 1) for name in SCHEDULERS), *((name, 2) for name in SCHEDULERS if "step" in name)]
)
def test_schedulers(tmp_path, name, window):
    class Scheduled(Net):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            return [optimizer], [SCHEDULERS[name](optimizer)]

    assert_parity(
        tmp_path,
        Scheduled,
        callbacks=lambda: [Rates()],
        accumulate_grad_batches=window,
        lightning_quirks=True,
        max_epochs=3,
    )


def test_two_schedulers_with_validation_inside_the_epoch(tmp_path):
    class Scheduled(Net):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [SCHEDULERS["plateau"](optimizer), SCHEDULERS["step"](optimizer)]

    assert_parity(tmp_path, Scheduled, callbacks=lambda: [Rates()], val_check_interval=2, max_epochs=3)


@pytest.mark.parametrize("interval", ["step", "epoch", None])
@pytest.mark.parametrize("every", [1, 2])
def test_learning_rate_monitor(tmp_path, interval, every):
    class Scheduled(Net):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            return [optimizer], [SCHEDULERS["step"](optimizer), SCHEDULERS["epoch"](optimizer)]

    assert_parity(
        tmp_path,
        Scheduled,
        callbacks=lambda: [LearningRateMonitor(interval, log_momentum=True, log_weight_decay=True)],
        loggers=lambda folder: MemoryLogger(),
        log_every_n_steps=every,
        spy=True,
    )
