"""16-mixed precision on zdtrain's own loop equals stock Lightning's, steps that overflow included."""

from itertools import pairwise

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import zdtrain
from tests.parity.harness import QUIET, Net, assert_parity, loader
from zdtrain.optim import SimpleAdam
from zdtrain.quiet import quiet

OVERFLOWS = frozenset({0, 1, 4, 7})


def half(**options):
    """Make the plugin that ``precision="16-mixed"`` stands for on a GPU, with a scale that moves in a short run."""
    scaler = torch.amp.GradScaler("cpu", **{"init_scale": 1024.0, "growth_interval": 3, **options})
    return [MixedPrecision("16-mixed", "cpu", scaler)]


def use(plugins):
    def do(trainer, module):
        trainer.strategy.precision_plugin = plugins()[0]
        return trainer.fit(module)

    return do


class Scaled(Net):
    """Notes the scale after every batch; the gradients of some batches are infinite."""

    overflows = OVERFLOWS
    make_optimizer = staticmethod(lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9))

    def loss(self, batch):
        loss = super().loss(batch)
        if self.training and self.counted() in self.overflows:
            loss = loss + (self.net[0].weight * 1e30).sum() * 1e8
        return loss

    def counted(self):
        self.batches = getattr(self, "batches", -1) + 1
        return self.batches

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append((outputs["loss"].clone(), self.trainer.precision_plugin.scaler.state_dict()))

    def configure_optimizers(self):
        return self.make_optimizer(self.parameters())


def with_optimizer(make):
    class WithOptimizer(Scaled):
        make_optimizer = staticmethod(make)

    return WithOptimizer


def two_groups(parameters):
    first, *rest = parameters
    return torch.optim.AdamW([{"params": [first], "lr": 0.2}, {"params": rest, "weight_decay": 0.1}], lr=0.05)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.5),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05),
    "groups": two_groups,
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.05, momentum=0.5),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.05),
    "adam-fused": lambda p: torch.optim.Adam(p, lr=0.05, fused=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
    "simple-adam": lambda p: SimpleAdam(p, lr=0.05),
    "simple-adam-foreach": lambda p: SimpleAdam(p, lr=0.05, implementation="foreach"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_skips_and_grows_as_in_stock(tmp_path, name):
    left = assert_parity(tmp_path, with_optimizer(OPTIMIZERS[name]), do=use(half), max_epochs=3)
    scales = [state["scale"] for _, state in left.seen]
    assert scales[:3] == [512.0, 256.0, 256.0]
    assert any(after > before for before, after in pairwise(scales))


@pytest.mark.parametrize("name", ["sgd", "adamw", "adamw-fused"])
def test_factors_that_are_no_powers_of_two(tmp_path, name):
    def odd():
        return half(init_scale=777.7, growth_factor=1.37, backoff_factor=0.61)

    assert_parity(tmp_path, with_optimizer(OPTIMIZERS[name]), do=use(odd), max_epochs=3)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_sees_unscaled_gradients(tmp_path, algorithm):
    options = {"gradient_clip_val": 0.1, "gradient_clip_algorithm": algorithm}
    assert_parity(tmp_path, with_optimizer(OPTIMIZERS["adam"]), do=use(half), **options)


class Plain(Scaled):
    """Nothing random, so that a loop written by hand can follow."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 1))

    def train_dataloader(self):
        return loader(18, 4)


class ClipsItself(Plain):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)


class UnscalesItself(Plain):
    def on_before_optimizer_step(self, optimizer):
        self.trainer.precision_plugin.scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)


@pytest.mark.parametrize("name", ["adamw-fused", "simple-adam", "momentum-fused"])
@pytest.mark.parametrize("module", [Plain, ClipsItself, UnscalesItself])
def test_fused_optimizers_clip_what_stock_refuses_to(tmp_path, module, name):
    make = OPTIMIZERS.get(name, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True))
    limit = None if module is UnscalesItself else 0.1
    torch.manual_seed(7)
    model = type("Model", (module,), {"make_optimizer": staticmethod(make)})()
    trainer = zdtrain.Trainer(
        **QUIET, default_root_dir=tmp_path, logger=False, plugins=half(), gradient_clip_val=limit, limit_val_batches=0
    )
    trainer.fit(model)
    assert trainer.fit_loop.epoch_loop.fallbacks == []
    assert "clip_gradients" not in vars(trainer.precision_plugin)

    torch.manual_seed(7)
    reference = Plain()
    optimizer, scaler = make(reference.parameters()), half()[0].scaler
    for batch in [*reference.train_dataloader(), *reference.train_dataloader()]:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.half):
            loss = reference.loss(batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        if name == "momentum-fused" and not torch.isfinite(reference.net[0].weight.grad).all():
            scaler.update()  # torch's own fused step would leave a first momentum unwritten
            continue
        scaler.step(optimizer)
        scaler.update()
    assert trainer.precision_plugin.scaler.state_dict() == scaler.state_dict()
    torch.testing.assert_close(dict(model.state_dict()), dict(reference.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize("window", [2, 3, 5])
@pytest.mark.parametrize("name", ["momentum", "adamw-fused"])
def test_accumulation(tmp_path, window, name):
    module = with_optimizer(OPTIMIZERS[name])
    assert_parity(
        tmp_path, module, do=use(half), accumulate_grad_batches=window, lightning_quirks=True, max_epochs=4, spy=True
    )


class ByHand(Scaled):
    """Optimizes by hand; its losses overflow as those of `Scaled` do."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer, loss = self.optimizers(), super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


@pytest.mark.parametrize("name", ["momentum", "adamw-fused"])
def test_optimizing_by_hand(tmp_path, name):
    make = OPTIMIZERS[name]
    assert_parity(tmp_path, type("Model", (ByHand,), {"make_optimizer": staticmethod(make)}), do=use(half))


def test_schedulers_go_on_in_steps_that_are_skipped(tmp_path):
    class Scheduled(Scaled):
        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=12)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    assert_parity(tmp_path, Scheduled, do=use(half))


class Looks(Callback):
    """Notes what the hooks around backward and the update get to see."""

    def on_before_backward(self, trainer, module, loss):
        module.seen.append(loss.detach().clone())

    def on_before_optimizer_step(self, trainer, module, optimizer):
        module.seen.append([p.grad.clone() for p in module.parameters()])


@pytest.mark.parametrize("name", ["sgd", "adamw-fused", "simple-adam"])
def test_hooks_see_the_same_losses_and_gradients(tmp_path, name):
    assert_parity(tmp_path, with_optimizer(OPTIMIZERS[name]), do=use(half), callbacks=lambda: [Looks()])


def test_a_step_without_a_loss_updates_nothing(tmp_path):
    class Skips(Scaled):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == 2 else super().training_step(batch, batch_idx)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.seen.append(self.trainer.precision_plugin.scaler.state_dict())

    assert_parity(tmp_path, Skips, do=use(half))


def test_factors_set_in_the_middle_of_a_run_count_at_once(tmp_path):
    class Sets(Scaled):
        def on_train_batch_start(self, batch, batch_idx):
            scaler = self.trainer.precision_plugin.scaler
            if batch_idx == 3:
                scaler.set_growth_factor(4.0)
                scaler.set_backoff_factor(0.25)
                scaler.set_growth_interval(1)
                scaler.update(64.0)

    assert_parity(tmp_path, Sets, do=use(half))


def test_optimizers_with_hooks_on_their_step(tmp_path):
    class Hooked(Scaled):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            optimizer.register_step_post_hook(lambda *_: self.seen.append("stepped"))
            return optimizer

    assert_parity(tmp_path, Hooked, do=use(half))


class Lion(torch.optim.Optimizer):
    """An optimizer of the user's that counts its steps in an attribute."""

    steps = 0

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad.sign(), alpha=0.01 / self.steps)


def test_an_optimizer_of_the_users_is_not_called_in_a_step_that_overflowed(tmp_path):
    assert_parity(tmp_path, with_optimizer(Lion), do=use(half))


@pytest.mark.parametrize("spoil", ["disabled", "subclass", "patched"])
def test_other_scalers_run_on_lightnings_own_loop(tmp_path, spoil):
    class Own(torch.amp.GradScaler):
        def update(self, new_scale=None):
            super().update(new_scale)

    def plugins():
        made = half(enabled=spoil != "disabled")
        if spoil == "subclass":
            made[0].scaler = Own("cpu", init_scale=1024.0)
        elif spoil == "patched":
            step = made[0].scaler.step
            made[0].scaler.step = lambda optimizer, **kwargs: step(optimizer, **kwargs)
        return made

    class Noted(Scaled):
        overflows = frozenset({0, 1, 4, 7}) if spoil != "disabled" else frozenset()

    assert_parity(tmp_path, Noted, do=use(plugins), fallbacks=("loss-scaler",))


def test_lbfgs_is_refused_as_in_stock(tmp_path):
    left = assert_parity(tmp_path, with_optimizer(lambda p: torch.optim.LBFGS(p)), do=use(half))
    assert left.error.startswith(MisconfigurationException.__name__)


class Last(Callback):
    """Keeps a checkpoint in the middle of the run."""

    def on_train_epoch_end(self, trainer, module):
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(f"{trainer.default_root_dir}/middle.ckpt")


def train(make_trainer, folder, name, *, resume=None, epochs=2):
    torch.manual_seed(7)
    module = with_optimizer(OPTIMIZERS[name])()
    with quiet():
        trainer = make_trainer(
            **{**QUIET, "default_root_dir": folder, "logger": False, "max_epochs": epochs, "callbacks": [Last()]},
            plugins=half(),
        )
        module.batches = -1 if resume is None else 4
        torch.manual_seed(11)
        trainer.fit(module, ckpt_path=resume)
    return {
        "weights": module.state_dict(),
        "optimizer": trainer.optimizers[0].state_dict(),
        "scaler": trainer.precision_plugin.state_dict(),
        "fallbacks": getattr(trainer.fit_loop.epoch_loop, "fallbacks", []),
    }


@pytest.mark.parametrize("name", ["momentum", "simple-adam"])
def test_checkpoints_carry_the_scaler_both_ways(tmp_path, name):
    saved = {}
    for kind, make in (("stock", pl.Trainer), ("ours", zdtrain.Trainer)):
        (tmp_path / kind).mkdir()
        train(make, tmp_path / kind, name, epochs=1)
        saved[kind] = torch.load(tmp_path / kind / "middle.ckpt", weights_only=False)["MixedPrecision"]
    assert saved["stock"] == saved["ours"]
    assert saved["ours"]["scale"] != 1024.0
    stock, ours = tmp_path / "stock" / "middle.ckpt", tmp_path / "ours" / "middle.ckpt"
    want = train(pl.Trainer, tmp_path, name, resume=stock)
    for make, resume in ((pl.Trainer, ours), (zdtrain.Trainer, stock), (zdtrain.Trainer, ours)):
        end = train(make, tmp_path, name, resume=resume)
        assert end["scaler"] == want["scaler"]
        assert end["fallbacks"] == []
        torch.testing.assert_close(end["weights"], want["weights"], rtol=0, atol=0)
        torch.testing.assert_close(end["optimizer"]["state"], want["optimizer"]["state"], rtol=0, atol=0)
