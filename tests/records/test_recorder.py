import csv
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from zdtrain import Trainer
from zdtrain.errors import ConfigError
from zdtrain.monitors import Threshold
from zdtrain.records import RecordError, RecordWarning, RunRecorder, find_runs, load_run

QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "log_every_n_steps": 1,
}
VALUES = [1.0, float("nan"), float("inf"), 2.0]

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec"),
    pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval"),
]


class Net(pl.LightningModule):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        self.log("m", torch.tensor(VALUES[batch_idx % 4]))
        loss = self.layer(batch).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.layer(batch).square().mean())

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


def data(size=4):
    return DataLoader(torch.arange(1.0, size + 1).view(-1, 1) / size)


def strict_documents(folder):
    for path in sorted(folder.rglob("*.json*")):
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        yield from (json.loads(line, parse_constant=pytest.fail) for line in lines)


def test_records_true_writes_one_row_per_step_in_strict_json(tmp_path):
    trainer = Trainer(max_epochs=2, records=True, default_root_dir=tmp_path, **QUIET)
    trainer.fit(Net(), data(), data())
    (folder,) = find_runs(tmp_path / "runs")
    assert list(strict_documents(folder))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    assert [row["step"] for row in rows] == list(range(8))
    assert [row["values"]["m"] for row in rows] == [1.0, "NaN", "Infinity", 2.0] * 2
    assert [row["epoch"] for row in rows] == [0] * 4 + [1] * 4


def test_every_step_is_recorded_whatever_log_every_n_steps_says(tmp_path):
    trainer = Trainer(max_epochs=2, records=True, default_root_dir=tmp_path, **QUIET | {"log_every_n_steps": 50})
    trainer.fit(Net(), data(), data())
    run = load_run(trainer.recorder.folder)
    assert run.steps == list(range(8))
    assert None not in run.metrics["loss_step"]
    assert run.summary["num_steps"] == 8


def test_the_summary_accounts_for_what_the_run_cost(tmp_path):
    class OwnStep(Net):
        def optimizer_step(self, *args, **kwargs):
            super().optimizer_step(*args, **kwargs)

    trainer = Trainer(max_epochs=2, records=True, default_root_dir=tmp_path, **QUIET)
    trainer.fit(OwnStep(), data(), data())
    run = load_run(trainer.recorder.folder)
    assert run.summary["host_reads"] == run.summary["host_waits"] == 0
    assert run.summary["fallbacks"] == {"module-hook": 1}
    assert [event["code"] for event in run.events if event["kind"] == "fallback"] == ["module-hook"]
    assert run.summary["peak_host_memory_bytes"] > 1e7
    assert 0 < run.summary["read_back_lag_seconds"] < 60


def test_without_records_a_trainer_writes_what_stock_writes(tmp_path):
    for make, place in ((Trainer, tmp_path / "ours"), (pl.Trainer, tmp_path / "stock")):
        make(max_epochs=1, default_root_dir=place, logger=CSVLogger(place), **QUIET).fit(Net(), data())
    ours, stock = ({p.relative_to(r) for p in r.rglob("*")} for r in (tmp_path / "ours", tmp_path / "stock"))
    assert ours == stock


@pytest.mark.parametrize("make", [Trainer, pl.Trainer])
def test_values_equal_those_of_the_csv_logger(tmp_path, make):
    recorder, logger = RunRecorder(tmp_path / "runs"), CSVLogger(tmp_path)
    loggers = {"records": recorder, "logger": logger} if make is Trainer else {"logger": [logger, recorder]}
    make(max_epochs=3, callbacks=[LearningRateMonitor()], **loggers, **QUIET).fit(Net(), data(), data())
    merged = {}
    for row in csv.DictReader(Path(logger.log_dir, "metrics.csv").read_text().splitlines()):
        merged.setdefault(int(row["step"]), {}).update({k: float(v) for k, v in row.items() if v and k != "step"})
    run = load_run(recorder.folder)
    assert set(run.steps) == set(merged)
    for index, step in enumerate(run.steps):
        recorded = {name: column[index] for name, column in run.metrics.items() if column[index] is not None}
        expected = {name: value for name, value in merged[step].items() if name != "epoch"}
        assert {k: repr(v) for k, v in recorded.items()} == {k: repr(v) for k, v in expected.items()}


def test_recorder_composes_with_other_loggers_without_taking_their_place(tmp_path):
    logger = CSVLogger(tmp_path)
    trainer = Trainer(max_epochs=1, logger=logger, records=True, default_root_dir=tmp_path, **QUIET)
    assert trainer.logger is logger
    trainer.fit(Net(), data())
    assert len(list(tmp_path.rglob("metrics.csv"))) == 1


def test_checkpoints_lie_in_the_run_folder_with_their_hyperparameters(tmp_path):
    best = ModelCheckpoint(monitor="val", save_top_k=2)
    trainer = Trainer(
        max_epochs=4, logger=CSVLogger(tmp_path), records=True, default_root_dir=tmp_path, callbacks=[best], **QUIET
    )
    trainer.fit(Net(lr=0.05), data(), data())
    folder = trainer.recorder.folder / "checkpoints"
    checkpoints = sorted(folder.glob("*.ckpt"))
    assert len(checkpoints) == 2
    assert [path.with_suffix(".json") for path in checkpoints] == sorted(folder.glob("*.json"))
    note = json.loads(checkpoints[-1].with_suffix(".json").read_text())
    assert note["hparams"]["lr"] == 0.05
    assert note["hparams"]["optimizers"][0]["class"] == "torch.optim.sgd.SGD"
    assert note["monitor"] == "val"
    assert note["value"] == pytest.approx(float(best.current_score))


def test_hyperparameters_hold_what_was_chosen_for_the_trainer(tmp_path):
    monitors = [Threshold("loss", above=9.0)]
    options = {**QUIET, "gradient_clip_val": 0.5, "monitors": monitors, "callbacks": [ModelCheckpoint()]}
    first, second = (Trainer(max_epochs=1, records=tmp_path, **options) for _ in range(2))
    first.fit(Net(), data())
    second.fit(Net(), data())
    settings = load_run(first.recorder.folder).hparams["trainer"]
    assert (settings["max_epochs"], settings["gradient_clip_val"]) == (1, 0.5)
    assert settings["monitors"] == ["Threshold('loss > 9', then='warn')"]
    assert "capture" not in settings
    assert load_run(second.recorder.folder).hparams == load_run(first.recorder.folder).hparams


def test_environment_says_where_the_run_ran(tmp_path):
    trainer = Trainer(max_epochs=1, records=True, default_root_dir=tmp_path, **QUIET)
    trainer.fit(Net(), data())
    environment = load_run(trainer.recorder.folder).environment
    assert environment["packages"]["torch"] == torch.__version__
    assert environment["device"] == "cpu"
    assert environment["command"] == sys.argv


def test_a_run_folder_is_continued_from_its_checkpoint(tmp_path):
    first = Trainer(max_epochs=2, records=True, default_root_dir=tmp_path, **QUIET)
    first.fit(Net(), data(), data())
    (checkpoint,) = (first.recorder.folder / "checkpoints").glob("*.ckpt")
    second = Trainer(max_epochs=3, records=first.recorder.folder, default_root_dir=tmp_path, **QUIET)
    second.fit(Net(), data(), data(), ckpt_path=checkpoint)
    assert second.recorder.folder == first.recorder.folder
    run = load_run(second.recorder.folder)
    assert run.steps == list(range(12))
    assert [event["kind"] for event in run.events if event["kind"] == "continued"] == ["continued"]


def test_when_a_checkpoint_is_saved_every_row_but_its_own_is_on_disk(tmp_path):
    on_disk = []

    class Saving(ModelCheckpoint):
        def _save_checkpoint(self, trainer, path):
            super()._save_checkpoint(trainer, path)
            on_disk.append((trainer.global_step, load_run(trainer.recorder.folder).steps))

    recorder = RunRecorder(tmp_path, chunk_rows=1000, chunk_seconds=1000)
    saving = Saving(every_n_train_steps=3, save_top_k=-1)
    Trainer(max_epochs=2, records=recorder, callbacks=[saving], **QUIET).fit(Net(), data())
    assert on_disk == [(3, [0, 1]), (6, [0, 1, 2, 3, 4])]


def test_an_exception_is_recorded_with_its_traceback_and_no_row_is_lost(tmp_path):
    class Failing(Net):
        def training_step(self, batch, batch_idx):
            if self.global_step == 6:
                raise RuntimeError("boom")
            return super().training_step(batch, batch_idx)

    trainer = Trainer(max_epochs=2, records=True, default_root_dir=tmp_path, **QUIET)
    with pytest.raises(RuntimeError, match="boom") as caught:
        trainer.fit(Failing(), data())
    run = load_run(trainer.recorder.folder)
    assert run.summary["status"] == "failed"
    assert run.steps == list(range(6))
    (event,) = [event for event in run.events if event["kind"] == "exception"]
    assert "raise RuntimeError" in event["traceback"]
    assert any("events.jsonl" in note for note in caught.value.__notes__)


def test_test_results_join_the_run_that_was_trained(tmp_path):
    trainer = Trainer(max_epochs=1, records=True, default_root_dir=tmp_path, **QUIET)
    trainer.fit(Net(), data(), data())
    trainer.test(dataloaders=data(), ckpt_path=None, model=trainer.lightning_module, verbose=False)
    run = load_run(trainer.recorder.folder)
    assert run.series("val")[0] == [3, 4]
    assert len(find_runs(tmp_path / "runs")) == 1


def test_values_that_are_no_numbers_are_left_out_and_named_once(tmp_path):
    recorder = RunRecorder(tmp_path)
    odd = {"text": "x", "none": None, "vector": torch.ones(3), "huge": 10**400, "complex": 1j, "epoch": "late"}
    rows = [{**odd, "half": torch.tensor(0.5, dtype=torch.bfloat16), "in": {"a": 1}}] * 3
    with pytest.warns(RecordWarning) as said:
        list(map(recorder.log_metrics, rows, range(3)))
    recorder.finalize("success")
    assert {name for name in odd if any(repr(name) in str(warning.message) for warning in said)} == set(odd)
    assert len(said) == len(odd)
    assert load_run(recorder.folder).metrics == {"half": [0.5] * 3, "in/a": [1.0] * 3}


def test_an_unwritable_root_lets_training_go_on_or_stops_it(tmp_path):
    (tmp_path / "file").write_text("")
    root = tmp_path / "file" / "runs"
    with pytest.warns(RecordWarning, match=r"cannot make a run folder in .*Training goes on"):
        Trainer(max_epochs=1, records=root, default_root_dir=tmp_path, **QUIET).fit(Net(), data())
    with pytest.raises(RecordError, match=r"cannot make a run folder in .*records=PATH"):
        Trainer(max_epochs=1, records=RunRecorder(root, on_error="raise"), **QUIET).fit(Net(), data())


def test_continuing_a_folder_that_holds_no_run_is_refused(tmp_path):
    with pytest.raises(RecordError, match="is not a run folder"):
        RunRecorder(folder=tmp_path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RunRecorder(on_error="wran"), r"records.on_error='wran': use one of warn, raise"),
        (lambda: RunRecorder(chunk_rows=0), r"records.chunk_rows=0: use 1 or more"),
        (lambda: Trainer(records=3.5, **QUIET), r"trainer.records=3.5: use True, False, the path"),
    ],
)
def test_wrong_options_are_refused_by_name(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_remote_root_is_refused():
    with pytest.raises(ConfigError, match=r"trainer\.records='memory://bucket/runs': run folders are local"):
        Trainer(records=True, default_root_dir="memory://bucket", logger=False, **QUIET)


def test_two_processes_of_one_run_share_one_folder(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys
            import torch, lightning.pytorch as pl
            from lightning.pytorch.demos.boring_classes import BoringModel
            from zdtrain import Trainer
            class Net(BoringModel):
                def training_step(self, batch, batch_idx):
                    loss = super().training_step(batch, batch_idx)["loss"]
                    self.log("loss", loss, sync_dist=True)
                    return loss
            trainer = Trainer(max_epochs=1, records=True, accelerator="cpu", devices=2, strategy="ddp",
                              limit_train_batches=4, limit_val_batches=1, default_root_dir=sys.argv[1],
                              enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1)
            trainer.fit(Net())
            open(f"{sys.argv[1]}/rank{trainer.global_rank}", "w").write(str(trainer.recorder.folder))
            """
        )
    )
    done = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True, timeout=110, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    (folder,) = find_runs(tmp_path / "runs")
    assert {(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)} == {str(folder)}
    run = load_run(folder)
    assert run.environment["num_processes"] == 2
    assert run.steps == list(range(4))
    assert len(list((folder / "checkpoints").glob("*.ckpt"))) == 1
