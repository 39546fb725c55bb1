"""What every test starts from, and what none may leave behind."""

import os
import random
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Lightning sets these in the process that trains; the fixture takes them back.
LIGHTNING_VARIABLES = {
    "CUBLAS_WORKSPACE_CONFIG",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NODE_RANK",
    "PL_GLOBAL_SEED",
    "PL_SEED_WORKERS",
    "WORLD_SIZE",
}
# torch, scikit-learn and pytest keep these for themselves.
LIBRARY_PREFIXES = ("KINETO_", "KMP_", "PYTEST_", "TORCHINDUCTOR_", "_TORCHINDUCTOR_", "TRITON_")

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # otherwise Inductor keeps a pool of threads for good


def pytest_addoption(parser: pytest.Parser) -> None:
    """Know the time limit of pyproject.toml where pytest-timeout, which keeps it, is not installed."""
    if find_spec("pytest_timeout") is None:
        parser.addini("timeout", "seconds that a test may take")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Pass by what has no `gpu` test under ``-m gpu``: a machine with a GPU may lack what other tests import."""
    if config.option.markexpr == "gpu" and collection_path.suffix == ".py":
        return "pytest.mark.gpu" not in collection_path.read_text(encoding="utf-8") or None
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a `gpu` test with its reason, or fail it under ZDTRAIN_REQUIRE_GPU=1."""
    if item.get_closest_marker("gpu") is None or torch.cuda.is_available():
        return
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
    reason = f"needs a CUDA device: torch {torch.__version__} is {build} and finds {torch.cuda.device_count()} devices"
    if os.environ.get("ZDTRAIN_REQUIRE_GPU") == "1":
        pytest.fail(f"{reason} (ZDTRAIN_REQUIRE_GPU=1)", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(autouse=True)
def same_start() -> None:
    """Start every test from the same random numbers and algorithms, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(False)  # Trainer(deterministic=True) turns it on for the whole process


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a thread, an environment variable or one of torch's global modes behind."""
    threads, environment, modes = set(threading.enumerate()), dict(os.environ), _torch_modes()
    yield
    names = {name for name in environment.keys() | os.environ.keys() if not name.startswith(LIBRARY_PREFIXES)}
    changed = {name for name in names if environment.get(name) != os.environ.get(name)}
    for name in changed:
        _restore(name, environment.get(name))
    left = [thread.name for thread in _leaked_threads(threads)]
    assert not left, f"threads still running: {left}"
    assert changed <= LIGHTNING_VARIABLES, f"environment variables changed: {sorted(changed - LIGHTNING_VARIABLES)}"
    assert _torch_modes() == modes, f"torch's global modes changed: {modes} -> {_torch_modes()}"


def _torch_modes() -> dict[str, object]:
    return {
        "default dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "cuda sync debug": torch.cuda.get_sync_debug_mode() if torch.cuda.is_initialized() else 0,
    }


def _restore(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _leaked_threads(before: set[threading.Thread], patience_seconds: float = 2.0) -> list[threading.Thread]:
    """Return the non-daemon threads that a test started and that do not end by themselves."""
    end = time.monotonic() + patience_seconds
    leaked = [t for t in threading.enumerate() if t not in before and not t.daemon]
    for thread in leaked:
        thread.join(max(0.0, end - time.monotonic()))
    return [thread for thread in leaked if thread.is_alive()]


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
