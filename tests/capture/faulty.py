"""A stand-in for a device with graphs on which calls fail."""

from collections import Counter
from contextlib import contextmanager

from .host_graph import GraphRuntime, HostGraph

DOOR = (
    "rng_state",
    "restore_rng",
    "graph",
    "begin",
    "end",
    "replay",
    "memory",
    "memory_bytes",
    "reset",
    "release_pool",
)
"""What captured steps ask of the device."""


class Faults:
    """Counts the calls of each kind, and raises where it is told to.

    Args:
        call: The kind that fails, if any.
        error: What it raises.
        first: Number of the first call that fails, counted from 1.
        last: Number of the last one.
    """

    def __init__(self, call=None, error=None, first=1, last=None):
        self.call, self.error, self.first, self.last = call, error, first, last
        self.counts = Counter()
        self.raised = 0

    def at(self, call):
        self.counts[call] += 1
        if call == self.call and self.first <= self.counts[call] <= (self.last or self.counts[call]):
            self.raised += 1
            raise self.error


class FaultyGraph(HostGraph):
    def __init__(self, faults):
        super().__init__()
        self.faults = faults

    @contextmanager
    def capture(self):
        self.faults.at("begin")
        with super().capture():
            yield
        self.faults.at("end")

    def replay(self):
        self.faults.at("replay")
        super().replay()

    def reset(self):
        self.faults.at("reset")
        super().reset()

    @property
    def memory_bytes(self):
        self.faults.at("memory_bytes")
        return super().memory_bytes


class FaultyRuntime(GraphRuntime):
    def __init__(self, faults):
        super().__init__()
        self.faults = faults

    def graph(self):
        self.faults.at("graph")
        return FaultyGraph(self.faults)

    def rng_state(self):
        self.faults.at("rng_state")
        return super().rng_state()

    def restore_rng(self, state):
        self.faults.at("restore_rng")
        super().restore_rng(state)

    def memory(self):
        self.faults.at("memory")
        return super().memory()

    def release_pool(self):
        self.faults.at("release_pool")
        super().release_pool()
