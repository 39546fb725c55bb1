"""Hooks of the module between forward and update are part of the program: surgery on gradients, values logged there."""

import itertools
import random
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from torchmetrics import MeanSquaredError

import zdtrain.capture.tape
from zdtrain.capture.verify import first_mismatch
from zdtrain.monitors import NonFinite
from zdtrain.optim import SimpleAdam

from .runs import QUIET, Classifier, assert_equal, assert_same, batches, both, codes, fit, trap_line
from .test_traps import Deterministic


def norm_of(module):
    return torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])


class Repairs(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + (self.net[0].weight[0, 0] * 0).sqrt()  # whose gradient is not finite

    def on_after_backward(self):
        for p in self.parameters():
            p.grad.nan_to_num_(0.0, 0.0, 0.0)


class AddsNoise(Classifier):
    def on_before_optimizer_step(self, optimizer):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad.add_(torch.randn_like(p.grad), alpha=0.01)


class ReplacesGradients(Classifier):
    def on_after_backward(self):
        for p in self.parameters():
            p.grad = p.grad.clamp(-0.01, 0.01)


class LogsNorms(Classifier):
    def on_before_backward(self, loss):
        self.log("scaled", loss * 2, on_step=False, on_epoch=True)

    def on_after_backward(self):
        self.log("loss", norm_of(self), prog_bar=True)  # a name that training_step logs, too

    def on_before_optimizer_step(self, optimizer):
        norms = {f"norm/{name}": p.grad.norm() for name, p in self.named_parameters()}
        self.log_dict(norms, on_step=True, on_epoch=True, reduce_fx="max")
        self.log("factor", 0.5)
        self.log("weighted", norm_of(self), on_epoch=True, batch_size=3)


class LogsOldNorm(Classifier):
    def on_before_zero_grad(self, optimizer):
        if self.net[0].weight.grad is not None:
            self.log("old_norm", norm_of(self), on_epoch=True)


class LogsMetric(Classifier):
    def __init__(self):
        super().__init__()
        self.error = MeanSquaredError()

    def on_after_backward(self):
        weight = self.net[0].weight
        self.error(weight.detach(), weight.grad)
        self.log("error", self.error, on_step=True, on_epoch=True)


class LogsWhereItClips(Classifier):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        norm = norm_of(self)
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        self.log_dict({"before": norm, "after": norm_of(self), "limit": 0.5}, on_epoch=True)

    def backward(self, loss):
        loss.backward()
        self.log("in_backward", loss, on_epoch=True, on_step=False)

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad()
        self.log("zeroed", 1, reduce_fx="sum", on_epoch=True)


HOOKED = [Repairs, AddsNoise, ReplacesGradients, LogsNorms, LogsOldNorm, LogsMetric, LogsWhereItClips]


@pytest.mark.parametrize("module", HOOKED, ids=lambda cls: cls.__name__)
def test_hooks_of_the_module_are_part_of_the_program(tmp_path, module):
    run = both(tmp_path, module)
    assert codes(run) == set()
    assert run.report.steps_replayed >= 39
    assert {program.verification for program in run.report.programs} == {"equal"}


@pytest.mark.parametrize("module", HOOKED, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("verify", [True, False])
def test_hooks_run_at_their_place_in_windows_of_any_length(tmp_path, module, verify):
    options = {"accumulate_grad_batches": 3, "max_epochs": 6, "verify_capture": verify}
    run = both(tmp_path, module, loader=lambda: batches(10), **options)
    assert not codes(run) - {"many-keys"}
    assert run.report.steps_replayed > 20


class Validates(LogsNorms):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def val_dataloader(self):
        return batches(3)


def test_hooks_log_on_after_a_validation_in_the_middle_of_an_epoch(tmp_path):
    run = both(tmp_path, Validates, val_check_interval=5, max_epochs=5, verify_capture=False)
    assert codes(run) == set()
    assert run.report.steps_replayed > 50
    assert {"val_loss", "norm/net.0.weight", "weighted_epoch"} <= run.metrics.keys()


@pytest.mark.usefixtures("device_graphs")
@pytest.mark.parametrize("module", [Repairs, LogsNorms, LogsOldNorm], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("window", [1, 2])
def test_hooks_are_part_of_device_graphs(tmp_path, module, window):
    run = both(tmp_path, module, accumulate_grad_batches=window, max_epochs=6)
    assert codes(run) == set()
    assert run.report.steps_replayed > 40


def test_hooks_are_part_of_several_steps_in_one_program(tmp_path):
    class Net(LogsNorms):
        def configure_optimizers(self):
            return SimpleAdam(self.parameters(), lr=0.01)

    run = both(tmp_path, Net, steps_per_replay=4)
    assert codes(run) == set()
    assert any(program.key.startswith("4 steps of") and program.replays > 20 for program in run.report.programs)


def test_hooks_are_lowered_with_the_step(tmp_path, monkeypatch):
    monkeypatch.setattr(zdtrain.capture.tape, "lower", lambda graph, arguments: graph.forward)

    class Net(LogsNorms, AddsNoise):
        def on_before_optimizer_step(self, optimizer):
            AddsNoise.on_before_optimizer_step(self, optimizer)
            LogsNorms.on_before_optimizer_step(self, optimizer)

    eager, lowered = (fit(tmp_path, Net, capture) for capture in ("off", "compile"))
    assert codes(lowered) == set()
    assert lowered.report.steps_replayed >= 39
    assert first_mismatch(eager.weights, lowered.weights, exact=False) is None
    assert first_mismatch(eager.metrics, lowered.metrics, exact=False) is None


def test_gradients_are_repaired_before_monitors_look_at_them(tmp_path):
    def monitors():
        return {"monitors": [NonFinite("grad_norm", then="skip")], "gradient_clip_val": 0.1}

    eager, captured = (fit(tmp_path, Repairs, capture, **monitors()) for capture in ("off", "graph"))
    assert_same(eager, captured)
    assert captured.report.steps_replayed >= 39
    assert captured.trainer.skipped_steps == eager.trainer.skipped_steps


class ByHand(Classifier):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def on_after_backward(self):
        for p in self.parameters():
            p.grad.clamp_(-0.01, 0.01)

    def on_before_optimizer_step(self, optimizer):
        self.log("loss", norm_of(self), on_epoch=True)  # with the flags and the name that training_step has


def test_hooks_are_part_of_a_step_that_optimizes_by_hand(tmp_path):
    run = both(tmp_path, ByHand)
    assert codes(run) == set()
    assert run.report.steps_replayed >= 39


@pytest.mark.parametrize("module", [ByHand, *HOOKED], ids=lambda cls: cls.__name__)
def test_what_hooks_log_is_what_stock_lightning_logs(tmp_path, module):
    run = fit(tmp_path, module, "graph")
    torch.manual_seed(0)
    stock = module()
    torch.manual_seed(7)
    logger = CSVLogger(str(tmp_path), name="stock")
    trainer = pl.Trainer(**{**QUIET, "max_epochs": 4, "logger": logger})
    trainer.fit(stock, batches())
    assert_equal(dict(trainer.callback_metrics), run.metrics, "metrics")
    assert_equal(dict(stock.state_dict()), run.weights, "weights")
    assert Path(logger.log_dir, "metrics.csv").read_text() == run.rows


class Counts(Deterministic):
    n = 0

    def on_after_backward(self):
        self.n += 1  # trap
        self.net[0].weight.grad.mul_(self.n)


class Reads(Deterministic):
    def on_before_optimizer_step(self, optimizer):
        if self.net[0].weight.grad.norm() > 0.1:  # trap
            self.net[0].weight.grad.zero_()


class Draws(Deterministic):
    def on_after_backward(self):
        self.net[0].weight.grad.mul_(random.random())  # trap


class LooksAtStep(Deterministic):
    def on_before_backward(self, loss):
        self.log("factor", loss * self.global_step)  # trap


class Keeps(Deterministic):
    def __init__(self):
        super().__init__()
        self.norms = []

    def on_before_zero_grad(self, optimizer):
        self.norms.append(self.net[0].weight.square().sum().detach())  # trap


TRAPS = {Counts: "python-state", Reads: "host-read", Draws: "host-randomness", LooksAtStep: "trainer-state"}
TRAPS[Keeps] = "kept-tensor"


@pytest.mark.parametrize("module", TRAPS, ids=lambda cls: cls.__name__)
def test_a_trap_in_a_hook_trains_right_and_is_named_with_its_line(tmp_path, module):
    def make():
        random.seed(0)
        return module()

    run = both(tmp_path, make)
    assert run.report.steps_replayed == 0
    found = {(reason.code, reason.file, reason.line) for reason in run.report.fallbacks}
    assert (TRAPS[module], __file__, trap_line(module)) in found


def test_what_a_hook_reads_and_others_change_is_part_of_the_key(tmp_path):
    class Net(Deterministic):
        limit = 0.1

        def on_before_optimizer_step(self, optimizer):
            for p in self.parameters():
                p.grad.clamp_(-self.limit, self.limit)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.limit = 0.1 if batch_idx < 6 else 0.01

    run = both(tmp_path, Net)
    assert codes(run) == set()
    assert len(run.report.programs) == 2
    assert run.report.steps_replayed > 30


@pytest.mark.parametrize("name", ["on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping"])
@pytest.mark.parametrize("verify", [True, False])
def test_a_hook_that_comes_with_a_later_epoch_makes_a_program_of_its_own(tmp_path, name, verify):
    class Net(Deterministic):
        def on_train_epoch_start(self):
            if self.current_epoch == 3:
                setattr(self, name, self.halve)

        def halve(self, *args, **kwargs):
            for p in self.parameters():
                p.grad.mul_(0.5)

    run = both(tmp_path, Net, max_epochs=6, verify_capture=verify)
    assert codes(run) == set()
    assert len(run.report.programs) == 2
    assert all(program.replays > 15 for program in run.report.programs)


@pytest.mark.parametrize("verify", [True, False])
def test_zeroing_by_the_epoch_makes_a_program_per_epoch(tmp_path, verify):
    class Net(Deterministic):
        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            if epoch < 2:
                optimizer.zero_grad()

    run = both(tmp_path, Net, verify_capture=verify)
    assert codes(run) == set()
    assert run.report.steps_replayed > 20


def test_a_callback_in_the_middle_of_the_step_keeps_it_eager_and_is_named(tmp_path):
    class Clamps(Callback):
        def on_after_backward(self, trainer, module):
            for p in module.parameters():
                p.grad.clamp_(-0.01, 0.01)

    run = both(tmp_path, LogsNorms, callbacks=lambda: [Clamps()])
    assert run.report.steps_replayed == 0
    (reason,) = [reason for reason in run.report.fallbacks if reason.code == "hook-inside"]
    assert reason.file == __file__
    assert "Clamps overrides on_after_backward" in reason.message
    assert "move it to the module" in reason.message


def test_what_a_hook_logs_under_changing_names_keeps_the_step_eager(tmp_path):
    names = itertools.cycle(["even", "odd"])

    class Net(Deterministic):
        def on_before_backward(self, loss):
            self.log(next(names), loss)

    captured = fit(tmp_path, Net, "graph")
    assert captured.report.steps_replayed == 0
    assert "control-flow" in codes(captured)
