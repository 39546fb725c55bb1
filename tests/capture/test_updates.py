"""Updates written for programs compute the very bits of torch's own optimizers."""

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
from torch.optim import (
    ASGD,
    LBFGS,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    RAdam,
    RMSprop,
    Rprop,
    SparseAdam,
)

from zdtrain.capture.handed import InsideByRule
from zdtrain.capture.optimizers import inside
from zdtrain.errors import FallbackReason
from zdtrain.optim import SimpleAdam

from .runs import assert_equal

CASES = [
    (SGD, {"lr": 0.1}),
    (SGD, {"lr": 0.1, "weight_decay": 0.01, "maximize": True}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (Adam, {"lr": 0.01}),
    (Adam, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True, "maximize": True}),
    (AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    (AdamW, {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-5}),
    (NAdam, {"lr": 0.01}),
    (NAdam, {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    (RAdam, {"lr": 0.01}),
    (RAdam, {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    (Adamax, {"lr": 0.01, "weight_decay": 0.1}),
    (Adadelta, {"lr": 0.5, "weight_decay": 0.1}),
    (Adagrad, {"lr": 0.1, "lr_decay": 0.01, "weight_decay": 0.1, "initial_accumulator_value": 0.1}),
    (RMSprop, {"lr": 0.01}),
    (RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True, "weight_decay": 0.1}),
    (Rprop, {"lr": 0.01}),
    (ASGD, {"lr": 0.1, "t0": 8, "weight_decay": 0.01, "lambd": 0.01}),
    (Adafactor, {}),
    (Adafactor, {"lr": 0.1, "weight_decay": 0.1, "maximize": True, "eps": (1e-6, 0.1), "d": 2.0}),
    (Muon, {}),
    (Muon, {"lr": 0.1, "nesterov": False, "weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 2}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "foreach": True}),
    (Adam, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True, "foreach": True}),
    (Adamax, {"lr": 0.01, "weight_decay": 0.1, "foreach": True}),
    (Adadelta, {"lr": 0.5, "weight_decay": 0.1, "foreach": True}),
    (Adagrad, {"lr": 0.1, "lr_decay": 0.01, "weight_decay": 0.1, "foreach": True}),
    (RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True, "weight_decay": 0.1, "foreach": True}),
    (Rprop, {"lr": 0.01, "foreach": True}),
]
HALF_CASES = [
    (Adam, {"lr": 0.01}),
    (Adam, {"lr": 0.01, "amsgrad": True, "maximize": True, "betas": (0.8, 0.95)}),
    (AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    (NAdam, {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    (RAdam, {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    (Adamax, {"lr": 0.01}),
    (Adagrad, {"lr": 0.1, "lr_decay": 0.01, "initial_accumulator_value": 0.1}),
    (RMSprop, {"lr": 0.01, "centered": True}),
    (Rprop, {"lr": 0.01}),
]
OUTSIDE = [  # each with parameters in bfloat16 and in float32: whether it is outside
    (SGD, {"lr": 0.1}, True, False),
    (Adam, {"weight_decay": 0.1}, True, False),
    (Adam, {"foreach": True}, True, False),
    (RMSprop, {"momentum": 0.9}, True, False),
    (Adadelta, {}, True, False),
    (ASGD, {}, True, False),
    (Adafactor, {}, True, False),
    (Muon, {}, True, False),
    (NAdam, {"foreach": True}, True, True),
    (RAdam, {"foreach": True}, True, True),
    (ASGD, {"foreach": True}, True, True),
    (Adafactor, {"foreach": True}, True, True),
    (Adagrad, {"fused": True}, True, True),
    (AdamW, {"differentiable": True}, True, True),
    (LBFGS, {}, True, True),
    (SparseAdam, {}, True, True),
]


def parameters(kind, dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = ((7, 5), (16, 9), (9, 16), (64, 16)) if kind is Muon else ((7, 5), (33,), (), (64, 16))
    made = [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]
    return [torch.nn.Parameter(tensor) for tensor in made]


def train(kind, options, dtype, *, by_rule, steps=12, frozen=()):
    params = parameters(kind, dtype)
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.02}]
    optimizer = kind(groups, **options)
    part = inside(optimizer, lowered=False)
    assert isinstance(part, InsideByRule)
    assert part.exact
    generator = torch.Generator().manual_seed(1)
    for number in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator, dtype=dtype)
        if number in frozen:  # these parameters count fewer updates from now on
            params[0].grad = params[3].grad = None
        optimizer.param_groups[0]["lr"] *= 0.9
        if "weight_decay" in optimizer.param_groups[0]:
            optimizer.param_groups[0]["weight_decay"] *= 1.1
        if by_rule and number > 0:  # the first step makes the state
            with part.recording():
                optimizer.step()
            assert part.refusal is None
        else:
            optimizer.step()
    return [param.detach() for param in params], optimizer.state_dict()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("kind", "options"), CASES)
def test_an_update_by_rule_leaves_the_bits_and_the_state_of_the_optimizer(kind, options, dtype):
    params, state = train(kind, options, dtype, by_rule=False)
    got, got_state = train(kind, options, dtype, by_rule=True)
    assert_equal(params, got, "parameters")
    assert_equal(state, got_state, "state")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kind", "options"), HALF_CASES)
def test_half_parameters_are_rounded_as_torch_rounds_them(kind, options, dtype):
    runs = [train(kind, options, dtype, by_rule=by_rule, steps=30) for by_rule in (False, True)]
    assert_equal(*runs, "run")


@pytest.mark.parametrize(("kind", "options", "half", "single"), OUTSIDE)
def test_what_would_be_rounded_in_another_way_is_outside(kind, options, half, single):
    for dtype, outside in ((torch.bfloat16, half), (torch.float32, single)):
        found = inside(kind(parameters(kind, dtype), **options), lowered=False)
        assert isinstance(found, FallbackReason) == outside, (dtype, found)


def test_a_decay_that_appears_later_takes_half_parameters_outside():
    optimizer = Adam(parameters(Adam, torch.bfloat16))
    part = inside(optimizer, lowered=False)
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.param_groups[0]["weight_decay"] = 0.1
    with part.recording():
        optimizer.step()
    assert "adds multiples of bfloat16 tensors" in part.refusal.message
    assert all(state["step"] == 2 for state in optimizer.state.values())


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 0.0])
def test_adafactor_takes_gradients_that_are_no_numbers_as_torch_does(number):
    results = []
    for by_rule in (False, True):
        params = parameters(Adafactor, torch.float32)
        optimizer = Adafactor(params)
        part = inside(optimizer, lowered=False)
        for step in range(3):
            for param in params:
                param.grad = torch.full_like(param, number if step == 1 else 1.0)
            with part.recording() if by_rule and step else nullcontext():
                optimizer.step()
        results.append([param.detach() for param in params])
    assert_equal(*results, "parameters")


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_parameters_that_were_frozen_for_a_while_keep_counts_of_their_own(kind, options):
    runs = [train(kind, options, torch.float32, by_rule=by_rule, frozen={3, 4}) for by_rule in (False, True)]
    assert_equal(*runs, "run")


def test_a_pickled_part_starts_anew():
    optimizer = Adam(parameters(Adam, torch.float32))
    part = inside(optimizer, lowered=False)
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    optimizer.step()
    with part.recording():
        optimizer.step()
    again = pickle.loads(pickle.dumps(part))
    assert isinstance(again, InsideByRule)
    assert again.exact


def test_nothing_of_the_update_stays_in_the_optimizer():
    optimizer = Adam(parameters(Adam, torch.float32))
    part = inside(optimizer, lowered=True)
    before = {name: copy.copy(value) for name, value in vars(optimizer).items() if name != "state"}
    with part.recording():
        assert optimizer.step.__func__ is not Adam.step
    assert {name: value for name, value in vars(optimizer).items() if name != "state"} == before
    assert optimizer.step.__func__ is Adam.step


@pytest.mark.parametrize("kind", [Adam, SimpleAdam])
def test_a_step_that_somebody_replaced_is_called_and_not_recorded(monkeypatch, kind):
    optimizer = kind(parameters(kind, torch.float32), lr=0.1)
    assert not isinstance(inside(optimizer, lowered=False), FallbackReason)
    monkeypatch.setattr(kind, "step", lambda self, closure=None: None)
    assert "another step in its place" in inside(optimizer, lowered=False).message
