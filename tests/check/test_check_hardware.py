"""The comparison of the shadow device with a real GPU."""

import contextlib
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils._python_dispatch import TorchDispatchMode

from tests.check.zoo.case import Base, batch
from zdtrain.check import ShadowDevice, hardware
from zdtrain.check.api import Repeated, check_configured
from zdtrain.check.findings import make_finding
from zdtrain.check.hardware import disagreements, try_capture
from zdtrain.check.report import CheckReport, StageReport, judge
from zdtrain.source.location import NOWHERE, Location


def test_lines_that_only_one_side_saw_are_reported() -> None:
    simulated = [
        make_finding("host-read", "a", file="m.py", line=1),
        make_finding("host-read", "b", file="m.py", line=2),
        make_finding("python-state", "not a read", file="m.py", line=3),
        make_finding("host-read", "in validation", file="m.py", line=4, stage="validation"),
    ]
    waits = Counter(
        {
            (Location("m.py", 2, "f"), "aten._local_scalar_dense.default"): 3,
            (Location("m.py", 9, "f"), "aten.secret.default"): 6,
            (NOWHERE, "aten.library.default"): 3,
        }
    )
    found = disagreements(simulated, waits, num_steps=3)
    assert [(finding.line, finding.severity, finding.count) for finding in found] == [(9, "warning", 2), (1, "note", 1)]
    assert "aten.secret.default" in found[0].message


def test_agreement_is_silent() -> None:
    simulated = [make_finding("host-read", "a", file="m.py", line=1)]
    assert disagreements(simulated, Counter({(Location("m.py", 1, "f"), "op"): 4}), num_steps=4) == []


# As if from inside torch, so that the line of the user that waits is not one of these.
DRIVER = """
class Waiting(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            report_wait()
            if graph.under_way:
                raise RuntimeError("operation not permitted when stream is capturing")
        return func(*args, **(kwargs or {}))
"""


class Graph:
    """Stands for a capture: waiting inside is an error."""

    under_way = False

    @contextlib.contextmanager
    def capture(self):
        Graph.under_way = True
        try:
            yield
        finally:
            Graph.under_way = False


@pytest.fixture
def stand_in(monkeypatch):
    """A GPU that is simulated and reports waits as torch's trace callbacks do."""
    names = {
        "torch": torch,
        "TorchDispatchMode": TorchDispatchMode,
        "report_wait": hardware._hit,
        "graph": Graph,
    }
    exec(compile(DRIVER, "<frozen driver>", "exec"), names)
    monkeypatch.setattr(hardware, "runtime_for", lambda device: SimpleNamespace(graph=Graph))
    monkeypatch.setattr(hardware, "_register_once", lambda: None)
    with ShadowDevice(), names["Waiting"]():
        yield


class Clean(Base):
    def train_dataloader(self) -> Repeated:
        return Repeated(batch(), 10)


class Reads(Clean):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        loss.item()
        return loss


READ_LINE = Reads.training_step.__code__.co_firstlineno + 2


def compared(module, simulated, **options):
    verdict, fallbacks = judge(simulated, "train")
    stage = StageReport(
        name="train",
        num_steps=4,
        verdict=verdict,
        host_reads_per_step=0,
        num_tensors_per_step=0,
        num_bytes_per_step=0,
        fallbacks=fallbacks,
    )
    report = CheckReport(subject="", device="shadow", findings=tuple(simulated), stages=(stage,))
    return hardware.compare_with_gpu(module, None, report, options, 4)


def test_a_stand_in_gpu_that_waits_where_the_simulation_says_so_agrees(stand_in) -> None:
    expected = make_finding("host-read", "", file=__file__, line=READ_LINE)
    assert compared(Reads(), [expected]) == []


def test_what_a_stand_in_gpu_does_otherwise_is_reported(stand_in) -> None:
    unforeseen, refused = compared(Reads(), [])
    assert (unforeseen.line, unforeseen.count, unforeseen.severity) == (READ_LINE, 1, "warning")
    assert "_local_scalar_dense" in unforeseen.message
    assert "not permitted when stream is capturing; the simulation says capturable" in refused.message


def test_scalars_and_callbacks_of_the_config_do_not_stop_the_run_on_a_gpu(stand_in, tmp_path) -> None:
    callbacks = [ModelCheckpoint(dirpath=tmp_path), EarlyStopping("loss")]
    found = compared(Clean(), [], callbacks=callbacks, scalars={"weight": 0.5}, accumulate_grad_batches=2)
    assert found == []
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_simulation_and_gpu_agree_on_a_read() -> None:
    class Reads(Base):
        def train_dataloader(self) -> Repeated:
            return Repeated(batch(), 10)

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            loss.item()
            return loss

    report = check_configured(
        Reads(), None, num_steps=4, num_validation_steps=1, trainer_options={}, shapes=False, on_gpu=True
    )
    assert report.codes("error", "warning") == {"host-read"}
    assert report.device == torch.cuda.get_device_name()


@pytest.mark.gpu
def test_trial_capture_on_the_gpu() -> None:
    class Reads(Base):
        def training_step(self, batch, batch_idx):
            loss = self(batch[0]).sum()
            loss.item()
            return loss

    class Clean(Base):
        def training_step(self, batch, batch_idx):
            return self(batch[0]).sum()

    on_gpu = [tensor.cuda() for tensor in batch()]
    assert try_capture(Clean().cuda(), on_gpu) is None
    assert try_capture(Reads().cuda(), on_gpu) is not None
