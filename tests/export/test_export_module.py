import copy
import itertools
import os
import subprocess
import sys

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from zdtrain import Trainer
from zdtrain.errors import ConfigError
from zdtrain.export import ExportError, ExportReport, ParityError, export_module

ROWS = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))


class Classifier(pl.LightningModule):
    """Buffers, dropout and batch norm: three ways to differ in training mode."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2))
        self.register_buffer("scale", torch.tensor([2.0, 0.5]))
        self.example_input_array = ROWS

    def forward(self, x):
        return self.net(x) * self.scale


class Calls(nn.Module):
    """Runs any function of its arguments, beside a layer."""

    def __init__(self, function):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.function = function

    def forward(self, x):
        return self.function(self.layer(x))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.pt2"


def exported(path):
    return torch.export.load(path).module()


def in_eval(module):
    return copy.deepcopy(module).eval()


# what is written


def test_the_file_computes_what_the_module_does_in_eval_mode_to_the_last_bit(path):
    module = Classifier()
    module(torch.randn(16, 3))  # gives batch norm some statistics
    report = export_module(module, path)
    assert report == ExportReport(
        path=path,
        num_bytes=path.stat().st_size,
        batch_sizes=(4, 5, 1),
        dynamic=("x",),
        bit_equal=True,
        max_abs_difference=0.0,
        max_rel_difference=0.0,
    )
    for n in (1, 2, 7):
        rows = torch.randn(n, 3)
        assert torch.equal(exported(path)(rows), in_eval(module)(rows))
    assert os.listdir(path.parent) == ["model.pt2"]


def test_the_file_needs_torch_only_and_takes_any_batch_size(path):
    export_module(Classifier(), path)
    program = f"""
import sys, torch
run = torch.export.load({str(path)!r}).module()
print([tuple(run(torch.ones(n, 3)).shape) for n in (1, 2, 33)])
assert not {{"lightning", "pytorch_lightning", "zdtrain"}} & set(sys.modules)
"""
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "[(1, 2), (2, 2), (33, 2)]\n"


def test_one_example_is_enough_for_any_batch_size(path):
    assert export_module(Classifier(), path, ROWS[:1]).batch_sizes == (2, 3, 1)
    assert exported(path)(torch.ones(9, 3)).shape == (9, 2)


def test_a_static_batch_takes_the_size_of_the_examples_only(path):
    report = export_module(Classifier(), path, dynamic_batch=False)
    assert (report.batch_sizes, report.dynamic) == ((4,), ())
    assert exported(path)(ROWS).shape == (4, 2)
    with pytest.raises(Exception, match=r"[Gg]uard|[Ee]xpected"):
        exported(path)(ROWS[:3])


def test_the_report_is_one_line():
    options = {"path": "m.pt2", "num_bytes": 18_172, "max_abs_difference": 1e-7, "max_rel_difference": 2e-6}
    assert str(ExportReport(**options, batch_sizes=(4, 1), dynamic=("x", "y"), bit_equal=True)) == (
        "m.pt2 (18,172 bytes): equal to the module to the last bit at batch sizes 4, 1; takes any batch size (x, y)"
    )
    assert str(ExportReport(**options, batch_sizes=(4,), dynamic=(), bit_equal=False)) == (
        "m.pt2 (18,172 bytes): equal to the module within torch.testing's tolerances (at most 1e-07 absolute, 2e-06 "
        "relative) at batch size 4; takes the batch size of the examples only"
    )


def test_the_examples_are_not_kept_in_the_file(path):
    export_module(Classifier(), path)
    (kept,), _ = torch.export.load(path).example_inputs
    assert torch.equal(kept, torch.zeros_like(ROWS))


# the module


def test_the_module_comes_back_as_it_was(path):
    module = Classifier()
    module.net[0].weight.requires_grad_(False)
    module.net[3].eval()
    module.kept = module(ROWS)  # no leaf of the graph: cannot be copied as it is
    module.net.register_forward_hook(lambda *_: None)
    module.trainer = pl.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    before = copy.deepcopy(module.state_dict())
    parameters, modes = list(map(id, module.parameters())), [part.training for part in module.modules()]
    random = torch.get_rng_state()
    report = export_module(module, path)
    assert report.bit_equal
    assert list(map(id, module.parameters())) == parameters
    assert [part.training for part in module.modules()] == modes
    assert not module.net[0].weight.requires_grad
    assert module.net[2].training
    assert module.trainer is not None
    assert len(module.net._forward_hooks) == 1
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.is_grad_enabled()


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*isinstance.treespec, LeafSpec")
@pytest.mark.parametrize("capture", ["off", "graph"])
def test_a_module_is_exported_during_and_after_its_fit(path, capture):
    class Trained(Classifier):
        def training_step(self, batch, batch_idx):
            return self(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def on_train_epoch_end(self):
            self.during = export_module(self, path)

    module = Trained()
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(**options, enable_model_summary=False, accelerator="cpu", max_epochs=2, capture=capture)
    trainer.fit(module, DataLoader(torch.randn(64, 3), batch_size=4))
    assert (trainer.capture_report.steps_replayed > 0) == (capture == "graph")
    assert module.during.bit_equal
    assert export_module(module, path).bit_equal
    assert torch.equal(exported(path)(ROWS), in_eval(module)(ROWS))


def test_hooks_of_layers_are_exported(path):
    module = Classifier()
    module.net.register_forward_hook(lambda module, inputs, output: output + 1)
    export_module(module, path)
    assert torch.equal(exported(path)(ROWS), in_eval(module)(ROWS))


def test_compiled_modules_and_parts_of_them_are_exported_as_they_are_uncompiled(path):
    def backend(*_):
        raise AssertionError("compiled")

    module = Classifier()
    rows = in_eval(module)(ROWS)
    whole, in_place, part = torch.compile(module, backend=backend), copy.deepcopy(module), copy.deepcopy(module)
    in_place.compile(backend=backend)
    part.net = torch.compile(part.net, backend=backend)
    for each in (whole, in_place, part):
        assert export_module(each, path, ROWS).bit_equal
        assert torch.equal(exported(path)(ROWS), rows)


def test_it_works_from_a_hook_that_runs_in_inference_mode(path):
    with torch.inference_mode():
        assert export_module(Classifier(), path).bit_equal


# kinds of inputs, outputs and weights


class Nested(nn.Module):
    def forward(self, batch, *rest, scale: float = 1.0, bias=None):
        x, (y, mask) = batch["x"], batch["more"]
        return {"sum": (x + y + rest[0]) * scale + bias, "rest": [mask & True, (x.shape[1], None)]}


def test_nested_inputs_and_outputs_keyword_arguments_and_plain_values(path):
    batch = {"x": ROWS, "more": (ROWS.clone(), ROWS > 0)}
    kwargs = {"scale": 3.0, "bias": torch.ones(3)}  # of another size: no batch
    report = export_module(Nested(), path, (batch, ROWS), example_kwargs=kwargs)
    assert report.bit_equal
    assert report.dynamic == ("batch['x']", "batch['more'][0]", "batch['more'][1]", "rest[0]")
    half = {"x": ROWS[:2], "more": (ROWS[:2], ROWS[:2] > 0)}
    out = exported(path)(half, ROWS[:2], **kwargs)
    assert torch.equal(out["sum"], Nested()(half, ROWS[:2], **kwargs)["sum"])
    assert out["rest"][1] == (3, None)


def test_a_size_that_equals_that_of_a_longer_batch_is_not_taken_for_it(path):
    """With one example, sizes are found by running two: a weight of two rows is still no batch."""

    class Weighted(nn.Module):
        def forward(self, x, weight):
            return x @ weight.T

    report = export_module(Weighted(), path, (ROWS[:1], ROWS[:2]))
    assert report.dynamic == ("x",)
    assert exported(path)(ROWS, ROWS[:2]).shape == (4, 2)


class Keywords(nn.Module):
    def forward(self, **inputs):
        return inputs["ids"].float() @ torch.ones(3, 2) + inputs["offset"]


def test_a_dict_is_keyword_arguments_also_of_a_forward_that_takes_any(path):
    inputs = {"offset": torch.zeros(4, 2), "ids": torch.arange(12).view(4, 3)}
    assert export_module(Keywords(), path, inputs).dynamic == ("offset", "ids")
    rows = {"ids": torch.ones(2, 3, dtype=torch.int64), "offset": torch.ones(2, 2)}
    assert torch.equal(exported(path)(**rows), torch.full((2, 2), 4.0))


def test_tied_weights_stay_tied(path):
    module = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    module[2].weight = module[0].weight
    assert export_module(module, path, ROWS).bit_equal
    state = torch.export.load(path).state_dict
    assert state["0.weight"].data_ptr() == state["2.weight"].data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_other_dtypes(path, dtype):
    report = export_module(nn.Linear(3, 2).to(dtype), path, ROWS.to(dtype))
    assert report.bit_equal
    assert exported(path)(ROWS.to(dtype)).dtype == dtype


def test_random_numbers_in_forward_are_compared_from_the_same_seed(path):
    assert export_module(Calls(lambda x: x + torch.randn_like(x)), path, ROWS).bit_equal


def test_state_in_buffers_goes_on_in_the_file(path):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen += 1
            return x * self.seen

    module = Counts()
    assert export_module(module, path, ROWS).bit_equal
    assert module.seen == 0
    run = exported(path)
    assert torch.equal(run(ROWS), ROWS)
    assert torch.equal(run(ROWS), ROWS * 2)


def test_a_forward_that_writes_into_its_input_leaves_the_examples_alone(path):
    class Writes(nn.Module):
        def forward(self, x):
            return x.add_(1) * 2

    rows = ROWS.clone()
    assert export_module(Writes(), path, rows).bit_equal
    assert torch.equal(rows, ROWS)


def test_nan_and_infinity_are_equal_to_themselves(path):
    report = export_module(Calls(lambda x: torch.stack([x / 0, x * 0 / 0])), path, ROWS)
    assert report.bit_equal


# parity


@pytest.fixture
def count():
    """Return a function that returns 0, 1, 2, ...: state that an export cannot see."""
    numbers = itertools.count()
    return lambda: next(numbers)


def test_values_within_tolerance_are_reported_with_the_largest_difference(path, count):
    report = export_module(Calls(lambda x: torch.ones_like(x) + 1e-6 * count()), path, ROWS)
    assert not report.bit_equal
    assert 1e-6 < report.max_abs_difference < 1e-5
    assert report.max_rel_difference == pytest.approx(report.max_abs_difference, rel=1e-3)


@pytest.mark.parametrize("dynamic_batch", [True, False])
def test_what_differs_is_named_and_the_older_file_stays(path, count, dynamic_batch):
    path.write_bytes(b"older")
    message = (
        r"Calls at batch size 4: output\['moved'\]\[0\] of the exported program differs: .*Mismatched elements: "
        r"12 / 12 .*Greatest absolute difference: 1.0 .*depends on something that changes and is no input"
    )
    with pytest.raises(ParityError, match=message):
        export_module(
            Calls(lambda x: {"same": x * 0, "moved": [x * 0 + count()]}), path, ROWS, dynamic_batch=dynamic_batch
        )
    assert path.read_bytes() == b"older"
    assert os.listdir(path.parent) == ["model.pt2"]


def test_no_file_is_left_where_none_was(path, count):
    with pytest.raises(ParityError, match="differs"):
        export_module(Calls(lambda x: x + count()), path, ROWS)
    assert os.listdir(path.parent) == []


def test_an_output_that_is_no_tensor_is_compared(path, count):
    with pytest.raises(ParityError, match=r"output\[1\] .* differs: 0 in place of 1"):
        export_module(Calls(lambda x: (x, count())), path, ROWS)


def test_another_structure_is_a_difference(path, count):
    with pytest.raises(ParityError, match=r"the exported program returns .*, the module "):
        export_module(Calls(lambda x: [x] * (1 + count())), path, ROWS)


# what cannot be exported


def branches(x):
    if x.sum() > 0:
        return x
    return -x


def test_control_flow_that_depends_on_data_is_named_with_its_line(path, capsys):
    line = branches.__code__.co_firstlineno + 1
    message = (
        rf"^Calls.forward cannot be exported: its Python code depends on the values of a tensor "
        rf"\({__file__}:{line}\); use torch.where or torch.cond in place of `if`"
    )
    with pytest.raises(ExportError, match=message) as caught:
        export_module(Calls(branches), path, ROWS)
    assert len(str(caught.value).splitlines()) == 1
    assert capsys.readouterr().err == ""
    assert os.listdir(path.parent) == []


def test_a_batch_size_in_the_code_is_named_with_what_helps(path):
    message = (
        r"^Calls.forward does not take every batch size: it needs batch = 4. Write -1 or x.shape\[0\] .* or pass "
        r"dynamic_batch=False \(--static_batch\). Taken as batched, since dimension 0 is 4: x; if one of them"
    )
    with pytest.raises(ExportError, match=message):
        export_module(Calls(lambda x: x.view(4, 3)), path, ROWS)
    assert export_module(Calls(lambda x: x.view(4, 3)), path, ROWS, dynamic_batch=False).bit_equal


def test_what_is_not_torch_is_named_with_its_line(path):
    def leaves(x):
        return torch.from_numpy(x.numpy())

    line = leaves.__code__.co_firstlineno + 1
    with pytest.raises(ExportError, match=rf"cannot be exported: RuntimeError: .*numpy.* \({__file__}:{line}\). torch"):
        export_module(Calls(leaves), path, ROWS)


def test_a_forward_that_fails_by_itself_is_not_blamed_on_the_export(path, capsys):
    message = (
        r"^Classifier.forward fails with the example inputs, before anything is exported: RuntimeError: mat1 and mat2"
    )
    with pytest.raises(ExportError, match=message):
        export_module(Classifier(), path, torch.ones(2, 5))
    assert capsys.readouterr().err == ""


def test_a_forward_that_asks_for_the_trainer_is_named(path):
    class Asks(pl.LightningModule):
        def forward(self, x):
            return x * self.trainer.current_epoch

    with pytest.raises(ExportError, match=r"Asks is not attached to a `Trainer`. \(.*test_export_module.py:\d+\)"):
        export_module(Asks(), path, ROWS)


def test_a_module_that_a_lambda_knows_is_refused_since_its_own_mode_would_count(path):
    class Captured(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 3), nn.Dropout())
            self.run = lambda x: self.net(x)

        def forward(self, x):
            return self.run(x)

    with pytest.raises(ExportError, match=r"Captured holds a function that knows the module by itself"):
        export_module(Captured(), path, ROWS)


def test_an_output_that_torch_cannot_read_back_is_refused(path, capsys):
    message = r"the exported program cannot be written and read back: .* have to be tensors, numbers or None, in tuples"
    with pytest.raises(ExportError, match=message):
        export_module(Calls(lambda x: {"logits": x, "kind": "text"}), path, ROWS)
    assert capsys.readouterr().err == ""
    assert os.listdir(path.parent) == []


def test_a_module_that_cannot_be_copied_says_so(path):
    module = Classifier()
    module.file = open(os.devnull)  # noqa: SIM115
    with module.file, pytest.raises(ExportError, match=r"Classifier cannot be copied: TypeError: .*TextIOWrapper"):
        export_module(module, path)


@pytest.mark.parametrize("module", [nn.LazyLinear(3), nn.Linear(3, 3, device="meta")])
def test_weights_without_values_are_refused(path, module):
    with pytest.raises(ExportError, match="Linear has weights without values; load them, or run a batch"):
        export_module(module, path, ROWS)


def test_a_module_without_forward_says_so(path):
    with pytest.raises(ConfigError, match="LightningModule has no forward: define what the exported program is"):
        export_module(pl.LightningModule(), path, ROWS)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (None, "example_inputs: give arguments of Linear.forward, or set its example_input_array"),
        ((ROWS, ROWS), r"example_inputs do not fit Linear.forward\(input: .*\).*: too many positional arguments"),
        ({"x": ROWS}, r"example_inputs do not fit Linear.forward"),
        (torch.tensor(1.0), "dynamic_batch=True: no example input is a tensor with rows; pass dynamic_batch=False"),
        (torch.ones(0, 3), "dynamic_batch=True: no example input is a tensor with rows"),
    ],
)
def test_examples_that_cannot_be_used_are_refused(path, inputs, message):
    with pytest.raises(ConfigError, match=message):
        export_module(nn.Linear(3, 3), path, inputs)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.pt", r"cannot export to .*model.pt: give a file that ends in .pt2, as torch.export.load expects it"),
        ("nowhere/model.pt2", r"cannot export to .*: .*nowhere is no folder that can be written"),
    ],
)
def test_a_path_that_cannot_be_written_is_refused(tmp_path, name, message):
    with pytest.raises(ConfigError, match=message):
        export_module(Classifier(), tmp_path / name)


@pytest.mark.gpu
def test_a_module_on_the_gpu_stays_there_and_is_exported_on_the_cpu(path):
    module = Classifier().cuda()
    assert export_module(module, path, ROWS.cuda()).bit_equal
    assert all(tensor.is_cuda for tensor in module.state_dict().values())
    assert exported(path)(ROWS).device.type == "cpu"
