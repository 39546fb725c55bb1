"""What changes between two steps is heeded by the very next one, whoever changes it."""

import os
from os import environ, getenv

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

import zdtrain

from . import test_swapped as swapped
from .runs import CLASSES, QUIET, batches, both, codes
from .test_traps import Deterministic

SIZE, COUNT, LATE = 8, 16, 10  # of a batch; batches of an epoch; the batch from which on something is another


class Weighed(Deterministic):
    """Reads an attribute that somebody else sets."""

    weight = 1.0
    latest = None

    def __init__(self):
        super().__init__()
        Weighed.latest = self

    def loss(self, batch):
        return super().loss(batch) * self.weight

    def weigh(self, batch_idx):
        self.weight = 1.0 if batch_idx % COUNT < LATE else 3.0


class ChangingData(TensorDataset):
    def __init__(self, data, change):
        super().__init__(*data.tensors)
        self.change = change

    def __getitem__(self, index):
        if index % SIZE == 0:
            self.change(index // SIZE)
        return super().__getitem__(index)


def from_data(change):
    """Return what makes a loader whose data set calls `change` with the number of each batch."""
    return lambda: DataLoader(ChangingData(batches(COUNT, SIZE).dataset, change), batch_size=SIZE)


def weigh(batch_idx):
    Weighed.latest.weigh(batch_idx)


def by_sampler():
    class Sampler(BatchSampler):
        def __iter__(self):
            for batch_idx, indices in enumerate(super().__iter__()):
                weigh(batch_idx)
                yield indices

    data = batches(COUNT, SIZE).dataset
    return DataLoader(data, batch_sampler=Sampler(SequentialSampler(data), SIZE, drop_last=False))


def by_collation():
    data = batches(COUNT, SIZE).dataset
    indexed = TensorDataset(*data.tensors, torch.arange(len(data)))

    def collate(samples):
        weigh(int(samples[0][2]) // SIZE)
        x, y, _ = map(torch.stack, zip(*samples, strict=True))
        return [x, y]

    return DataLoader(indexed, batch_size=SIZE, collate_fn=collate)


@pytest.mark.parametrize(
    "loader", [from_data(weigh), by_sampler, by_collation], ids=["data set", "sampler", "collation"]
)
def test_what_the_data_loader_sets_on_the_module_is_heeded(tmp_path, loader):
    run = both(tmp_path, Weighed, loader=loader)
    assert not codes(run)
    assert run.report.steps_replayed > 30


def test_what_a_logger_sets_on_the_module_is_heeded(tmp_path):
    class Logger(CSVLogger):
        n = 0

        def log_metrics(self, metrics, step=None):
            self.n += 1
            weigh(self.n)

    def train(capture):
        torch.manual_seed(0)
        module = Weighed()
        logger = Logger(str(tmp_path), name=capture)
        trainer = zdtrain.Trainer(**QUIET, max_epochs=3, capture=capture, logger=logger)
        trainer.fit(module, batches(COUNT, SIZE))
        return module.state_dict(), trainer.capture_report

    (eager, _), (captured, report) = train("off"), train("graph")
    assert all(torch.equal(eager[name], captured[name]) for name in eager)
    assert report.steps_replayed > 10


def test_what_the_function_of_a_schedule_sets_on_the_module_is_heeded(tmp_path):
    class Scheduled(Weighed):
        def configure_optimizers(self):
            def factor(step):
                self.weigh(step)
                return 1.0

            optimizer = super().configure_optimizers()
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    run = both(tmp_path, Scheduled, loader=lambda: batches(COUNT, SIZE))
    assert run.report.steps_replayed > 30


def test_what_is_set_in_the_middle_of_a_validation_is_heeded(tmp_path):
    class Validated(Weighed):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.loss(batch))

        def val_dataloader(self):
            return from_data(weigh)()

    run = both(tmp_path, Validated, loader=lambda: batches(4, SIZE))
    assert run.report.evaluation_replayed > 30
    assert not codes(run)


# The same changes as in `test_swapped`, made by the data set instead of a hook.


def quietly(kind):
    """Return a maker of modules of that kind whose hooks change nothing, and a loader whose data set does."""
    held = []

    def make():
        swapped.reset()
        held[:] = [kind()]
        hooked = type(held[0])
        held[0].__class__ = type(
            hooked.__name__, (hooked,), {"on_train_batch_start": pl.LightningModule.on_train_batch_start}
        )
        return held[0]

    return make, from_data(lambda batch_idx: held[0].change() if batch_idx == LATE else None)


LATE_KINDS = [kind for kind in swapped.KINDS if kind is swapped.by_closure or "change" in vars(kind)]


class Freezes(swapped.Late):
    def change(self):
        self.net[0].requires_grad_(False)


class Evaluates(swapped.Late):
    def __init__(self):
        super().__init__()
        self.net.append(nn.Dropout(0.5))

    def change(self):
        self.net.eval()


class ReplacesParameter(swapped.Late):
    def change(self):
        self.net[2].weight = nn.Parameter(torch.ones(CLASSES, 16) / 16, requires_grad=False)


class ReplacesForward(swapped.Late):
    def change(self):
        self.net[1].forward = torch.relu


class BecomesAnother(swapped.Late):
    def change(self):
        self.net[1].__class__ = nn.ReLU
        self.net[1].inplace = False


class Appends(swapped.Late):
    def change(self):
        self.net.append(nn.Tanh())


class ChangesInPlace(swapped.Late):
    def __init__(self):
        super().__init__()
        self.options = {"weights": [1.0, 1.0]}

    def loss(self, batch):
        return super().loss(batch) * self.options["weights"][1]

    def change(self):
        self.options["weights"][1] = 3.0


MORE_KINDS = [Freezes, Evaluates, ReplacesParameter, ReplacesForward, BecomesAnother, Appends, ChangesInPlace]


@pytest.mark.parametrize("kind", [*LATE_KINDS, *MORE_KINDS], ids=lambda kind: kind.__name__)
def test_whatever_a_data_set_changes_is_heeded(tmp_path, kind):
    make, loader = quietly(kind)
    run = both(tmp_path, make, max_epochs=2, loader=loader)
    assert run.report.steps_replayed > 5
    assert "verification" not in codes(run)


class HooksEverything(swapped.Late):
    handle = None

    def change(self):
        if self.handle is not None:
            return

        def double(module, args, out):
            return out * 2 if isinstance(module, nn.Tanh) else None

        self.handle = nn.modules.module.register_module_forward_hook(double)

    def on_fit_end(self):
        self.handle.remove()


@pytest.mark.parametrize(
    "kind", [swapped.HooksModule, swapped.HooksParameter, HooksEverything], ids=lambda kind: kind.__name__
)
def test_a_hook_that_a_data_set_registers_is_called_from_then_on(tmp_path, kind):
    make, loader = quietly(kind)
    run = both(tmp_path, make, max_epochs=2, loader=loader)
    assert "tensor-hook" in codes(run)
    assert 0 < run.report.steps_replayed < LATE


def test_an_optimizer_that_a_data_set_patches_does_what_it_then_does(tmp_path):
    make, loader = quietly(swapped.PatchesStep)
    assert both(tmp_path, make, max_epochs=2, loader=loader).report.steps_replayed > 5


# What lies past the module.


class ReadsLibrary(Deterministic):
    def loss(self, batch):
        return F.nll_loss(torch.log_softmax(self.net(batch[0]), 1), batch[1])


def sharper(x, dim):
    return F.log_softmax(2 * x, dim)


def doubled_layer(layer, x):
    return 2 * F.linear(x, layer.weight, layer.bias)


@pytest.mark.parametrize(
    ("owner", "name", "other"),
    [(torch, "log_softmax", sharper), (nn.Linear, "forward", doubled_layer)],
    ids=["function", "method"],
)
def test_a_function_of_a_library_that_is_replaced_is_heeded(tmp_path, monkeypatch, owner, name, other):
    original = getattr(owner, name)

    def change(batch_idx):
        monkeypatch.setattr(owner, name, original if batch_idx < LATE else other)

    run = both(tmp_path, ReadsLibrary, loader=from_data(change))
    assert not codes(run)
    assert run.report.steps_replayed > 30


class ReadsEnviron(Deterministic):
    def loss(self, batch):
        return super().loss(batch) * self.factor()

    def factor(self):
        return float(os.environ["FACTOR"])


class GetsEnv(ReadsEnviron):
    def factor(self):
        return float(os.getenv("FACTOR", "1"))


class ReadsImportedEnviron(ReadsEnviron):
    def factor(self):
        return float(environ["FACTOR"])


class GetsImportedEnv(ReadsEnviron):
    def factor(self):
        return float(getenv("FACTOR", "1"))


@pytest.mark.parametrize(
    "module", [ReadsEnviron, GetsEnv, ReadsImportedEnviron, GetsImportedEnv], ids=lambda kind: kind.__name__
)
def test_a_variable_of_the_environment_is_part_of_the_key(tmp_path, monkeypatch, module):
    run = both(
        tmp_path,
        module,
        loader=from_data(lambda batch_idx: monkeypatch.setenv("FACTOR", "1.0" if batch_idx < LATE else "3.0")),
    )
    assert not codes(run)
    assert run.report.steps_replayed > 30


# Memory that programs hold.


class MovesWeight(swapped.Late):
    def change(self):
        weight = self.net[0].weight
        weight.data = weight.data * 2


class MovesBuffer(swapped.Late):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def loss(self, batch):
        return super().loss(batch) * self.scale

    def change(self):
        self.scale.data = self.scale.data * 2


class TurnsWeight(swapped.Late):
    """Leaves the values where they are and changes their order in memory."""

    def change(self):
        weight = self.net[2].weight
        weight.data = weight.data.t().contiguous().t()


MOVES = pytest.mark.parametrize("kind", [MovesWeight, MovesBuffer, TurnsWeight], ids=lambda kind: kind.__name__)


def assert_found(tmp_path, kind):
    make, loader = quietly(kind)
    run = both(tmp_path, make, max_epochs=3, loader=loader)
    assert run.report.steps_replayed > 10
    assert "verification" not in codes(run)


@MOVES
def test_a_tensor_whose_memory_is_replaced_is_found_where_it_is(tmp_path, kind):
    assert_found(tmp_path, kind)


@MOVES
@pytest.mark.usefixtures("device_graphs")
def test_a_tensor_whose_memory_is_replaced_is_found_by_device_graphs(tmp_path, kind):
    assert_found(tmp_path, kind)


@pytest.mark.parametrize(("owner", "name"), [(F, "relu"), (torch.Tensor, "relu")])
def test_a_function_of_torch_that_is_replaced_by_one_that_calls_it_is_called_once(tmp_path, monkeypatch, owner, name):
    class Net(Deterministic):
        def loss(self, batch):
            return super().loss(batch) + F.relu(self.net[0].weight).sum() + self.net[0].weight.relu().sum()

    original = getattr(owner, name)

    def doubled(*args, **kwargs):
        return 2 * original(*args, **kwargs)

    monkeypatch.setattr(owner, name, doubled)
    run = both(tmp_path, Net)
    assert codes(run) == {"torch-replaced"}
