"""In a run of several processes all leave when rank zero is told to, and no batch waits for the answer."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from zdtrain.device.lagging import LaggingRuntime
from zdtrain.drain import Drain
from zdtrain.loop.sigterm import LAG, SharedSigterm


@pytest.fixture
def one_process(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_a_device_that_answers_late_is_asked_every_batch_and_heard_a_fixed_number_of_batches_later():
    runtime = LaggingRuntime(lag=1)
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    trainer = SimpleNamespace(received_sigterm=False, strategy=strategy)
    sigterm = SharedSigterm(trainer, Drain(lambda: runtime))
    for _ in range(2 * LAG):
        sigterm.look()
    trainer.received_sigterm = True
    for _ in range(LAG):
        sigterm.look()
    with pytest.raises(SIGTERMException):
        sigterm.look()
    assert runtime.counters.host_waits == 0
