"""The only loader of an epoch, read past Lightning's layers and, where asked, ahead of the step."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from lightning.pytorch.loops.fetchers import _DataFetcher, _PrefetchDataFetcher
from lightning.pytorch.utilities.combined_loader import _MaxSizeCycle

from zdtrain.data.prefetch import CopyAhead


class OneLoader:
    """Reads batches of one loader of known length; Lightning's counts follow when a batch is handed out.

    Args:
        fetcher: The epoch's data fetcher, for which `has_one_sized_loader`.
        copies: Copies the batches to the device one ahead, if any.
    """

    def __init__(self, fetcher: _DataFetcher, copies: CopyAhead | None = None) -> None:
        self._fetcher = fetcher
        self._copies = copies
        self._ahead: Iterator[Any] | None = None  # the loader's batches, on the device
        self.looks = 0  # reads behind the first at which to find out whether they move torch's default generator
        self.draws = False  # whether one did
        self._has_read = False
        self._waiting = 0  # batches read and not handed out
        self._failed: Exception | None = None  # what the loader raised for a batch that is not due yet

    def next(self) -> Any:
        """Read a batch and hand it out.

        Raises:
            StopIteration: The epoch's batches are used up.
        """
        if self._fetcher.done:
            raise StopIteration
        try:
            batch = self._read()
        except StopIteration:
            self._modes._consumed[0] = True
            self._fetcher.done = True
            raise
        self.hand_out()
        return batch

    def read_ahead(self) -> Iterator[Any]:
        """Yield the batches that come next, until the epoch ends or the loader fails; they are handed out later."""
        while self._fetcher.fetched + self._waiting < self._fetcher.length:  # type: ignore[operator]
            try:
                yield self._read()
            except Exception as error:  # an end before its time is met again as well
                self._failed = error
                return

    def close(self) -> None:
        """Let go of the loader, whose workers end with it."""
        self._ahead = None

    def hand_out(self) -> None:
        """Count a batch that was read."""
        fetcher = self._fetcher
        self._waiting -= 1
        self._modes._idx += 1
        fetcher.fetched += 1
        fetcher.done = fetcher.fetched >= fetcher.length  # type: ignore[operator]

    @property
    def _modes(self) -> Any:
        return self._fetcher.iterator._iterator  # type: ignore[union-attr]

    def _read(self) -> Any:
        if self._failed is not None:
            raise self._failed
        if not self._has_read:
            self._has_read = True  # samplers draw a seed at the first one
            batch = self._read_next()
        elif self.looks:
            self.looks -= 1
            before = torch.get_rng_state()
            batch = self._read_next()
            self.draws = self.draws or not torch.equal(before, torch.get_rng_state())
        else:
            batch = self._read_next()
        self._waiting += 1
        return batch

    def _read_next(self) -> Any:
        loader = self._modes.iterators[0]
        if self._copies is None:
            return next(loader)
        if self._ahead is None:
            missing: int = self._fetcher.length - self._fetcher.fetched  # type: ignore[operator]
            self._ahead = self._copies.over(islice(loader, missing))
        return next(self._ahead)


def has_one_sized_loader(fetcher: _DataFetcher) -> bool:
    """Return whether all layers between `fetcher` and the loader pass batches on unchanged."""
    combined: Any = fetcher.iterator
    return (
        type(fetcher) is _PrefetchDataFetcher
        and fetcher.length is not None
        and not fetcher.batches
        and type(combined._iterator) is _MaxSizeCycle
        and len(combined.flattened) == 1
        and combined.iterables is combined.flattened[0]
    )
