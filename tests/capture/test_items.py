"""Python values in a batch that no step reads are no part of the key; those that one may read are, and are named."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from .runs import CLASSES, FEATURES, Classifier, both, codes


class Named(Dataset[Any]):
    """Samples with a name each, which get longer."""

    def __len__(self):
        return 96

    def __getitem__(self, index):
        x = torch.randn(FEATURES, generator=torch.Generator().manual_seed(index))
        return {"x": x, "y": index % CLASSES, "name": f"{index:0{1 + index // 60}}"}


def dictionaries():
    return DataLoader(Named(), batch_size=4)


def tuples():
    return DataLoader([tuple(Named()[index].values()) for index in range(96)], batch_size=4)


class Keys(Classifier):
    def training_step(self, batch, batch_idx):
        return self.loss(batch, "train")

    def validation_step(self, batch, batch_idx):
        self.loss(batch, stage="val")

    def loss(self, batch, stage):
        logits = self.net(batch["x"] if "x" in batch and len(batch) > 2 else None)
        loss = nn.functional.cross_entropy(logits, batch.get("y"))
        self.log(f"{stage}_loss", loss, batch_size=len(batch["y"]))
        return loss

    def val_dataloader(self):
        return dictionaries()


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, batch):
        return self.layer(batch["x"])


def entropy(logits, batch):
    return nn.functional.cross_entropy(logits, batch["y"])


class ThroughModules(Classifier):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, batch):
        return self.inner(batch)

    def training_step(self, batch, batch_idx):
        return entropy(self(batch), batch=batch)


class Unpacks(Classifier):
    def training_step(self, batch, batch_idx):
        x, y, _names = batch
        return nn.functional.cross_entropy(self.net(x), y)


class ByPlace(Classifier):
    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[-2])


@pytest.mark.parametrize(
    ("module", "loader"),
    [(Keys, dictionaries), (ThroughModules, dictionaries), (Unpacks, tuples), (ByPlace, tuples)],
)
def test_values_that_no_step_reads_are_no_part_of_the_key(tmp_path, module, loader):
    run = both(tmp_path, module, loader=loader, max_epochs=2)
    assert not codes(run)
    assert run.report.steps_replayed > 35
    if module is Keys:
        assert run.report.evaluation_replayed > 30


class Weighs(Classifier):
    """Trains on a loss that depends on how long the names are, but only late in the epoch."""

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch["x"]), batch["y"])
        return loss * self.weight(batch) if batch_idx > 14 else loss

    def weight(self, batch):
        return len(batch["name"][0])


class Iterates(Weighs):
    def weight(self, batch):
        return sum(len(item[0]) for key, item in batch.items() if key == "name")


class Copies(Weighs):
    def weight(self, batch):
        return len({**batch}["name"][0])


class Hands(Weighs):
    def weight(self, batch):
        return len(dict(batch)["name"][0])


class Renames(Weighs):
    def weight(self, batch):
        other = batch
        return len(other["name"][0])


class Computes(Weighs):
    def weight(self, batch):
        return len(batch["na" + "me"[:2]][0])


class Keeps(Weighs):
    def weight(self, batch):
        return (lambda: len(batch[self.key][0]))()

    key = "name"


class Looks(Weighs):
    def weight(self, batch):
        return len(locals()["batch"]["name"][0])


class Inherits(Weighs):
    def weight(self, batch):
        return super().weight(batch)


@pytest.mark.parametrize("module", [Weighs, Iterates, Copies, Hands, Renames, Computes, Keeps, Looks, Inherits])
def test_values_that_a_step_may_read_are_part_of_the_key_and_named(tmp_path, module):
    run = both(tmp_path, module, loader=dictionaries, max_epochs=2)
    (reason,) = [reason for reason in run.report.fallbacks if reason.code == "many-keys"]
    assert "batch['name'][0] holds a str that changes" in reason.message
    assert run.report.steps_replayed == 0


def test_a_function_put_in_the_place_of_another_is_looked_at_again(tmp_path):
    class Swaps(Weighs):
        def training_step(self, batch, batch_idx):
            return nn.functional.cross_entropy(self.net(batch["x"]), batch["y"]) * self.weight(batch)

        def weight(self, batch):
            return 1.0

        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx == 14:
                type(self).weight = Weighs.weight

        def on_train_epoch_start(self):
            type(self).weight = Plain.weight

    run = both(tmp_path, Swaps, loader=dictionaries, max_epochs=2)
    assert run.report.steps_replayed > 5


class Plain:
    def weight(self, batch):
        return 1.0
