"""From the data loader to a batch on the device, past the layers that have nothing to do."""

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.core.datamodule import LightningDataModule
from lightning.pytorch.core.hooks import DataHooks
from lightning.pytorch.loops.fetchers import _DataFetcher, _PrefetchDataFetcher
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.combined_loader import _MaxSizeCycle
from torch import Tensor

from zdtrain.step.hooks import overrides

TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class Feed:
    """Fetches one batch after another and moves it to the device, as stock Lightning does.

    Args:
        trainer: The Trainer, with its module attached.
        fetcher: The epoch's data fetcher.
    """

    def __init__(self, trainer: Trainer, fetcher: _DataFetcher) -> None:
        self._fetcher = fetcher
        self._module = trainer.lightning_module
        self._device = trainer.strategy.root_device
        self._strategy = trainer.strategy
        precision = trainer.precision_plugin
        self._convert = None if type(precision).convert_input is Precision.convert_input else precision.convert_input
        self._hooked = transfer_is_hooked(trainer)
        self._next = self._next_of_one_loader if has_one_sized_loader(fetcher) else self._next_of_fetcher

    def next(self) -> Any:
        """Return the next batch, on the device.

        Raises:
            StopIteration: The epoch's batches are used up.
        """
        batch = self._next()
        if self._convert is not None:
            batch = self._convert(batch)
        if not self._hooked:
            resident = self._resident(batch)
            if resident is not None:
                return resident
        return self._transfer(batch)

    def _next_of_fetcher(self) -> Any:
        batch, _, _ = next(self._fetcher)
        return batch

    def _next_of_one_loader(self) -> Any:
        fetcher = self._fetcher
        if fetcher.done:
            raise StopIteration
        modes: Any = fetcher.iterator._iterator  # type: ignore[union-attr]
        try:
            batch = next(modes.iterators[0])
        except StopIteration:
            modes._consumed[0] = True
            fetcher.done = True
            raise
        modes._idx += 1
        fetcher.fetched += 1
        fetcher.done = fetcher.fetched >= fetcher.length  # type: ignore[operator]
        return batch

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

    def _transfer(self, batch: Any) -> Any:
        module = self._module
        batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
        attributes = module.__dict__
        previous = attributes["_current_fx_name"]
        attributes["_current_fx_name"] = "batch_to_device"
        batch = self._strategy.batch_to_device(batch, dataloader_idx=0)
        attributes["_current_fx_name"] = previous
        return batch


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


def transfer_is_hooked(trainer: Trainer) -> bool:
    """Return whether the module or the data module overrides a batch-transfer hook."""
    module, data = trainer.lightning_module, trainer.datamodule  # type: ignore[attr-defined]
    if any(overrides(module, name, DataHooks) for name in TRANSFER_HOOKS):
        return True
    return data is not None and any(overrides(data, name, LightningDataModule) for name in TRANSFER_HOOKS)
