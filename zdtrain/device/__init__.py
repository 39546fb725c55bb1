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
