"""Whether an epoch's batches can be read, and copied to the device, ahead of the step; and if not, why."""

from collections.abc import Iterator
from typing import Any

from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch import Trainer
from lightning.pytorch.core.datamodule import LightningDataModule
from lightning.pytorch.core.hooks import DataHooks
from lightning.pytorch.loops.fetchers import _DataFetcher

from zdtrain.capture.watch import reason_at
from zdtrain.data.prefetch import CopyAhead
from zdtrain.errors import FallbackReason
from zdtrain.loop.loader import has_one_sized_loader
from zdtrain.source.definitions import method_location
from zdtrain.step.hooks import overrides

TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def overridden_transfers(trainer: Trainer) -> Iterator[tuple[object, str]]:
    """Yield the module and the data module with each batch-transfer hook that they override."""
    module, data = trainer.lightning_module, trainer.datamodule  # type: ignore[attr-defined]
    for owner, base in ((module, DataHooks), (data, LightningDataModule)):
        for name in TRANSFER_HOOKS if owner is not None else ():
            if overrides(owner, name, base):
                yield owner, name


def reasons_against(trainer: Trainer, fetcher: _DataFetcher, option: str) -> Iterator[FallbackReason]:
    """Yield what keeps batches from being read before their step.

    Args:
        trainer: The Trainer, with its module attached.
        fetcher: The epoch's data fetcher.
        option: What the user asked for, e.g. ``"prefetch"``; also the code of the reasons, with dashes.
    """
    code, asked = option.replace("_", "-"), f"{option}= has no effect here"
    for owner, name in overridden_transfers(trainer):
        what = f"{asked}: {type(owner).__name__} overrides {name}, which is called when a batch's step is due"
        yield reason_at(method_location(owner, name), code, what)
    if not has_one_sized_loader(fetcher):
        yield FallbackReason(code=code, message=f"{asked}: it takes one training loader that has a length")
    elif isinstance(fetcher.combined_loader.flattened[0], _Stateful):
        what = "the loader keeps its place in checkpoints, and would be ahead of the step in them"
        yield FallbackReason(code=code, message=f"{asked}: {what}")


def copy_ahead(trainer: Any, note: Any) -> CopyAhead | None:
    """Return what copies batches ahead of the step; None where there is nothing to copy.

    Args:
        trainer: The Trainer.
        note: Takes the reason, now or when the first batch is seen.
    """
    runtime = trainer.drain.runtime
    if runtime.is_immediate:
        what = f"batches are used where they are made, on {runtime.device}"
        note(FallbackReason(code="prefetch", message=f"prefetch= has no effect here: {what}"))
        return None

    def tell_idle(batch: Any) -> None:
        what = f"a batch ({type(batch).__name__}) holds no plain tensor on the host"
        note(FallbackReason(code="prefetch", message=f"prefetch= has no effect here: {what}"))

    return CopyAhead(runtime, tell_idle=tell_idle)
