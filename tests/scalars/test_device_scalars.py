"""Device scalars: one address, one dtype, a host that knows what it wrote."""

import copy
import json
import logging
import pickle

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from zdtrain import DeviceScalars
from zdtrain.errors import ConfigError
from zdtrain.optim import SimpleAdam


@pytest.fixture
def scalars():
    return DeviceScalars({"lr": 0.1, "global_step": 0, "enabled": True, "tau": {"value": 1.0, "dtype": "float64"}})


def test_each_value_gets_the_dtype_its_declaration_says(scalars):
    dtypes = {name: scalars[name].dtype for name in scalars}
    assert dtypes == {"lr": torch.float32, "global_step": torch.int64, "enabled": torch.bool, "tau": torch.float64}
    assert all(scalars[name].shape == () for name in scalars)


def test_dtype_does_not_follow_the_default_dtype():
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert DeviceScalars({"lr": 0.1}).lr.dtype is torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_assignment_writes_in_place(scalars):
    lr, address = scalars.lr, scalars.lr.data_ptr()
    scalars.lr = 0.5
    scalars["lr"] = torch.tensor(0.25)
    assert scalars.lr is lr
    assert lr.data_ptr() == address
    assert lr.item() == 0.25


def test_assigning_and_the_host_mirror_read_nothing(scalars, host_reads):
    device_value = torch.tensor(0.3)
    with host_reads as reads:
        scalars.lr = 0.5
        assert scalars.host("lr") == 0.5
        scalars.lr = device_value
        assert scalars.host("lr") is None
        scalars.global_step.add_(1)
        scalars.set_host(global_step=1)
        assert scalars.host("global_step") == 1
    assert reads.count == 0


@pytest.mark.parametrize("cast", ["half", "bfloat16", "double"])
def test_casting_a_model_leaves_its_scalars_alone(scalars, cast):
    model = torch.nn.Linear(2, 2)
    model.scalars = scalars
    lr = scalars.lr
    getattr(model, cast)()
    assert model.weight.dtype is not torch.float32
    assert scalars.lr is lr
    assert lr.dtype is torch.float32


def test_a_module_made_on_meta_takes_its_values_from_the_host():
    scalars = DeviceScalars({"lr": 0.1, "n": 3}, device="meta")
    scalars.to_empty(device="cpu")
    assert scalars.to_dict() == {"lr": 0.1, "n": 3}
    assert scalars.lr.item() == pytest.approx(0.1)


def test_a_compiled_function_is_not_compiled_again_when_scalars_change(scalars):
    counter = CompileCounter()
    function = torch.compile(lambda x: torch.where(x > scalars.tau, x * scalars.lr, x), backend=counter, fullgraph=True)
    x = torch.tensor([0.5, 2.0])
    for i in range(5):
        scalars.lr, scalars.tau = 0.1 * i, float(i)
        assert torch.equal(function(x), torch.where(x > scalars.tau, x * scalars.lr, x))
    assert counter.frame_count == 1


def test_one_scalar_is_shared_by_module_loss_and_optimizer(scalars):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = SimpleAdam([weight], lr=scalars.lr)
    scalars.lr = 0.5
    weight.sum().backward()
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] is scalars.lr
    assert torch.allclose(weight, torch.full((2,), 0.5))
    optimizer.param_groups[0]["lr"] = 0.25
    assert scalars.lr.item() == 0.25


def test_checkpoint_keeps_addresses_and_updates_the_mirror(scalars):
    saved = {name: value.clone() for name, value in scalars.state_dict().items()}
    lr = scalars.lr
    scalars.lr, scalars.global_step = 9.0, 5
    for assign in (False, True):
        scalars.load_state_dict(saved, assign=assign)
        assert scalars.lr is lr
        assert scalars.host("lr") == pytest.approx(0.1)
        assert scalars.host("global_step") == 0


def test_loading_says_what_it_loaded(scalars, caplog):
    saved = {"lr": torch.tensor(0.5), "gamma": torch.tensor(1.0)}
    with caplog.at_level(logging.INFO, logger="zdtrain.scalars"):
        result = scalars.load_state_dict(saved, strict=False)
    assert result.missing_keys == ["global_step", "enabled", "tau"]
    assert "lr 0.1 -> 0.5" in caplog.text
    assert "global_step stays 0 (not saved)" in caplog.text
    assert "gamma ignored (no such scalar)" in caplog.text


def test_strict_loading_names_missing_and_unexpected_scalars(scalars):
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "global_step", "enabled", "tau"') as error:
        scalars.load_state_dict({"lr": torch.tensor(0.5), "gamma": torch.tensor(1.0)})
    assert 'Unexpected key(s) in state_dict: "gamma"' in str(error.value)


def test_a_saved_scalar_of_another_dtype_is_refused(scalars):
    saved = {**scalars.state_dict(), "lr": torch.tensor(1)}
    with pytest.raises(RuntimeError, match=r"scalar 'lr' is 0-D torch\.float32, the checkpoint holds torch.int64"):
        scalars.load_state_dict(saved)


def test_scalars_round_trip_through_plain_numbers(scalars):
    scalars.lr = 0.3
    plain = json.loads(json.dumps(scalars.to_dict()))
    again = DeviceScalars(plain)
    assert again.to_dict() == scalars.to_dict() == {**plain, "lr": 0.3}
    assert [t.dtype for t in again.buffers()] == [t.dtype for t in scalars.buffers()]


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))], ids=["deepcopy", "pickle"])
def test_copies_are_independent(scalars, clone):
    other = clone(scalars)
    other.lr = 0.9
    assert other.host("lr") == 0.9
    assert scalars.host("lr") == 0.1
    assert scalars.lr.item() == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("lr", torch.ones(1), r"scalar 'lr' must be 0-D, got shape \(1,\): use .squeeze\(\)"),
        ("lr", torch.ones(3), r"got shape \(3,\): reduce it"),
        ("lr", torch.tensor(1), "scalar 'lr' is torch.float32, got torch.int64"),
        ("lr", torch.ones((), device="meta"), "on cpu, got a tensor on meta: assign a Python number"),
        ("lr", True, "got the bool True"),
        ("lr", "1e-3", "YAML reads it as text, write 0.001"),
        ("global_step", 0.5, "torch.int64 and cannot hold 0.5"),
        ("enabled", 1, "torch.bool and cannot hold 1"),
    ],
)
def test_a_wrong_value_is_refused_by_name(scalars, name, value, message):
    with pytest.raises(ConfigError, match=message):
        setattr(scalars, name, value)


def test_an_unknown_name_gets_the_nearest_one(scalars):
    with pytest.raises(AttributeError, match="no scalar called 'learning_r'; there are: lr"):
        _ = scalars.learning_r
    with pytest.raises(AttributeError, match="did you mean 'global_step'"):
        scalars.globalstep = 1
    with pytest.raises(KeyError, match="did you mean 'tau'"):
        scalars["taus"] = 1.0
    with pytest.raises(KeyError, match="did you mean 'lr'"):
        scalars.host("lrs")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"training": 1.0}, "cannot be called 'training'"),
        ({"no good": 1.0}, "cannot be called 'no good'"),
        ({"lr": torch.tensor(1.0, dtype=torch.bfloat16)}, "cannot be torch.bfloat16"),
        ({"lr": {"value": 1.0, "dtype": "float16"}}, "one of float32, float64, int32, int64, bool"),
        ({"lr": torch.ones(2)}, "must be 0-D"),
        ({"lr": None}, "must be a float, int, bool or 0-D tensor"),
    ],
)
def test_a_wrong_declaration_is_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        DeviceScalars(values)
