"""A resumed run acts in the same steps as one that was never interrupted."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from zdtrain.monitors import NonFinite, Plateau, Spike, Statistics, Threshold
from zdtrain.records import load_run

from .runs import Net, loader, run

NAN = float("nan")
STEPS = 24


class Values(Net):
    """Logs a fixed value per step."""

    def __init__(self, values):
        super().__init__("SimpleAdam", scheduler=False)
        self.values = values

    def training_step(self, batch, batch_idx):
        self.log("value", torch.tensor(float(self.values[self.trainer.global_step])))
        return super().training_step(batch, batch_idx)


CASES = {
    "patience": (lambda then: Threshold("value", above=0, patience=5, then=then), [0] * 6 + [1] * 6 + [0] * 12),
    "cooldown": (lambda then: Threshold("value", above=0, cooldown=6, then=then), [0] * 7 + [1] * 17),
    "plateau": (lambda then: Plateau("value", patience=6, then=then), [1, 0] + [0.5] * 22),
    "spike": (lambda then: Spike("value", min_steps=8, then=then), [1, 2] * 7 + [9, 1, 2, 9] + [1, 2] * 3),
    "not finite": (lambda then: NonFinite("value", patience=3, then=then), [0] * 8 + [NAN] * 4 + [0] * 12),
}


def events(values, monitors, folder, **options):
    trainer = run(Values(values), loader(STEPS), monitors=monitors, records=folder, max_steps=STEPS, **options)
    return trainer, [e["step"] for e in load_run(trainer.recorder.folder).events if e["kind"] == "monitor"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("then", ["warn", "skip"])
@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_acts_in_the_steps_of_an_uninterrupted_one(case, then, tmp_path):
    make, values = CASES[case]
    keep = ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=10, save_top_k=-1, filename="{step}")
    options = {"callbacks": [keep], "enable_checkpointing": True}
    whole, acted = events(values, [make(then)], tmp_path / "whole", **options)
    start = tmp_path / "checkpoints" / "step=10.ckpt"
    resumed, later = events(values, [make(then)], tmp_path / "resumed", ckpt_path=start)
    _, afresh = events(values[10:] + [0] * 10, [make(then)], tmp_path / "afresh")
    assert later == [step for step in acted if step >= 10]
    assert later != []
    assert later != [step + 10 for step in afresh if step < STEPS - 10], "what was known before has to matter here"
    assert resumed.skipped_steps == whole.skipped_steps == (len(acted) if then == "skip" else 0)


@pytest.mark.filterwarnings("ignore")
def test_monitors_that_are_not_those_of_the_checkpoint_start_anew(tmp_path):
    values = [1] * STEPS
    first, _ = events(values, [Threshold("value", above=0, patience=3)], tmp_path / "first")
    first.save_checkpoint(tmp_path / "end.ckpt")
    other = [Plateau("value", patience=4)]
    trainer = run(
        Values(values + [0] * 10),
        loader(STEPS),
        monitors=other,
        ckpt_path=tmp_path / "end.ckpt",
        max_steps=STEPS + 6,
        max_epochs=3,
        records=tmp_path / "other",
    )
    steps = [e["step"] for e in load_run(trainer.recorder.folder).events if e["kind"] == "monitor"]
    assert steps == [STEPS + 4]


def test_statistics_of_the_run_go_on(tmp_path):
    def make():
        return Statistics("value", per_epoch=False)

    values = list(range(STEPS))
    half = run(Values(values), loader(STEPS), monitors=[make()], max_steps=10)
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed = run(
        Values(values),
        loader(STEPS),
        monitors=[make()],
        max_steps=STEPS,
        max_epochs=3,
        ckpt_path=tmp_path / "half.ckpt",
    )
    statistics = resumed.statistics["value"]
    assert (statistics.count.item(), statistics.mean.item()) == (STEPS, sum(values) / STEPS)
