"""Optimizer state goes to and from torch's optimizers and files, and never moves when it is loaded."""

import io

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from zdtrain.errors import ConfigError
from zdtrain.optim import Linear, SimpleAdam

STOCK = {
    "adamw": (torch.optim.AdamW, {}),
    "adamw foreach": (torch.optim.AdamW, {"foreach": True}),
    "adamw fused": (torch.optim.AdamW, {"fused": True}),
    "adamw tensor lr": (torch.optim.AdamW, {"lr": torch.tensor(0.01)}),
    "adam": (torch.optim.Adam, {}),
}


def make(dtype=torch.float32):
    return [torch.nn.Parameter(torch.linspace(-1, 1, 6).to(dtype)), torch.nn.Parameter(torch.ones(2, 2).to(dtype))]


def train(params, optimizer, first, last):
    for step in range(first, last):
        for i, param in enumerate(params):
            param.grad = torch.full_like(param, (step % 7 - 3 + i) / 3)
        optimizer.step()


def addresses(optimizer):
    tensors = [t for entry in optimizer.state.values() for t in entry.values()]
    tensors += [group["lr"] for group in optimizer.param_groups]
    return [t.data_ptr() for t in tensors]


def through_a_file(state_dict, *, weights_only):
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, map_location="cpu", weights_only=weights_only)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("warm", [False, True], ids=["fresh", "after steps"])
@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_a_resumed_run_equals_one_that_never_stopped(dtype, weights_only, warm, implementation):
    params = make(dtype)
    optimizer = SimpleAdam(params, lr=0.01, implementation=implementation)
    train(params, optimizer, 0, 300)  # bfloat16 could not count as far
    saved = through_a_file(optimizer.state_dict(), weights_only=weights_only)
    weights = [p.detach().clone() for p in params]
    train(params, optimizer, 300, 305)

    resumed = make(dtype)
    other = SimpleAdam(resumed, lr=torch.tensor(0.5), implementation=implementation)
    if warm:
        train(resumed, other, 0, 2)
    lr, before = other.param_groups[0]["lr"], addresses(other)
    other.load_state_dict(saved)
    assert addresses(other) == before or not warm
    assert other.param_groups[0]["lr"] is lr
    with torch.no_grad():
        for param, weight in zip(resumed, weights, strict=True):
            param.copy_(weight)
    placed = addresses(other)
    train(resumed, other, 300, 305)
    assert addresses(other) == placed
    for a, b in zip(params, resumed, strict=True):
        assert torch.equal(a, b)
        step = other.state[b]["step"]
        assert (step.shape, step.dtype, step.item()) == ((), torch.float32, 305)


@pytest.mark.parametrize("kind", STOCK)
@pytest.mark.parametrize("warm", [False, True], ids=["fresh", "after steps"])
def test_a_run_can_go_on_from_a_stock_optimizer(kind, warm):
    stock_class, options = STOCK[kind]
    params, twin = make(), make()
    stock = stock_class(params, **{"lr": 0.01, "weight_decay": 0.0, "betas": (0.8, 0.9), **options})
    ours = SimpleAdam(twin, lr=0.5)
    if warm:
        train(twin, ours, 0, 2)
    train(params, stock, 0, 5)
    before = addresses(ours)
    ours.load_state_dict(through_a_file(stock.state_dict(), weights_only=False))
    assert addresses(ours) == before or not warm
    assert ours.param_groups[0]["lr"].item() == pytest.approx(0.01)
    assert ours.param_groups[0]["betas"] == (0.8, 0.9)
    with torch.no_grad():
        for a, b in zip(params, twin, strict=True):
            b.copy_(a)
    train(params, stock, 5, 10)
    train(twin, ours, 5, 10)
    for a, b in zip(params, twin, strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-7)
        assert ours.state[b]["step"].item() == 10


@pytest.mark.parametrize("kind", STOCK)
@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_a_stock_optimizer_can_go_on_from_ours(kind, implementation):
    stock_class, options = STOCK[kind]
    params, twin = make(), make()
    knobs = {"weight_decay": 0.1} if implementation == "fused" else {"weight_decay": torch.tensor(0.1)}
    ours = SimpleAdam(params, lr=0.01, implementation=implementation, **knobs)
    train(params, ours, 0, 5)
    stock = stock_class(twin, **{"lr": 0.5, **options})
    stock.load_state_dict(through_a_file(ours.state_dict(), weights_only=True))
    with torch.no_grad():
        for a, b in zip(params, twin, strict=True):
            b.copy_(a)
    train(params, ours, 5, 10)
    train(twin, stock, 5, 10)
    for a, b in zip(params, twin, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def test_saved_scalars_do_not_change_with_the_optimizer():
    params = make()
    optimizer = SimpleAdam(params, lr=0.1)
    train(params, optimizer, 0, 1)
    saved = optimizer.state_dict()
    optimizer.param_groups[0]["lr"] = 0.5
    train(params, optimizer, 1, 2)
    assert saved["param_groups"][0]["lr"].item() == pytest.approx(0.1)
    assert saved["state"][0]["step"].item() == 1


def test_a_schedule_goes_on_where_it_was_saved():
    params = make()
    optimizer = SimpleAdam(params, lr=1.0, schedule=Linear(num_steps=10))
    train(params, optimizer, 0, 4)
    other_params = make()
    other = SimpleAdam(other_params, lr=1.0, schedule=Linear(num_steps=10))
    other.load_state_dict(through_a_file(optimizer.state_dict(), weights_only=True))
    train(other_params, other, 4, 5)
    assert other.step_count.item() == 5
    assert other.param_groups[0]["lr"].item() == pytest.approx(0.6)


def test_state_that_was_not_saved_starts_anew():
    params = make()
    optimizer = SimpleAdam(params)
    train(params, optimizer, 0, 3)
    saved = optimizer.state_dict()
    del saved["state"][1]
    optimizer.load_state_dict(saved)
    assert [optimizer.state[p]["step"].item() for p in params] == [3, 0]
    assert not optimizer.state[params[1]]["exp_avg"].any()


def test_old_checkpoints_with_numbers_for_counts_load():
    params = make()
    optimizer = SimpleAdam(params)
    train(params, optimizer, 0, 3)
    saved = optimizer.state_dict()
    for entry in saved["state"].values():
        entry["step"] = 7
    optimizer.load_state_dict(saved)
    assert optimizer.state[params[0]]["step"].item() == 7
    assert optimizer.step_count.item() == 7


def test_load_hooks_run():
    params, seen = make(), []
    optimizer = SimpleAdam(params)
    train(params, optimizer, 0, 1)
    optimizer.register_load_state_dict_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_load_state_dict_post_hook(lambda *_: seen.append("post"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["pre", "post"]


class Regression(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return SimpleAdam(self.parameters(), lr=torch.tensor(0.01), schedule=Linear(num_steps=20))


def test_a_lightning_checkpoint_resumes_where_it_stopped(tmp_path):
    def fit(max_steps, ckpt_path=None):
        torch.manual_seed(0)
        module = Regression()
        options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
        trainer = Trainer(max_steps=max_steps, max_epochs=-1, **options)
        trainer.fit(module, DataLoader(torch.linspace(-1, 1, 8).reshape(4, 2), batch_size=4), ckpt_path=ckpt_path)
        return module, trainer

    whole, _ = fit(6)
    _, trainer = fit(4)
    trainer.save_checkpoint(tmp_path / "four.ckpt")
    resumed, trainer = fit(6, tmp_path / "four.ckpt")
    assert torch.equal(resumed.layer.weight, whole.layer.weight)
    assert trainer.optimizers[0].step_count.item() == 6


def saved_by(optimizer_class, **options):
    params = make()
    optimizer = optimizer_class(params, lr=0.1, **options)
    train(params, optimizer, 0, 1)
    return optimizer.state_dict()


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (lambda: saved_by(torch.optim.AdamW, amsgrad=True), "saved with amsgrad=True"),
        (lambda: saved_by(torch.optim.AdamW, maximize=True), "saved with maximize=True"),
        (lambda: saved_by(torch.optim.Adam, weight_decay=0.1), r"coupled weight_decay=0.1, SimpleAdam decouples it"),
        (
            lambda: saved_by(torch.optim.SGD, momentum=0.9),
            r"parameter 0 of shape \(6,\): the saved state holds momentum",
        ),
    ],
)
def test_state_that_means_something_else_is_refused(saved, message):
    with pytest.raises(ConfigError, match=message):
        SimpleAdam(make()).load_state_dict(saved())


def test_moments_of_another_shape_are_refused_by_parameter():
    saved = saved_by(torch.optim.AdamW)
    saved["state"][1]["exp_avg"] = torch.zeros(3)
    with pytest.raises(ConfigError, match=r"parameter 1 of shape \(2, 2\): the saved exp_avg has shape \(3,\)"):
        SimpleAdam(make()).load_state_dict(saved)


def test_a_refused_state_dict_changes_nothing():
    params = make()
    optimizer = SimpleAdam(params, lr=0.5)
    train(params, optimizer, 0, 1)
    before = [t.clone() for t in optimizer.state[params[0]].values()]
    saved = saved_by(torch.optim.AdamW)
    saved["state"][1]["exp_avg"] = torch.zeros(3)
    with pytest.raises(ConfigError, match="has shape"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"].item() == 0.5
    assert all(map(torch.equal, before, optimizer.state[params[0]].values()))
