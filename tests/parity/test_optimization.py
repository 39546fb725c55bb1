"""Weights, optimizer state and counters equal stock Lightning's."""

from collections import OrderedDict
from types import MappingProxyType

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, Callback, GradientAccumulationScheduler
from torch import nn

from tests.parity.harness import Net, assert_parity


class Plain(Net):
    """No logs, no validation: the shortest step there is."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def val_dataloader(self):
        return []


def with_optimizer(make):
    class WithOptimizer(Net):
        def configure_optimizers(self):
            return make(self)

    return WithOptimizer


@pytest.mark.parametrize("module", [Net, Plain])
def test_a_plain_fit(tmp_path, module):
    assert_parity(tmp_path, module)


@pytest.mark.parametrize("window", [2, 3])
@pytest.mark.parametrize("samples", [24, 21])
def test_accumulation_over_whole_windows(tmp_path, window, samples):
    class WholeWindows(Net):  # 6 batches
        pass

    WholeWindows.samples = samples
    assert_parity(tmp_path, WholeWindows, accumulate_grad_batches=window, spy=True)


@pytest.mark.parametrize("window", [2, 3, 4, 7])
def test_accumulation_with_a_partial_last_window_under_quirks(tmp_path, window):
    assert_parity(tmp_path, Net, accumulate_grad_batches=window, lightning_quirks=True, spy=True)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("limit", [0.01, 1, 0.0])
def test_clipping(tmp_path, algorithm, limit):
    assert_parity(tmp_path, Net, gradient_clip_val=limit, gradient_clip_algorithm=algorithm)


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true", "bf16-true", "32-true"])
def test_precision(tmp_path, precision):
    assert_parity(tmp_path, Net, precision=precision, spy=True, gradient_clip_val=0.5)


OPTIMIZERS = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "adamw-foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, foreach=True),
    "adamw-fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, fused=True),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01),
    "lbfgs": lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=3),
    "groups": lambda m: torch.optim.Adam(
        [{"params": m.net[0].parameters(), "lr": 0.2}, {"params": m.net[4].parameters(), "weight_decay": 0.1}], lr=0.1
    ),
    "none": lambda m: None,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(tmp_path, name):
    assert_parity(tmp_path, with_optimizer(OPTIMIZERS[name]), spy=True)


class Lion(torch.optim.Optimizer):
    """An optimizer of the user's whose closure is not the first argument."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, scale=1.0, closure=None):
        loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign(), alpha=group["lr"] * scale)
        return loss


class KeepsZeros(torch.optim.SGD):
    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none=False)


@pytest.mark.parametrize("optimizer", [Lion, KeepsZeros])
def test_optimizers_of_the_users(tmp_path, optimizer):
    assert_parity(tmp_path, with_optimizer(lambda m: optimizer(m.parameters(), lr=0.01)))


def test_hooks_registered_on_the_optimizer_see_the_same_arguments(tmp_path):
    class Hooked(Net):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            note = self.seen.append
            optimizer.register_step_pre_hook(lambda o, args, kwargs: note(("pre", len(args), sorted(kwargs))))
            optimizer.register_step_post_hook(lambda o, args, kwargs: note(("post", len(args), sorted(kwargs))))
            return optimizer

    assert_parity(tmp_path, Hooked)


class OwnZeroGrad(Net):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        self.seen.append(("zero", epoch, batch_idx))
        optimizer.zero_grad(set_to_none=False)


class OwnBackward(Net):
    def backward(self, loss):
        self.seen.append("backward")
        (2 * loss).backward()


class OwnClipping(Net):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.seen.append(("clip", gradient_clip_val, gradient_clip_algorithm))
        self.log("limit", 0.3, on_epoch=True)
        self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")


class OwnSchedulerStep(Net):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def lr_scheduler_step(self, scheduler, metric):
        self.seen.append(("scheduler", metric))
        scheduler.step()


class Logged(Net):
    """Logs in the hooks that stock Lightning calls from inside the optimizer step."""

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        self.log("zeroed", batch_idx)
        optimizer.zero_grad()

    def backward(self, loss):
        self.log("scaled", 2 * loss.detach(), on_epoch=True)
        loss.backward()


@pytest.mark.parametrize("module", [OwnZeroGrad, OwnBackward, OwnClipping, OwnSchedulerStep, Logged])
@pytest.mark.parametrize("window", [1, 5])
def test_overridden_hooks_of_the_step(tmp_path, module, window):
    assert_parity(tmp_path, module, accumulate_grad_batches=window, spy=True)


def test_an_overridden_optimizer_step_runs_on_lightnings_own_loop(tmp_path):
    class OwnStep(Net):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            self.seen.append((epoch, batch_idx))
            optimizer.step(closure=optimizer_closure)

    assert_parity(tmp_path, OwnStep, fallbacks=("module-hook",))


class ByHand(Net):
    """Steps its optimizer itself, every other batch, and returns what hooks are to see."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        loss = self.loss(batch)
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return {"loss": loss, "extra": loss.detach() + 1}

    def on_train_epoch_end(self):
        self.lr_schedulers().step()

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def test_manual_optimization(tmp_path):
    assert_parity(tmp_path, ByHand, spy=True)


class NoneSometimes(Net):
    def training_step(self, batch, batch_idx):
        return None if batch_idx % 2 else super().training_step(batch, batch_idx)


class NoBatchIdx(Net):
    def training_step(self, batch):
        return self.loss(batch)


class ReturnsDict(Net):
    def training_step(self, batch, batch_idx):
        return {"extra": batch_idx, "loss": super().training_step(batch, batch_idx), "list": [1, 2]}


class ReturnsMapping(Net):
    def training_step(self, batch, batch_idx):
        return MappingProxyType({"loss": super().training_step(batch, batch_idx), "extra": batch_idx})


class ReturnsOrderedDict(Net):
    def training_step(self, batch, batch_idx):
        return OrderedDict(extra=batch_idx, loss=super().training_step(batch, batch_idx))


class OneElement(Net):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx).reshape(1)


class DoubleLoss(Net):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx).double()


class NoLossKey(Net):
    def training_step(self, batch, batch_idx):
        return {"other": self.loss(batch)}


class ReturnsText(Net):
    def training_step(self, batch, batch_idx):
        return "loss"


class Outputs(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        module.seen.append(dict(outputs) if outputs is not None else None)


@pytest.mark.parametrize(("window", "watched"), [(1, True), (5, True), (1, False)])
@pytest.mark.parametrize(
    "module",
    [
        NoneSometimes,
        NoBatchIdx,
        ReturnsDict,
        ReturnsMapping,
        ReturnsOrderedDict,
        OneElement,
        DoubleLoss,
        NoLossKey,
        ReturnsText,
    ],
)
def test_what_a_training_step_returns(tmp_path, module, window, watched):
    assert_parity(
        tmp_path, module, callbacks=lambda: [Outputs()] if watched else [], accumulate_grad_batches=window, spy=watched
    )


@pytest.mark.parametrize("epochs", [{0: 2}, {0: 1, 1: 5}])
def test_gradient_accumulation_scheduler(tmp_path, epochs):
    assert_parity(tmp_path, Net, callbacks=lambda: [GradientAccumulationScheduler(epochs)], lightning_quirks=True)


class Change(Callback):
    """Changes something in the middle of an epoch."""

    def __init__(self, change):
        self.change = change

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 2:
            self.change(trainer, module)


def unfreeze(trainer, module):
    if len(trainer.optimizers[0].param_groups) == 1:
        trainer.optimizers[0].add_param_group({"params": list(module.net[0].parameters()), "lr": 0.3})


def clip(trainer, module):
    trainer.gradient_clip_val = 0.01


def accumulate(trainer, module):
    trainer.accumulate_grad_batches = 2


def other_optimizer(trainer, module):
    trainer.strategy.optimizers = [torch.optim.SGD(module.parameters(), lr=0.5)]


def other_step(trainer, module):
    module.training_step = lambda batch, batch_idx: 3 * module.loss(batch)


def freeze(trainer, module):
    module.net[0].requires_grad_(False)


def log_each_step(trainer, module):
    trainer.log_every_n_steps = 1


def add_callback(trainer, module):
    trainer.callbacks.append(Outputs())


def swap_callback(trainer, module):
    trainer.callbacks[-1] = Outputs()


@pytest.mark.parametrize(
    "change",
    [
        unfreeze,
        clip,
        accumulate,
        other_optimizer,
        other_step,
        freeze,
        log_each_step,
        add_callback,
        swap_callback,
    ],
)
def test_changes_in_the_middle_of_an_epoch(tmp_path, change):
    class Head(Net):
        def configure_optimizers(self):
            return torch.optim.SGD(self.net[4].parameters(), lr=0.1)

    assert_parity(tmp_path, Head, callbacks=lambda: [Change(change), Callback()], lightning_quirks=True)


def test_finetuning(tmp_path):
    class Backbone(Net):
        def __init__(self):
            super().__init__()
            self.backbone, self.head = nn.Linear(4, 3), nn.Linear(3, 1)

        def loss(self, batch):
            return nn.functional.mse_loss(self.head(self.backbone(batch[0])), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.head.parameters(), lr=0.1)

    assert_parity(tmp_path, Backbone, callbacks=lambda: [BackboneFinetuning(1, lambda epoch: 1.0)], max_epochs=3)


def test_detect_anomaly(tmp_path):
    assert_parity(tmp_path, Net, detect_anomaly=True)


def test_ddp_in_one_process(tmp_path):
    def fit_and_leave(trainer, module):
        trainer.fit(module)
        torch.distributed.destroy_process_group()

    assert_parity(tmp_path, Net, do=fit_and_leave, strategy="ddp", spy=True)


def test_compiled_parts_train_alike(tmp_path):
    class Scripted(Net):
        def __init__(self):
            super().__init__()
            self.net = torch.jit.script(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1)))

    assert_parity(tmp_path, Scripted)


def test_gradient_checkpointing(tmp_path):
    class Checkpointed(Net):
        def loss(self, batch):
            y = torch.utils.checkpoint.checkpoint(self.net, batch[0], use_reentrant=False)
            return nn.functional.mse_loss(y, batch[1])

    assert_parity(tmp_path, Checkpointed)


def test_deterministic_and_benchmark_flags(tmp_path):
    assert_parity(tmp_path, Net, deterministic=True, benchmark=False)
    torch.use_deterministic_algorithms(False)
