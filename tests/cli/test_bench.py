import json
import sys
from pathlib import Path

import pytest
import yaml

import zdtrain.cli.training  # noqa: F401 - importing lightning leaves environment variables behind, once
from zdtrain.cli import main
from zdtrain.cli.bench import Rung, table

MODEL = """
import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from zdtrain.optim import SimpleAdam


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        raise AssertionError("a benchmark validates nothing")

    def configure_optimizers(self):
        return SimpleAdam(self.parameters(), lr=0.01)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(64, 4)), batch_size=4)

    val_dataloader = train_dataloader
"""
CONFIG = {
    "trainer": {
        "accelerator": "cpu",
        "max_epochs": 3,
        "callbacks": [{"class_path": "EarlyStopping", "init_args": {"monitor": "loss"}}],
    },
    "model": {"class_path": "bench_model.Net"},
}

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec"),
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with a model and its config."""
    (tmp_path / "bench_model.py").write_text(MODEL)
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(CONFIG))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("ZDTRAIN_CAPTURE", raising=False)
    yield tmp_path
    sys.modules.pop("bench_model", None)


def bench(*flags):
    return main(["bench", "base.yaml", "--steps", "8", "--warmup", "16", "--rounds", "2", *flags])


def test_the_rungs_are_measured_beside_stock_lightning(here, capsys):
    assert bench("--rungs", "eager", "graph", "--output", "out.json") == 0
    result = json.loads(Path("out.json").read_text())
    assert [rung["name"] for rung in result["rungs"]] == ["lightning", "eager", "graph"]
    lightning, eager, graph = result["rungs"]
    assert lightning["times_lightning"] == 1
    assert all(rung["ms_per_step"] > 0 and rung["times_lightning"] > 0 for rung in result["rungs"])
    assert [rung["replayed"] for rung in (lightning, eager)] == [0, 0]
    assert graph["replayed"] >= 7 / 8  # one of them may be compared: an epoch begins
    assert graph["reasons"] == []
    assert result["packages"]["torch"]
    out = capsys.readouterr().out
    assert "x lightning" in out
    assert "left out: EarlyStopping" in out
    assert not Path("runs").exists()


def test_flags_of_fit_are_taken_and_windows_are_timed_by_batch(here):
    assert bench("--rungs", "graph", "--trainer.accumulate_grad_batches", "2", "--output", "out.json") == 0
    (_, graph) = json.loads(Path("out.json").read_text())["rungs"]
    assert graph["replayed"] > 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps", "0"], "--steps: use a whole number that is at least 1, got '0'"),
        (["--stps", "9"], "unknown option 'stps'; did you mean 'steps'?"),
        (["--output", "nowhere/out.json"], "--output nowhere/out.json: nowhere is no folder that can be written"),
        (["--trainer.max_epoch", "1"], "unknown option 'trainer.max_epoch'"),
        (["--trainer.limit_train_batches", "0"], "the data gave fewer than 25 batches; lower --steps or --warmup"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(here, capsys, flags, message):
    assert bench("--rungs", "eager", *flags) == 2
    assert message in capsys.readouterr().err


def test_a_capture_forced_from_outside_is_refused(here, capsys, monkeypatch):
    monkeypatch.setenv("ZDTRAIN_CAPTURE", "graph")
    assert bench() == 2
    assert "ZDTRAIN_CAPTURE='graph' captures all rungs alike" in capsys.readouterr().err


def test_the_table_names_why_steps_were_not_replayed():
    rung = Rung(name="graph", ms_per_step=1.25, times_lightning=0.5, replayed=0.9, reasons=("why",))
    assert table([rung]).splitlines()[1:] == ["graph            1.250         0.50       90%", "  - why"]
