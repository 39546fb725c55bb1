"""SimpleAdam computes what AdamW computes, for every implementation, dtype, group and option."""

import math
from itertools import chain

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zdtrain.optim import Cosine, Linear, SimpleAdam, Warmup

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(), (1,), (3,), (2, 5), (4, 1, 3)]


def parameters(shapes, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def set_grads(groups_of_params, seed, scale=1.0, missing=()):
    generator = torch.Generator().manual_seed(1000 + seed)
    for i, params in enumerate(zip(*groups_of_params, strict=True)):
        grad = torch.randn(params[0].shape, generator=generator, dtype=torch.float64) * scale
        for param in params:
            param.grad = None if i in missing else grad.to(param.dtype)


group_options = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([0.0, 1e-3, 0.1]),
        "weight_decay": st.sampled_from([0.0, 0.01, 0.5]),
        "betas": st.sampled_from([(0.9, 0.999), (0.0, 0.5), (0.95, 0.9)]),
        "eps": st.sampled_from([1e-8, 1e-3]),
    }
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=4),
    dtype=st.sampled_from([*DTYPES, torch.float64]),
    options=st.lists(group_options, min_size=1, max_size=3),
    missing_every=st.sampled_from([0, 2, 3]),
)
def test_fused_steps_equal_fused_adamw_bitwise(shapes, dtype, options, missing_every):
    ours = [parameters(shapes, dtype, seed) for seed in range(len(options))]
    stock = [parameters(shapes, dtype, seed) for seed in range(len(options))]
    tensors = [{**o, "lr": torch.tensor(o["lr"])} for o in options]
    simple = SimpleAdam([{"params": p, **o} for p, o in zip(ours, tensors, strict=True)])
    adamw = torch.optim.AdamW(
        [{"params": p, **o, "lr": o["lr"].clone()} for p, o in zip(stock, tensors, strict=True)], fused=True
    )
    for step in range(100):
        missing = {0} if missing_every and step % missing_every == 0 else set()
        for mine, theirs in zip(ours, stock, strict=True):
            set_grads([mine, theirs], step, missing=missing)
        simple.step()
        adamw.step()
    for mine, theirs in zip(chain.from_iterable(ours), chain.from_iterable(stock), strict=True):
        assert torch.equal(mine, theirs)
        for key in adamw.state[theirs]:
            assert torch.equal(simple.state[mine][key], adamw.state[theirs][key]), key


def float64_run(params, *, steps, lr, betas, eps, weight_decay, max_norm=None, factor=lambda t: 1.0, skipped=()):
    """AdamW in plain float64, from the formula."""
    p = [param.detach().double().clone() for param in params]
    m, v, t = [torch.zeros_like(x) for x in p], [torch.zeros_like(x) for x in p], 0
    for step in range(steps):
        set_grads([params], step)
        if step in skipped:
            continue
        g = [param.grad.double() for param in params]
        if max_norm is not None:
            norm = math.sqrt(sum(x.square().sum().item() for x in g))
            g = [x / max(1.0, (norm + 1e-6) / max_norm) for x in g]
        rate, t = lr * factor(t), t + 1
        for x, grad, m_, v_ in zip(p, g, m, v, strict=True):
            x.mul_(1 - rate * weight_decay)
            m_.mul_(betas[0]).add_(grad, alpha=1 - betas[0])
            v_.mul_(betas[1]).add_(grad.square(), alpha=1 - betas[1])
            x.sub_(rate * (m_ / (1 - betas[0] ** t)) / ((v_ / (1 - betas[1] ** t)).sqrt() + eps))
    return p


@pytest.mark.parametrize("implementation", ["fused", "foreach", "compiled"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-7)])
@pytest.mark.parametrize("tensor_knobs", [False, True])
def test_a_run_with_every_option_follows_the_float64_formula(implementation, dtype, tolerance, tensor_knobs):
    if implementation == "compiled" and dtype is torch.float64:
        pytest.skip("the compiled implementation is the foreach one; one dtype shows it")
    params = parameters(SHAPES, dtype)
    skipped = {5, 6, 40}
    numbers = {"lr": 0.0625, "betas": (0.875, 0.96875), "eps": 2.0**-20, "weight_decay": 0.125}  # exact in float32
    want = float64_run(
        parameters(SHAPES, dtype),
        steps=100,
        **numbers,
        max_norm=2.0,
        factor=lambda t: t / 10 if t < 10 else (1 + math.cos(math.pi * min((t - 10) / 80, 1))) / 2,
        skipped=skipped,
    )
    given = dict(numbers)
    if tensor_knobs:
        given |= {"lr": torch.tensor(0.0625), "weight_decay": torch.tensor(0.125)}
        if implementation != "fused":
            given |= {"betas": (torch.tensor(0.875), torch.tensor(0.96875)), "eps": torch.tensor(2.0**-20)}
    optimizer = SimpleAdam(
        params,
        **given,
        max_norm=2.0,
        skip_nonfinite=True,
        schedule=Warmup(lr_warmup_steps=10, then=Cosine(num_steps=80)),
        implementation=implementation,
    )
    for step in range(100):
        set_grads([params], step)
        if step in skipped:
            params[2].grad[0] = float("nan") if step % 2 else float("inf")
        optimizer.step()
    assert optimizer.skipped_count.item() == 3
    assert optimizer.step_count.item() == 97
    for param, wanted in zip(params, want, strict=True):
        assert torch.allclose(param.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("knobs", ["numbers", "tensors"])
def test_foreach_differs_from_fused_by_one_rounding_per_step(dtype, knobs):
    fused_params, foreach_params = parameters(SHAPES, dtype), parameters(SHAPES, dtype)
    options = {"lr": 0.0625, "weight_decay": 0.125, "betas": (0.875, 0.96875), "eps": 2.0**-20, "max_norm": 1.5}
    fused = SimpleAdam(fused_params, **options)
    if knobs == "tensors":
        options |= {name: torch.tensor(options[name]) for name in ("lr", "weight_decay", "eps", "max_norm")}
        options["betas"] = tuple(map(torch.tensor, options["betas"]))
    foreach = SimpleAdam(foreach_params, **options, implementation="foreach")
    rounding = torch.finfo(dtype).eps
    for step in range(100):
        set_grads([fused_params, foreach_params], step)
        before = [tensors_of(fused, p) for p in fused_params]
        fused.step()
        foreach.step()
        for a, b, old in zip(fused_params, foreach_params, before, strict=True):
            grad = a.grad.double().abs()
            for x, y, start, moved_by in zip(
                tensors_of(fused, a), tensors_of(foreach, b), old, (0.0625, grad, grad.square()), strict=True
            ):
                magnitude = torch.maximum(start.abs(), x.abs()) + moved_by
                assert ((x - y).abs() <= rounding * magnitude + torch.finfo(dtype).tiny).all(), step
        with torch.no_grad():  # judge each step by itself
            for a, b in zip(fused_params, foreach_params, strict=True):
                b.copy_(a)
                for key in ("exp_avg", "exp_avg_sq"):
                    foreach.state[b][key].copy_(fused.state[a][key])


def tensors_of(optimizer, param):
    state = optimizer.state.get(param) or {"exp_avg": torch.zeros(()), "exp_avg_sq": torch.zeros(())}
    return [t.detach().double().clone() for t in (param, state["exp_avg"], state["exp_avg_sq"])]


def test_the_tensor_given_as_lr_is_the_lr():
    weight = torch.nn.Parameter(torch.ones(2))
    lr = torch.tensor(0.5)
    optimizer = SimpleAdam([weight], lr=lr)
    assert optimizer.param_groups[0]["lr"] is lr
    for value in (0.5, 0.25):
        lr.fill_(value)
        before = weight.detach().clone()
        weight.grad = torch.ones(2)
        optimizer.step()
        assert torch.allclose(before - weight, torch.full((2,), value))


def test_step_reads_nothing_with_every_option_on(host_reads):
    params = parameters(SHAPES, torch.float32)
    tensor_betas = {"betas": (torch.tensor(0.9), torch.tensor(0.99)), "eps": torch.tensor(1e-6)}
    for implementation, more in (("fused", {}), ("foreach", {}), ("foreach", tensor_betas)):
        optimizer = SimpleAdam(
            params,
            lr=torch.tensor(0.1),
            weight_decay=torch.tensor(0.1),
            **more,
            max_norm=torch.tensor(1.0),
            skip_nonfinite=True,
            schedule=Linear(num_steps=10),
            implementation=implementation,
        )
        optimizer.skip_if = torch.tensor(0.0)
        set_grads([params], 0)
        with host_reads:
            for _ in range(3):
                optimizer.step()
                optimizer.param_groups[0]["lr"] = 0.1
                optimizer.max_norm = 0.5
    assert host_reads.count == 0


def test_gradients_of_another_memory_layout_are_read_in_the_right_order():
    grad = torch.arange(12.0).reshape(3, 4)
    params = [torch.nn.Parameter(torch.zeros(4, 3)) for _ in range(2)]
    params[0].grad, params[1].grad = grad.t(), torch.ones(()).expand(4, 3)
    plain = [torch.nn.Parameter(torch.zeros(4, 3)) for _ in range(2)]
    plain[0].grad, plain[1].grad = grad.t().contiguous(), torch.ones(4, 3)
    for tensors in (params, plain):
        SimpleAdam(tensors, lr=0.1, eps=1.0).step()
    assert all(torch.equal(a, b) for a, b in zip(params, plain, strict=True))


def test_parameters_in_channels_last_layout():
    weight = torch.nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    plain = torch.nn.Parameter(weight.detach().contiguous())
    plain.grad = torch.randn(4, 3, 2, 2)
    weight.grad = plain.grad.clone()
    for param in (weight, plain):
        SimpleAdam([param], lr=0.1).step()
    assert torch.equal(weight, plain)
