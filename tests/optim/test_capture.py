"""A step with SimpleAdam in it can be recorded once, replayed, lowered and steered through its tensors."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.fx.experimental.proxy_tensor import make_fx

from zdtrain.errors import ConfigError
from zdtrain.optim import Cosine, SimpleAdam


def build(implementation, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    knobs = {"lr": torch.tensor(0.05), "weight_decay": torch.tensor(0.01), "max_norm": torch.tensor(0.5), **options}
    optimizer = SimpleAdam(
        model.parameters(),
        skip_nonfinite=True,
        schedule=Cosine(num_steps=20),
        implementation=implementation,
        **knobs,
    )

    def step(x):
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, optimizer, step


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 4, generator=generator) for _ in range(count)]


def change_knobs(optimizer, step):
    optimizer.max_norm = 0.1 + step / 10
    optimizer.param_groups[0]["weight_decay"] = step / 100
    optimizer.param_groups[0]["initial_lr"].fill_(0.05 / (1 + step))


def state_of(model, optimizer):
    state = [t for entry in optimizer.state.values() for t in entry.values()]
    scalars = [optimizer.grad_norm, optimizer.step_count, optimizer.skipped_count, optimizer.param_groups[0]["lr"]]
    return [*model.parameters(), *state, *scalars]


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_a_recorded_step_replays_bit_equal_while_every_knob_changes(implementation):
    data = batches(12)
    data[7] = data[7] * float("nan")
    model_a, optimizer_a, eager = build(implementation)
    model_b, optimizer_b, source = build(implementation)
    eager(data[0]), source(data[0])
    tape = make_fx(source)(data[1])  # recording runs the step once
    eager(data[1])
    key = optimizer_b.capture_key()
    for i, batch in enumerate(data[2:]):
        change_knobs(optimizer_a, i)
        change_knobs(optimizer_b, i)
        want = eager(batch)
        with torch.no_grad():
            got = tape(batch)
        assert torch.equal(want, got) or (want.isnan() and got.isnan())
    assert optimizer_b.skipped_count.item() == 1
    assert optimizer_b.capture_key() == key
    pairs = zip(state_of(model_a, optimizer_a), state_of(model_b, optimizer_b), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_tensor_betas_and_eps_change_in_a_replay():
    knobs = [{"betas": (torch.tensor(0.9), torch.tensor(0.99)), "eps": torch.tensor(1e-6)} for _ in range(2)]
    model_a, optimizer_a, eager = build(None, **knobs[0])
    model_b, optimizer_b, source = build(None, **knobs[1])
    data = batches(8)
    eager(data[0]), source(data[0])
    tape = make_fx(source)(data[1])
    eager(data[1])
    for i, batch in enumerate(data[2:]):
        for optimizer in (optimizer_a, optimizer_b):
            optimizer.param_groups[0]["betas"] = (0.9 - i / 20, 0.99)
            optimizer.param_groups[0]["eps"] = 1e-6 * (i + 1)
        eager(batch)
        with torch.no_grad():
            tape(batch)
    pairs = zip(state_of(model_a, optimizer_a), state_of(model_b, optimizer_b), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_the_foreach_form_lowers_through_inductor_and_is_compiled_once():
    model_a, optimizer_a, eager = build("foreach")
    model_b, optimizer_b, source = build("foreach")
    data = batches(8)
    eager(data[0]), source(data[0])
    tape = make_fx(source)(data[1])
    for node in reversed(tape.graph.nodes):
        if "profiler" in str(node.target):
            tape.graph.erase_node(node)
    tape.recompile()
    eager(data[1])
    lowered = torch.compile(tape, fullgraph=True)
    torch._dynamo.utils.counters.clear()
    for i, batch in enumerate(data[2:]):
        change_knobs(optimizer_a, i)
        change_knobs(optimizer_b, i)
        eager(batch)
        with torch.no_grad():
            lowered(batch)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    for a, b in zip(state_of(model_a, optimizer_a), state_of(model_b, optimizer_b), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


def test_the_compiled_implementation_is_compiled_once_while_lr_decay_and_threshold_change():
    weight = nn.Parameter(torch.ones(5))
    optimizer = SimpleAdam(
        [weight], lr=torch.tensor(0.1), weight_decay=torch.tensor(0.1), max_norm=1.0, implementation="compiled"
    )
    twin = nn.Parameter(torch.ones(5))
    reference = SimpleAdam([twin], lr=0.1, weight_decay=torch.tensor(0.1), max_norm=1.0, implementation="foreach")
    torch._dynamo.utils.counters.clear()
    for step in range(6):
        for o, w in ((optimizer, weight), (reference, twin)):
            w.grad = torch.arange(5.0) + step
            o.param_groups[0]["lr"] = 0.1 / (1 + step)
            o.param_groups[0]["weight_decay"] = step / 10
            o.max_norm = 1.0 + step
            o.step()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert torch.allclose(weight, twin, rtol=1e-5)


def test_a_compiled_function_of_the_knobs_is_not_compiled_again_when_they_change():
    counter = CompileCounter()
    optimizer = SimpleAdam([nn.Parameter(torch.ones(2))], lr=0.1, max_norm=1.0)
    group = optimizer.param_groups[0]
    function = torch.compile(lambda x: x * group["lr"] + optimizer.max_norm, backend=counter, fullgraph=True)
    for step in range(5):
        group["lr"], optimizer.max_norm = 0.1 * step, 1.0 + step
        assert torch.equal(function(torch.ones(2)), torch.ones(2) * group["lr"] + optimizer.max_norm)
    assert counter.frame_count == 1


def test_state_is_not_allocated_while_recording():
    _, optimizer, step = build("fused")
    with pytest.raises(ConfigError, match="allocate its state while a step is being captured: run one step"):
        make_fx(step)(batches(1)[0])
    optimizer.init_state()
    make_fx(step)(batches(1)[0])
    assert optimizer.step_count.item() == 1


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_a_cuda_graph_of_the_step_replays_bit_equal(implementation):
    weights = [nn.Parameter(torch.ones(1000, device="cuda")) for _ in range(2)]
    optimizers = []
    for weight in weights:
        weight.grad = torch.ones_like(weight)
        optimizers.append(
            SimpleAdam([weight], lr=0.1, weight_decay=torch.tensor(0.1, device="cuda"), implementation=implementation)
        )
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for optimizer in optimizers:
            optimizer.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        optimizers[1].step()
    for i in range(5):
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 0.1 / (i + 1)
        optimizers[0].step()
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(weights[0], weights[1])
