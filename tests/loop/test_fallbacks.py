"""What keeps a run on stock Lightning's own loop is named, once, with what was found."""

import logging
from contextlib import nullcontext

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from tests.parity.harness import QUIET, Net
from zdtrain import Trainer


class NoOptimizer(Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.loss(batch))

    def configure_optimizers(self):
        return []


class Iterates(Net):
    def training_step(self, dataloader_iter):
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)


class OwnStep(Net):
    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)


class OwnStrategy(SingleDeviceStrategy):
    pass


class OwnDDP(DDPStrategy):
    def backward(self, *args, **kwargs):
        super().backward(*args, **kwargs)


class Unwrapped(DDPStrategy):
    def _setup_model(self, model):
        return model


class OnCluster(DDPStrategy):
    """Replaces what says where a process is, and nothing of the step."""

    @property
    def root_device(self):
        return torch.device("cpu")

    @property
    def distributed_sampler_kwargs(self):
        return {"num_replicas": self.world_size, "rank": self.global_rank}


class OwnPrecision(Precision):
    def backward(self, *args, **kwargs):
        super().backward(*args, **kwargs)


def own_strategy(trainer):
    strategy = OwnStrategy(torch.device("cpu"), accelerator=trainer.accelerator)
    strategy.precision_plugin = Precision()
    trainer._accelerator_connector.strategy = strategy


def patched_strategy(trainer):
    backward = trainer.strategy.backward
    trainer.strategy.backward = lambda *args: backward(*args)


def unreduced(trainer):
    trainer.strategy.block_backward_sync = nullcontext


def own_precision(trainer):
    trainer.strategy.precision_plugin = OwnPrecision()


def disabled_scaler(trainer):
    trainer.strategy.precision_plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", enabled=False))


def own_optimization(trainer):
    trainer.fit_loop.epoch_loop.automatic_optimization = _AutomaticOptimization(trainer)


def patched_optimization(trainer):
    optimization = trainer.fit_loop.epoch_loop.automatic_optimization
    run = optimization.run
    optimization.run = lambda *args: run(*args)


class SkipsBackward(Callback):
    def on_train_epoch_start(self, trainer, module):
        trainer.fit_loop.epoch_loop.automatic_optimization._skip_backward = True


def nothing(trainer):
    pass


CASES = [
    ("manual-optimization", "(automatic_optimization=False) and has no optimizer", NoOptimizer, nothing, {}),
    ("dataloader-iter", "training_step takes", Iterates, nothing, {}),
    ("strategy", "strategy OwnStrategy", Net, own_strategy, {}),
    ("strategy", "SingleDeviceStrategy.backward is replaced", Net, patched_strategy, {}),
    ("strategy", "OwnDDP.backward is replaced", Net, nothing, {"strategy": OwnDDP()}),
    ("strategy", "Unwrapped wraps the module in its own way", Net, nothing, {"strategy": Unwrapped()}),
    ("strategy", "DDPStrategy.block_backward_sync is replaced", Net, unreduced, {"strategy": "ddp"}),
    ("precision", "OwnPrecision.backward", Net, own_precision, {}),
    ("loss-scaler", "the GradScaler is disabled", Net, disabled_scaler, {}),
    ("module-hook", "OwnStep.optimizer_step", OwnStep, nothing, {}),
    ("optimization-loop", "automatic_optimization was replaced", Net, own_optimization, {}),
    ("optimization-loop", "automatic_optimization was replaced", Net, patched_optimization, {}),
    ("skip-backward", "skips the backward pass", Net, nothing, {"callbacks": [SkipsBackward()]}),
]


@pytest.fixture
def no_processes_left():
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def said(monkeypatch):
    """What Lightning's loggers say at level INFO."""
    messages = []

    class Keep(logging.Handler):
        def emit(self, record):
            messages.append(record.getMessage())

    logger, handler = logging.getLogger("lightning.pytorch"), Keep()
    monkeypatch.setattr(logger, "level", logging.INFO)
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


@pytest.mark.parametrize(
    ("code", "text", "module", "prepare", "options"), CASES, ids=[f"{case[0]}-{case[3].__name__}" for case in CASES]
)
@pytest.mark.usefixtures("no_processes_left")
def test_a_fallback_is_named_once_and_kept(tmp_path, said, code, text, module, prepare, options):
    trainer = Trainer(**{**QUIET, "default_root_dir": tmp_path, "logger": False, **options})
    prepare(trainer)
    trainer.fit(module())
    reasons = trainer.fit_loop.epoch_loop.fallbacks
    assert [reason.code for reason in reasons] == [code]
    assert text in reasons[0].message
    messages = [message for message in said if f"[{code}]" in message]
    assert len(messages) == 1  # although there were two epochs
    assert text in messages[0]


@pytest.mark.parametrize("options", [{}, {"strategy": OnCluster()}], ids=["one device", "subclass of DDPStrategy"])
@pytest.mark.usefixtures("no_processes_left")
def test_an_ordinary_fit_names_none(tmp_path, said, options):
    trainer = Trainer(**{**QUIET, "default_root_dir": tmp_path, "logger": False, **options})
    trainer.fit(Net())
    assert trainer.fit_loop.epoch_loop.fallbacks == []
    assert not [message for message in said if "stock Lightning's loop" in message]
