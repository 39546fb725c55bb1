import csv
from pathlib import Path

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger

import zdtrain.trainer
from zdtrain.device import HostRuntime
from zdtrain.device.lagging import LaggingRuntime


class LoggingModel(BoringModel):
    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("twice", 2 * loss, prog_bar=True)
        return loss


def fit(monkeypatch, runtime, folder: Path):
    monkeypatch.setattr(zdtrain.trainer, "runtime_for", lambda device: runtime)
    torch.manual_seed(1)
    model = LoggingModel()
    trainer = zdtrain.trainer.Trainer(
        accelerator="cpu",
        max_epochs=2,
        limit_train_batches=12,
        limit_val_batches=2,
        log_every_n_steps=1,
        logger=CSVLogger(folder, version=0),
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(model)
    with open(Path(trainer.logger.log_dir, "metrics.csv"), newline="") as file:
        rows = list(csv.DictReader(file))
    return model.layer.weight.detach(), rows, {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("lag", [0, 1, 7, 10_000])
def test_a_fit_whose_copies_arrive_late_touches_nothing_early_and_loses_no_row(monkeypatch, tmp_path, lag):
    weight, rows, metrics = fit(monkeypatch, HostRuntime(), tmp_path / "host")
    runtime = LaggingRuntime(lag=lag)
    with runtime.watching():
        late_weight, late_rows, late_metrics = fit(monkeypatch, runtime, tmp_path / "late")
    assert runtime.counters.copies > 0
    assert len(rows) >= 24
    assert (late_rows, late_metrics) == (rows, metrics)
    assert torch.equal(late_weight, weight)
