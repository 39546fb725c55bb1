"""What the tests of this folder need: Inductor in the test process."""

import pytest
import torch._inductor.config


@pytest.fixture(autouse=True)
def compile_in_this_thread():
    """Keep Inductor from starting a pool of compile workers that outlives the test."""
    with torch._inductor.config.patch(compile_threads=1):
        yield
