"""SimpleAdam as a torch optimizer: groups, hooks, closures, guards and refusals."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch

from zdtrain.errors import ConfigError
from zdtrain.optim import Linear, SimpleAdam, clip_grad_norm_


def weight_with_grad(value=1.0, grad=1.0, size=2):
    weight = torch.nn.Parameter(torch.full((size,), value))
    weight.grad = torch.full((size,), grad)
    return weight


def test_importing_the_optimizer_loads_neither_lightning_nor_torchmetrics():
    code = (
        "import sys, zdtrain.optim; print([m for m in sys.modules if m.split('.')[0] in ('lightning', 'torchmetrics')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_closure_and_hooks_run():
    weight, seen = weight_with_grad(), []
    optimizer = SimpleAdam([weight])
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        seen.append("closure")
        return loss

    assert optimizer.step(closure).item() == 2.0
    assert seen == ["pre", "closure", "post"]


def test_groups_keep_their_own_options_and_numbers_become_separate_tensors():
    first, second, third = (weight_with_grad() for _ in range(3))
    optimizer = SimpleAdam([{"params": [first]}, {"params": [second], "lr": 0.2}, {"params": []}], lr=0.1)
    optimizer.add_param_group({"params": [third], "lr": torch.tensor(0.4)})
    assert len({group["lr"].data_ptr() for group in optimizer.param_groups}) == 4
    optimizer.step()
    assert [round(1 - w[0].item(), 4) for w in (first, second, third)] == [0.1, 0.2, 0.4]


def test_a_group_added_during_a_run_leaves_the_others_where_they_are():
    first, second = weight_with_grad(), weight_with_grad()
    optimizer = SimpleAdam([first])
    optimizer.step()
    before = {key: value.data_ptr() for key, value in optimizer.state[first].items()}
    optimizer.add_param_group({"params": [second]})
    optimizer.step()
    assert before == {key: value.data_ptr() for key, value in optimizer.state[first].items()}
    assert [optimizer.state[w]["step"].item() for w in (first, second)] == [2, 1]


def test_a_parameter_that_thaws_later_joins_in():
    first, frozen = weight_with_grad(), torch.nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = SimpleAdam([first, frozen], lr=0.1)
    optimizer.step()
    assert frozen not in optimizer.state
    frozen.requires_grad_()
    frozen.grad = torch.ones(2)
    optimizer.step()
    assert frozen[0].item() == pytest.approx(0.9)


def test_nothing_happens_without_gradients():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = SimpleAdam([weight])
    optimizer.step()
    assert torch.equal(weight, torch.ones(2))
    assert optimizer.step_count.item() == 0


def test_state_replaced_from_outside_is_used():
    weight = weight_with_grad()
    optimizer = SimpleAdam([weight], lr=0.1)
    optimizer.step()
    optimizer.state[weight] = {key: value.clone() for key, value in optimizer.state[weight].items()}
    optimizer.state[weight]["exp_avg"].zero_()
    optimizer.step()
    assert optimizer.state[weight]["exp_avg"][0].item() == pytest.approx(0.1)
    optimizer.state[weight]["exp_avg"] = torch.zeros(2)
    optimizer.step()
    assert optimizer.state[weight]["exp_avg"][0].item() == pytest.approx(0.1)
    assert optimizer.state[weight]["step"].item() == 3


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
def test_copies_go_on_as_the_original_would(clone):
    weight = weight_with_grad()
    optimizer = SimpleAdam([weight], lr=0.1, weight_decay=0.1, max_norm=0.5, schedule=Linear(num_steps=9))
    optimizer.step()
    other = clone(optimizer)
    twin = other.param_groups[0]["params"][0]
    for o, w in ((optimizer, weight), (other, twin)):
        w.grad = torch.full((2,), 0.3)
        o.step()
    assert twin is not weight
    assert torch.equal(twin, weight)
    assert other.step_count.item() == 2
    other.param_groups[0]["lr"] = 0.0
    assert optimizer.param_groups[0]["lr"].item() > 0


def test_a_tensor_on_another_device_than_the_parameters_is_refused():
    weight = torch.nn.Parameter(torch.ones(2, device="meta"))
    optimizer = SimpleAdam([weight], lr=torch.tensor(0.1))
    weight.grad = torch.ones(2, device="meta")
    with pytest.raises(ConfigError, match="lr is on cpu but the parameters are on meta: make it with device='meta'"):
        optimizer.step()


@pytest.mark.gpu
def test_numbers_given_before_the_model_moved_follow_it_to_its_device():
    model = torch.nn.Linear(2, 2)
    optimizer = SimpleAdam(model.parameters(), lr=0.1, max_norm=1.0)
    lr = optimizer.param_groups[0]["lr"]
    model.cuda()(torch.ones(1, 2, device="cuda")).sum().backward()
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr.device.type == optimizer.max_norm.device.type == optimizer.step_count.device.type == "cuda"


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_the_callers_flag_skips_a_step_on_the_device(implementation):
    weight = weight_with_grad()
    optimizer = SimpleAdam([weight], lr=0.1, weight_decay=torch.tensor(0.5), implementation=implementation)
    optimizer.skip_if = torch.tensor(0.0)
    optimizer.step()
    kept = [t.clone() for t in (weight.detach(), *optimizer.state[weight].values())]
    optimizer.skip_if.fill_(1.0)
    weight.grad.fill_(float("nan"))
    optimizer.step()
    assert all(map(torch.equal, kept, (weight.detach(), *optimizer.state[weight].values())))
    optimizer.skip_if.fill_(0.0)
    weight.grad.fill_(1.0)
    optimizer.step()
    assert (optimizer.step_count.item(), optimizer.skipped_count.item()) == (2, 1)
    assert optimizer.state[weight]["step"].item() == 2
    assert weight[0].item() < kept[0][0].item()


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_a_first_step_that_is_skipped_leaves_no_trace(implementation):
    weight = weight_with_grad(grad=float("inf"))
    optimizer = SimpleAdam([weight], lr=0.1, skip_nonfinite=True, implementation=implementation)
    optimizer.step()
    assert torch.equal(weight, torch.ones(2))
    assert not any(value.any() for value in optimizer.state[weight].values())


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
@pytest.mark.parametrize("unscale_first", [False, True])
def test_the_loss_scaler_needs_no_host_read_and_the_result_is_the_unscaled_one(
    implementation, unscale_first, host_reads
):
    scaled, plain = weight_with_grad(), weight_with_grad()
    options = {"lr": 0.1, "max_norm": 0.7, "implementation": implementation}
    optimizer, reference = SimpleAdam([scaled], **options), SimpleAdam([plain], **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for bad in (False, True, False):
        optimizer.zero_grad()
        scaler.scale((scaled * 3).sum()).backward()
        if bad:
            scaled.grad[0] = float("inf")
        if unscale_first:
            scaler.unscale_(optimizer)
        with host_reads:
            scaler.step(optimizer)
        scaler.update()
        if not bad:
            plain.grad = torch.full((2,), 3.0)
            reference.step()
    assert host_reads.count == 0
    assert torch.equal(scaled, plain)
    assert optimizer.skipped_count.item() == 1


def test_gradients_are_left_clipped_and_the_norm_is_kept():
    weight = torch.nn.Parameter(torch.zeros(2))
    for implementation in ("fused", "foreach"):
        weight.grad = torch.tensor([3.0, 4.0])
        optimizer = SimpleAdam([weight], max_norm=1.0, implementation=implementation)
        optimizer.step()
        assert optimizer.grad_norm.item() == 5.0
        assert torch.allclose(weight.grad, torch.tensor([0.6, 0.8]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("scale", [0.01, 10.0])
def test_clipping_equals_torch_and_takes_a_tensor(dtype, scale, host_reads):
    ours = [torch.nn.Parameter(torch.zeros(n, dtype=dtype)) for n in (3, 50)] + [torch.nn.Parameter(torch.zeros(1))]
    stock = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    for a, b in zip(ours, stock, strict=True):
        a.grad = torch.randn(a.shape).to(a.dtype) * scale
        b.grad = a.grad.clone()
    with host_reads:
        norm = clip_grad_norm_(ours, torch.tensor(1.0))
    want = torch.nn.utils.clip_grad_norm_(stock, 1.0)
    assert host_reads.count == 0
    assert torch.allclose(norm.double(), want.double(), rtol=2 * torch.finfo(dtype).eps)
    assert all(
        torch.allclose(a.grad, b.grad, rtol=8 * torch.finfo(dtype).eps) for a, b in zip(ours, stock, strict=True)
    )


def test_clipping_half_precision_does_not_overflow():
    weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.float16))
    weight.grad = torch.full((4,), 6e4, dtype=torch.float16)
    assert clip_grad_norm_(weight, 1.0).item() == pytest.approx(1.2e5, rel=1e-3)
    assert torch.allclose(weight.grad, torch.full((4,), 0.5, dtype=torch.float16), rtol=1e-3)
    assert clip_grad_norm_([torch.nn.Parameter(torch.zeros(1))], 1.0).item() == 0.0


def test_capture_key_changes_when_a_held_number_does_and_not_when_a_tensor_is_written():
    weight = weight_with_grad()
    optimizer = SimpleAdam([weight], weight_decay=torch.tensor(0.1), max_norm=1.0)
    optimizer.step()
    key = optimizer.capture_key()
    optimizer.param_groups[0]["lr"] = 0.3
    optimizer.param_groups[0]["weight_decay"] = 0.3
    optimizer.max_norm = 0.3
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.capture_key() == key
    optimizer.param_groups[0]["betas"] = (0.5, 0.5)
    assert optimizer.capture_key() != key


BAD_OPTIONS = [
    ({"lr": -1.0}, r"SimpleAdam.lr must not be negative, got -1.0"),
    ({"lr": torch.ones(1)}, r"lr must be a 0-D tensor, got shape \(1,\): pass lr.reshape"),
    ({"lr": torch.tensor(1)}, r"lr must be float32 or float64, got torch.int64"),
    ({"lr": torch.tensor(0.1, dtype=torch.bfloat16)}, r"got torch.bfloat16: pass lr.float"),
    ({"lr": torch.tensor(0.1, requires_grad=True)}, r"must not require a gradient"),
    ({"betas": (0.9, 1.0)}, r"betas\[1\] must be at least 0 and less than 1, got 1.0"),
    ({"betas": 0.9}, r"betas must be a pair, got 0.9"),
    ({"eps": -1.0}, r"eps must not be negative"),
    ({"weight_decay": -0.1}, r"weight_decay must not be negative"),
    ({"max_norm": 0.0}, r"max_norm must be greater than 0, got 0.0: use None"),
    ({"implementation": "fast"}, r"must be one of fused, foreach, compiled, got 'fast'"),
    ({"betas": (torch.tensor(0.9), 0.999), "implementation": "fused"}, r"take betas\[0\] as numbers"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS)
def test_options_that_cannot_be_used_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        SimpleAdam([torch.nn.Parameter(torch.ones(2))], **options)


def test_parameters_and_gradients_that_cannot_be_used_are_refused():
    with pytest.raises(ConfigError, match=r"real floating-point parameters, got torch.complex64"):
        SimpleAdam([torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))])
    with pytest.raises(ConfigError, match="SimpleAdam has no amsgrad"):
        SimpleAdam([{"params": [torch.nn.Parameter(torch.ones(2))], "amsgrad": True}])
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match=r"needs dense gradients, got torch.sparse_coo of shape \(4, 2\)"):
        SimpleAdam(embedding.parameters()).step()
    spread = [torch.nn.Parameter(torch.ones(2, device=device)) for device in ("cpu", "meta")]
    spread[0].grad = torch.ones(2)
    with pytest.raises(ConfigError, match="all parameters on one device, got cpu and meta"):
        SimpleAdam(spread).step()


def test_a_refused_group_is_not_added():
    optimizer = SimpleAdam([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(ConfigError, match="lr must not be negative"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "lr": -1.0})
    assert len(optimizer.param_groups) == 1


def test_writing_a_tensor_over_a_number_is_refused():
    optimizer = SimpleAdam([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(ConfigError, match="betas is a Python number in this param group"):
        optimizer.param_groups[0]["betas"] = (torch.tensor(0.5), 0.9)
    with pytest.raises(ConfigError, match="eps is a Python number"):
        optimizer.param_groups[0]["eps"] = torch.tensor(0.5)


def test_a_group_behaves_like_a_dict_and_writes_in_place():
    optimizer = SimpleAdam([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    group = optimizer.param_groups[0]
    lr = group["lr"]
    group.update(lr=0.2, note="kept")
    group |= {"lr": torch.tensor(0.3)}
    assert group.setdefault("lr", 9.0) is lr
    assert (group["lr"] is lr, round(lr.item(), 4), group["note"]) == (True, 0.3, "kept")
    group["initial_lr"] = lr
    assert group["initial_lr"] is not lr
    with pytest.raises(ConfigError, match="lr must be one number"):
        group["lr"] = torch.ones(2)
