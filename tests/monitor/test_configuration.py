"""Monitors in configuration files, and documented examples."""

import re
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from zdtrain import Trainer, cli
from zdtrain.records import find_runs, load_run

from .runs import Net, loader, run

DOCS = Path(__file__).parents[2] / "docs" / "monitors.md"
CONFIG = """
trainer:
  max_epochs: 1
  accelerator: cpu
  limit_train_batches: 6
  enable_progress_bar: false
  enable_model_summary: false
  log_every_n_steps: 1
  max_lag_steps: 20
  nonfinite: skip
  monitors:
    - class_path: zdtrain.monitors.Threshold
      init_args: {metric: loss, above: ABOVE, then: THEN, after_step: 4}
    - class_path: zdtrain.monitors.NonFinite
      init_args: {metric: [loss, grad_norm], then: skip, stop_after: 5}
model:
  class_path: lightning.pytorch.demos.boring_classes.BoringModel
"""


def fit(folder, monkeypatch, **replace):
    monkeypatch.chdir(folder)
    text = CONFIG
    for name, value in {"ABOVE": "-1.0", "THEN": "stop", **replace}.items():
        text = text.replace(name, value)
    (folder / "config.yaml").write_text(text)
    return cli.main(["fit", "config.yaml"])


def test_a_configuration_file_makes_monitors(tmp_path, monkeypatch):
    assert fit(tmp_path, monkeypatch) == 0
    (folder,) = find_runs(tmp_path / "runs")
    assert load_run(folder).summary["stopped_by"] == {"monitor": "loss > -1", "step": 4}


@pytest.mark.parametrize(
    ("replace", "message"),
    [
        ({"THEN": "stopp"}, r"error: Threshold\('loss'\): then='stopp' is no action; did you mean 'stop'\?"),
        ({"ABOVE": "high"}, r"error: Threshold\('loss'\): above='high' is no number"),
        ({"Threshold": "Treshold"}, r"error: no 'Treshold' in zdtrain.monitors; did you mean 'Threshold'\?"),
    ],
)
def test_a_mistake_in_a_configuration_file_is_one_line(tmp_path, monkeypatch, capsys, replace, message):
    assert fit(tmp_path, monkeypatch, **replace) == 2
    assert re.search(message, capsys.readouterr().err)


def test_the_documented_example_makes_a_trainer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)[0]
    names: dict[str, object] = {}
    exec(code, names)
    assert len(names["trainer"].monitors) == 5  # type: ignore[attr-defined]


@pytest.mark.parametrize(("options", "is_said"), [({}, True), ({"nonfinite": "skip"}, False)])
def test_a_lag_that_nobody_waits_for_is_said_to_have_no_effect(monkeypatch, options, is_said):
    said = []
    monkeypatch.setattr("zdtrain.loop.watching.rank_zero_info", said.append)
    Trainer(accelerator="cpu", logger=False, max_lag_steps=7, **options)
    assert any("max_lag_steps=7 has no effect" in line for line in said) == is_said


def test_a_module_that_logs_nothing_can_be_watched():
    class Silent(Net):
        def log(self, *args, **kwargs):
            raise AssertionError

        def training_step(self, batch, batch_idx):
            return (self.net(batch[0]) - batch[1]).square().mean() + batch[2].mean()

    assert run(Silent(), loader(20, {7: "large"}), nonfinite="stop").global_step == 20
    assert run(Silent(), loader(20, {7: "nan"}), nonfinite="stop").global_step == 7


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_step_without_a_loss_is_no_bad_step():
    class Sometimes(Net):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == 3 else super().training_step(batch, batch_idx)

    trainer = run(Sometimes(), loader(6), nonfinite="stop")
    assert trainer.global_step == 6


def test_a_run_resumed_in_the_middle_of_an_epoch_is_watched_from_its_first_step(tmp_path):
    whole = run(Net("AdamW"), loader(20), max_steps=7)
    whole.save_checkpoint(tmp_path / "seven.ckpt")
    resumed = run(Net("AdamW"), loader(20, {0: "nan", 7: "nan"}), nonfinite="stop", ckpt_path=tmp_path / "seven.ckpt")
    assert resumed.global_step == 7
    assert all(torch.isfinite(p).all() for p in resumed.lightning_module.parameters())
    assert isinstance(resumed.lightning_module, pl.LightningModule)
