"""A host runtime for tests on which copies arrive late and every unordered access is an error.

On the plain host runtime a copy is done at once, so code that reads or reuses a buffer too early still gives the right
numbers. Here a copy runs as late as the declared order allows, events report done only after `lag` queries,
and inside `LaggingRuntime.watching` every tensor operation is checked against the copies in flight.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zdtrain.device.base import Event, StreamName, check_copy
from zdtrain.device.host import HostRuntime
from zdtrain.errors import ZDTrainError

Span = tuple[int, int]  # first byte and one past the last byte of a tensor's memory
Clock = dict[StreamName, int]  # up to which time the work of each stream is known to lie behind


class OrderError(ZDTrainError, AssertionError):
    """Code touched memory in an order that a real device does not guarantee."""


class LaggingEvent:
    """An event that reports done after `LaggingRuntime.lag` queries, or when it is synchronised."""

    def __init__(self, runtime: "LaggingRuntime", name: str) -> None:
        self._runtime = runtime
        self._queries_left = 0
        self._behind: Clock = {}
        self.name = name

    def record(self, stream: StreamName = "train") -> None:
        """Mark the work enqueued on `stream` so far."""
        self._runtime.tick(f"record {self.name} on {stream}")
        self._behind = self._runtime.clock(stream)
        self._queries_left = self._runtime.lag

    def query(self) -> bool:
        """Return False `lag` times after a record, then True."""
        if self._queries_left:
            self._queries_left -= 1
            return False
        self._runtime.tick(f"{self.name} done")
        self._runtime.show_host(self._behind)
        return True

    def wait(self, stream: StreamName) -> None:
        """Run what `stream` now waits for; the host still has not seen it done.

        Raises:
            OrderError: The event was never recorded, so the wait orders nothing.
        """
        if not self._behind:
            raise OrderError(
                f"stream {stream!r} waits for event {self.name}, which was never recorded: it orders nothing"
            )
        self._runtime.tick(f"{stream} waits {self.name}")
        self._runtime.order(stream, self._behind)

    def synchronize(self) -> None:
        """Finish the marked work and count a host wait."""
        self._runtime.counters.host_waits += 1
        self._runtime.tick(f"host waits {self.name}")
        self._queries_left = 0
        self._runtime.show_host(self._behind)


@dataclass(eq=False)
class _Copy:
    dst: Tensor
    src: Tensor
    stream: StreamName
    time: int
    has_run: bool = False

    def is_behind(self, clock: Clock) -> bool:
        return self.time <= clock.get(self.stream, 0)

    def __str__(self) -> str:
        return f"a copy of {tuple(self.src.shape)} {self.src.dtype} on {self.stream!r}"


class LaggingRuntime(HostRuntime):
    """A `HostRuntime` that defers copies and checks their order.

    Args:
        lag: How many queries of a recorded event report "not done".

    Example:
        >>> runtime = LaggingRuntime(lag=1)
        >>> row, host = torch.ones(2), runtime.pinned((2,), torch.float32)
        >>> ready, done = runtime.event(), runtime.event()
        >>> ready.record()
        >>> runtime.copy_async(host, row, "drain", after=ready, done=done)
        >>> done.query(), host.tolist()
        (False, [0.0, 0.0])
        >>> done.query(), host.tolist()
        (True, [1.0, 1.0])
    """

    def __init__(self, *, lag: int = 1) -> None:
        super().__init__()
        self.is_immediate = False
        self.lag = lag
        self.log: list[str] = []
        """What happened, in order: records, waits, copies enqueued, copies run, events seen done."""
        self._num_events = 0
        self._stream: StreamName = "train"
        self._pinned: list[weakref.ref[Tensor]] = []
        self._in_flight: list[_Copy] = []  # not yet seen done by the host
        self._is_running_copy = False
        # Happens-before: what each stream, and the host, knows to be behind it.
        self._clocks: dict[StreamName, Clock] = {}
        self._host_clock: Clock = {}
        self._last_write: dict[tuple[Span, StreamName], int] = {}
        self._last_read: dict[tuple[Span, StreamName], int] = {}

    def event(self) -> Event:
        """Make an event, named ``e0``, ``e1``, … in the log."""
        self._num_events += 1
        return LaggingEvent(self, f"e{self._num_events - 1}")

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate a zeroed buffer of the host's: the host may touch it only after it has seen the event done."""
        buffer = super().pinned(shape, dtype)
        self._pinned = [alive for alive in self._pinned if alive() is not None] + [weakref.ref(buffer)]
        return buffer

    @contextmanager
    def on(self, stream: StreamName) -> Iterator[None]:
        """Attribute the body's operations to `stream`."""
        self._run(self.clock(stream))  # its copies so far come before the body
        before, self._stream = self._stream, stream
        try:
            yield
        finally:
            self._stream = before

    def copy_async(self, dst: Tensor, src: Tensor, stream: StreamName, *, after: Event, done: Event) -> None:
        """Enqueue the copy; it runs when `done` is seen done or waited for, or when the device `advance`s.

        Raises:
            OrderError: `after` does not order the copy behind the last write of `src` or the last use of `dst`.
        """
        check_copy(dst, src)
        after.wait(stream)
        self._check_free(src, "read by another copy", is_write=False, by=stream)
        self._check_free(dst, "written by another copy", is_write=True, by=stream)
        self._check_ordered(src, "source", stream, self._last_write)
        self._check_ordered(dst, "destination", stream, self._last_write, self._last_read)
        self.counters.copies += 1
        self._in_flight.append(_Copy(dst, src.detach(), stream, self.tick(f"copy enqueued on {stream}")))
        done.record(stream)

    def read(self, src: Tensor) -> Tensor:
        """Let the current stream catch up, then copy `src` to the host."""
        self.tick("host reads")
        self.show_host(self.clock(self._stream))
        return super().read(src)

    def synchronize(self) -> None:
        """Finish everything and count a host wait."""
        super().synchronize()
        self.tick("host waits for the device")
        self.show_host({copy.stream: self._time for copy in self._in_flight})

    def advance(self) -> None:
        """Let the device catch up with all copies; the host learns of it only from its events."""
        self._run({copy.stream: self._time for copy in self._in_flight})

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Check every tensor operation of the body against the copies in flight.

        Raises:
            OrderError: The body touches a destination, or overwrites a source, that a copy in flight still needs.
        """
        with _Dispatched(self), _RawReads(self):
            yield

    def tick(self, what: str) -> int:
        """Log `what` and return its time, counted from 1."""
        self.log.append(what)
        return self._time

    def clock(self, stream: StreamName) -> Clock:
        """Return what lies behind the next operation on `stream`."""
        return {**self._clocks.get(stream, {}), stream: self._time}

    def order(self, stream: StreamName, behind: Clock) -> None:
        """Put the work of `behind` before later work on `stream`: run its copies, which the host has not seen yet."""
        self._run(behind)
        _merge(self._clocks.setdefault(stream, {}), behind)

    def show_host(self, behind: Clock) -> None:
        """Run the copies of `behind` and let the host know that they are done."""
        self._run(behind)
        _merge(self._host_clock, behind)
        self._in_flight = [copy for copy in self._in_flight if not copy.is_behind(behind)]

    def note_access(self, tensor: Tensor, what: str, *, is_write: bool) -> None:
        """Refuse an access that races with a copy in flight; remember it for the copies to come."""
        if self._is_running_copy:
            return
        self._check_free(tensor, what, is_write=is_write)
        if not self._is_pinned(tensor):  # accesses of the host are in program order with its copies
            times = self._last_write if is_write else self._last_read
            times[_span(tensor), self._stream] = self._time + 1

    @property
    def _time(self) -> int:
        return len(self.log)

    def _run(self, behind: Clock) -> None:
        for copy in self._in_flight:
            if copy.has_run or not copy.is_behind(behind):
                continue
            self.tick(f"copy run on {copy.stream}")
            self._is_running_copy = True
            try:
                with torch.no_grad():
                    copy.dst.copy_(copy.src)
            finally:
                self._is_running_copy = False
            copy.has_run = True

    def _check_free(self, tensor: Tensor, what: str, *, is_write: bool, by: StreamName | None = None) -> None:
        """Refuse an access to memory that a copy in flight needs; copies of the stream `by` are in order with it."""
        span, clock = _span(tensor), self.clock(by or self._stream)
        for copy in self._in_flight:
            if copy.stream == by:
                continue
            for end, role in ((copy.dst, "destination"), (copy.src, "source")):
                is_over = copy.has_run and copy.is_behind(clock) and not self._is_pinned(end)
                if not is_over and (is_write or role == "destination") and _overlap(span, _span(end)):
                    raise OrderError(
                        f"the {role} of {copy} is {what} before that copy is known to be done; "
                        "query or synchronise its event first, or let the stream wait for it"
                    )

    def _check_ordered(
        self, tensor: Tensor, role: str, stream: StreamName, *accesses: dict[tuple[Span, StreamName], int]
    ) -> None:
        """Refuse a copy that may overtake an access made on another stream."""
        span, clock = _span(tensor), self.clock(stream)
        _merge(clock, self._host_clock)
        for times in accesses:
            for (other, where), time in times.items():
                if time > clock.get(where, 0) and _overlap(span, other):
                    raise OrderError(
                        f"the {role} of a copy on {stream!r} was used on {where!r} after the event "
                        "that the copy waits for; record the event behind that use"
                    )

    def _is_pinned(self, tensor: Tensor) -> bool:
        span = _span(tensor)
        buffers = (reference() for reference in self._pinned)
        return any(buffer is not None and _overlap(span, _span(buffer)) for buffer in buffers)


class _Dispatched(TorchDispatchMode):
    """Shows the runtime what each operation reads and writes."""

    def __init__(self, runtime: LaggingRuntime) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._runtime = runtime

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for position, argument in enumerate(func._schema.arguments):
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            alias = argument.alias_info
            if alias is not None and not alias.is_write:
                continue  # a view: it touches no memory
            for tensor in _plain_tensors(given):
                verb = "written" if alias is not None else "read"
                self._runtime.note_access(tensor, f"{verb} by {func}", is_write=alias is not None)
        return func(*args, **kwargs)


class _RawReads(TorchFunctionMode):
    """Shows the runtime the reads that go round the dispatcher."""

    _READS = ("tolist", "numpy", "__array__")

    def __init__(self, runtime: LaggingRuntime) -> None:
        super().__init__()
        self._runtime = runtime

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in self._READS:
            for tensor in _plain_tensors(args[0]):
                self._runtime.note_access(tensor, f"read by {name}", is_write=False)
        return func(*args, **(kwargs or {}))


def _plain_tensors(value: Any) -> list[Tensor]:
    """Return the tensors in `value` that have memory on the host: no fakes, no subclasses without storage."""
    return [t for t in tree_leaves(value) if type(t) in (Tensor, torch.nn.Parameter) and t.device.type == "cpu"]


def _span(tensor: Tensor) -> Span:
    first = tensor.data_ptr()
    if tensor.numel() == 0:
        return first, first
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (last + 1) * tensor.element_size()


def _overlap(one: Span, other: Span) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _merge(clock: Clock, other: Clock) -> None:
    for stream, time in other.items():
        clock[stream] = max(time, clock.get(stream, 0))
