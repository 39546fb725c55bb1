"""What several tests of this folder count."""

import pytest
import torch
import torch._inductor.config
from torch.utils._python_dispatch import TorchDispatchMode


class HostReads(TorchDispatchMode):
    """Counts the operations by which the host learns a tensor's value."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.fixture
def host_reads():
    return HostReads()


@pytest.fixture(autouse=True)
def compile_in_this_thread():
    """Keep Inductor from starting a pool of compile workers that outlives the test."""
    with torch._inductor.config.patch(compile_threads=1):
        yield
