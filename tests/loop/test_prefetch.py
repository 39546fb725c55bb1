"""`Trainer(prefetch=True)` against a device on which copies arrive late and every unordered access is an error."""

from contextlib import nullcontext

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.capture.host_graph import HostGraph
from zdtrain import Trainer
from zdtrain.device.lagging import LaggingEvent, LaggingRuntime, OrderError
from zdtrain.optim import SimpleAdam

BATCHES = 12


class Lagging(LaggingRuntime):
    """A late device with graphs; replays are part of the log."""

    has_graphs = True

    def graph(self):
        runtime = self

        class Logged(HostGraph):
            def replay(self):
                runtime.tick("replay")
                super().replay()

        return Logged()


class Late(Trainer):
    """Trains on the late device."""

    runtime: LaggingRuntime

    def _open_runtime(self):
        return self.runtime


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch["x"], batch["rest"][0]
        loss = (self.net(x) - y).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=4)
        return loss

    def configure_optimizers(self):
        return SimpleAdam(self.parameters(), lr=0.01)


def collate(samples):
    x, y = map(torch.stack, zip(*samples, strict=True))
    return {"x": x, "rest": (y, "name")}


def batches():
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(*(torch.randn(BATCHES * 4, n, generator=generator) for n in (4, 1)))
    return DataLoader(data, batch_size=4, collate_fn=collate)


def fit(tmp_path, runtime=None, make=Net, loader=batches, *, watching=False, **options):
    torch.manual_seed(0)
    module = make()
    torch.manual_seed(7)
    options = {"capture": "off", "max_epochs": 2, "log_every_n_steps": 1, **options}
    trainer = (Trainer if runtime is None else Late)(
        accelerator="cpu",
        default_root_dir=tmp_path,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **options,
    )
    if runtime is not None:
        trainer.runtime = runtime
    with runtime.watching() if watching else nullcontext():
        trainer.fit(module, loader())
    return module, trainer


def assert_same_weights(one, other):
    for (name, mine), theirs in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), name


def reasons(trainer):
    return [reason for reason in trainer.fit_loop.epoch_loop.fallbacks if reason.code == "prefetch"]


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_training_is_the_same_however_late_the_copies_are(tmp_path, lag):
    plain, _ = fit(tmp_path)
    runtime = LaggingRuntime(lag=lag)
    ahead, trainer = fit(tmp_path, runtime, watching=True, prefetch=True)
    assert_same_weights(plain, ahead)
    assert trainer.callback_metrics.keys() == {"loss", "loss_step", "loss_epoch"}
    assert runtime.log.count("copy enqueued on copy") == 2 * 2 * BATCHES  # two tensors a batch, two epochs
    assert not reasons(trainer)


def test_a_copy_is_under_way_while_the_replay_before_it_runs_and_waits_for_the_one_before_that(tmp_path):
    plain, _ = fit(tmp_path)
    runtime = Lagging(lag=1)
    ahead, trainer = fit(tmp_path, runtime, prefetch=True, capture="graph", verify_capture=False)
    assert_same_weights(plain, ahead)
    (program,) = trainer.capture_report.programs
    assert program.replays > BATCHES
    second = max(i for i, line in enumerate(runtime.log) if line == "replay")
    first = max(i for i, line in enumerate(runtime.log[:second]) if line == "replay")
    third = max(i for i, line in enumerate(runtime.log[:first]) if line == "replay")
    fourth = max(i for i, line in enumerate(runtime.log[:third]) if line == "replay")
    between = [line for line in runtime.log[fourth + 1 : third] if "drain" not in line]
    # Between two replays, in this order: the second one waits for its own batch, whose copy was enqueued before the
    # first one; the next batch's copy waits for all that is enqueued so far, the first replay included.
    wait = next(i for i, line in enumerate(between) if line.startswith("train waits"))
    record = next(i for i, line in enumerate(between) if line.startswith("record") and line.endswith("on train"))
    enqueued = [i for i, line in enumerate(between) if line == "copy enqueued on copy"]
    waits = [i for i, line in enumerate(between) if line == f"copy waits {between[record].split()[1]}"]
    assert wait < record < waits[0] < enqueued[0]
    assert len(enqueued) == len(waits) == 2


def test_a_step_that_did_not_wait_for_its_batch_would_be_noticed(tmp_path, monkeypatch):
    wait = LaggingEvent.wait
    monkeypatch.setattr(LaggingEvent, "wait", lambda self, stream: None if stream == "train" else wait(self, stream))
    with pytest.raises(OrderError, match="destination of a copy"):
        fit(tmp_path, LaggingRuntime(lag=1), watching=True, prefetch=True)


class Moves(Net):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch


class Whole:
    """A batch that moves itself."""

    def __init__(self, batch):
        self.batch = batch

    def __getitem__(self, name):
        return self.batch[name]

    def to(self, device):
        return self


def wholes():
    return DataLoader(batches().dataset, batch_size=4, collate_fn=lambda samples: Whole(collate(samples)))


class Unsized:
    def __iter__(self):
        return iter(batches())


class Placed(DataLoader):
    """Keeps its place in checkpoints."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def placed():
    return Placed(batches().dataset, batch_size=4, collate_fn=collate)


@pytest.mark.parametrize(
    ("make", "loader", "says"),
    [
        (Moves, batches, "Moves overrides on_after_batch_transfer"),
        (Net, wholes, "a batch (Whole) holds no plain tensor on the host"),
        (Net, Unsized, "it takes one training loader that has a length"),
        (Net, placed, "the loader keeps its place in checkpoints"),
    ],
)
def test_what_keeps_batches_from_being_copied_ahead_is_said_once(tmp_path, make, loader, says):
    plain, _ = fit(tmp_path, make=make, loader=loader)
    runtime = LaggingRuntime()
    ahead, trainer = fit(tmp_path, runtime, make, loader, prefetch=True)
    assert_same_weights(plain, ahead)
    (reason,) = reasons(trainer)
    assert says in str(reason)
    assert "prefetch= has no effect here" in str(reason)
    assert "copy enqueued on copy" not in runtime.log


def test_on_the_host_there_is_nothing_to_copy(tmp_path):
    _, trainer = fit(tmp_path, prefetch=True)
    assert "used where they are made" in str(*reasons(trainer))


def test_steps_on_lightnings_own_loop_say_that_nothing_is_copied_ahead(tmp_path):
    class OwnStep(Net):
        def optimizer_step(self, *args, **kwargs):
            super().optimizer_step(*args, **kwargs)

    _, trainer = fit(tmp_path, make=OwnStep, prefetch=True)
    assert "stock Lightning's loop" in str(*reasons(trainer))


def test_an_epoch_that_ends_early_reads_no_batch_beyond_its_limit(tmp_path):
    class Counted(DataLoader):
        read = 0

        def __iter__(self):
            for batch in super().__iter__():
                Counted.read += 1
                yield batch

    Counted.read = 0
    loader = Counted(batches().dataset, batch_size=4, collate_fn=collate)
    _, trainer = fit(tmp_path, LaggingRuntime(), Net, lambda: loader, prefetch=True, limit_train_batches=5)
    assert trainer.global_step == Counted.read == 10
