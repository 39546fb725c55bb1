"""From the data loader to a batch on the device, past the layers that have nothing to do."""

from collections import deque
from itertools import islice
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer import call
from torch import Tensor

from zdtrain.data.prefetch import CopyAhead
from zdtrain.loop.ahead import overridden_transfers
from zdtrain.loop.loader import OneLoader, has_one_sized_loader
from zdtrain.step.profiled import Parts


class Feed:
    """Fetches one batch after another and moves it to the device, as stock Lightning does.

    Args:
        trainer: The Trainer, with its module attached.
        fetcher: The epoch's data fetcher.
        copies: Copies batches to the device one ahead, if any.
    """

    def __init__(self, trainer: Trainer, fetcher: _DataFetcher, copies: CopyAhead | None = None) -> None:
        self._fetcher = fetcher
        self._module = trainer.lightning_module
        self._device = trainer.strategy.root_device
        self._strategy = trainer.strategy
        precision = trainer.precision_plugin
        self._convert = None if type(precision).convert_input is Precision.convert_input else precision.convert_input
        self._hooked = any(overridden_transfers(trainer))
        self._loader = OneLoader(fetcher, copies) if has_one_sized_loader(fetcher) else None
        self._waiting: deque[Any] = deque()  # batches on the device whose steps are not due yet

    def look_for_draws(self, reads: int) -> None:
        """Find out, at the next reads, whether reading moves torch's default generator."""
        if self._loader is not None:
            self._loader.looks = reads

    @property
    def draws(self) -> bool:
        """Whether a read that was looked at moved torch's default generator."""
        return self._loader is not None and self._loader.draws

    def next(self) -> Any:
        """Return the next batch, on the device.

        Raises:
            StopIteration: The epoch's batches are used up.
        """
        loader = self._loader
        if self._waiting and loader is not None:
            loader.hand_out()
            return self._waiting.popleft()
        return self.move(self._read())

    def peek(self, count: int) -> list[Any]:
        """Return the next `count` batches, on the device, without handing them out; fewer where the epoch ends."""
        missing = count - len(self._waiting)
        if missing > 0 and self._loader is not None:
            self._waiting.extend(self.move(batch) for batch in islice(self._loader.read_ahead(), missing))
        return list(islice(self._waiting, count))

    def close(self) -> None:
        """Let go of batches that nobody will ask for."""
        self._waiting.clear()
        if self._loader is not None:
            self._loader.close()

    def _read(self) -> Any:
        if self._loader is not None:
            return self._loader.next()
        batch, _, _ = next(self._fetcher)
        return batch

    def move(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """Return `batch`, which the loader with this index gave, on the device."""
        if self._convert is not None:
            batch = self._convert(batch)
        if not self._hooked:
            resident = self._resident(batch)
            if resident is not None:
                return resident
        return self._transfer(batch, dataloader_idx)

    def _resident(self, batch: Any) -> Any | None:
        """Return a flat batch whose tensors are all on the device already; None where something has to move.

        Lists and dicts are copied, because stock's transfer does: a step that edits its batch must not edit the data.
        """
        kind = type(batch)
        if kind is Tensor:
            return batch if batch.device == self._device else None
        if kind in (tuple, list):
            return kind(batch) if all(self._is_resident(item) for item in batch) else None
        if kind is dict:
            return dict(batch) if all(self._is_resident(item) for item in batch.values()) else None
        return None

    def _is_resident(self, item: Any) -> bool:
        return type(item) is Tensor and item.device == self._device

    def _transfer(self, batch: Any, dataloader_idx: int) -> Any:
        module = self._module
        batch = module._on_before_batch_transfer(batch, dataloader_idx=dataloader_idx)
        attributes = module.__dict__
        previous = attributes["_current_fx_name"]
        attributes["_current_fx_name"] = "batch_to_device"
        batch = self._strategy.batch_to_device(batch, dataloader_idx=dataloader_idx)
        attributes["_current_fx_name"] = previous
        return batch


class ProfiledFeed(Feed):
    """A `Feed` whose parts have the names that they have in stock Lightning's loop; every batch is transferred there.

    Args:
        trainer: The Trainer, with its module attached.
        fetcher: The epoch's data fetcher.
        copies: Copies batches to the device one ahead, if any.
    """

    def __init__(self, trainer: Trainer, fetcher: _DataFetcher, copies: CopyAhead | None = None) -> None:
        super().__init__(trainer, fetcher, copies)
        self._hooked = True
        self._trainer = trainer
        self._parts = Parts(trainer)

    def _read(self) -> Any:
        if self._loader is None:  # the fetcher tells the profiler itself
            return super()._read()
        with self._parts.profile("[_TrainingEpochLoop].train_dataloader_next"):
            return super()._read()

    def _transfer(self, batch: Any, dataloader_idx: int) -> Any:
        batch = self._module._on_before_batch_transfer(batch, dataloader_idx=dataloader_idx)
        return call._call_strategy_hook(self._trainer, "batch_to_device", batch, dataloader_idx=dataloader_idx)
