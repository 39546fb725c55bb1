"""Steps captured in device graphs, on a stand-in for the device's graph: the same code, real numbers."""

import itertools
from collections import Counter

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.utils.checkpoint import checkpoint

import zdtrain.capture.handed
import zdtrain.capture.tape
from zdtrain.capture.graph import GraphProgram, LoweredGraphProgram
from zdtrain.capture.report import readable
from zdtrain.capture.tape import LoweredTape, record
from zdtrain.capture.verify import first_mismatch
from zdtrain.optim import SimpleAdam

from .host_graph import GraphRuntime, HostGraph
from .runs import CLASSES, FEATURES, Classifier, Metered, assert_equal, assert_same, batches, both, codes, fit


class Adam(Classifier):
    def configure_optimizers(self):
        optimizer = SimpleAdam(self.parameters(), lr=0.01, max_norm=1.0)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Normalised(Classifier):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))


@pytest.mark.usefixtures("device_graphs")
@pytest.mark.parametrize("module", [Adam, Classifier, Normalised])
@pytest.mark.parametrize("window", [1, 3])
def test_a_graph_leaves_the_bits_of_an_eager_run(tmp_path, module, window):
    run = both(tmp_path, module, loader=lambda: batches(12, rest=3), accumulate_grad_batches=window)
    assert run.report.steps_replayed > 20
    assert "untraceable" not in codes(run)
    assert "verification" not in codes(run)


@pytest.mark.usefixtures("device_graphs")
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.NAdam, torch.optim.SGD])
@pytest.mark.parametrize("capture", ["graph", "compile"])
def test_what_an_optimizer_counts_on_the_host_is_counted_beside_a_device(tmp_path, monkeypatch, kind, capture):
    monkeypatch.setattr(zdtrain.capture.handed, "on_device", lambda host, device: host.clone())  # device memory
    monkeypatch.setattr(zdtrain.capture.handed, "is_capturing", lambda: HostGraph.capturing)
    monkeypatch.setattr(zdtrain.capture.tape, "lower", lambda graph, arguments: graph.forward)

    class Net(Classifier):
        def configure_optimizers(self):
            optimizer = kind(self.parameters(), lr=0.01)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    run = both(tmp_path, Net, capture)
    assert run.report.steps_replayed > 30
    assert codes(run) == set()


@pytest.mark.usefixtures("device_graphs")
def test_metrics_and_replaced_attributes_live_through_replays(tmp_path):
    run = both(tmp_path, Metered)
    assert run.report.steps_replayed > 30


@pytest.mark.usefixtures("device_graphs")
def test_what_a_callback_keeps_is_not_overwritten_by_the_next_replay(tmp_path):
    class Net(Classifier):
        kept: list = []

        def on_train_batch_end(self, outputs, batch, batch_idx):
            type(self).kept.append(outputs["loss"])

    runs = []
    for capture in ("off", "graph"):
        Net.kept = []
        outcome = fit(tmp_path, Net, capture)
        runs.append((outcome, Net.kept))
    assert_same(runs[0][0], runs[1][0])
    assert runs[1][0].report.steps_replayed > 30
    assert [loss.item() for loss in runs[0][1]] == [loss.item() for loss in runs[1][1]]


@pytest.mark.usefixtures("device_graphs")
@pytest.mark.parametrize("window", [1, 2])
def test_gradients_that_a_callback_keeps_are_not_overwritten_by_the_next_replay(tmp_path, window):
    class Keeps(Callback):
        def __init__(self):
            self.kept = []

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            self.kept.append([parameter.grad for parameter in module.parameters()])

    keepers = {capture: Keeps() for capture in ("off", "graph")}
    eager, captured = (
        fit(tmp_path, Adam, capture, callbacks=lambda kept=keeper: [kept], accumulate_grad_batches=window)
        for capture, keeper in keepers.items()
    )
    assert_same(eager, captured)
    assert captured.report.steps_replayed > 25
    # in a window, stock adds to one tensor: what was kept first has the sum as well
    last = slice(window - 1, None, window)
    assert_equal(keepers["off"].kept[last], keepers["graph"].kept[last], "gradients")


@pytest.mark.usefixtures("device_graphs")
@pytest.mark.parametrize("window", [1, 3])
def test_gradients_that_nobody_keeps_stay_in_the_memory_of_the_graph(tmp_path, window):
    class Looks(Callback):
        addresses = Counter()

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            self.addresses[next(module.parameters()).grad.data_ptr()] += 1

    run = fit(tmp_path, Adam, "graph", callbacks=lambda: [Looks()], accumulate_grad_batches=window, max_epochs=8)
    assert run.report.steps_replayed > 50
    programs = [program.replays for program in run.report.programs]
    assert [n for _, n in Looks.addresses.most_common(len(programs))] >= sorted(programs, reverse=True)


class ReadsInSomeSteps(Classifier):
    steps = (53,)
    """Counted from 1; the 53rd step is the one that is captured, and no watched step reads."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if next(self.count) in self.steps:
            loss.item()
        return loss


@pytest.fixture
def reading():
    class Net(ReadsInSomeSteps):
        count = itertools.count(1)  # which nothing can look at

    return Net


@pytest.mark.usefixtures("device_graphs")
def test_a_step_that_a_graph_refused_is_taken_back_and_captured_at_the_next_try(tmp_path, reading):
    run = both(tmp_path, reading)
    assert codes(run) == set()
    assert run.report.steps_replayed > 20


@pytest.mark.usefixtures("device_graphs")
def test_a_step_that_a_graph_refuses_twice_stays_eager_and_is_named(tmp_path, reading):
    reading.steps = (53, 55)  # the 54th is the first one again, eagerly
    run = both(tmp_path, reading)
    (reason,) = [reason for reason in run.report.fallbacks if reason.code == "untraceable"]
    assert "not permitted when stream is capturing" in reason.message
    assert run.report.steps_replayed == 0


@pytest.fixture
def noise(monkeypatch):
    """An operation whose last bits differ at every call, as those of atomic additions on a device do."""
    calls, replay = itertools.count(1), HostGraph.replay

    @torch.library.custom_op("zdtrain_tests::atomic_add", mutates_args=())
    def atomic_add(x: torch.Tensor) -> torch.Tensor:
        return x * (1 + atomic_add.error * (next(calls) % 3))

    def replaying(graph):
        atomic_add.error = atomic_add.error_in_graphs
        replay(graph)
        atomic_add.error = 1e-7

    atomic_add.register_autograd(lambda ctx, grad: grad)
    atomic_add.error = atomic_add.error_in_graphs = 1e-7
    monkeypatch.setattr(HostGraph, "replay", replaying)
    return atomic_add


@pytest.mark.usefixtures("device_graphs")
def test_a_step_that_does_not_repeat_itself_is_compared_within_tolerance(tmp_path, noise):
    class Net(Adam):
        def loss(self, batch):
            return noise(super().loss(batch))

    run = fit(tmp_path, Net, "graph")
    (program,) = run.report.programs
    assert program.verification == "within tolerance"
    assert program.replays > 30
    assert not codes(run)
    assert run.metrics["loss_epoch"].isfinite()
    assert run.report.steps_eager + run.report.steps_replayed == 48  # a step that was run twice counts once


@pytest.mark.usefixtures("device_graphs")
def test_a_program_that_is_wrong_beyond_tolerance_is_refused_even_so(tmp_path, noise):
    noise.error_in_graphs = 0.1

    class Net(Adam):
        def loss(self, batch):
            return noise(super().loss(batch))

    run = fit(tmp_path, Net, "graph")
    assert "verification" in codes(run)
    assert run.report.steps_replayed == 0


@pytest.mark.usefixtures("device_graphs")
def test_a_graph_is_compared_before_a_step_depends_on_it(tmp_path):
    class Net(Adam):
        def loss(self, batch):  # recomputes with the numbers of the capture, not of the launch
            return nn.functional.cross_entropy(checkpoint(self.net, batch[0], use_reentrant=False), batch[1])

    assert "verification" in codes(both(tmp_path, Net))


@pytest.mark.usefixtures("device_graphs")
@pytest.mark.parametrize("window", [1, 3])
def test_a_lowered_step_is_captured_in_a_graph(tmp_path, monkeypatch, window):
    # The stand-in sees ATen's operations only, so they stay what they are instead of becoming kernels.
    monkeypatch.setattr(zdtrain.capture.tape, "lower", lambda graph, arguments: graph.forward)
    options = {"loader": lambda: batches(12, rest=3), "accumulate_grad_batches": window, "max_epochs": 6}
    eager, lowered = (fit(tmp_path, Adam, capture, **options) for capture in ("off", "compile"))
    assert first_mismatch(eager.weights, lowered.weights, exact=False) is None
    assert first_mismatch(eager.metrics, lowered.metrics, exact=False) is None
    assert torch.equal(eager.rng, lowered.rng)
    assert not codes(lowered)
    assert all(program.memory_bytes > 0 for program in lowered.report.programs)


def test_a_lowered_step_runs_nothing_before_its_graph_does():
    total, x = torch.zeros(2), torch.ones(2)

    def step():
        total.add_(nn.functional.dropout(x))
        x.mul_(2)
        return [total.sum()]

    torch.manual_seed(3)
    tape = record(step, [x], LoweredTape)
    want, rng = total.clone(), torch.get_rng_state()
    total.zero_(), x.fill_(1)
    torch.manual_seed(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zdtrain.capture.tape, "lower", lambda graph, arguments: graph.forward)
        program = LoweredGraphProgram(tape, GraphRuntime())
        other = torch.ones(2)
        (result,) = program.run([other])
    assert torch.equal(total, want)
    assert torch.equal(result, want.sum())
    assert torch.equal(torch.get_rng_state(), rng)
    assert other.tolist() == [2.0, 2.0]  # what the step writes to its input reaches it


@pytest.mark.usefixtures("device_graphs")
def test_the_report_tells_the_memory_of_each_program(tmp_path):
    run = fit(tmp_path, Adam, "graph", loader=lambda: batches(12, rest=3))
    small, large = sorted(run.report.programs, key=lambda program: program.memory_bytes)
    assert "(3, 8)" in small.key
    assert 3 * FEATURES * 4 < small.memory_bytes < large.memory_bytes
    assert readable(large.memory_bytes) in run.report.table()


@pytest.mark.parametrize(
    ("size", "text"), [(None, ""), (0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 20, "3.0 MiB")]
)
def test_memory_is_told_in_units_that_people_read(size, text):
    assert readable(size) == text


def test_an_input_of_another_shape_is_refused_instead_of_broadcast():
    program = GraphProgram(HostGraph(), {0: torch.zeros(4, 2)}, [], [])
    with pytest.raises(ValueError, match=r"input 0 is \(\(1, 2\), torch.float32\), captured as \(\(4, 2\)"):
        program.run([torch.ones(1, 2)])


@pytest.mark.gpu
@pytest.mark.parametrize("window", [1, 3])
def test_a_cuda_graph_leaves_the_bits_of_an_eager_run(tmp_path, window):
    run = both(tmp_path, Adam, accelerator="gpu", accumulate_grad_batches=window)
    assert run.report.steps_replayed > 20
