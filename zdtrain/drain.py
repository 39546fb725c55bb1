"""The one way from the device to the host: packed copies on a side stream, delivered in order when they are done."""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from zdtrain.device.base import Event, Runtime, StreamName

Value = float | int | bool
Deliver = Callable[[list[Value]], None]
MAX_LAG = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Carrier:
    """What a delivery travels in; used again for the next of its size, so that a step allocates nothing pinned."""

    buffer: Tensor
    """Pinned host buffer, shape=(n,), float64."""
    written: Event
    """Recorded once the values are packed on the device."""
    done: Event
    """Recorded once `buffer` is written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """Packed values on their way to the host."""

    packed: Tensor
    """The values on the device, shape=(n,), float64 (float32 and bfloat16 fit exactly); kept alive until copied."""
    carrier: Carrier
    """What they travel in."""
    deliver: Deliver
    """Whom the n numbers go to."""


class Drain:
    """Brings device values to the host without making a step wait.

    `submit` packs the values and starts one copy; `poll` hands over what has arrived. Deliveries keep their order. When
    `MAX_LAG` copies are under way the oldest is waited for, and counted.

    Args:
        open_runtime: Gives the device door; asked on first use, since some devices exist only in launched processes.
    """

    def __init__(self, open_runtime: Callable[[], Runtime]) -> None:
        self._open_runtime = open_runtime
        self.waits = 0
        self._under_way: deque[Delivery] = deque()
        self._idle: defaultdict[int, list[Carrier]] = defaultdict(list)

    @cached_property
    def runtime(self) -> Runtime:
        """The device door."""
        return self._open_runtime()

    def __getstate__(self) -> dict[str, Any]:
        """Leave behind what belongs to this process's device: a launcher sends the Trainer to others."""
        state = {name: value for name, value in self.__dict__.items() if name != "runtime"}
        return {**state, "_under_way": deque(), "_idle": defaultdict(list)}

    def submit(self, values: Sequence[Tensor], deliver: Deliver) -> None:
        """Bring `values` (one element each) to the host and hand them to `deliver` as Python numbers."""
        device = self.runtime.device
        dtypes = [value.dtype for value in values]
        here: dict[int, Any] = {
            i: value.detach().reshape(()).tolist()
            for i, value in enumerate(values)
            if value.device.type == "cpu" != device.type
        }
        cells = [value for i, value in enumerate(values) if i not in here]

        def merge(numbers: list[Value]) -> None:
            arriving = iter(numbers)
            deliver([here[i] if i in here else restore(next(arriving), dtype) for i, dtype in enumerate(dtypes)])

        self.send(pack(cells, device), merge)

    def send(self, packed: Tensor, deliver: Deliver, *, stream: StreamName = "train") -> None:
        """Bring `packed`, which nobody writes to again, to the host.

        Args:
            packed: Values side by side, shape=(n,), float64, on the device.
            deliver: Whom the n numbers go to.
            stream: The stream that made `packed`.
        """
        carrier = self._carrier(packed.numel())
        carrier.written.record(stream)
        self.runtime.copy_async(carrier.buffer, packed, "drain", after=carrier.written, done=carrier.done)
        self._under_way.append(Delivery(packed=packed, carrier=carrier, deliver=deliver))
        self.poll()

    def _carrier(self, size: int) -> Carrier:
        if self._idle[size]:
            return self._idle[size].pop()
        runtime = self.runtime
        with torch.inference_mode(False):  # a buffer made while validating is used again while training
            buffer = runtime.pinned((size,), torch.float64)
        return Carrier(buffer=buffer, written=runtime.event(), done=runtime.event())

    def poll(self) -> None:
        """Hand over what has arrived; waits only for what is more than `MAX_LAG` deliveries behind."""
        while self._under_way and self._under_way[0].carrier.done.query():
            self._hand_over()
        while len(self._under_way) > MAX_LAG:
            self.waits += 1
            self._under_way[0].carrier.done.synchronize()
            self._hand_over()

    def flush(self) -> None:
        """Wait for everything under way and hand it over."""
        while self.wait_for_oldest():
            pass

    def wait_for_oldest(self) -> bool:
        """Wait for the delivery that is under way for longest and hand it over; return False where there is none."""
        if not self._under_way:
            return False
        done = self._under_way[0].carrier.done
        if not done.query():
            done.synchronize()
        self._hand_over()
        return True

    def _hand_over(self) -> None:
        delivery = self._under_way.popleft()
        carrier = delivery.carrier
        numbers = carrier.buffer.tolist()
        self._idle[carrier.buffer.numel()].append(carrier)
        delivery.deliver(numbers)


def pack(values: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return `values` side by side on `device`, shape=(n,), float64, as a copy."""
    if not values:
        return torch.zeros(0, dtype=torch.float64, device=device)
    return torch.stack([value.detach().reshape(()).to(device=device, dtype=torch.float64) for value in values])


def pack_vectors(vectors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return vectors of any dtypes one behind the other on `device`, shape=(n,), float64, as a copy."""
    sizes = [len(vector) for vector in vectors]
    packed = torch.empty(sum(sizes), dtype=torch.float64, device=device)
    if vectors:
        torch._foreach_copy_(packed.split(sizes), list(vectors))
    return packed


def restore(number: float, dtype: torch.dtype) -> Value:
    """Return the Python number that ``.item()`` would have given for a value of `dtype`."""
    if dtype == torch.bool:
        return bool(number)
    if dtype.is_floating_point:
        return number
    return int(number)
