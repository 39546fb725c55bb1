import re
import sys
from pathlib import Path

import pytest
import torch
import yaml

import zdtrain.cli.training  # noqa: F401 - importing lightning leaves environment variables behind, once
from zdtrain.cli import main
from zdtrain.records import find_runs

ROOT = Path(__file__).parents[2]
MODELS = """
import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __init__(self, as_dict):
        self.as_dict = as_dict

    def __len__(self):
        return 6

    def __getitem__(self, index):
        x, y = torch.full((3,), float(index)), index
        return {"x": x, "offset": x + 1, "label": y} if self.as_dict else (x, x + 1, y)


class Sum(pl.LightningModule):
    def __init__(self, as_dict: bool = False, fails: bool = False):
        super().__init__()
        self.as_dict, self.fails = as_dict, fails

    def configure_model(self):
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, x, offset):
        return self.layer(x) + offset

    def train_dataloader(self):
        if self.fails:
            raise FileNotFoundError("no such data")
        return DataLoader(Rows(self.as_dict), batch_size=4)


class Whole(Sum):
    def forward(self, batch):
        return self.layer(batch[0])


class Branches(Sum):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class Example(Sum):
    example_input_array = (torch.ones(2, 3), torch.ones(2, 3))

    train_dataloader = None


class NoData(pl.LightningModule):
    def forward(self, x):
        return x
"""

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval"),
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with models and a config of one."""
    (tmp_path / "export_models.py").write_text(MODELS)
    (tmp_path / "base.yaml").write_text(yaml.safe_dump({"model": {"class_path": "export_models.Sum"}}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("export_models", None)


def export(*flags):
    return main(["export", "base.yaml", *flags])


def error_of(capsys):
    """The error message, after checking that it is the only line of ours."""
    (message,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("zdtrain: ")]
    return message.removeprefix("zdtrain: error: ")


def test_the_weights_of_a_run_are_exported_by_its_config_or_by_that_of_its_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))
    fit = ["max_epochs=1", "limit_train_batches=2", f"default_root_dir={tmp_path}"]
    quiet = ["enable_progress_bar=false", "enable_model_summary=false"]
    assert main(["fit", "configs/digits.yaml", *(f"--trainer.{option}" for option in [*fit, *quiet])]) == 0
    (run,) = find_runs(tmp_path / "runs")
    (checkpoint,) = (run / "checkpoints").glob("*.ckpt")
    files = [tmp_path / "a.pt2", tmp_path / "b.pt2"]
    capsys.readouterr()
    assert main(["export", "configs/digits.yaml", "--ckpt_path", str(checkpoint), "-o", str(files[0])]) == 0
    chosen, report = capsys.readouterr().out.splitlines()
    assert chosen == (
        f"DigitsMLP with {checkpoint}, example inputs: images from the first batch of Digits.predict_dataloader"
    )
    assert re.fullmatch(
        rf"{files[0]} \([\d,]+ bytes\): equal to the module .* at batch sizes 360, 361, 1; "
        r"takes any batch size \(images\)",
        report,
    )
    config = str(run / "config.yaml")
    assert main(["export", config, "--ckpt_path", str(checkpoint), "--static_batch", "--output", str(files[1])]) == 0
    assert capsys.readouterr().out.endswith("takes the batch size of the examples only\n")
    weights = torch.load(checkpoint, weights_only=True)["state_dict"]
    for file in files:
        state = torch.export.load(file).state_dict
        assert state.keys() == weights.keys()
        assert all(torch.equal(state[name], weights[name]) for name in weights)


def test_parts_of_a_batch_are_taken_by_position_or_by_name(here, capsys):
    assert export("--untrained") == 0
    assert capsys.readouterr().out.startswith(
        "Sum with initial weights, example inputs: x, offset from the first batch of Sum.train_dataloader\nmodel.pt2 ("
    )
    rows = torch.ones(2, 3)
    by_position = torch.export.load("model.pt2").module()(rows, rows)
    assert export("--untrained", "--model.as_dict", "true") == 0
    assert torch.export.load("model.pt2").module()(x=rows, offset=rows).shape == by_position.shape


def test_a_forward_of_a_batch_takes_all_of_it(here, capsys):
    assert export("--untrained", "--model=export_models.Whole") == 0
    assert "example inputs: batch from the first batch of Whole.train_dataloader" in capsys.readouterr().out


def test_the_example_of_the_module_comes_first(here, capsys):
    assert export("--untrained", "--model=export_models.Example") == 0
    assert "example inputs: example_input_array of the module" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "zdtrain export: name the weights with --ckpt_path FILE, or give --untrained to have none"),
        (["--untrained", "--ckpt_path", "a.ckpt"], "--untrained exports initial weights: leave it out to export"),
        (["--ckpt_path", "a.ckpt"], "ckpt_path: no file a.ckpt; did you mean 'b.ckpt'?"),
        (
            ["--ckpt_path", "b.ckpt"],
            "--ckpt_path b.ckpt does not fit Sum: 1 of 2 tensors loaded; not in the checkpoint",
        ),
        (["--untrained", "--static_bach"], "unknown option 'static_bach'; did you mean 'static_batch'?"),
        (["--untrained", "--trainer.max_epoch", "1"], "unknown option 'trainer.max_epoch'"),
        (["--untrained", "-o", "model.onnx"], "cannot export to model.onnx: give a file that ends in .pt2"),
        (
            ["--untrained", "--model.fails", "true"],
            "Sum.train_dataloader gave no batch to take example inputs from (FileNotFoundError: no such data): set "
            "example_input_array in the module",
        ),
        (
            ["--untrained", "--model=export_models.NoData"],
            "no data to take example inputs from: set example_input_array in NoData",
        ),
    ],
)
def test_what_cannot_be_exported_is_refused_by_name(here, capsys, flags, message):
    torch.save({"layer.weight": torch.ones(3, 3)}, "b.ckpt")
    assert export(*flags) == 2
    assert error_of(capsys).startswith(message)
    assert not Path("model.pt2").exists()


def test_no_config_is_refused(capsys):
    assert main(["export", "--untrained"]) == 2
    assert "zdtrain export: name a config file: zdtrain export configs/digits.yaml" in error_of(capsys)


def test_a_module_that_torch_refuses_fails_with_one_line(here, capsys):
    assert export("--untrained", "--model=export_models.Branches") == 1
    message = error_of(capsys)
    assert message.startswith("Branches.forward cannot be exported: its Python code depends on the values of a tensor")
    assert "export_models.py:" in message
    assert not Path("model.pt2").exists()
