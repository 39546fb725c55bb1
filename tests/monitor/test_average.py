"""``ema_decay``: averaged weights, kept in the step."""

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from .runs import Net, differences, loader, run


class Weights(Callback):
    """Keeps the weights after every batch."""

    def __init__(self):
        self.after = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.after.append([p.detach().clone() for p in module.parameters()])


def reference(start, weights, decay):
    average = [p.double() for p in start]
    for after in weights:
        average = [decay * a + (1 - decay) * p.double() for a, p in zip(average, after, strict=True)]
    return average


@pytest.mark.parametrize("capture", ["off", "graph"])
@pytest.mark.parametrize("optimizer", ["SGD", "fused AdamW", "SimpleAdam"])
def test_the_average_is_that_of_the_weights_after_every_step(optimizer, capture):
    spy, module = Weights(), Net(optimizer)
    start = []
    module.on_fit_start = lambda: start.extend(p.detach().clone() for p in module.parameters())  # type: ignore[method-assign]
    trainer = run(module, loader(40), ema_decay=0.9, callbacks=[spy], capture=capture)
    want = reference(start, spy.after, 0.9)
    named = trainer.ema.state_dict()
    for (name, _), expected in zip(module.named_parameters(), want, strict=True):
        torch.testing.assert_close(named[name].double(), expected, rtol=1e-5, atol=1e-6)
    if capture == "graph":
        assert trainer.capture_report.steps_replayed > 20


def test_skipped_steps_do_not_enter_the_average():
    skipped = run(Net("AdamW"), loader(40, {17: "nan"}), nonfinite="skip", ema_decay=0.9)
    without = run(Net("AdamW"), loader(40, without=(17,)), ema_decay=0.9)
    assert differences(skipped.ema.state_dict(), without.ema.state_dict()) == []


def test_a_stop_leaves_the_average_of_the_good_steps():
    stopped = run(Net("AdamW"), loader(60, {17: "nan"}), nonfinite="stop", ema_decay=0.9, lag=10_000, max_lag_steps=20)
    ended = run(Net("AdamW"), loader(60), max_steps=17, ema_decay=0.9)
    assert differences(stopped.ema.state_dict(), ended.ema.state_dict()) == []


def test_the_module_holds_the_average_inside_the_context_only():
    trainer = run(Net(), loader(10), ema_decay=0.9)
    module = trainer.lightning_module
    trained = {name: value.clone() for name, value in module.state_dict().items()}
    with trainer.ema.applied():
        assert differences(dict(module.state_dict()), trainer.ema.state_dict()) == []
        assert differences(dict(module.state_dict()), trained) != []
    assert differences(dict(module.state_dict()), trained) == []


class Validated(Net):
    def __init__(self):
        super().__init__("AdamW")
        self.seen = []

    def val_dataloader(self):
        return loader(2)

    def on_validation_epoch_end(self):
        self.seen.append({name: value.clone() for name, value in self.state_dict().items()})


def test_validation_on_request_sees_the_average_and_training_goes_on_with_the_trained_weights(tmp_path):
    options = {"max_epochs": 2, "num_sanity_val_steps": 0, "enable_checkpointing": True}
    keep = ModelCheckpoint(tmp_path, save_top_k=-1)
    averaged, plain = Validated(), Validated()
    run(averaged, loader(10), ema_decay=0.9, ema_validation=True, callbacks=[keep], **options)
    run(plain, loader(10), **options, default_root_dir=tmp_path / "plain")
    saved = [torch.load(path, weights_only=False) for path in sorted(tmp_path.glob("*.ckpt"))]
    assert differences(dict(averaged.state_dict()), dict(plain.state_dict())) == []
    for epoch, checkpoint in enumerate(saved):
        assert differences(averaged.seen[epoch], checkpoint["ema_state_dict"]) == []
        assert differences(plain.seen[epoch], dict(checkpoint["state_dict"])) == []


def test_a_resumed_run_goes_on_with_the_average(tmp_path):
    keep = ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}")
    options = {"ema_decay": 0.9, "enable_checkpointing": True}
    whole = run(Net("AdamW"), loader(10), max_epochs=2, callbacks=[keep], **options)
    resumed = run(Net("AdamW"), loader(10), max_epochs=2, ckpt_path=tmp_path / "epoch=0.ckpt", **options)
    assert differences(whole.ema.state_dict(), resumed.ema.state_dict()) == []


def test_sixteen_bit_weights_are_averaged_in_32():
    trainer = run(Net().bfloat16(), loader(3), ema_decay=0.999, precision="bf16-true")
    assert trainer.ema.state_dict()["net.0.weight"].dtype == torch.float32
