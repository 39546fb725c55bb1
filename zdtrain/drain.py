"""The one way from the device to the host: packed copies on a side stream, delivered in order when they are done."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zdtrain.device.base import Event, Runtime

Value = float | int | bool
Deliver = Callable[[list[Value]], None]
MAX_LAG = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """A packed copy on its way to the host."""

    packed: Tensor
    """Device copy of the values, shape=(n,), float64 (float32 and bfloat16 fit exactly)."""
    buffer: Tensor
    """Pinned host buffer that `packed` is copied into."""
    dtypes: tuple[torch.dtype, ...]
    """Dtypes the values had before they were packed."""
    written: Event
    """Recorded once `packed` is written."""
    done: Event
    """Recorded once `buffer` is written."""
    deliver: Deliver
    """Whom the values go to."""


class Drain:
    """Brings device values to the host without making a step wait.

    `submit` packs the values and starts one copy; `poll` hands over what has arrived. Deliveries keep their order. When
    `MAX_LAG` copies are under way the oldest is waited for, and counted.

    Args:
        runtime: The device door.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.waits = 0
        self._under_way: deque[Delivery] = deque()

    def submit(self, values: Sequence[Tensor], deliver: Deliver) -> None:
        """Bring `values` (one element each) to the host and hand them to `deliver` as Python numbers."""
        self.send(pack(values, self.runtime.device), tuple(value.dtype for value in values), deliver)

    def send(self, packed: Tensor, dtypes: tuple[torch.dtype, ...], deliver: Deliver) -> None:
        """Bring `packed`, which nobody writes to again, to the host.

        Args:
            packed: Values side by side, shape=(n,), float64, on the device.
            dtypes: Dtypes that the n numbers are handed over as.
            deliver: Whom they go to.
        """
        delivery = Delivery(
            packed=packed,
            buffer=self.runtime.pinned(tuple(packed.shape), packed.dtype),
            dtypes=dtypes,
            written=self.runtime.event(),
            done=self.runtime.event(),
            deliver=deliver,
        )
        delivery.written.record("train")
        self.runtime.copy_async(delivery.buffer, packed, "drain", after=delivery.written, done=delivery.done)
        self._under_way.append(delivery)
        self.poll()

    def poll(self) -> None:
        """Hand over what has arrived; waits only for what is more than `MAX_LAG` deliveries behind."""
        while self._under_way and self._under_way[0].done.query():
            self._hand_over()
        while len(self._under_way) > MAX_LAG:
            self.waits += 1
            self._under_way[0].done.synchronize()
            self._hand_over()

    def flush(self) -> None:
        """Wait for everything under way and hand it over."""
        while self._under_way:
            delivery = self._under_way[0]
            if not delivery.done.query():
                delivery.done.synchronize()
            self._hand_over()

    def _hand_over(self) -> None:
        delivery = self._under_way.popleft()
        numbers = delivery.buffer.tolist()
        delivery.deliver([restore(number, dtype) for number, dtype in zip(numbers, delivery.dtypes, strict=True)])


def pack(values: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return `values` side by side on `device`, shape=(n,), float64, as a copy."""
    if not values:
        return torch.zeros(0, dtype=torch.float64, device=device)
    cells = [value.detach().reshape(()).to(device=device, dtype=torch.float64, non_blocking=True) for value in values]
    return torch.stack(cells)


def restore(number: float, dtype: torch.dtype) -> Value:
    """Return the Python number that ``.item()`` would have given for a value of `dtype`."""
    if dtype == torch.bool:
        return bool(number)
    if dtype.is_floating_point:
        return number
    return int(number)
