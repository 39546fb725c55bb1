"""How long loops run, what they are fed with and when they validate equals stock Lightning's."""

import dataclasses
from collections import namedtuple

import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

from tests.parity.harness import MemoryLogger, Net, assert_parity, loader


@pytest.mark.parametrize(
    "options",
    [
        {"limit_train_batches": 3},
        {"limit_train_batches": 0.5},
        {"limit_train_batches": 0},
        {"limit_val_batches": 1},
        {"limit_val_batches": 0},
        {"val_check_interval": 2},
        {"val_check_interval": 0.5},
        {"val_check_interval": 7, "check_val_every_n_epoch": None},
        {"check_val_every_n_epoch": 2, "max_epochs": 3},
        {"val_check_interval": "00:00:00:00", "check_val_every_n_epoch": None, "limit_train_batches": 2},
        {"fast_dev_run": True},
        {"fast_dev_run": 3},
        {"overfit_batches": 2},
        {"overfit_batches": 0.5},
        {"max_steps": 7, "max_epochs": -1},
        {"max_steps": 7},
        {"max_steps": 3, "accumulate_grad_batches": 5, "max_epochs": 5},
        {"max_steps": 0},
        {"max_epochs": 0},
        {"min_steps": 8, "max_epochs": 2},
        {"max_time": "00:01:00:00"},
        {"max_time": {"seconds": 0}},
        {"num_sanity_val_steps": 1},
        {"num_sanity_val_steps": -1},
        {"reload_dataloaders_every_n_epochs": 1},
        {"use_distributed_sampler": False},
        {"inference_mode": False},
        {"val_check_interval": 2, "accumulate_grad_batches": 3, "max_steps": 3},
    ],
    ids=str,
)
def test_lengths(tmp_path, options):
    assert_parity(tmp_path, Net, lightning_quirks=True, spy=True, **options)


class Endless(IterableDataset):
    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        generator = torch.Generator().manual_seed(3)
        for _ in range(self.batches):
            yield torch.randn(4, 4, generator=generator), torch.randn(4, 1, generator=generator)


def fed_by(make, unpack=None):
    class Fed(Net):
        def loss(self, batch):
            self.seen.append(type(batch).__name__)
            return super().loss(unpack(batch) if unpack else batch)

        def train_dataloader(self):
            return make()

        def val_dataloader(self):
            return []

    return Fed


Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor


def collate_as(kind):
    def collate(samples):
        x, y = torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])
        return kind(x, y)

    return DataLoader(loader().dataset, batch_size=4, collate_fn=collate)


class WithTo:
    """A batch that moves itself."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def to(self, device, **kwargs):
        return WithTo(self.x.to(device), self.y.to(device))

    def __len__(self):
        return len(self.x)


def sequence(length):
    class Batches(list):
        pass

    return Batches(list(loader())[:length])


FEEDS = {
    "no-length": (lambda: DataLoader(Endless(5), batch_size=None), None),
    "list-of-batches": (lambda: sequence(5), None),
    "generator-like": (lambda: iter_once(), None),
    "empty": (lambda: sequence(0), None),
    "namedtuple": (lambda: collate_as(Point), None),
    "dataclass": (lambda: collate_as(Pair), lambda b: (b.x, b.y)),
    "dict": (lambda: collate_as(lambda x, y: {"x": x, "y": y}), lambda b: (b["x"], b["y"])),
    "nested": (lambda: collate_as(lambda x, y: ({"x": x}, [y])), lambda b: (b[0]["x"], b[1][0])),
    "tuple": (lambda: collate_as(lambda x, y: (x, y)), None),
    "tensor": (lambda: collate_as(lambda x, y: torch.cat([x, y], 1)), lambda b: (b[:, :4], b[:, 4:])),
    "with-to": (lambda: collate_as(WithTo), lambda b: (b.x, b.y)),
    "strings-beside": (lambda: collate_as(lambda x, y: (x, y, "text", 3)), lambda b: b[:2]),
    "dict-of-loaders": (lambda: {"a": loader(18), "b": loader(10)}, lambda b: b["a"] or b["b"]),
    "list-of-loaders": (lambda: [loader(18), loader(10)], lambda b: b[0] or b[1]),
    "combined-min": (
        lambda: CombinedLoader({"a": loader(18), "b": loader(10)}, "min_size"),
        lambda b: (b["a"][0][:2], b["b"][1][:2]),
    ),
    "combined-cycle": (
        lambda: CombinedLoader([loader(18), loader(10)], "max_size_cycle"),
        lambda b: (b[0][0][:2], b[1][1][:2]),
    ),
    "combined-sequential": (lambda: CombinedLoader([loader(18), loader(10)], "sequential"), None),
    "combined-one": (lambda: CombinedLoader(loader(18), "max_size"), None),
    "workers": (lambda: DataLoader(loader().dataset, batch_size=4, num_workers=1), None),
}


def iter_once():
    class Loader:
        def __iter__(self):
            return iter(list(loader()))

    return Loader()


@pytest.mark.parametrize("feed", FEEDS)
def test_batches(tmp_path, feed):
    make, unpack = FEEDS[feed]
    assert_parity(tmp_path, fed_by(make, unpack), spy=feed != "workers")


@pytest.mark.parametrize(
    "options",
    [
        {"limit_train_batches": 3},
        {"max_steps": 7},
        {"accumulate_grad_batches": 2},
        {"val_check_interval": 2, "limit_train_batches": 4},
        {"limit_train_batches": 5},
        {"max_steps": 12, "max_epochs": -1},
    ],
    ids=str,
)
def test_a_loader_without_length(tmp_path, options):
    class Unsized(Net):
        def train_dataloader(self):
            return DataLoader(Endless(5), batch_size=None)

    assert_parity(tmp_path, Unsized, spy=True, lightning_quirks=True, **options)


def test_a_step_that_edits_its_batch_does_not_edit_the_data(tmp_path):
    data = [[torch.full((4, 4), 1.0), torch.zeros(4, 1)] for _ in range(3)]

    class Edits(Net):
        def training_step(self, batch, batch_idx):
            x, y = batch
            batch[0] = None
            return super().training_step((x, y), batch_idx)

        def train_dataloader(self):
            return data

    assert_parity(tmp_path, Edits)
    assert all(batch[0] is not None for batch in data)


def test_a_loader_that_yields_none(tmp_path):
    class Holes(Net):
        def train_dataloader(self):
            batches = list(loader())
            return [batches[0], None, batches[1], batches[2]]

        def val_dataloader(self):
            return []

    assert_parity(tmp_path, Holes, spy=True)


def transfers(base):
    class Transfers(base):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            self.notes().append(("before", dataloader_idx, self.trainer.state.stage))
            return [2 * batch[0], batch[1]]

        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            self.notes().append(("transfer", str(device), dataloader_idx))
            return super().transfer_batch_to_device(batch, device, dataloader_idx)

        def on_after_batch_transfer(self, batch, dataloader_idx):
            self.notes().append(("after", dataloader_idx))
            return batch[0] + 1, batch[1]

        def notes(self):
            return self.seen if isinstance(self, Net) else self.trainer.lightning_module.seen

    return Transfers


class Data(LightningDataModule):
    def __init__(self):
        super().__init__()
        self.calls = []

    def train_dataloader(self):
        return loader(18, shuffle=True)

    def val_dataloader(self):
        return loader(10)

    def on_exception(self, exception):
        self.trainer.lightning_module.seen.append(type(exception).__name__)


@pytest.mark.parametrize("in_module", [True, False])
@pytest.mark.parametrize("in_data", [True, False])
def test_transfer_hooks(tmp_path, in_module, in_data):
    data = transfers(Data) if in_data else Data
    module = transfers(Net) if in_module else Net
    assert_parity(tmp_path, module, do=lambda trainer, net: trainer.fit(net, datamodule=data()), spy=True)


def test_dataloader_iter_runs_on_lightnings_own_loop(tmp_path):
    class Iterates(Net):
        def training_step(self, dataloader_iter):
            batch, _, _ = next(dataloader_iter)
            loss = self.loss(batch)
            self.log("loss", loss, batch_size=len(batch[0]))
            return loss

    assert_parity(tmp_path, Iterates, fallbacks=("dataloader-iter",))


@pytest.mark.parametrize("at", [0, 2, 4])
@pytest.mark.parametrize("window", [1, 2])
def test_an_epoch_that_the_module_ends(tmp_path, at, window):
    class Ends(Net):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == at and self.current_epoch == 0 else None

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    assert_parity(tmp_path, Ends, accumulate_grad_batches=window, lightning_quirks=True, spy=True)


@pytest.mark.parametrize("how", ["StopIteration", "should_stop", "RuntimeError", "max_steps"])
def test_a_run_that_ends_in_the_middle(tmp_path, how):
    class Ends(Net):
        def training_step(self, batch, batch_idx):
            if self.global_step == 7:
                if how == "StopIteration":
                    raise StopIteration
                if how == "RuntimeError":
                    raise RuntimeError("boom")
                if how == "max_steps":
                    self.trainer.fit_loop.epoch_loop.max_steps = 8
                self.trainer.should_stop = how == "should_stop"
            return super().training_step(batch, batch_idx)

    assert_parity(tmp_path, Ends, spy=True)


@pytest.mark.parametrize("sanity", [0, 2])
def test_validation_results_and_several_loaders(tmp_path, sanity):
    class Several(Net):
        def val_dataloader(self):
            return [loader(10), loader(6)]

        test_dataloader = val_dataloader
        predict_dataloader = Net.val_dataloader

        def validation_step(self, batch, batch_idx, dataloader_idx):
            self.log("val_loss", self.loss(batch), prog_bar=True, on_step=True, on_epoch=True)
            self.log(f"own_{dataloader_idx}", self.loss(batch), add_dataloader_idx=False)

        def test_step(self, batch, batch_idx, dataloader_idx):
            self.log_dict({"test_loss": self.loss(batch), "two": 2.0})

        def predict_step(self, batch, batch_idx):
            return self.net(batch[0])

        def on_validation_epoch_end(self):
            self.log("at_end", 4.0)

    def everything(trainer, module):
        results = [trainer.validate(module, verbose=False), trainer.test(module, verbose=False)]
        trainer.fit(module)
        results += [trainer.validate(module, verbose=False), trainer.test(module, verbose=False)]
        return [*results, trainer.predict(module)]

    ours = assert_parity(tmp_path, Several, do=everything, spy=True, num_sanity_val_steps=sanity)
    assert len(ours.result) == 5


def test_two_fits_with_one_trainer(tmp_path):
    def twice(trainer, module):
        trainer.fit(module)
        trainer.fit_loop.max_epochs = 4
        trainer.fit(module)
        other = Net()
        trainer.fit_loop.max_epochs = 6
        trainer.fit(other)
        return other.state_dict()

    assert_parity(tmp_path, Net, do=twice, loggers=lambda folder: MemoryLogger(), spy=True)


def test_a_fit_after_a_failed_fit(tmp_path):
    class Fails(Net):
        broken = True

        def training_step(self, batch, batch_idx):
            if self.broken and batch_idx == 3:
                raise RuntimeError("boom")
            return super().training_step(batch, batch_idx)

    def twice(trainer, module):
        with pytest.raises(RuntimeError, match="boom"):
            trainer.fit(module)
        module.broken = False
        trainer.fit(module)

    assert_parity(tmp_path, Fails, do=twice, spy=True)


def test_an_epoch_mean_read_at_the_end_of_its_epoch(tmp_path):
    class Reads(Net):
        def on_train_epoch_end(self):
            self.seen.append(self.trainer.callback_metrics["loss_epoch"].clone())

    assert_parity(tmp_path, Reads)
