"""Steps captured in device graphs, on a stand-in for the device's graph: the same code, real numbers."""

import pytest
import torch
from torch import nn
from torchmetrics import MeanSquaredError
from torchmetrics.classification import MulticlassAccuracy

import zdtrain.loop.capturing
from zdtrain.optim import SimpleAdam
from zdtrain.step.graph import GraphProgram
from zdtrain.step.session import CaptureSession

from .host_graph import GraphRuntime, HostGraph
from .runs import CLASSES, FEATURES, Classifier, assert_same, batches, both, codes, fit


@pytest.fixture
def device_graphs(monkeypatch):
    def session(**options):
        return CaptureSession(**{**options, "runtime": GraphRuntime(), "device_graphs": True})

    monkeypatch.setattr(zdtrain.loop.capturing, "CaptureSession", session)


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
def test_metrics_and_replaced_attributes_live_through_replays(tmp_path):
    class Net(Classifier):
        def __init__(self):
            super().__init__()
            self.accuracy = MulticlassAccuracy(CLASSES, average="micro", validate_args=False)
            self.error = MeanSquaredError()
            self.register_buffer("mean", torch.zeros(()))
            self.losses = []

        def training_step(self, batch, batch_idx):
            x, y = batch
            out = self.net(x)
            loss = nn.functional.cross_entropy(out, y)
            self.mean = 0.9 * self.mean + 0.1 * loss.detach()
            self.accuracy(out, y)
            self.error.update(out.softmax(1)[:, 0].contiguous(), (y == 0).float())
            self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
            self.log("error", self.error, on_epoch=True)
            return {"loss": loss, "out": out}

    run = both(tmp_path, Net)
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
def test_an_operation_that_a_graph_refuses_is_taken_back_and_named(tmp_path):
    calls = []

    class Net(Classifier):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            calls.append(None)
            if len(calls) == 52:  # once, while the step is being captured: neither watched step does it
                loss.item()
            return loss

    eager = fit(tmp_path, Net, "off")
    captured = fit(tmp_path, Net, "graph")
    assert_same(eager, captured)
    (reason,) = [reason for reason in captured.report.fallbacks if reason.code == "untraceable"]
    assert "not permitted when stream is capturing" in reason.message


def test_an_input_of_another_shape_is_refused_instead_of_broadcast():
    program = GraphProgram(HostGraph(), {0: torch.zeros(4, 2)}, [], [])
    with pytest.raises(ValueError, match=r"input 0 is \(\(1, 2\), torch.float32\), captured as \(\(4, 2\)"):
        program.run([torch.ones(1, 2)])


@pytest.mark.gpu
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("module", [Adam, Classifier, Normalised])
def test_a_cuda_graph_leaves_the_bits_of_an_eager_run(tmp_path, module, window):
    run = both(tmp_path, module, accelerator="gpu", accumulate_grad_batches=window)
    assert run.report.steps_replayed > 20
