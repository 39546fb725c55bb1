"""Checkpoints go from stock Lightning to zdtrain and back."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader

import zdtrain
from tests.parity.harness import Net, differences, loader, run

TRAINERS = {"stock": pl.Trainer, "zdtrain": zdtrain.Trainer}


class Resumed(Net):
    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5), "interval": "step"}]

    def train_dataloader(self):
        return loader(18, 4)  # not shuffled: a resumed epoch starts with the same order


class StatefulLoader(DataLoader):
    """Knows where it is: an epoch is resumed in its middle."""

    def __init__(self):
        super().__init__(loader().dataset, batch_size=4)
        self.at = 0

    def __iter__(self):
        batches = list(super().__iter__())
        while self.at < len(batches):
            self.at += 1
            yield batches[self.at - 1]
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Stateful(Resumed):
    def train_dataloader(self):
        return StatefulLoader()


def save_by(options):
    return lambda: [
        ModelCheckpoint(save_top_k=-1, filename="{step}", **options),
        EarlyStopping("val_loss", patience=5),
    ]


@pytest.mark.parametrize("module", [Resumed, Stateful])
@pytest.mark.parametrize(
    ("save", "options"),
    [
        ({"every_n_epochs": 1}, {}),
        ({"every_n_train_steps": 3}, {}),
        ({"every_n_train_steps": 2}, {"accumulate_grad_batches": 2, "val_check_interval": 2}),
        ({"monitor": "val_loss"}, {"val_check_interval": 2}),
        ({"every_n_train_steps": 5}, {}),
    ],
    ids=str,
)
def test_resuming_both_ways(tmp_path, module, save, options):
    options = {"enable_checkpointing": True, "callbacks": save_by(save), **options}
    if "accumulate_grad_batches" in options:
        options["limit_train_batches"] = 4
    written = {}
    for name, trainer in TRAINERS.items():
        run(trainer, tmp_path / name, module, max_epochs=2, **options)
        written[name] = sorted((tmp_path / name).rglob("*.ckpt"))
    stock, ours = ([file.name for file in files] for files in written.values())
    assert stock == ours
    for files in list(zip(*written.values(), strict=True))[:2]:
        outcomes = []
        for writer, reader in (("stock", "stock"), ("stock", "zdtrain"), ("zdtrain", "stock"), ("zdtrain", "zdtrain")):
            file = files[list(TRAINERS).index(writer)]
            outcome, _ = run(
                TRAINERS[reader],
                tmp_path / f"{file.stem}-{writer}-{reader}",
                module,
                max_epochs=3,
                do=lambda trainer, net, file=file: trainer.fit(net, ckpt_path=file),
                **{**options, "enable_checkpointing": False, "callbacks": lambda: [EarlyStopping("val_loss")]},
                spy=True,
            )
            outcomes.append(outcome)
        for other in outcomes[1:]:
            assert not list(differences(outcomes[0], other))[:10]
        if file.stem != "step=10" and file.stem != "step=5":  # an epoch that was over leaves nothing to train on
            assert outcomes[0].error is None


def test_fit_again_from_the_last_checkpoint(tmp_path):
    def twice(trainer, module):
        trainer.fit(module)
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module, ckpt_path="last")
        return trainer.test(module, loader(6), ckpt_path="best", verbose=False)

    class Tested(Resumed):
        def test_step(self, batch, batch_idx):
            self.log("test_loss", self.loss(batch))

    options = {
        "do": twice,
        "enable_checkpointing": True,
        "callbacks": lambda: [ModelCheckpoint(monitor="val_loss", save_last=True)],
    }
    stock, _ = run(pl.Trainer, tmp_path / "run", Tested, **options)
    (tmp_path / "run").rename(tmp_path / "stock")
    ours, _ = run(zdtrain.Trainer, tmp_path / "run", Tested, **options)
    assert stock.error is None
    assert not list(differences(stock, ours))[:10]
