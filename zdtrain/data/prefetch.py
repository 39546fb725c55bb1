"""Batches on the device before the step asks for them."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import RandomSampler, SequentialSampler

from zdtrain.device import Event, Runtime, runtime_for
from zdtrain.errors import ZDTrainWarning

_ALIGNMENT_BYTES = 64


def prefetch(loader: Iterable[Any], device: torch.device | str) -> Iterable[Any]:
    """Return `loader` with its batches copied to `device` one ahead; `loader` itself where `device` is the CPU.

    Example:
        >>> list(prefetch([torch.ones(1)], "cpu"))
        [tensor([1.])]
    """
    device = torch.device(device)
    return loader if device.type == "cpu" else DevicePrefetcher(loader, runtime=runtime_for(device))


class DevicePrefetcher:
    """Copies batch k + 1 on the copy stream while step k runs.

    The tensors of a batch go through one of two page-locked buffers (tensors already page-locked do not need it) into
    memory of their own on the device, so a batch can be kept. The order that makes this safe, with no host wait unless
    the host is more than two batches ahead of the device:

    - the step's stream waits for the copy of batch k before batch k is handed out;
    - each copy waits for all the work that the step's stream had before it, so memory that a dropped batch gave back is
      not overwritten while a step still reads it;
    - a page-locked buffer is filled again only when the copy out of it is done.

    Tensors that are not plain, dense and on the CPU, and leaves that are not tensors, pass through as they are. The
    loader is read one batch ahead: an error in it is raised when its batch is due, and a loop that stops early leaves
    one batch read and unused.

    Args:
        loader: Iterable of batches, each a pytree.
        runtime: Where the batches go.

    Example:
        >>> from zdtrain.device import HostRuntime
        >>> [batch.tolist() for batch in DevicePrefetcher([torch.zeros(1), torch.ones(1)], runtime=HostRuntime())]
        [[0.0], [1.0]]
    """

    def __init__(self, loader: Iterable[Any], *, runtime: Runtime) -> None:
        self.loader = loader
        self._ahead = CopyAhead(runtime)

    @property
    def sampler(self) -> Any:
        """The loader's sampler; Lightning tells it the epoch."""
        return getattr(self.loader, "sampler", None)

    @property
    def batch_sampler(self) -> Any:
        """The loader's batch sampler."""
        return getattr(self.loader, "batch_sampler", None)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type] # an unsized loader makes this unsized, by the same TypeError

    def __iter__(self) -> Iterator[Any]:
        _warn_if_not_distributed(self.loader)
        return self._ahead.over(iter(self.loader))


class CopyAhead:
    """Copies the batches of an iterator to the device one ahead, in the order that `DevicePrefetcher` describes.

    Args:
        runtime: Where the batches go.
        tell_idle: Called with the first batch if there is nothing in it to copy.
    """

    def __init__(self, runtime: Runtime, *, tell_idle: Callable[[Any], None] | None = None) -> None:
        self._buffers = [_StagingBuffer(runtime), _StagingBuffer(runtime)]
        self._next_buffer = 0
        self._tell_idle = tell_idle

    def over(self, source: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of `source`, on the device."""
        ahead = self._fetch(source)
        while True:
            current, ahead = ahead, None
            if isinstance(current, _Failed):
                raise current.error
            if current is None:
                return
            current.ready.wait("train")
            ahead = self._fetch(source)
            batch = current.batch
            del current  # or the batch would live one step longer than the step needs it
            yield batch
            del batch

    def _fetch(self, source: Iterator[Any]) -> "_Ahead | _Failed | None":
        try:
            batch = next(source)
        except StopIteration:
            return None
        except Exception as error:
            return _Failed(error)
        buffer = self._buffers[self._next_buffer]
        self._next_buffer = (self._next_buffer + 1) % len(self._buffers)
        tell_idle, self._tell_idle = self._tell_idle, None
        if tell_idle is not None and not any(_is_copied(leaf) for leaf in tree_leaves(batch)):
            tell_idle(batch)
        return buffer.send(batch)


@dataclass(frozen=True, kw_only=True)
class _Ahead:
    batch: Any
    """The batch on the device, valid behind `ready`."""
    ready: Event
    """Recorded on the copy stream behind the batch's copies."""


@dataclass(frozen=True)
class _Failed:
    error: Exception
    """What the loader raised for a batch that is not due yet."""


class _StagingBuffer:
    """Page-locked memory for one batch at a time, grown to the largest batch seen."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._used = runtime.event()  # behind every step that may read the memory the next copies go to
        self._done = runtime.event()  # behind the last copies out of this buffer
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._end = 0  # first byte of it that is free
        self._sources: list[Tensor] = []  # kept alive until their copies are done

    def send(self, batch: Any) -> _Ahead:
        if not self._done.query():
            self._done.synchronize()
        leaves = tree_leaves(batch)
        self._reserve(sum(_num_bytes(leaf) for leaf in leaves if _is_copied(leaf)))
        self._sources.clear()
        self._end = 0
        self._used.record("train")
        self._done.record("copy")
        on_device = tree_map_only(Tensor, lambda leaf: self._copy(leaf) if _is_copied(leaf) else leaf, batch)
        return _Ahead(batch=on_device, ready=self._done)

    def _reserve(self, num_bytes: int) -> None:
        if num_bytes > len(self._memory):
            self._memory = self._runtime.pinned((num_bytes,), torch.uint8)

    def _copy(self, leaf: Tensor) -> Tensor:
        # From the copy stream's own pool: memory given back early is used again behind this copy, on the same stream.
        with self._runtime.on("copy"):
            target = torch.empty_like(leaf, device=self._runtime.device)
        source = leaf if leaf.is_pinned() else self._stage(leaf, target.stride())
        self._sources.append(source)
        self._runtime.copy_async(target, source, "copy", after=self._used, done=self._done)
        return target

    def _stage(self, leaf: Tensor, stride: tuple[int, ...]) -> Tensor:
        start, self._end = self._end, self._end + _num_bytes(leaf)
        flat = self._memory[start : start + leaf.numel() * leaf.element_size()].view(leaf.dtype)
        return flat.as_strided(leaf.shape, stride, flat.storage_offset()).copy_(leaf)


def _num_bytes(leaf: Tensor) -> int:
    size = leaf.numel() * leaf.element_size()
    return -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _is_copied(leaf: Any) -> bool:
    return (
        type(leaf) is Tensor and leaf.device.type == "cpu" and leaf.layout == torch.strided and not leaf.requires_grad
    )


def _warn_if_not_distributed(loader: Iterable[Any]) -> None:
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    if isinstance(sampler, RandomSampler | SequentialSampler):
        warnings.warn(
            f"each of the {dist.get_world_size()} processes prefetches the whole dataset, because the loader has a "
            f"{type(sampler).__name__} and Lightning cannot replace it behind a DevicePrefetcher; "
            "give the loader a DistributedSampler",
            ZDTrainWarning,
            stacklevel=3,
        )
