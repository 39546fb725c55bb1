"""Stock callbacks decide, save and change the same as with stock Lightning."""

import copy
import pickle
from datetime import timedelta

import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    LambdaCallback,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    RichProgressBar,
    StochasticWeightAveraging,
    Timer,
    TQDMProgressBar,
    WeightAveraging,
)
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.tuner import Tuner

from tests.parity.harness import MemoryLogger, Net, assert_parity, loader

STOPPERS = {
    "val": {"monitor": "val_loss", "patience": 1},
    "train": {"monitor": "loss", "patience": 1, "mode": "max"},
    "threshold": {"monitor": "val_loss", "stopping_threshold": 5.0},
    "divergence": {"monitor": "loss_epoch", "divergence_threshold": 0.1},
    "at-train-end": {"monitor": "loss_epoch", "patience": 0, "mode": "max", "check_on_train_epoch_end": True},
    "not-there": {"monitor": "nothing"},
    "not-there-lenient": {"monitor": "nothing", "strict": False},
}


@pytest.mark.parametrize(
    ("options", "val_check_interval"),
    [*((options, 1.0) for options in STOPPERS.values()), (STOPPERS["val"], 2), (STOPPERS["train"], 2)],
    ids=str,
)
def test_early_stopping(tmp_path, options, val_check_interval):
    class Diverges(Net):
        lr = 3.0

    assert_parity(
        tmp_path,
        Diverges,
        callbacks=lambda: [EarlyStopping(**options)],
        max_epochs=6,
        val_check_interval=val_check_interval,
    )


@pytest.mark.parametrize("minimum", [{"min_epochs": 3}, {"min_steps": 12}])
def test_an_early_stop_before_the_minimum_under_quirks(tmp_path, minimum):
    assert_parity(
        tmp_path,
        Net,
        callbacks=lambda: [EarlyStopping("loss_epoch", patience=0, mode="max")],
        max_epochs=6,
        lightning_quirks=True,
        **minimum,
    )


CHECKPOINTS = {
    "default": {},
    "top-2": {"monitor": "val_loss", "save_top_k": 2, "filename": "{epoch}-{step}-{val_loss:.3f}"},
    "top-2-of-train": {"monitor": "loss", "save_top_k": 2, "mode": "max", "save_last": True},
    "every-2-steps": {"every_n_train_steps": 2, "save_top_k": -1, "filename": "{epoch}-{step}-{loss:.4f}"},
    "every-3-steps-monitored": {
        "every_n_train_steps": 3,
        "monitor": "loss_step",
        "save_top_k": 2,
        "filename": "{step}-{loss_step:.4f}",
    },
    "every-step-of-epoch-metric": {"every_n_train_steps": 1, "monitor": "val_loss", "save_top_k": 1},
    "every-2-epochs": {"every_n_epochs": 2, "save_top_k": -1},
    "by-time": {"train_time_interval": timedelta(0), "save_top_k": -1},
    "weights-only": {"save_weights_only": True, "save_last": "link"},
    "at-train-end": {"monitor": "loss_epoch", "save_on_train_epoch_end": True, "auto_insert_metric_name": False},
    "not-there": {"monitor": "nothing"},
    "epoch-and-steps": {"monitor": "val_loss", "every_n_train_steps": 4, "save_last": True},
}


@pytest.mark.parametrize("options", CHECKPOINTS.values(), ids=CHECKPOINTS)
@pytest.mark.parametrize("inside_epoch", [False, True])
def test_checkpoints(tmp_path, options, inside_epoch):
    more = {"val_check_interval": 2, "accumulate_grad_batches": 2} if inside_epoch else {}
    assert_parity(
        tmp_path,
        Net,
        callbacks=lambda: [ModelCheckpoint(**options)],
        enable_checkpointing=True,
        max_epochs=3,
        lightning_quirks=True,
        **more,
    )


def test_several_checkpoint_callbacks_and_early_stopping(tmp_path):
    assert_parity(
        tmp_path,
        Net,
        callbacks=lambda: [
            EarlyStopping("val_loss", patience=1),
            ModelCheckpoint(monitor="val_loss", filename="val-{epoch}"),
            ModelCheckpoint(monitor="loss_epoch", filename="loss-{epoch}", save_top_k=2),
            Timer(),
        ],
        enable_checkpointing=True,
        max_epochs=5,
    )


def test_a_checkpoint_of_an_exception(tmp_path):
    class Fails(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 3:
                raise RuntimeError("boom")
            return loss

    ours = assert_parity(
        tmp_path,
        Fails,
        callbacks=lambda: [OnExceptionCheckpoint(tmp_path / "run"), ModelCheckpoint(save_on_exception=True)],
        enable_checkpointing=True,
        spy=True,
    )
    assert ours.checkpoints


OTHERS = {
    "swa": lambda: StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=1),
    "weight-averaging": lambda: WeightAveraging(),
    "ema": lambda: EMAWeightAveraging(decay=0.5),
    "device-stats": lambda: DeviceStatsMonitor(cpu_stats=False),
    "timer": lambda: Timer("00:01:00:00"),
    "timer-over": lambda: Timer("00:00:00:00"),
    "pruning": lambda: ModelPruning("l1_unstructured", amount=0.2, parameters_to_prune=None),
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_other_callbacks(tmp_path, make):
    assert_parity(
        tmp_path,
        Net,
        callbacks=lambda: [make(), ModelCheckpoint()],
        enable_checkpointing=True,
        max_epochs=4,
        fallbacks=("skip-backward",) if isinstance(make(), StochasticWeightAveraging) else (),
        spy=True,
    )


def test_spike_detection(tmp_path):
    def watch():
        class Spikes(SpikeDetection):
            def _handle_spike(self, trainer, batch_idx):
                trainer.lightning_module.seen.append(("spike", batch_idx))

        return [Spikes(warmup=2, atol=0.1, rtol=0.1, exclude_batches_path=str(tmp_path / "run" / "skip.json"))]

    class Spiky(Net):
        lr = 2.0

    assert_parity(tmp_path, Spiky, callbacks=watch)


@pytest.mark.parametrize("bar", [RichProgressBar, TQDMProgressBar])
def test_progress_bars(tmp_path, capsys, bar):
    def last_shown(trainer, module):
        trainer.fit(module)
        return trainer.progress_bar_callback.get_metrics(trainer, module)

    assert_parity(tmp_path, Net, callbacks=lambda: [bar()], enable_progress_bar=True, do=last_shown)


class Keeps(Callback):
    """Keeps what it is given, as user code does."""

    def __init__(self):
        self.kept = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.kept += [outputs["loss"], trainer.callback_metrics["loss"], trainer.logged_metrics["loss_step"], batch[0]]

    def on_train_epoch_end(self, trainer, module):
        self.kept += [trainer.callback_metrics["loss_epoch"], trainer.callback_metrics]
        module.seen.append(copy.deepcopy(self.kept))


def test_what_a_callback_keeps_does_not_change_later(tmp_path):
    assert_parity(tmp_path, Net, callbacks=lambda: [Keeps()])


class Writes(Callback):
    """Writes into the live dictionary."""

    def on_train_batch_end(self, trainer, module, *args):
        trainer.callback_metrics["mine"] = torch.tensor(3.0)
        trainer.callback_metrics.update(other=torch.tensor(1.0))

    def on_validation_end(self, trainer, module):
        module.seen.append(dict(trainer.callback_metrics))
        trainer.logged_metrics["late"] = torch.tensor(2.0)


def test_what_a_callback_writes_stays(tmp_path):
    assert_parity(tmp_path, Net, callbacks=lambda: [Writes()])


def test_lambda_callbacks(tmp_path):
    assert_parity(
        tmp_path,
        Net,
        callbacks=lambda: [
            LambdaCallback(
                on_train_batch_start=lambda trainer, module, batch, batch_idx: module.seen.append(batch_idx),
                on_after_backward=lambda trainer, module: module.seen.append("backward"),
            )
        ],
    )


@pytest.mark.parametrize("find", ["lr_find", "scale_batch_size"])
def test_tuner(tmp_path, find):
    class Tuned(Net):
        def train_dataloader(self):
            return loader(18, self.batch_size, shuffle=True)

    def tune(trainer, module):
        module.lr, module.batch_size = 0.1, 2
        if find == "lr_find":
            found = Tuner(trainer).lr_find(module, num_training=20, early_stop_threshold=None)
            result = [found.results, found.suggestion()]
        else:
            result = Tuner(trainer).scale_batch_size(module, max_trials=2, steps_per_trial=2)
        trainer.fit(module)
        return [result, module.lr, module.batch_size]

    ours = assert_parity(tmp_path, Tuned, do=tune, loggers=lambda folder: MemoryLogger(), max_epochs=1)
    assert ours.error is None


def test_pickling_the_trainer(tmp_path):
    def pickled(trainer, module):
        trainer.fit(module)
        again = pickle.loads(pickle.dumps(trainer))
        return [again.global_step, again.max_epochs]

    assert_parity(tmp_path, Net, do=pickled, loggers=lambda folder: False)
