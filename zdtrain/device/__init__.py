"""The door to the device: streams, events, pinned memory, ordered copies and graphs behind one protocol."""

import torch

from zdtrain.device.base import (
    Counters,
    Event,
    Graph,
    MemoryStats,
    Runtime,
    StreamName,
    SyncDebugMode,
    UnsupportedError,
)
from zdtrain.device.host import HostRuntime

__all__ = [
    "Counters",
    "Event",
    "Graph",
    "HostRuntime",
    "MemoryStats",
    "Runtime",
    "StreamName",
    "SyncDebugMode",
    "UnsupportedError",
    "is_capturing",
    "runtime_for",
]


def runtime_for(device: torch.device) -> Runtime:
    """Return the runtime for `device`: CUDA's for a CUDA device, the host's for every other.

    Example:
        >>> runtime_for(torch.device("cpu")).event().query()
        True
    """
    if device.type == "cuda":
        from zdtrain.device.cuda import CudaRuntime

        return CudaRuntime(device)
    return HostRuntime(device)


def is_capturing() -> bool:
    """Return whether work on the current stream is only noted, not done; never so without a CUDA device in use.

    Example:
        >>> is_capturing()
        False
    """
    from zdtrain.device.cuda import is_capturing as is_current_stream_capturing

    return is_current_stream_capturing()
