"""Updates written for programs compute the very bits of torch's own optimizers."""

import copy
import pickle

import pytest
import torch
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop

from zdtrain.errors import FallbackReason
from zdtrain.optim import SimpleAdam
from zdtrain.step.handed import InsideByRule
from zdtrain.step.optimizers import inside

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
]


def parameters(dtype):
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator, dtype=dtype) for shape in ((7, 5), (33,), (), (64, 16))]
    return [torch.nn.Parameter(tensor) for tensor in made]


def train(kind, options, dtype, *, by_rule, steps=12, frozen=()):
    params = parameters(dtype)
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


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_parameters_that_were_frozen_for_a_while_keep_counts_of_their_own(kind, options):
    runs = [train(kind, options, torch.float32, by_rule=by_rule, frozen={3, 4}) for by_rule in (False, True)]
    assert_equal(*runs, "run")


def test_a_pickled_part_starts_anew():
    optimizer = Adam(parameters(torch.float32))
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
    optimizer = Adam(parameters(torch.float32))
    part = inside(optimizer, lowered=True)
    before = {name: copy.copy(value) for name, value in vars(optimizer).items() if name != "state"}
    with part.recording():
        assert optimizer.step.__func__ is not Adam.step
    assert {name: value for name, value in vars(optimizer).items() if name != "state"} == before
    assert optimizer.step.__func__ is Adam.step


@pytest.mark.parametrize("kind", [Adam, SimpleAdam])
def test_a_step_that_somebody_replaced_is_called_and_not_recorded(monkeypatch, kind):
    optimizer = kind(parameters(torch.float32), lr=0.1)
    assert not isinstance(inside(optimizer, lowered=False), FallbackReason)
    monkeypatch.setattr(kind, "step", lambda self, closure=None: None)
    assert "another step in its place" in inside(optimizer, lowered=False).message
