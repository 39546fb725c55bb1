"""16-mixed precision inside captured steps: the scale, the overflow and the skip are the program's."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from examples.gan import GAN, ring
from zdtrain.capture.verify import first_mismatch
from zdtrain.optim import SimpleAdam

from .runs import CLASSES, FEATURES, Classifier, assert_same, batches, codes, fit


def half(**options):
    """Make the options that ``precision="16-mixed"`` stands for on a GPU, with a scale that moves in a short run."""
    scaler = torch.amp.GradScaler("cpu", **{"init_scale": 1024.0, "growth_interval": 7, **options})
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}


class Overflows(Classifier):
    """The gradients of batches with a large first value are infinite."""

    make_optimizer = staticmethod(lambda p: SimpleAdam(p, lr=0.01))

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, CLASSES))

    def loss(self, batch):
        spoiled = (batch[0][0, 0] > 1.0).float()
        return super().loss(batch) + spoiled * (self.net[0].weight * 1e30).sum() * 1e6

    def configure_optimizers(self):
        return self.make_optimizer(self.parameters())

    def on_train_epoch_end(self):
        self.log("scale", self.trainer.precision_plugin.scaler._scale.clone())


def with_optimizer(make):
    class WithOptimizer(Overflows):
        make_optimizer = staticmethod(make)

    return WithOptimizer


def both_half(folder, make, capture="graph", scaler=None, **options):
    """Train eagerly and captured and compare, the scaler's state included."""
    eager = fit(folder, make, "off", **half(**(scaler or {})), **options)
    captured = fit(folder, make, capture, **half(**(scaler or {})), **options)
    states = [run.trainer.precision_plugin.scaler.state_dict() for run in (eager, captured)]
    assert states[0] == states[1]
    if capture == "graph":
        assert_same(eager, captured)
    return eager, captured


OPTIMIZERS = {
    "simple-adam": lambda p: SimpleAdam(p, lr=0.01),
    "simple-adam-foreach": lambda p: SimpleAdam(p, lr=0.01, implementation="foreach", max_norm=0.5),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "adagrad-fused": lambda p: torch.optim.Adagrad(p, lr=0.01, fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_replayed_steps_overflow_and_grow_like_eager_ones(tmp_path, name):
    eager, captured = both_half(tmp_path, with_optimizer(OPTIMIZERS[name]))
    assert captured.report.steps_replayed > 20
    assert captured.report.host_reads == 0
    assert codes(captured) <= {"optimizer-outside"}
    scales = {float(row.split(",")[-1]) for row in eager.rows.split() if row.split(",")[-1].replace(".", "").isdigit()}
    assert len(scales) > 1, "the scale moved"
    assert [program.includes_optimizer for program in captured.report.programs] == [name != "adagrad-fused"]


@pytest.mark.parametrize("name", ["adamw-fused", "simple-adam", "momentum"])
@pytest.mark.parametrize("clip", [{}, {"gradient_clip_val": 0.1}, {"gradient_clip_val": 0.01, "algorithm": "value"}])
def test_windows_and_clipping_are_part_of_the_program(tmp_path, name, clip):
    options = {"gradient_clip_val": clip.get("gradient_clip_val"), "gradient_clip_algorithm": clip.get("algorithm")}
    _, captured = both_half(
        tmp_path,
        with_optimizer(OPTIMIZERS[name]),
        loader=lambda: batches(11, rest=3),
        accumulate_grad_batches=2,
        **options,
    )
    assert captured.report.steps_replayed > 15
    assert codes(captured) <= {"optimizer-outside"}


def test_a_run_that_overflows_from_the_start_is_captured_once_it_has_trained(tmp_path):
    scaler = {"init_scale": 2.0**40}
    _, captured = both_half(tmp_path, with_optimizer(OPTIMIZERS["sgd-fused"]), scaler=scaler, max_epochs=6)
    assert captured.report.steps_replayed > 20
    assert captured.report.fallbacks == ()
    assert [program.captures for program in captured.report.programs] == [1]


class Sets(Callback):
    """Sets the scaler's numbers in the middle of the run."""

    def on_train_epoch_start(self, trainer, module):
        scaler = trainer.precision_plugin.scaler
        if trainer.current_epoch == 2:
            scaler.set_growth_factor(3.0)
            scaler.set_backoff_factor(0.3)
            scaler.set_growth_interval(2)
            scaler.update(300.0)


def test_the_scale_and_its_factors_are_never_baked(tmp_path):
    _, captured = both_half(tmp_path, Overflows, callbacks=lambda: [Sets()])
    assert [program.captures for program in captured.report.programs] == [1]
    assert captured.report.fallbacks == ()
    assert captured.trainer.precision_plugin.scaler.get_scale() % 2 != 0


def test_a_checkpoint_of_a_captured_run_resumes_to_the_same_bits(tmp_path):
    keep = {"callbacks": lambda: [ModelCheckpoint(tmp_path, filename="middle", every_n_train_steps=18)]}
    options = {"enable_checkpointing": True, "max_epochs": 2, **keep}
    fit(tmp_path, Overflows, "graph", **half(), **options)
    eager, captured = both_half(tmp_path, Overflows, ckpt_path=tmp_path / "middle.ckpt")
    assert captured.report.steps_replayed > 20
    assert eager.trainer.global_step == captured.trainer.global_step == 48


def test_an_optimizer_that_the_host_has_to_ask_for_steps_behind_the_program(tmp_path):
    class Hooked(Overflows):
        steps = 0

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            optimizer._step_supports_amp_scaling = False
            optimizer.register_step_post_hook(self.count)
            return optimizer

        def count(self, *_):
            type(self).steps += 1

    _, captured = both_half(tmp_path, Hooked)
    assert captured.report.steps_replayed > 20
    (reason,) = [reason for reason in captured.report.fallbacks if reason.code == "scaler-on-host"]
    assert "SimpleAdam has hooks on its step" in reason.message
    assert 0 < Hooked.steps < 2 * 48


@pytest.mark.usefixtures("device_graphs")
def test_a_device_graph_overflows_and_grows_like_an_eager_step(tmp_path):
    _, captured = both_half(tmp_path, Overflows, gradient_clip_val=0.1)
    assert captured.report.steps_replayed > 20
    assert captured.report.fallbacks == ()


def points():
    return DataLoader(TensorDataset(ring(12 * 16)), batch_size=16)


def test_a_step_that_optimizes_by_hand_is_captured_with_its_scaler(tmp_path):
    class Net(GAN):
        """Its penultimate loss overflows now and then."""

        def manual_backward(self, loss, *args, **kwargs):
            super().manual_backward(loss * torch.where(loss > 0.7, 1e37, 1.0), *args, **kwargs)

        def configure_optimizers(self):
            parts = (self.generator, self.discriminator)
            return [torch.optim.Adam(part.parameters(), lr=1e-3, fused=True) for part in parts]

    _, captured = both_half(tmp_path, Net, loader=points)
    assert captured.report.steps_replayed > 35
    assert captured.report.fallbacks == ()
    assert "optimizer_step" not in vars(captured.trainer.precision_plugin)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["simple-adam", "momentum", "adamw-fused", "sgd-fused"])
def test_a_lowered_step_overflows_and_grows_like_an_eager_one(tmp_path, name):
    eager, lowered = both_half(tmp_path, with_optimizer(OPTIMIZERS[name]), "compile", gradient_clip_val=0.1)
    (program,) = lowered.report.programs
    assert program.verification == "within tolerance"
    assert program.includes_optimizer
    assert program.replays > 20
    assert first_mismatch(eager.weights, lowered.weights, exact=False) is None
