"""Schedules write one tensor in place: ours without the host, torch's through the param group."""

import copy
import math
import pickle
import warnings

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from zdtrain.errors import ConfigError
from zdtrain.optim import (
    Constant,
    Cosine,
    DeviceLR,
    InverseSquareRoot,
    Linear,
    OneCycle,
    SimpleAdam,
    Warmup,
)

TORCH_SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda e: 0.5**e),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda e: 0.5),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.1),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.25, total_iters=4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 6, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=10),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}
READS = {"ReduceLROnPlateau"}  # compares on the host


def two_groups():
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    for param in params:
        param.grad = torch.ones(2)
    return params


def run(optimizer, scheduler, steps=7):
    """Return lr and beta1 of each group after each step."""
    seen = []
    for _ in range(steps):
        optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scheduler.step(torch.tensor(1.0)) if "Plateau" in type(scheduler).__name__ else scheduler.step()
        seen.append([(float(g["lr"]), float(g["betas"][0])) for g in optimizer.param_groups])
    return seen


def test_every_scheduler_of_torch_is_in_the_table():
    known = {name for name in lr_scheduler.__all__ if name != "LRScheduler"}
    assert known == set(TORCH_SCHEDULERS)


@pytest.mark.parametrize("tensor_betas", [False, True], ids=["number betas", "tensor betas"])
@pytest.mark.parametrize("name", TORCH_SCHEDULERS)
def test_a_torch_scheduler_lands_in_the_same_tensors(name, tensor_betas):
    first, second = two_groups()
    lrs = [torch.tensor(0.5), torch.tensor(0.25)]
    betas = (torch.tensor(0.9), torch.tensor(0.999)) if tensor_betas else (0.9, 0.999)
    second_betas = tuple(b.clone() for b in betas) if tensor_betas else betas
    groups = [{"params": [first], "lr": lrs[0]}, {"params": [second], "lr": lrs[1], "betas": second_betas}]
    optimizer = SimpleAdam(groups, betas=betas)
    scheduler = TORCH_SCHEDULERS[name](optimizer)
    reference = torch.optim.AdamW(
        [{"params": [p], "lr": lr} for p, lr in zip(two_groups(), (0.5, 0.25), strict=True)], weight_decay=0.0
    )
    want = run(reference, TORCH_SCHEDULERS[name](reference))
    got = run(optimizer, scheduler)
    assert torch.allclose(torch.tensor(got), torch.tensor(want), rtol=1e-5)
    for group, lr in zip(optimizer.param_groups, lrs, strict=True):
        assert group["lr"] is lr
        assert group.get("initial_lr") is not lr
        for beta, given in zip(group["betas"], betas if group["params"][0] is first else second_betas, strict=True):
            assert beta is given or not tensor_betas


@pytest.mark.parametrize("name", TORCH_SCHEDULERS)
def test_only_the_plateau_scheduler_reads(name, host_reads):
    weight = two_groups()[0]
    optimizer = SimpleAdam([weight], lr=torch.tensor(0.1))
    scheduler = TORCH_SCHEDULERS[name](optimizer)
    optimizer.step()
    with host_reads:
        for _ in range(2):
            scheduler.step(1.0) if name in READS else scheduler.step()
    assert (host_reads.count > 0) == (name in READS)


def factors(schedule, steps):
    return [schedule(torch.tensor(float(step))).item() for step in range(steps)]


def lrs_of(make_scheduler, steps):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = make_scheduler(optimizer)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


@pytest.mark.parametrize(
    ("schedule", "stock"),
    [
        (Constant(), lambda o: lr_scheduler.ConstantLR(o, 1.0)),
        (Linear(num_steps=8, start=0.25, end=0.75), lambda o: lr_scheduler.LinearLR(o, 0.25, 0.75, 8)),
        (Cosine(num_steps=12, end=0.1), lambda o: lr_scheduler.CosineAnnealingLR(o, 12, eta_min=0.1)),
        (OneCycle(num_steps=12), lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=12, cycle_momentum=False)),
        (
            OneCycle(num_steps=12, rise=0.5, div_factor=5.0, final_div_factor=10.0),
            lambda o: lr_scheduler.OneCycleLR(
                o, 1.0, total_steps=12, pct_start=0.5, div_factor=5.0, final_div_factor=10.0, cycle_momentum=False
            ),
        ),
        (
            Warmup(lr_warmup_steps=4, start=0.2, then=Cosine(num_steps=8)),
            lambda o: lr_scheduler.SequentialLR(
                o, [lr_scheduler.LinearLR(o, 0.2, total_iters=4), lr_scheduler.CosineAnnealingLR(o, 8)], [4]
            ),
        ),
    ],
)
def test_schedules_equal_those_of_torch(schedule, stock):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert factors(schedule, 12) == pytest.approx(lrs_of(stock, 12), rel=1e-5, abs=1e-6)


def test_inverse_square_root_and_the_ends_of_the_others():
    assert factors(InverseSquareRoot(num_steps=4), 17)[::4] == pytest.approx(
        [1, 1, math.sqrt(0.5), math.sqrt(1 / 3), 0.5]
    )
    late = torch.tensor(1e6)
    assert Linear(num_steps=5, end=0.3)(late).item() == pytest.approx(0.3)
    assert Cosine(num_steps=5, end=0.3)(late).item() == pytest.approx(0.3)
    assert OneCycle(num_steps=50)(late).item() == pytest.approx(1 / 25e4)
    assert Warmup(lr_warmup_steps=2, then=Constant(factor=0.5))(late).item() == 0.5


def test_a_schedule_runs_inside_the_optimizer_for_each_group_without_reads(host_reads):
    first, second = two_groups()
    optimizer = SimpleAdam(
        [{"params": [first], "lr": torch.tensor(1.0)}, {"params": [second], "lr": 0.5}], schedule=lambda t: 1 / (1 + t)
    )
    optimizer.init_state()
    with host_reads:
        for _ in range(3):
            optimizer.step()
    assert host_reads.count == 0
    assert [g["lr"].item() for g in optimizer.param_groups] == pytest.approx([1 / 3, 0.5 / 3])
    assert [g["initial_lr"].item() for g in optimizer.param_groups] == [1.0, 0.5]


def test_the_lr_of_every_step_is_that_of_the_step_before_the_skipped_ones():
    weight = two_groups()[0]
    optimizer = SimpleAdam([weight], lr=1.0, schedule=Linear(num_steps=10), skip_nonfinite=True)
    seen = []
    for bad in (False, True, True, False):
        weight.grad = torch.full((2,), float("nan") if bad else 1.0)
        optimizer.step()
        seen.append(round(optimizer.param_groups[0]["lr"].item(), 4))
    assert seen == [1.0, 0.9, 0.9, 0.9]


def test_a_device_scheduler_counts_writes_and_reads_nothing(host_reads):
    weight = two_groups()[0]
    lr = torch.tensor(2.0)
    optimizer = torch.optim.SGD([weight], lr=lr)
    scheduler = DeviceLR(optimizer, Linear(num_steps=4))
    seen = [lr.clone()]
    for _ in range(3):
        optimizer.step()
        with host_reads:
            scheduler.step()
        seen.append(lr.clone())
    assert host_reads.count == 0
    assert optimizer.param_groups[0]["lr"] is lr
    assert torch.stack(seen).tolist() == [2.0, 1.5, 1.0, 0.5]
    assert scheduler.get_last_lr()[0].item() == 0.5


def test_a_device_scheduler_resumes_from_its_state():
    def make():
        optimizer = SimpleAdam(two_groups()[:1], lr=1.0)
        return optimizer, DeviceLR(optimizer, [Cosine(num_steps=10)])

    optimizer, scheduler = make()
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    saved = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
    other, other_scheduler = make()
    other.load_state_dict(saved[0])
    other_scheduler.load_state_dict(saved[1])
    optimizer.step()
    scheduler.step()
    other.step()
    other_scheduler.step()
    assert torch.equal(other.param_groups[0]["lr"], optimizer.param_groups[0]["lr"])
    assert other_scheduler.last_epoch == 4


def test_a_device_scheduler_can_be_recorded_and_replayed():
    optimizer = SimpleAdam(two_groups()[:1], lr=1.0)
    scheduler = DeviceLR(optimizer, Linear(num_steps=10))
    optimizer.step()
    replay = make_fx(lambda x: (scheduler.step(), optimizer.param_groups[0]["lr"] * x)[1])(torch.tensor(1.0))
    with torch.no_grad():
        assert [round(replay(torch.tensor(1.0)).item(), 4) for _ in range(3)] == [0.8, 0.7, 0.6]


def test_a_device_scheduler_refuses_a_number_for_lr_and_too_few_schedules():
    weight = two_groups()[0]
    with pytest.raises(
        ConfigError, match=r"param group 0 holds the number 0.1: give the optimizer lr=torch.tensor\(0.1"
    ):
        DeviceLR(torch.optim.SGD([weight], lr=0.1), Constant())
    with pytest.raises(ConfigError, match="2 schedules for 1 param groups"):
        DeviceLR(SimpleAdam([weight]), [Constant(), Constant()])


class Regression(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.seen = []

    def training_step(self, batch):
        return self.layer(batch).square().mean()

    def on_train_batch_end(self, *_):
        self.seen.append(self.optimizers().param_groups[0]["lr"].item())

    def configure_optimizers(self):
        optimizer = SimpleAdam(self.parameters(), lr=1.0)
        scheduler = DeviceLR(optimizer, Linear(num_steps=4))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def test_a_device_scheduler_is_a_lightning_lr_scheduler():
    module = Regression()
    trainer = Trainer(max_steps=3, logger=False, enable_checkpointing=False, accelerator="cpu")
    trainer.fit(module, DataLoader(torch.randn(8, 2), batch_size=2))
    assert module.seen == [0.75, 0.5, 0.25]  # Lightning steps the scheduler before this hook


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Linear(num_steps=0), "Linear.num_steps must be greater than 0, got 0"),
        (lambda: Cosine(num_steps=-1), "Cosine.num_steps"),
        (lambda: InverseSquareRoot(num_steps=0), "InverseSquareRoot.num_steps"),
        (lambda: Warmup(lr_warmup_steps=0), "Warmup.lr_warmup_steps"),
        (lambda: OneCycle(num_steps=10, rise=1.0), "OneCycle.rise must be between 0 and 1"),
        (lambda: OneCycle(num_steps=2, rise=0.3), r"rise \* num_steps must be more than 1"),
        (lambda: OneCycle(num_steps=10, div_factor=0.0), "OneCycle.div_factor"),
    ],
)
def test_schedules_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_schedules_compare_and_pickle():
    schedule = Warmup(lr_warmup_steps=3, then=Cosine(num_steps=5))
    assert pickle.loads(pickle.dumps(schedule)) == schedule
