"""The optimizer's step is called past torch's wrapper only where the wrapper has nothing to do."""

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from zdtrain.optim import SimpleAdam
from zdtrain.step.eager import unobserved_step


def optimizer(kind=torch.optim.Adam):
    return kind([nn.Parameter(torch.ones(2))], lr=0.1)


# Not LBFGS: Dynamo, once it is used in a process, puts a wrapper of its own around that step, which is then kept.
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop, SimpleAdam])
def test_a_step_that_nobody_observes_is_the_optimizers_own(kind):
    bare, wrapped = optimizer(kind), optimizer(kind)
    for one, step in ((bare, unobserved_step(bare)), (wrapped, type(wrapped).step)):
        (parameter,) = one.param_groups[0]["params"]

        def closure(one=one, parameter=parameter):
            one.zero_grad()
            loss = parameter.square().sum()
            loss.backward()
            return loss

        step(one, closure=closure)
    assert torch.equal(bare.param_groups[0]["params"][0], wrapped.param_groups[0]["params"][0])
    assert unobserved_step(bare) is not type(bare).step


@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
def test_hooks_of_the_optimizer_are_run(register):
    one = optimizer()
    handle = getattr(one, register)(lambda *args: None)
    assert unobserved_step(one) is None
    handle.remove()
    assert unobserved_step(one) is not None


def test_global_hooks_schedulers_profilers_and_own_steps_are_heeded():
    one = optimizer()
    handle = register_optimizer_step_post_hook(lambda *args: None)
    assert unobserved_step(one) is None
    handle.remove()
    with torch.profiler.profile():
        assert unobserved_step(one) is None
    assert unobserved_step(one) is not None
    torch.optim.lr_scheduler.StepLR(one, 1)  # counts the calls of `step`
    assert unobserved_step(one) is None
