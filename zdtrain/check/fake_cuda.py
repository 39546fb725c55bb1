"""Stand-ins for what `torch.cuda` and `torch.accelerator` hand out while the shadow device is on."""

import contextlib
from typing import Any

import torch

from zdtrain.check import recorder as recording
from zdtrain.check.tensor import DEVICE


class Event:
    """An event that has always happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> None:
        """Nothing to record: work is done when it is submitted."""

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Always true."""
        return True

    def synchronize(self) -> None:
        """On a GPU the host waits here."""
        recording.note("device-synchronize", "Event.synchronize()")

    def elapsed_time(self, other: "Event") -> float:
        """Always zero."""
        recording.note("device-synchronize", "Event.elapsed_time()")
        return 0.0


class Stream:
    """A stream on which everything is done at once."""

    cuda_stream = 0
    device = DEVICE
    device_index = 0
    stream_id = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Event | None = None) -> Event:
        """An event that has happened."""
        return event or Event()

    def query(self) -> bool:
        """Always idle."""
        return True

    def is_capturing(self) -> bool:
        """Never: the steps run eagerly."""
        return False

    def synchronize(self) -> None:
        """On a GPU the host waits here."""
        recording.note("device-synchronize", "Stream.synchronize()")

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *exc_info: Any) -> None: ...


class Properties:
    """What `torch.cuda.get_device_properties` returns."""

    name = "shadow device"
    major = 9
    minor = 0
    total_memory = 80 << 30
    multi_processor_count = 132
    warp_size = 32
    max_threads_per_multi_processor = 2048
    regs_per_multiprocessor = 65536
    L2_cache_size = 50 << 20
    gcnArchName = ""  # noqa: N815 - torch's own name


def _refuse(what: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> None:
        recording.note("graph-refused", what)

    return call


def _synchronize(what: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> None:
        recording.note("device-synchronize", what)

    return call


def _get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    recording.note("rng-state-in-step", "torch.cuda.get_rng_state()")
    return torch.random.get_rng_state()


def _set_rng_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    recording.note("rng-state-in-step", "torch.cuda.set_rng_state()")
    torch.random.set_rng_state(state)


def _constant(value: Any) -> Any:
    return lambda *args, **kwargs: value


CUDA: dict[str, Any] = {
    "is_available": _constant(True),
    "is_initialized": _constant(True),
    "_initialized": True,  # activation checkpointing asks before it saves the random state
    "_lazy_init": _constant(None),
    "init": _constant(None),
    "device_count": _constant(1),
    "current_device": _constant(0),
    "set_device": _constant(None),
    "device": lambda *args: contextlib.nullcontext(),
    "get_device_capability": _constant((9, 0)),
    "get_device_name": _constant(Properties.name),
    "get_device_properties": _constant(Properties()),
    "is_bf16_supported": _constant(True),
    "Stream": Stream,
    "Event": Event,
    "current_stream": lambda *args: Stream(),
    "default_stream": lambda *args: Stream(),
    "stream": lambda stream: contextlib.nullcontext(stream),
    "set_stream": _constant(None),
    "is_current_stream_capturing": _constant(False),
    "manual_seed": _constant(None),
    "manual_seed_all": _constant(None),
    "get_rng_state": _get_rng_state,
    "set_rng_state": _set_rng_state,
    "get_rng_state_all": lambda: [torch.random.get_rng_state()],
    "set_rng_state_all": _constant(None),
    "memory_allocated": _constant(0),
    "max_memory_allocated": _constant(0),
    "memory_reserved": _constant(0),
    "memory_stats": lambda *args: {},
    "reset_peak_memory_stats": _constant(None),
    "synchronize": _synchronize("torch.cuda.synchronize()"),
    "empty_cache": _refuse("torch.cuda.empty_cache()"),
    "ipc_collect": _constant(None),
}
"""Attributes of `torch.cuda` to replace."""

ACCELERATOR: dict[str, Any] = {
    "is_available": _constant(True),
    "device_count": _constant(1),
    "current_accelerator": _constant(torch.device("cuda")),
    "current_device_index": _constant(0),
    "set_device_index": _constant(None),
    "current_stream": lambda *args: Stream(),
    "set_stream": _constant(None),
    "synchronize": _synchronize("torch.accelerator.synchronize()"),
    "empty_cache": _refuse("torch.accelerator.empty_cache()"),
}
"""Attributes of `torch.accelerator` to replace."""
