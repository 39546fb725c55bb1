"""The comparison of the shadow device with a real GPU."""

from collections import Counter

import pytest
import torch

from tests.check.zoo.case import Base, batch
from zdtrain.check.api import Repeated, check_configured
from zdtrain.check.findings import make_finding
from zdtrain.check.hardware import disagreements, try_capture
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
