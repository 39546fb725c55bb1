"""What a fit cost the host and the device, for the summary of its run folder."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from zdtrain.device.base import MemoryStats


@contextmanager
def accounted(trainer: Any) -> Iterator[None]:
    """Add to the run's summary what the body, a fit, cost; nothing where the Trainer keeps no records.

    ``host_reads`` are reads through the device door that a step or a checkpoint waited for, ``host_waits`` the times
    that the host waited for values on their way, ``fallbacks`` how many reasons of each code there were not to run or
    capture a step the short way. Memory is in bytes; fragmentation is the share of reserved memory not in tensors.
    """
    if trainer.recorder is None or not trainer.training:
        yield
        return
    runtime = trainer.drain.runtime
    before = replace(runtime.counters)
    try:
        yield
    finally:
        counters = runtime.counters
        trainer.recorder.summarize(
            host_reads=counters.host_reads - before.host_reads,
            host_waits=counters.host_waits - before.host_waits,
            fallbacks=dict(Counter(reason.code for reason in trainer.capture_report.fallbacks)),
            **_memory(runtime.memory()),
        )


def _memory(stats: MemoryStats | None) -> dict[str, Any]:
    facts: dict[str, Any] = {"peak_host_memory_bytes": peak_host_memory()}
    if stats is not None:
        facts["peak_device_memory_bytes"] = stats.peak_allocated_bytes
        facts["allocator_fragmentation"] = round(1 - stats.allocated_bytes / max(stats.reserved_bytes, 1), 4)
    return facts


def peak_host_memory() -> int | None:
    """Return the most memory that this process had resident so far, in bytes; None where the system does not tell."""
    if sys.platform == "win32":
        return None
    from resource import RUSAGE_SELF, getrusage

    unit = 1 if sys.platform == "darwin" else 1024
    return getrusage(RUSAGE_SELF).ru_maxrss * unit
