"""What steps ask of the host's counters is part of the key by the answer; every other use is named."""

import copy
import math
import pickle
import sys

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from zdtrain.capture.counters import Counters, NotedInt
from zdtrain.optim import SimpleAdam

from .runs import FEATURES, Classifier, assert_same, batches, both, codes, fit, trap_line


def loader():
    return batches(25)


def served(asks):
    """Return a module that trains and logs otherwise in the steps that `asks` tells from its batch's index."""

    return type("Asks", (Sometimes,), {"asks": asks})


class Sometimes(Classifier):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(FEATURES, 3)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if self.asks(batch_idx):
            loss = 2 * loss
            self.log("rare", loss, on_step=True, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


SERVED = {
    "every fifth": lambda self, i: (i + 1) % 5 == 0,
    "truth": lambda self, i: i % 2,
    "not": lambda self, i: not i,
    "late": lambda self, i: i > 16,
    "chained": lambda self, i: 3 < i <= 19.5,
    "one of": lambda self, i: i in (0, 5, 17),
    "combined": lambda self, i: i % 6 == 0 or i == 17,
    "negative": lambda self, i: (i - 30) % -4 == -2,
    "quotient": lambda self, i: i // 8 % 2 == 1,
    "on the right": lambda self, i: 20 - 1 * i < 3,
    "capped": lambda self, i: min(i, 20) == 20,
    "last": lambda self, i: i == self.trainer.num_training_batches - 1,
    "an update in seven": lambda self, i: self.global_step % 7 == 6,
    "after a while": lambda self, i: self.trainer.global_step >= 33,
    "of both": lambda self, i: i > 16 and self.global_step > 30,
}


@pytest.mark.parametrize("name", SERVED)
def test_a_condition_on_a_counter_is_part_of_the_key(tmp_path, name):
    run = both(tmp_path, served(SERVED[name]), loader=loader, max_epochs=3)
    assert not codes(run)
    assert run.report.steps_replayed > 40
    if name in ("every fifth", "an update in seven", "late"):
        assert len(run.report.programs) == 2
        assert all(program.replays for program in run.report.programs)


class Scales(Classifier):
    def training_step(self, batch, batch_idx):
        return self.loss(batch) * self.part(batch_idx)

    def part(self, i):
        return 1 + (i % 5 == 0) + (i >= 17)


class Depth(nn.Module):
    def forward(self, x, index):
        return x * 2 if index % 3 == 0 else x


class PassesOn(Classifier):
    def __init__(self):
        super().__init__()
        self.part = Depth()

    def training_step(self, batch, batch_idx):
        return self.part(self.loss(batch), index=batch_idx + 1)


class Targets(Classifier):
    """Brings a second network up to date every ten updates."""

    def __init__(self):
        super().__init__()
        self.target = copy.deepcopy(self.net)

    def training_step(self, batch, batch_idx):
        x, _ = batch
        if self.global_step % 10 == 0:
            self.target.load_state_dict(self.net.state_dict())
        with torch.no_grad():
            far = self.target(x)
        return self.loss(batch) + nn.functional.mse_loss(self.net(x), far)


class ZeroesByBatchIdx(Classifier):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        if batch_idx % 7 != 5:
            optimizer.zero_grad()


@pytest.mark.parametrize("module", [Scales, PassesOn, Targets, ZeroesByBatchIdx], ids=lambda kind: kind.__name__)
def test_what_conditions_lead_to_is_replayed(tmp_path, module):
    run = both(tmp_path, module, loader=loader, max_epochs=3)
    assert not codes(run)
    assert run.report.steps_replayed > 40


TABLE = [1.0] * 20 + [2.0] * 5
NETS = {20: 2.0}
REFUSED = {
    "tensor": lambda self, i: torch.full((), 1 + i),
    "float": lambda self, i: 2.0 if float(i) > 18 else 1.0,
    "quotient": lambda self, i: 2.0 if i / 25 > 0.7 else 1.0,
    "float on the left": lambda self, i: 2.0 if 0.5 * i > 9 else 1.0,
    "compared on the right": lambda self, i: 2.0 if 17.5 < i else 1.0,  # noqa: SIM300
    "maximum": lambda self, i: 2.0 if max(i, 18.5) > 18.5 else 1.0,
    "index": lambda self, i: TABLE[i],
    "slice": lambda self, i: len(TABLE[i // 20 :]),
    "repetitions": lambda self, i: 1.0 + sum(1 for _ in range(i // 20)),
    "key": lambda self, i: NETS.get(i, 1.0),
    "text": lambda self, i: len(f"{i}"),
    "old text": lambda self, i: len("%d" % i),  # noqa: UP031
    "of both": lambda self, i: 2.0 if i == self.global_step else 1.0,
    "function": lambda self, i: 2.0 if divmod(i, 20)[0] else 1.0,
    "bits": lambda self, i: 2.0 if i.bit_length() > 4 else 1.0,
    "floor": lambda self, i: 2.0 if math.floor(i) > 16 else 1.0,
    "array": lambda self, i: 2.0 if np.float64(0.5) * i > 9 else 1.0,
    "copy": lambda self, i: 2.0 if copy.deepcopy(i) > 16 else 1.0,
    "pickle": lambda self, i: 2.0 if pickle.loads(pickle.dumps(i)) > 16 else 1.0,
}


class ByBatch(Classifier):
    def training_step(self, batch, batch_idx):
        return self.loss(batch) * self.weight(batch_idx)


class ByStep(Classifier):
    def training_step(self, batch, batch_idx):
        return self.loss(batch) * self.weight(self.global_step % 25)


@pytest.mark.parametrize(("kind", "code"), [(ByBatch, "batch-idx"), (ByStep, "trainer-state")])
@pytest.mark.parametrize("name", REFUSED)
def test_every_other_use_of_a_counter_keeps_the_step_eager_and_is_named(tmp_path, name, kind, code):
    run = both(tmp_path, type("Weighs", (kind,), {"weight": REFUSED[name]}), loader=loader, max_epochs=2)
    reasons = [reason for reason in run.report.fallbacks if reason.code == code]
    assert (reasons[0].file, reasons[0].line) == (__file__, REFUSED[name].__code__.co_firstlineno)
    assert run.report.steps_replayed == 0


def test_what_a_counter_is_compared_with_may_change(tmp_path):
    class Shrinks(type("Asks", (Sometimes,), {"asks": SERVED["last"]})):
        def train_dataloader(self):
            return batches(18 - 3 * self.trainer.current_epoch)

    runs = [
        fit(tmp_path, Shrinks, capture, loader=lambda: None, reload_dataloaders_every_n_epochs=1, max_epochs=4)
        for capture in ("off", "graph")
    ]
    assert_same(*runs)
    assert not codes(runs[1])
    assert runs[1].report.steps_replayed > 20


@pytest.mark.usefixtures("device_graphs")
@pytest.mark.parametrize("name", ["float on the left", "repetitions"])
def test_a_device_graph_is_not_captured_of_a_counter_that_is_read_in_c(tmp_path, name):
    run = both(tmp_path, type("Weighs", (ByBatch,), {"weight": REFUSED[name]}), loader=loader, max_epochs=2)
    assert codes(run) == {"batch-idx"}
    assert run.report.steps_replayed == 0


@pytest.mark.usefixtures("device_graphs")
def test_device_graphs_serve_conditions(tmp_path):
    run = both(tmp_path, served(SERVED["every fifth"]), loader=loader, max_epochs=3)
    assert not codes(run)
    assert [program.replays > 0 for program in run.report.programs] == [True, True]


class Keeps(Classifier):
    def training_step(self, batch, batch_idx):
        self.last = batch_idx  # trap
        return self.loss(batch)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert type(self.last) is int


class Returns(Classifier):
    def training_step(self, batch, batch_idx):
        return {"loss": self.loss(batch), "index": batch_idx}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert type(outputs["index"]) is int
        assert outputs["index"] == batch_idx


class LogsBySize(Classifier):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True, batch_size=batch_idx + 1)
        return loss


class AsksTooMuch(Classifier):
    def training_step(self, batch, batch_idx):
        n = 0
        while n + 1 < batch_idx * 3:
            n += 1
        return self.loss(batch) if n < 40 else 2 * self.loss(batch)


@pytest.mark.parametrize(
    ("module", "code"),
    [(Keeps, "python-state"), (Returns, "batch-idx"), (LogsBySize, "batch-idx"), (AsksTooMuch, "batch-idx")],
)
def test_a_counter_that_leaves_the_step_is_named(tmp_path, module, code):
    run = both(tmp_path, module, loader=loader, max_epochs=2)
    assert code in codes(run)
    if module is Keeps:
        assert any(reason.line == trap_line(Keeps) for reason in run.report.fallbacks)


class ByHand(pl.LightningModule):
    """Two networks, each with an optimizer of its own."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.one, self.other = nn.Linear(FEATURES, 3), nn.Linear(FEATURES, 3)

    def backward_of(self, net, batch, scale=1.0):
        x, y = batch
        loss = nn.functional.cross_entropy(net(x), y)
        self.log("loss", loss)
        self.manual_backward(loss * scale)

    def configure_optimizers(self):
        return [torch.optim.Adam(net.parameters(), lr=0.01) for net in (self.one, self.other)]


class Critic(ByHand):
    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        first.zero_grad()
        self.backward_of(self.one, batch)
        first.step()
        if (batch_idx + 1) % 5 == 0:
            second.zero_grad()
            self.backward_of(self.other, batch)
            second.step()


class Accumulates(ByHand):
    def training_step(self, batch, batch_idx):
        self.backward_of(self.one, batch, 0.25)
        if (batch_idx + 1) % 4 == 0 or self.trainer.is_last_batch:
            self.optimizers()[0].step()
            self.optimizers()[0].zero_grad()


class AsksBetween(ByHand):
    """Counts its updates while it makes them."""

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        first.zero_grad()
        self.backward_of(self.one, batch)
        first.step()
        if self.global_step % 3 == 0:
            second.zero_grad()
            self.backward_of(self.other, batch)
            second.step()
            if self.global_step > 60:
                second.step()


@pytest.mark.parametrize("module", [Critic, Accumulates, AsksBetween], ids=lambda kind: kind.__name__)
def test_conditions_are_served_where_the_module_optimizes_by_hand(tmp_path, module):
    run = both(tmp_path, module, loader=loader, max_epochs=3)
    assert not codes(run)
    assert run.report.steps_replayed > 20
    assert all(program.verification in ("equal", "not yet") for program in run.report.programs)


class Validates(Classifier):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        loss = self.loss(batch)
        if batch_idx == 0:
            self.log("first", loss)
        if batch_idx % 3 == 2 and self.global_step > 20:
            loss = 2 * loss
        self.log("val_loss", loss)


def test_conditions_in_validation_are_served(tmp_path):
    def fitted(capture):
        torch.manual_seed(0)
        module = Validates()
        trainer_options = {"max_epochs": 4, "val_check_interval": 6}
        return fit(tmp_path, lambda: module, capture, loader=WithValidation, **trainer_options)

    class WithValidation:
        def __new__(cls):
            return loader()

    Validates.val_dataloader = lambda self: [batches(9), batches(7, size=4)]
    eager, captured = fitted("off"), fitted("graph")
    assert_same(eager, captured)
    assert not codes(captured)
    assert captured.report.evaluation_replayed > 100


def test_conditions_in_accumulation_windows_are_served(tmp_path):
    module = served(lambda self, i: i % 5 == 0 or self.global_step % 4 == 1)
    run = both(tmp_path, module, loader=loader, max_epochs=4, accumulate_grad_batches=2)
    assert not codes(run)
    assert run.report.steps_replayed > 10


def test_a_run_resumed_in_the_middle_of_an_epoch_asks_for_its_own_counters(tmp_path):
    checkpoints = ModelCheckpoint(dirpath=tmp_path / "checkpoints", every_n_train_steps=34, save_top_k=-1)
    module = served(lambda self, i: i % 5 == 1 or self.global_step > 60)
    fit(
        tmp_path, module, "off", loader=loader, max_steps=40, callbacks=lambda: [checkpoints], enable_checkpointing=True
    )
    (path,) = (tmp_path / "checkpoints").iterdir()
    run = both(tmp_path, module, loader=loader, max_epochs=4, ckpt_path=path)
    assert not codes(run)
    assert run.report.steps_replayed > 30


def test_a_lowered_step_serves_conditions(tmp_path):
    runs = [fit(tmp_path, served(SERVED["late"]), c, loader=loader, max_epochs=2) for c in ("off", "compile")]
    for name, want in runs[0].weights.items():
        assert torch.allclose(want, runs[1].weights[name], rtol=1e-4, atol=1e-5), name
    assert not codes(runs[1])
    assert [program.replays > 0 for program in runs[1].report.programs] == [True, True]


def test_a_block_of_steps_ends_where_a_condition_changes(tmp_path):
    class Simple(served(lambda self, i: i > 11)):
        def configure_optimizers(self):
            return SimpleAdam(self.parameters(), lr=0.01)

    runs = [fit(tmp_path, Simple, "graph", loader=loader, max_epochs=5, steps_per_replay=k) for k in (1, 4)]
    assert_same(*runs)
    blocks = [program for program in runs[1].report.programs if program.key.startswith("4 steps")]
    assert {block.replays > 20 for block in blocks[-2:]} == {True}


CONDITIONS = {
    "(batch_idx + 1) % 5 == 0": lambda i: (i + 1) % 5 == 0,
    "batch_idx % -3 != 0": lambda i: i % -3,
    "7 - batch_idx > 2.5": lambda i: 7 - i > 2.5,
    "(batch_idx * 2) // 3 >= 4": lambda i: 2 * i // 3 >= 4,
    "batch_idx < 10": lambda i: 10 > i,  # noqa: SIM300
}


@pytest.mark.parametrize("text", CONDITIONS)
def test_a_condition_holds_where_python_says_so(text):
    asks = CONDITIONS[text]
    counters = Counters({"batch_idx": 3, "global_step": 0}, sys._getframe().f_code)
    index = counters.stand_in("batch_idx", 3)
    assert isinstance(index, int)

    def step():
        return bool(asks(index))

    with counters.listening():
        assert step() == bool(asks(3))
    (condition,) = counters.conditions
    assert str(condition) == text
    assert not counters.reasons
    for value in range(-20, 40):
        assert condition.holds({"batch_idx": value, "global_step": 0}) == bool(asks(value))


def test_a_counter_that_outlives_its_step_is_an_integer_like_any_other():
    counters = Counters({"batch_idx": 3, "global_step": 0}, sys._getframe().f_code)
    index = counters.stand_in("batch_idx", 3)
    assert type(index) is NotedInt
    assert (index, index + 1, hash(index), f"{index}", {3: "x"}[index]) == (3, 4, hash(3), "3", "x")
    assert type(index + 1) is int
    assert type(pickle.loads(pickle.dumps(index))) is int
    assert type(copy.deepcopy(index)) is int
    assert not counters.conditions
    assert not counters.reasons
