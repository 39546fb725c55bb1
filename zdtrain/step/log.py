"""`self.log` while hooks of the module run: stock Lightning declares a metric, this writes its later values."""

from numbers import Real
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from torchmetrics import Metric

from zdtrain.step.results import MetricSlot, StepResults, default_dtype

_ADD_DATALOADER_IDX = 8  # its place among a call's flags


class StepLog:
    """Stands in for `LightningModule.log` while hooks of the module run.

    The first call for a name, and any call that differs from the one before, goes through stock Lightning: its checks,
    its errors, its warnings. Calls that repeat a known declaration only write the value.

    Args:
        module: The module whose `log` is replaced.
        results: Where the values go.
        connector: Knows whether this is the first batch of an epoch, on which stock Lightning resets metrics.
        dataloader_idx: Each of several data loaders has a `StepLog` of its own.
    """

    def __init__(
        self,
        module: LightningModule,
        results: StepResults,
        connector: _LoggerConnector,
        dataloader_idx: int | None = None,
    ) -> None:
        self._module = module
        self._attributes = module.__dict__
        self._results = results
        self._connector = connector
        self._declared = results.declared.setdefault(dataloader_idx, {})

    def __len__(self) -> int:
        """Return how many names are declared."""
        return len(self._declared)

    def __call__(  # noqa: D102 - LightningModule.log documents it
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any | None = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        flags = (
            prog_bar,
            logger,
            on_step,
            on_epoch,
            reduce_fx,
            enable_graph,
            sync_dist,
            sync_dist_group,
            add_dataloader_idx,
            metric_attribute,
            rank_zero_only,
        )
        hook = self._attributes["_current_fx_name"]
        known = self._declared.get((hook, name))
        if known is not None and known[0] == flags and self._connector._first_loop_iter is False:
            entry = known[1]
            if type(entry) is MetricSlot:
                if self._write(entry, value, batch_size):
                    return
            elif value is entry.value:
                note_metric(entry)
                return
        LightningModule.log(self._module, name, value, *flags[:9], batch_size, *flags[9:])
        self._remember(hook, name, flags, value)

    def _write(self, slot: MetricSlot, value: Any, batch_size: Any) -> bool:
        if slot.bank is None:  # moved away by the teardown of an earlier fit
            return False
        cell = slot.cell
        if type(value) is Tensor:
            if value.dim() != 0 or value.dtype != cell.dtype or value.device != cell.device:
                return False
        elif isinstance(value, Real):
            value, dtype = float(value), default_dtype()
            if cell.dtype != dtype:  # which rounds
                value = torch.full((), value, dtype=dtype, device=cell.device)
        else:
            return False
        if slot.reduction != "mean":
            size = 1 if batch_size is None else batch_size
        else:
            size = self._batch_size() if batch_size is None else batch_size
        slot.write(value, size)
        return True

    def _batch_size(self) -> int:
        results = self._results
        if results.batch_size is None:
            results.batch_size = 1 if results.batch is None else batch_size_of(results.batch)
        return results.batch_size

    def _remember(self, hook: str, name: str, flags: tuple[Any, ...], value: Any) -> None:
        key, index = f"{hook}.{name}", self._results.dataloader_idx
        if index is not None and flags[_ADD_DATALOADER_IDX]:
            key += f".{index}"
        entry = self._results.get(key)
        if isinstance(entry, MetricSlot):
            if not entry.meta.sync.should:
                self._declared[hook, name] = (flags, entry)
        elif entry is not None and isinstance(value, Metric):
            self._declared[hook, name] = (flags, entry)


def can_replace_log(module: LightningModule) -> bool:
    """Return whether `module.log` is stock Lightning's own, so that `StepLog` may stand in for it."""
    return "log" not in module.__dict__ and type(module).log is LightningModule.log


def note_metric(entry: Any) -> None:
    """Note that the torchmetrics object of `entry` has a new forward value."""
    d = entry.__dict__
    d["_forward_cache"] = d["value"]._forward_cache
    d["_computed"] = None
    d["_update_count"] += 1
    d["has_reset"] = False


def batch_size_of(batch: Any) -> int:
    """Return the batch size as stock Lightning finds it, without its recursion for the common flat batch."""
    if type(batch) in (tuple, list) and batch:
        sizes = {item.size(0) for item in batch if type(item) is Tensor and item.dim() > 0}
        if len(sizes) == 1 and all(type(item) is Tensor and item.dim() > 0 for item in batch):
            return int(sizes.pop())
    elif type(batch) is torch.Tensor and batch.dim() > 0:
        return batch.size(0)
    return extract_batch_size(batch)
