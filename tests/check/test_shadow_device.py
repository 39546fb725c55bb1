"""The shadow device: CPU values that claim to be on cuda:0, and nothing left behind."""

import copy
import random
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.check.zoo import CLEAN
from tests.check.zoo.case import Base, batch
from zdtrain.check import ShadowDevice
from zdtrain.check.pytest_plugin import capturable, no_host_reads, shadow_device  # noqa: F401 - fixtures
from zdtrain.errors import ZDTrainError


def train(module: nn.Module, data, device: str, optimizer_class, **options) -> list[torch.Tensor]:
    """Three plain steps; returns losses and parameters on the CPU."""
    module = module.to(device)
    x, y = (tensor.to(device) for tensor in data)
    optimizer = optimizer_class(module.parameters(), lr=0.01, **options)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(module(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach().to("cpu"))
    return [*losses, *(parameter.detach().to("cpu") for parameter in module.parameters())]


@pytest.mark.parametrize(
    "name", ["Classifier", "DropoutAndNorms", "ConvNet", "Attention", "TransformerEncoder", "Recurrent", "Checkpointed"]
)
def test_training_is_bit_equal_to_the_cpu(name: str) -> None:
    case = next(case for case in CLEAN if case.name == name)
    on_cpu = case.make()
    on_shadow = copy.deepcopy(on_cpu)
    torch.manual_seed(1)
    expected = train(on_cpu, case.batch(), "cpu", torch.optim.SGD, momentum=0.9)
    torch.manual_seed(1)
    with ShadowDevice():
        actual = train(on_shadow, case.batch(), "cuda", torch.optim.SGD, momentum=0.9)
    assert len(actual) == len(expected) > 3
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"fused": True}),
        (torch.optim.Adam, {"fused": True}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"foreach": False}),
        (torch.optim.RMSprop, {"momentum": 0.9}),
        (torch.optim.Adagrad, {}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_optimizers_take_their_cuda_path_with_the_same_numbers(optimizer_class, options) -> None:
    on_cpu = Base().net
    on_shadow = copy.deepcopy(on_cpu)
    expected = train(on_cpu, batch(), "cpu", optimizer_class, **options)
    with ShadowDevice():
        actual = train(on_shadow, batch(), "cuda", optimizer_class, **options)
    for a, b in zip(actual, expected, strict=True):  # multi-tensor kernels round differently from single-tensor ones
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_tensors_claim_the_device_inside_and_tell_the_truth_after() -> None:
    with ShadowDevice():
        assert torch.cuda.is_available()
        x = torch.arange(6, device="cuda", dtype=torch.float32).view(2, 3)
        module = nn.Linear(3, 2).cuda()
        y = module(x)
        assert x.device == y.device == module.weight.device == torch.device("cuda", 0)
        assert x.is_cuda
        assert not x.is_cpu
        assert isinstance(module.weight, nn.Parameter)
        assert x.cpu().device.type == "cpu"
        assert torch.zeros(2).device.type == "cpu"
        assert torch.zeros_like(x).is_cuda
        assert x.new_zeros(2).is_cuda
        assert copy.deepcopy(module).weight.is_cuda
        with torch.device("cuda"):
            assert torch.ones(2).is_cuda
    assert x.device.type == module.weight.device.type == y.device.type == "cpu"
    assert type(module.weight) is nn.Parameter
    assert type(x) is torch.Tensor
    assert x.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_everything_patched_is_restored_even_after_an_error() -> None:
    names = ("is_available", "synchronize", "Stream", "get_rng_state")
    before = [getattr(torch.cuda, name) for name in names]
    hosts = (random.random, time.perf_counter, nn.Parameter.__new__, torch.Generator, torch.Tensor.pin_memory)
    with pytest.raises(RuntimeError, match="on purpose"), ShadowDevice():
        raise RuntimeError("on purpose")
    assert [getattr(torch.cuda, name) for name in names] == before
    assert (random.random, time.perf_counter, nn.Parameter.__new__, torch.Generator, torch.Tensor.pin_memory) == hosts
    with ShadowDevice():
        assert torch.ones(1, device="cuda").is_cuda


def test_a_second_shadow_device_is_refused() -> None:
    with ShadowDevice(), pytest.raises(ZDTrainError, match="already on"), ShadowDevice():
        pass


def test_nothing_is_noted_outside_recording() -> None:
    with ShadowDevice() as device:
        x = torch.ones(2, device="cuda")
        x.sum().item()
        with device.recording():
            x.mean()
    assert device.findings() == []


def test_values_are_real_so_control_flow_is_too() -> None:
    with ShadowDevice() as device, device.recording():
        x = torch.tensor([1.0, 3.0], device="cuda", dtype=torch.float32)
        assert x.sum() > 3
        assert max(x[0], x[1]).item() == 3.0
        assert f"{x[0]:.1f}" == "1.0"
        assert x.tolist() == [1.0, 3.0]
    codes = [finding.code for finding in device.findings()]
    assert codes.count("implicit-host-read") == 3
    assert codes.count("host-read") == 2
    assert codes.count("copy-to-device") == 1


def test_autocast_and_the_loss_scaler_work() -> None:
    with ShadowDevice():
        module = nn.Linear(4, 2).cuda()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
        with torch.autocast("cuda", torch.float16):
            out = module(torch.ones(2, 4, device="cuda"))
        assert out.dtype is torch.float16
        before = module.weight.detach().clone()
        scaler.scale(out.float().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert not torch.equal(module.weight, before)


def test_half_precision_kernels_that_the_cpu_lacks_are_rounded_from_float32() -> None:
    with ShadowDevice():
        x = torch.tensor([0.1, 0.2, 0.3, 0.4], device="cuda", dtype=torch.float16).view(1, 4)
        squared = torch.cdist(x, x + 1)
        assert squared.dtype is torch.float16
        torch.testing.assert_close(squared.cpu(), torch.tensor([[2.0]], dtype=torch.float16))


def test_device_branches_run_on_request(shadow_device) -> None:  # noqa: F811
    def place(x: torch.Tensor) -> str:
        return "device" if x.is_cuda and torch.cuda.current_stream().query() else "host"

    assert place(torch.ones(1, device="cuda")) == "device"
    assert place(torch.ones(1)) == "host"


def test_fixtures_pass_and_fail_with_the_report(no_host_reads, capturable) -> None:  # noqa: F811
    class Reads(Base):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            loss.item()
            return loss

    assert no_host_reads(Base(), batch()).host_reads_per_step == 0
    assert capturable(Base(), batch()).verdict == "capturable"
    with pytest.raises(AssertionError, match=r"host reads in train\n.*test_shadow_device.py:\d+: error"):
        no_host_reads(Reads(), batch())
    with pytest.raises(AssertionError, match="capturable with changes"):
        capturable(Reads(), batch())
