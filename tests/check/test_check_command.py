"""``zdtrain check CONFIG.yaml``."""

import json
from pathlib import Path

import pytest

from zdtrain.check.cli import main
from zdtrain.errors import ConfigError

ROOT = Path(__file__).parents[2]
MODELS = """
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, TensorDataset


class Clean(LightningModule):
    def __init__(self, width: int = 4):
        super().__init__()
        self.net = torch.nn.Linear(8, width)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Reads(Clean):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        loss.item()
        return loss


class Unused(Clean):
    def __init__(self):
        super().__init__()
        self.unused = torch.nn.Linear(2, 2)


class Data(LightningDataModule):
    def train_dataloader(self):
        x = torch.zeros(64, 8)
        return DataLoader(TensorDataset(x, torch.zeros(64, dtype=torch.long)), batch_size=8)
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "check_command_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def write(model: str) -> str:
        path = tmp_path / f"{model}.yaml"
        path.write_text(
            f"model:\n  class_path: check_command_models.{model}\n"
            "data:\n  class_path: check_command_models.Data\n"
            "trainer:\n  accelerator: gpu\n  devices: 4\n  max_epochs: 100\n  precision: bf16-mixed\n"
        )
        return str(path)

    return write


def test_clean_config_exits_with_0_whatever_hardware_it_asks_for(config, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([config("Clean")]) == 0
    assert "train: capturable; 0 host reads per step" in capsys.readouterr().out


def test_findings_exit_with_1_and_show_the_line(config, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([config("Reads"), "--steps", "3"]) == 1
    out = capsys.readouterr().out
    line = 1 + MODELS.splitlines().index("        loss.item()")
    assert f"check_command_models.py:{line}: error" in out
    assert "3 steps run" in out


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "configs").glob("*.yaml")))
def test_shipped_configs_are_capturable_and_read_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(ROOT)
    assert main([f"configs/{name}", "--format", "json", "--fail-on", "warning"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {finding["code"] for finding in report["findings"]} <= {"optimizer-outside"}
    assert [stage["verdict"] for stage in report["stages"]] == ["capturable"] * 2
    assert [stage["host_reads_per_step"] for stage in report["stages"]] == [0, 0]


@pytest.mark.parametrize(("fail_on", "status"), [("error", 0), ("warning", 1), ("note", 1), ("never", 0)])
def test_fail_on_chooses_what_fails(config, fail_on: str, status: int) -> None:
    assert main([config("Unused"), "--fail-on", fail_on]) == status


def test_config_flags_work_as_in_fit(config, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([config("Clean"), "--model.init_args.width", "7", "--shapes"]) == 0
    assert "8×7" in capsys.readouterr().out


def test_output_file_and_format(config, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "report.json"
    assert main([config("Reads"), "--format", "json", "--output", str(target)]) == 1
    assert json.loads(target.read_text())["findings"][0]["code"] == "host-read"
    assert "host-read" not in capsys.readouterr().out
    assert not list(tmp_path.glob("**/*.ckpt"))
    assert not (tmp_path / "runs").exists()


def test_wrong_usage_is_a_clear_error(config, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="name a config file"):
        main([])
    with pytest.raises(ConfigError, match=r"nothing\.yaml"):
        main(["nothing.yaml"])
    with pytest.raises(ConfigError, match="no GPU that torch can use"):
        main([config("Clean"), "--device", "cuda"])
    with pytest.raises(ConfigError, match=r"--steps 1: .* give at least 3"):
        main([config("Clean"), "--steps", "1"])
    with pytest.raises(ConfigError, match=r"--output nowhere/report\.txt: No such file or directory"):
        main([config("Clean"), "--output", "nowhere/report.txt"])
    with pytest.raises(ConfigError, match=r"--format: expected one of text, json, github, sarif, got 'jsom'; .*'json'"):
        main(["--format", "jsom"])
    with pytest.raises(ConfigError, match="--steps: use a whole number that is at least 1, got 'few'"):
        main(["--steps", "few"])
    with pytest.raises(ConfigError, match="unknown option 'stpes'; did you mean 'steps'"):
        main([config("Clean"), "--stpes", "4"])
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
