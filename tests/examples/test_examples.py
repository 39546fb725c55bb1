from pathlib import Path

import pytest
import torch

import zdtrain.cli.training  # noqa: F401 - importing lightning leaves environment variables behind, once
from zdtrain.cli import main
from zdtrain.records import find_runs, load_run

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
EXAMPLES = [ROOT / "examples" / f"{name}.py" for name in ("digits", "charlm", "seed_classifier")]
QUIET = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec"),
]


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # these models are too small for more, and spinning threads starve each other
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_every_config_builds_and_takes_steps(config, capsys):
    assert main(["fit", str(config), "--trainer.fast_dev_run=2", *QUIET]) == 0
    assert "val_loss " in capsys.readouterr().out


@pytest.mark.parametrize("command", ["test", "predict"])
def test_digits_can_be_tested_and_predicted(command):
    assert main([command, "configs/digits.yaml", "--trainer.records=false", "--trainer.fast_dev_run=true", *QUIET]) == 0


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_every_config_opens_with_command_hardware_and_expected_result(config):
    comment = [line for line in config.read_text().splitlines() if line.startswith("#")]
    assert f"# Command:  zdtrain fit configs/{config.name}" in comment
    assert any(line.startswith("# Hardware: ") for line in comment)
    assert any(line.startswith("# Expected: val_") for line in comment)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_short_and_needs_nothing_of_ours(example):
    source = example.read_text()
    assert len(source.splitlines()) <= 100
    assert "zdtrain" not in source


@pytest.mark.slow
def test_digits_reach_97_percent_validation_accuracy(tmp_path):
    assert main(["fit", "configs/digits.yaml", f"--trainer.default_root_dir={tmp_path}", *QUIET]) == 0
    (folder,) = find_runs(tmp_path / "runs")
    run = load_run(folder)
    assert run.series("val_acc")[1][-1] >= 0.97
    assert len(run.series("train_loss")[0]) == run.summary["num_steps"] == 20 * 44


def test_windows_of_the_character_model_cover_the_text_and_predict_the_next_byte():
    from examples.charlm import Windows

    windows = Windows(torch.arange(11, dtype=torch.uint8), 5)
    assert [[part.tolist() for part in windows[i]] for i in range(len(windows))] == [
        [[0, 1, 2, 3, 4], [1, 2, 3, 4, 5]],
        [[5, 6, 7, 8, 9], [6, 7, 8, 9, 10]],
    ]


def test_the_character_model_does_not_look_ahead():
    from examples.charlm import CharGPT

    model = CharGPT(width=16, num_layers=2, num_heads=2, length=8).eval()
    tokens = torch.randint(256, (1, 8))
    changed = tokens.clone()
    changed[0, 5:] = (changed[0, 5:] + 1) % 256
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])
