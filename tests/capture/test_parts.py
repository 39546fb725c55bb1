"""The parts of a captured step, each by itself."""

import copy
import json
import logging
import pickle
import sys

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from zdtrain.capture.frozen import frozen
from zdtrain.capture.key import flatten_batch, signature, unflatten_batch
from zdtrain.capture.modules import fingerprint
from zdtrain.capture.noted import NotedInteger
from zdtrain.capture.program import LeastRecentlyUsed
from zdtrain.capture.reach import Reach
from zdtrain.capture.session import MAX_PROGRAMS, CaptureSession
from zdtrain.capture.shared import SharedCaptures
from zdtrain.capture.tape import Tape, record
from zdtrain.capture.verify import Saved, first_mismatch
from zdtrain.capture.watch import HostAccess, Watch, difference
from zdtrain.config import TrainerOptions
from zdtrain.device import runtime_for
from zdtrain.errors import ConfigError

from .runs import Classifier, batches, fit


@pytest.mark.parametrize(
    "batch",
    [torch.ones(2), [torch.ones(2), torch.zeros(3)], (torch.ones(1),), {"x": torch.ones(2), "more": ["a", 3]}],
)
def test_a_batch_comes_apart_and_together_again(batch):
    leaves, structure = flatten_batch(batch)
    again = unflatten_batch(leaves, structure)
    assert type(again) is type(batch)
    assert flatten_batch(again)[0] == leaves or torch.equal(again, batch)


def test_a_signature_tells_layouts_and_python_leaves_apart():
    x = torch.zeros(2, 3)
    same = signature([x, 1])
    assert signature([torch.ones(2, 3), 1]) == same
    others = [torch.zeros(3, 2).t(), x.double(), torch.zeros(1, 3), x.clone().requires_grad_()]
    assert all(signature([other, 1]) != same for other in others)
    assert signature([x, 2]) != same
    with pytest.raises(TypeError, match="object"):
        signature([object()])


def test_frozen_values_differ_where_the_values_do():
    assert frozen([1, 2.0, {"a": (None, "b")}]) == frozen([1, 2.0, {"a": (None, "b")}])
    assert frozen([1, 2]) != frozen([1, 3])
    assert frozen(float("nan")) == frozen(float("nan"))
    long = list(range(1000))
    assert frozen(long) != frozen([*long, 1])


def test_a_fingerprint_follows_modes_attributes_and_what_is_trained():
    net = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    seen = [fingerprint(net)]
    net.eval()
    seen.append(fingerprint(net))
    net[0].requires_grad_(False)
    seen.append(fingerprint(net))
    net[1].p = 0.1
    seen.append(fingerprint(net))
    net[0].note = [1]
    seen.append(fingerprint(net))
    net[0].note.append(2)
    seen.append(fingerprint(net))
    assert len(set(seen)) == len(seen)
    assert fingerprint(net) == seen[-1]


def test_the_least_recently_used_entry_goes():
    gone = []
    cache = LeastRecentlyUsed(cap=2, evicted=gone.append)
    cache.add("a", 1)
    cache.add("b", 2)
    assert cache.get("a") == 1
    cache.add("c", 3)
    assert gone == [2]
    assert cache.get("b") is None


def test_programs_beyond_the_cap_are_let_go_and_stay_in_the_report(tmp_path):
    sizes = list(range(2, 2 + MAX_PROGRAMS + 2))

    def loader():
        loaders = [batches(6, size) for size in sizes]
        return torch.utils.data.DataLoader([b for one in loaders for b in one], batch_size=None)

    report = fit(tmp_path, Classifier, "graph", loader=loader, max_epochs=1).report
    assert len(report.programs) == len(sizes)
    assert all(program.captures == 1 for program in report.programs)


def test_more_kinds_of_steps_than_can_be_kept_are_named(tmp_path):
    def loader():
        return torch.utils.data.DataLoader([b for n in range(2, 40) for b in batches(1, n)], batch_size=None)

    report = fit(tmp_path, Classifier, "graph", loader=loader, max_epochs=1).report
    assert report.steps_replayed == 0
    (reason,) = [reason for reason in report.fallbacks if reason.code == "many-keys"]
    assert "pad batches to few shapes" in reason.message


def test_an_attribute_that_makes_many_kinds_of_steps_is_named(tmp_path):
    class Drifts(Classifier):
        def on_train_batch_start(self, batch, batch_idx):
            self.weight = 1.0 + batch_idx / 100

        def loss(self, batch):
            return super().loss(batch) * self.weight

    report = fit(tmp_path, Drifts, "graph", loader=lambda: batches(40, 4), max_epochs=1).report
    (reason,) = [reason for reason in report.fallbacks if reason.code == "many-keys"]
    assert "what differs is the attribute 'weight'" in reason.message


def test_a_released_session_holds_no_tensors():
    session = CaptureSession(
        capture="graph",
        verify=True,
        shared=SharedCaptures(runtime_for(torch.device("cpu"))),
        reach=Reach(None),
        tell=print,
    )
    session.entry("key", lambda: "a batch").captures = 1
    session.release()
    assert [program.key for program in session.report().programs] == ["a batch"]


def watched(step, *inputs):
    with Watch(sys._getframe().f_code, inputs) as watch, HostAccess(watch):
        step()
    return watch


def test_two_equal_steps_do_not_differ_and_a_changed_number_is_named():
    weight, factor = torch.ones(3), [2.0]

    def step():
        return (weight * factor[0]).sum()

    first, second = watched(step), watched(step)
    assert difference(first, second, set()) is None
    factor[0] = 3.0
    reason = difference(second, watched(step), set())
    assert reason.code == "python-number"
    assert "2.0 -> 3.0" in reason.message
    assert reason.line == step.__code__.co_firstlineno + 1


def test_a_tensor_from_outside_that_is_another_one_each_time_is_named():
    held = [torch.ones(3)]

    def step():
        return held[0] * 2

    first = watched(step)
    held[0] = torch.ones(3)
    assert difference(first, watched(step), set()).code == "outside-tensor"
    assert difference(first, watched(step, held[0]), set()) is None


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.sum().item(),
        lambda t: bool(t.sum() > 0),
        lambda t: t[t > 0],
        lambda t: t.nonzero(),
        lambda t: torch.equal(t, t),
        lambda t: t.unique(),
        lambda t: torch.masked_select(t, t > 0),
        lambda t: t.index_put_((t > 0,), torch.zeros(3)),
        lambda t: t.index_put_((t > 0,), torch.zeros(()), accumulate=True),
        lambda t: t.expand(2, 3).clone().index_put_((torch.tensor([True, False]), torch.tensor(0)), torch.zeros(())),
        lambda t: t.tolist(),
        lambda t: t.numpy(),
        lambda t: np.asarray(t),
        lambda t: np.from_dlpack(t),
        lambda t: str(t),
        lambda t: f"{t}",
        lambda t: f"{t.sum():.3f}",
        lambda t: [str([t]), print(t, end="")],
        lambda t: logging.getLogger(__name__).warning("%s", t),
        lambda t: pickle.dumps(t),
        lambda t: copy.deepcopy(t),
    ],
)
def test_operations_that_wait_for_a_value_are_host_reads(read):
    watch = watched(lambda: read(torch.ones(3)))
    assert {reason.code for reason in watch.reads} == {"host-read"}


def test_filling_a_mask_with_a_number_is_no_host_read():
    def step():
        t = torch.ones(3).requires_grad_() * 2
        t[t > 0] = 2.0
        t.sum().backward()

    assert watched(step).reads == []


def test_a_number_that_fills_a_mask_and_changes_is_named():
    def fill(number):
        t = torch.ones(3)
        t[t > 0] = number

    assert difference(watched(lambda: fill(1.0)), watched(lambda: fill(1.0)), set()) is None
    assert difference(watched(lambda: fill(1.0)), watched(lambda: fill(2.0)), set()).code == "python-number"


def test_a_tape_replays_into_the_same_tensors_and_makes_literals_anew():
    state = torch.zeros(())
    x = torch.ones(2)

    def step():
        total = torch.tensor(1.0)
        total += x.sum()
        state.add_(total)
        return [total, None]

    tape = record(step, [x, None], Tape)
    assert tape.used == [0]
    assert state.item() == 3
    for _ in range(2):
        total, nothing = tape.run([torch.full((2,), 2.0), None])
        assert total.item() == 5
        assert nothing is None
    assert state.item() == 13


def test_a_tape_draws_from_the_same_generator():
    x = torch.ones(100)
    torch.manual_seed(3)
    tape = record(lambda: [nn.functional.dropout(x)], [x], Tape)
    torch.manual_seed(3)
    replayed = tape.run([x])[0]
    torch.manual_seed(3)
    assert torch.equal(replayed, nn.functional.dropout(x))


def test_saved_state_comes_back_with_the_random_generator():
    x = torch.zeros(3)
    saved = Saved({"x": x, "nothing": None}, runtime_for(torch.device("cpu")))
    want = torch.rand(2)
    x.add_(1)
    saved.restore()
    assert x.tolist() == [0, 0, 0]
    assert torch.equal(torch.rand(2), want)


def test_the_first_mismatch_says_what_and_by_how_much():
    want = {"a": torch.ones(2), "b": torch.tensor([1.0, float("nan")])}
    assert first_mismatch(want, {k: v.clone() for k, v in want.items()}, exact=True) is None
    found = first_mismatch(want, {**want, "a": torch.tensor([1.0, 1.5])}, exact=True)
    assert str(found) == "a differs by up to 0.5"
    near = {**want, "a": torch.tensor([1.0, 1.0 + 1e-6])}
    assert first_mismatch(want, near, exact=True) is not None
    assert first_mismatch(want, near, exact=False) is None
    widened = {"a": torch.ones(4), "b": torch.tensor([1.0, float("nan")], dtype=torch.float64)}  # of a float32 value
    apart = {"a": torch.ones(4), "b": widened["b"] + 2e-7}
    assert first_mismatch(widened, apart, exact=False) is None
    assert "by up to 2e-07" in str(first_mismatch({"b": widened["b"]}, {"b": apart["b"]}, exact=False))
    assert "missing" in str(first_mismatch(want, {"a": want["a"]}, exact=True))
    assert "(1, 2)" in str(first_mismatch(want, {**want, "a": torch.ones(1, 2)}, exact=True))


@pytest.mark.parametrize("use", [lambda i: i + 1, lambda i: 2 * i, lambda i: i == 3, lambda i: f"{i}"])
def test_a_noted_integer_is_one_that_tells_when_it_is_used(use):
    with Watch(sys._getframe().f_code) as watch:
        index = NotedInteger(3, lambda: watch.note("batch-idx", "used"))
        assert isinstance(index, int)
        assert not watch.reads

        def step():
            return use(index)

        assert step() == use(3)
    assert {reason.code for reason in watch.reads} == {"batch-idx"}


def test_a_wrong_choice_names_the_option_and_the_nearest_one(monkeypatch):
    with pytest.raises(ConfigError, match=r"trainer.capture='grph'.*did you mean 'graph'"):
        TrainerOptions(capture="grph")
    with pytest.raises(ConfigError, match=r"trainer\.verify_capture=3: use True or False"):
        TrainerOptions(verify_capture=3)
    monkeypatch.setenv("ZDTRAIN_CAPTURE", "compiled")
    with pytest.raises(ConfigError, match=r"ZDTRAIN_CAPTURE='compiled'.*did you mean 'compile'"):
        TrainerOptions()


@pytest.mark.parametrize(
    ("option", "variable", "on_host", "with_graphs"),
    [
        ("auto", None, "off", "graph"),
        ("graph", None, "graph", "graph"),
        ("graph", "off", "off", "off"),
        ("graph", "auto", "off", "graph"),
        ("off", "", "off", "off"),
        ("off", "compile", "compile", "compile"),
    ],
)
def test_the_environment_wins_and_auto_captures_where_the_device_has_graphs(
    monkeypatch, option, variable, on_host, with_graphs
):
    monkeypatch.delenv("ZDTRAIN_CAPTURE", raising=False)
    if variable is not None:
        monkeypatch.setenv("ZDTRAIN_CAPTURE", variable)
    options = TrainerOptions(capture=option)
    assert options.capture_in_effect(device_graphs=False) == on_host
    assert options.capture_in_effect(device_graphs=True) == with_graphs


def test_verification_can_be_switched_off(tmp_path):
    report = fit(tmp_path, Classifier, "graph", verify_capture=False).report
    (program,) = report.programs
    assert (program.verifications, program.verification) == (0, "off")
    assert program.replays > 40


def test_the_report_and_the_run_record_hold_programs_and_reasons(tmp_path, capsys):
    class Net(Classifier):
        def configure_optimizers(self):
            return torch.optim.NAdam(self.parameters(), lr=0.1, foreach=True)

    run = fit(tmp_path, Net, "graph", records=str(tmp_path / "runs"))
    table = run.report.table()
    assert "(8, 8) float32, (8,) int64" in table
    assert "[optimizer-outside]" in table
    folder = run.trainer.recorder.folder
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert {event["kind"] for event in events} >= {"program", "fallback"}
    assert '"steps_replayed"' in (folder / "summary.json").read_text()


def test_a_run_on_lightning_s_own_loop_reports_the_reason_and_no_table(tmp_path):
    table = fit(tmp_path, Classifier, "graph", profiler="simple").report.table()
    assert table.startswith("Captured steps (capture='graph'): none\n- SimpleProfiler times")
    assert "eager" not in table


def test_a_host_read_is_named_as_people_write_it(tmp_path):
    class Net(Classifier):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss if loss > 0 else -loss

    (reason,) = fit(tmp_path, Net, "graph").report.fallbacks
    assert "`if t`" in reason.message
    assert "torch.where" in reason.message
    assert "_local_scalar_dense" not in reason.message


def test_recording_describes_all_values_in_one_mode(tmp_path, monkeypatch):
    made, init = [], FakeTensorMode.__init__
    monkeypatch.setattr(FakeTensorMode, "__init__", lambda self, **options: made.append(self) or init(self, **options))
    report = fit(tmp_path, Classifier, "graph").report
    assert len(made) == sum(program.captures for program in report.programs)


def test_lbfgs_steps_eagerly_around_a_replayed_closure(tmp_path):
    class Net(Classifier):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    eager, captured = (fit(tmp_path, Net, capture) for capture in ("off", "graph"))
    assert captured.report.steps_replayed > captured.report.steps_eager
    assert all(torch.equal(eager.weights[name], captured.weights[name]) for name in eager.weights)


class Freezes(pl.Callback):
    def on_train_epoch_start(self, trainer, module):
        module.net[0].requires_grad_(trainer.current_epoch % 2 == 0)


class Weighted(Classifier):
    weight = 1.0

    def loss(self, batch):
        return super().loss(batch) * self.weight

    def on_train_epoch_start(self):
        self.weight = 1.0 + self.current_epoch % 2


class ReadsEpoch(Classifier):
    def loss(self, batch):
        return super().loss(batch) * (1 + self.current_epoch)


class Decays(Classifier):
    def on_train_epoch_start(self):
        self.trainer.optimizers[0].param_groups[0]["weight_decay"] = 0.1 * (self.current_epoch % 2)


@pytest.mark.parametrize(
    ("make", "options", "says"),
    [
        (Classifier, {"callbacks": lambda: [Freezes()]}, ["state of the module no. 2 (what is trained)"]),
        (Weighted, {}, ["state of the module no. 2 (the attribute 'weight')"]),
        (ReadsEpoch, {}, ["epoch 0", "epoch 1", "epoch 2", "epoch 3"]),
        (Decays, {}, ["state of the optimizer no. 2"]),
    ],
)
def test_programs_for_batches_of_one_shape_are_told_apart_in_words(tmp_path, make, options, says):
    programs = fit(tmp_path, make, "graph", **options).report.programs
    keys = [program.key for program in programs]
    assert len(set(keys)) == len(keys) > 1
    assert all(any(key.endswith(one) for key in keys) for one in says), keys
