"""All hooks of module, callbacks, data module and loggers are called in stock Lightning's order."""

import inspect

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks

from tests.parity.harness import Net, assert_parity


def hooks_of(*bases):
    names = {name for base in bases for name, _ in inspect.getmembers(base, inspect.isfunction)}
    return sorted(name for name in names if name.startswith(("on_", "setup", "teardown")))


def noting(base, names, note):
    """Make a subclass of `base` that notes every call of the hooks `names`."""

    def method(name):
        def hook(self, *args, **kwargs):
            note(self, args, name)
            return getattr(base, name)(self, *args, **kwargs)

        return hook

    return type(base.__name__, (base,), {name: method(name) for name in names})


MODULE_HOOKS = hooks_of(ModelHooks, DataHooks, CheckpointHooks)
IN_THE_STEP = ["training_step", "backward", "optimizer_zero_grad", "configure_gradient_clipping", "lr_scheduler_step"]


def state_of(module):
    trainer = module._trainer
    progress = trainer.fit_loop.epoch_loop.batch_progress.current
    return (
        module._current_fx_name,
        trainer.global_step,
        trainer.current_epoch,
        (progress.ready, progress.started, progress.processed, progress.completed),
        trainer.fit_loop.epoch_loop._batches_that_stepped,
        trainer.state.stage,
        torch.is_grad_enabled(),
        module.training,
        sum(parameter.grad is not None for parameter in module.parameters()),
    )


def note_in_module(self, args, name):
    self.seen.append(("module", name, state_of(self) if self._trainer is not None else None))


def note_in_callback(self, args, name):
    module = args[0].lightning_module
    state = state_of(module) if name not in ("setup", "teardown") else None
    module.seen.append((self.name, name, state, [type(arg).__name__ for arg in args]))


TracedCallback = noting(Callback, hooks_of(Callback), note_in_callback)


class Scheduled(Net):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]


def traced_callbacks(names):
    def make():
        callbacks = [TracedCallback() for _ in names]
        for name, callback in zip(names, callbacks, strict=True):
            callback.name = name
        return callbacks

    return make


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_grad_batches": 5},
        {"accumulate_grad_batches": 3, "lightning_quirks": True},
        {"gradient_clip_val": 0.5},
        {"val_check_interval": 2},
        {"fast_dev_run": True},
        {"max_steps": 7},
        {"precision": "bf16-mixed"},
        {"num_sanity_val_steps": 2},
        {"overfit_batches": 2},
        {"limit_val_batches": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("hooks", "names"),
    [
        pytest.param(MODULE_HOOKS, ("one", "two"), id="all"),
        pytest.param([*MODULE_HOOKS, *IN_THE_STEP], (), id="module"),
        pytest.param(IN_THE_STEP, (), id="step"),
        pytest.param([], ("one",), id="callback"),
    ],
)
def test_order(tmp_path, hooks, names, options):
    module = noting(Scheduled, [name for name in hooks if hasattr(LightningModule, name)], note_in_module)
    ours = assert_parity(tmp_path, module, callbacks=traced_callbacks(names), **options)
    assert ours.seen


@pytest.mark.parametrize("hook", [*MODULE_HOOKS, *IN_THE_STEP])
def test_an_exception_in_a_hook(tmp_path, hook):
    def fail(self, *args, **kwargs):
        raise RuntimeError(f"in {hook}")

    module = type("Fails", (Scheduled,), {hook: fail})
    assert_parity(
        tmp_path,
        module,
        callbacks=lambda: [*traced_callbacks(["one"])(), ModelCheckpoint()],
        enable_checkpointing=True,
        max_epochs=1,
    )


def test_teardown_leaves_the_same_module(tmp_path):
    def attributes(trainer, module):
        before = sorted(module.__dict__)
        trainer.fit(module)
        return before, sorted(module.__dict__), type(module.log).__name__

    assert_parity(tmp_path, Net, do=attributes)
