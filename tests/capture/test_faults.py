"""Whatever fails in capturing steps, the run goes on eagerly, trains the same bits, and says what failed."""

import pytest
import torch

import zdtrain.capture.tape
import zdtrain.trainer
from zdtrain.capture.verify import first_mismatch
from zdtrain.device.base import MemoryStats
from zdtrain.errors import CaptureError

from .faulty import DOOR, Faults, FaultyRuntime
from .runs import Classifier, assert_same, batches, codes, fit
from .test_several import Simple

ERRORS = {
    "refused": (RuntimeError, "CUDA error: operation not permitted"),
    "memory": (torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 2.00 GiB"),
    "missing": (AttributeError, "module 'torch.cuda' has no attribute 'CUDAGraph'"),
}


def new(name):
    kind, message = ERRORS[name]
    return kind(message)


class Validated(Classifier):
    """Trains and validates, with dropout."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def val_dataloader(self):
        return batches(6)


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Train with faults, on a device with graphs."""

    def train(faults, make=Validated, capture="auto", **options):
        monkeypatch.setattr(zdtrain.trainer, "runtime_for", lambda device: FaultyRuntime(faults))
        return fit(tmp_path, make, capture, **{"max_epochs": 2, **options})

    return train


@pytest.fixture
def stock(tmp_path):
    return fit(tmp_path, Validated, "off", max_epochs=2)


def test_without_faults_steps_are_captured_and_the_calls_are_those_that_can_fail(train, stock):
    faults = Faults()
    run = train(faults)
    assert_same(stock, run)
    assert run.report.steps_replayed > 10
    assert run.report.evaluation_replayed > 0
    assert run.report.fallbacks == ()
    assert set(faults.counts) == set(DOOR)


@pytest.mark.parametrize(("error", "last"), [("refused", 1), ("memory", 1), ("missing", None)])
@pytest.mark.parametrize("call", DOOR)
def test_a_call_that_fails_from_the_start_leaves_the_run_eager(train, stock, call, error, last):
    faults = Faults(call, new(error), last=last)
    run = train(faults)
    assert_same(stock, run)
    assert faults.raised
    assert any(ERRORS[error][1] in reason.message for reason in run.report.fallbacks)
    assert {reason.code for reason in run.report.fallbacks} <= {"device-graphs", "untraceable", "out-of-memory"}
    if call != "release_pool":  # which happens at the end
        assert run.report.steps_replayed == 0


@pytest.mark.parametrize(("error", "last"), [("refused", "once"), ("refused", "on"), ("memory", "on")])
@pytest.mark.parametrize("number", [2, 3, 5])
@pytest.mark.parametrize("call", ["rng_state", "graph", "begin", "end", "memory"])
def test_a_call_that_fails_later_on_leaves_its_step_eager(train, stock, call, number, error, last):
    faults = Faults(call, new(error), first=number, last=number if last == "once" else None)
    run = train(faults)
    assert_same(stock, run)
    if faults.raised:  # some are not called as often
        assert codes(run) or last == "once"  # a capture that fails once is tried once more


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("error", ERRORS)
def test_a_graph_that_cannot_be_launched_is_found_out_before_it_is_trusted(train, stock, error, verify):
    run = train(Faults("replay", new(error), first=2), verify_capture=verify)
    assert_same(stock, run)
    assert run.report.steps_replayed == 0
    assert codes(run) == {"out-of-memory" if error == "memory" else "untraceable"}


def test_an_error_out_of_a_trusted_graph_is_raised_with_what_to_do(train):
    with pytest.raises(RuntimeError, match="not permitted") as caught:
        train(Faults("replay", new("refused"), first=6))
    assert any('capture="off"' in note and "last checkpoint" in note for note in caught.value.__notes__)


def test_a_generator_that_cannot_be_put_back_ends_the_run_instead_of_training_something_else(train):
    with pytest.raises(CaptureError, match=r"could not be put back: CUDA error.*capture=\"off\""):
        train(Faults("restore_rng", new("refused"), first=4))


@pytest.mark.parametrize("call", ["graph", "begin", "end", "replay", "rng_state"])
@pytest.mark.parametrize("number", [2, 3, 4, 5, 6])
def test_a_lowered_step_that_fails_in_its_graph_runs_eagerly(train, stock, monkeypatch, call, number):
    monkeypatch.setattr(zdtrain.capture.tape, "lower", lambda graph, arguments: graph.forward)  # seen by the stand-in
    faults = Faults(call, new("refused"), first=number)
    if call == "replay" and number > 3:  # trusted by then
        with pytest.raises(RuntimeError, match="not permitted"):
            train(faults, capture="compile")
    else:
        run = train(faults, capture="compile")
        assert first_mismatch(stock.weights, run.weights, exact=False) is None
        assert "untraceable" in codes(run) or not faults.raised


@pytest.mark.parametrize("call", ["graph", "begin", "end", "replay"])
@pytest.mark.parametrize("error", ERRORS)
def test_several_steps_that_fail_as_one_run_one_by_one(train, tmp_path, call, error):
    def make():
        return Simple()

    eager = fit(tmp_path, make, "off")
    faults = Faults(call, new(error), first=2)  # the first is a rehearsal; the steps' own programs are tapes
    run = train(faults, make, "graph", steps_per_replay=4, max_epochs=4)
    assert faults.raised
    assert_same(eager, run)
    assert codes(run) == {"out-of-memory" if error == "memory" else "untraceable"}


# Memory


class ShortOfMemory(FaultyRuntime):
    """A device with little memory left."""

    def memory(self):
        return MemoryStats(allocated_bytes=0, reserved_bytes=0, peak_allocated_bytes=0, free_bytes=100)


def test_a_program_that_leaves_too_little_memory_for_eager_steps_is_given_up(tmp_path, stock, monkeypatch):
    monkeypatch.setattr(zdtrain.trainer, "runtime_for", lambda device: ShortOfMemory(Faults()))
    run = fit(tmp_path, Validated, "auto", max_epochs=2)
    assert_same(stock, run)
    assert (run.report.steps_replayed, run.report.evaluation_replayed) == (0, 0)
    (reason,) = run.report.fallbacks
    assert reason.code == "out-of-memory"
    assert "leave 100 B on the device" in reason.message
    assert run.report.programs[0].captures == 1


class Greedy(Validated):
    """Runs out of memory in one of its steps, as long as something is captured."""

    raises_in: int
    held: list

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        session = self.trainer._captures
        if session is not None and session.memory_bytes() and self.trainer.current_epoch == self.raises_in:
            raise new("memory")
        return loss


@pytest.mark.parametrize("epoch", [0, 1])
def test_an_eager_step_for_which_a_program_leaves_no_memory_is_run_again_without_it(train, stock, epoch):
    class Net(Greedy):
        raises_in = epoch

    run = train(Faults(), Net)
    assert_same(stock, run)
    assert codes(run) == {"out-of-memory"}
    assert "beside what is captured" in run.report.fallbacks[0].message
    steps = run.report.steps_eager + run.report.steps_replayed
    assert steps == 24  # a step that was run twice counts once


def test_a_run_out_of_memory_elsewhere_says_what_captured_steps_hold(train):
    class Net(Validated):
        def on_train_epoch_end(self):
            raise new("memory")

    with pytest.raises(torch.OutOfMemoryError) as caught:
        train(Faults(), Net)
    (note,) = caught.value.__notes__
    assert "captured steps hold" in note
    assert 'capture="off"' in note


# Ours


def broken(*args, **kwargs):
    raise ZeroDivisionError("ours")


@pytest.mark.parametrize(
    "where",
    [
        "zdtrain.capture.fingerprints.Fingerprints.current",
        "zdtrain.capture.key.Layouts.number",
        "zdtrain.capture.guarded.python_state",
        "zdtrain.capture.watch.Watch.__torch_dispatch__",
        "zdtrain.capture.watching.Observation",
        "zdtrain.capture.watching.obstacles",
        "zdtrain.capture.rollback.HostState",
        "zdtrain.capture.capturing.Recorder",
        "zdtrain.capture.capturing.Recording",
        "zdtrain.capture.recording.Recording.fits",
        "zdtrain.capture.capturing.first_mismatch",
        "zdtrain.capture.capturing.static_inputs",
    ],
)
@pytest.mark.parametrize("graphs", [True, False])
def test_a_mistake_of_ours_leaves_steps_eager(train, tmp_path, stock, monkeypatch, where, graphs):
    if where.endswith("static_inputs"):
        where = "zdtrain.capture.graph.static_copy" if graphs else "zdtrain.capture.tape.Tape.run"
    monkeypatch.setattr(where, broken)
    run = train(Faults()) if graphs else fit(tmp_path, Validated, "graph", max_epochs=2)
    assert_same(stock, run)
    assert run.report.steps_replayed <= 1  # on the host, a step counts that is recorded while it runs
    assert any("ZeroDivisionError" in reason.message for reason in run.report.fallbacks)


def test_an_error_of_the_step_itself_is_raised_as_it_is(train):
    class Net(Validated):
        def training_step(self, batch, batch_idx):
            if self.trainer.fit_loop.epoch_loop.batch_progress.current.ready == 3:  # under the watch
                raise KeyError("mine")
            return super().training_step(batch, batch_idx)

    with pytest.raises(KeyError, match="mine") as caught:
        train(Faults(), Net)
    assert not hasattr(caught.value, "__notes__")


def test_a_step_that_fails_under_the_watch_behind_a_change_of_its_own_is_not_run_again(train):
    class Net(Validated):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def training_step(self, batch, batch_idx):
            self.calls += 1
            if self.calls == 3:
                raise KeyError("mine")
            return super().training_step(batch, batch_idx)

    with pytest.raises(KeyError, match="mine") as caught:
        train(Faults(), Net)
    assert 'capture="off" does not' in caught.value.__notes__[0]
