import json
import subprocess
import sys

import pytest


def test_parts_can_be_named_after_importing_the_package_alone():
    program = "import zdtrain; print(zdtrain.monitors.Threshold.__name__, zdtrain.optim.SimpleAdam.__name__)"
    said = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert said.split() == ["Threshold", "SimpleAdam"]


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("zdtrain", {"torch", "lightning"}),
        ("zdtrain.lint", {"torch", "lightning"}),
        ("zdtrain.optim", {"lightning", "pytorch_lightning", "torchmetrics"}),
        ("zdtrain.device", {"lightning", "pytorch_lightning", "torchmetrics"}),
    ],
)
def test_importing_a_part_does_not_import_what_it_stands_apart_from(module, absent):
    program = f"import {module}, json, sys; print(json.dumps(sorted(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert absent.isdisjoint(json.loads(loaded))


def test_a_torch_without_processes_is_enough():
    program = """
import torch
import torch._dynamo.variables.functions

for name in [name for name in vars(torch.distributed) if not name.startswith("__")]:
    delattr(torch.distributed, name)
torch._dynamo.variables.functions._fsdp_param_group = None
torch.distributed.is_available = lambda: False
torch.distributed.ProcessGroup = type("ProcessGroup", (), {})
from zdtrain import Trainer
"""
    subprocess.run([sys.executable, "-c", program], check=True)
