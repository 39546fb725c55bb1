"""`Statistics`: running numbers of a metric, kept inside the step."""

import statistics

import pytest
import torch

from zdtrain.monitors import MonitorWarning, Statistics
from zdtrain.records import load_run

from .runs import Net, differences, loader, run


@pytest.mark.parametrize("capture", ["off", "graph"])
def test_every_number_of_an_epoch_equals_a_float64_reference(tmp_path, capture):
    trainer = run(
        Net("SimpleAdam"),
        loader(40),
        monitors=[Statistics("train_loss", ema_decay=0.9)],
        records=tmp_path,
        max_epochs=2,
        capture=capture,
    )
    record = load_run(trainer.recorder.folder)
    _, values = record.series("train_loss_step")
    for epoch in range(2):
        known = values[epoch * 40 : (epoch + 1) * 40]
        got = record.epoch_statistics[epoch]["device"]["train_loss"]
        average = 0.0
        for value in known:
            average = 0.9 * average + 0.1 * value
        assert got["mean"] == pytest.approx(statistics.fmean(known), rel=1e-12)
        assert got["var"] == pytest.approx(statistics.variance(known), rel=1e-12)
        assert got["ema"] == pytest.approx(average / (1 - 0.9**40), rel=1e-9)
        assert (got["min"], got["max"], got["count"], got["last"]) == (min(known), max(known), 40, known[-1])
    if capture == "graph":
        assert trainer.capture_report.steps_replayed > 60


def test_a_step_reads_the_numbers_of_the_steps_before_it_at_fixed_addresses():
    class Reads(Net):
        def __init__(self):
            super().__init__()
            self.means, self.addresses = [], set()

        def training_step(self, batch, batch_idx):
            kept = self.trainer.statistics["train_loss"]
            self.means.append(kept.mean.clone())
            self.addresses.add(kept.mean.data_ptr())
            return super().training_step(batch, batch_idx)

    module = Reads()
    trainer = run(module, loader(10), monitors=[Statistics("train_loss", per_epoch=False)])
    assert len(module.addresses) == 1
    assert module.means[0] == 0
    assert module.means[9] != trainer.statistics["train_loss"].mean
    assert trainer.statistics["train_loss"].count == 10


def test_a_metric_that_never_appears_is_reported_at_the_end_of_the_first_epoch():
    said = r"Statistics\('train_los'\): training_step logged no 'train_los'; did you mean 'train_loss'\?"
    with pytest.warns(MonitorWarning, match=said) as warned:
        run(Net(), loader(5), monitors=[Statistics("train_los"), Statistics("train_loss")], max_epochs=2)
    assert sum("Statistics" in str(warning.message) for warning in warned) == 1


def test_skipped_steps_do_not_count():
    skipped, without = Statistics("train_loss", per_epoch=False), Statistics("train_loss", per_epoch=False)
    run(Net("AdamW"), loader(30, {0: "nan", 17: "nan"}), nonfinite="skip", monitors=[skipped])
    run(Net("AdamW"), loader(30, without=(0, 17)), monitors=[without])
    assert differences(skipped.as_dict(), without.as_dict()) == []
    assert torch.isfinite(skipped.min)


def test_a_resumed_run_keeps_the_numbers_of_earlier_epochs(tmp_path):
    options = {"monitors": [Statistics("train_loss")], "records": tmp_path, "enable_checkpointing": True}
    first = run(Net("AdamW"), loader(10), max_epochs=1, **options)
    (checkpoint,) = first.recorder.folder.rglob("*.ckpt")
    second = run(Net("AdamW"), loader(10), max_epochs=2, ckpt_path=checkpoint, **options)
    epochs = load_run(second.recorder.folder).epoch_statistics
    assert second.recorder.folder == first.recorder.folder
    assert [entry["device"]["train_loss"]["count"] for entry in epochs] == [10, 10]
