"""What `self.log` declared, kept in device-resident slots instead of one torchmetrics object per call."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _METRICS,
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    warning_cache,
)
from torch import Tensor
from torchmetrics import Metric

from zdtrain.slots import IDENTITY, Reduction, SlotBank, fold
from zdtrain.step.reduction import Name, goes_packed, is_reduced, reduce_packed

Declared = dict[tuple[str, str], tuple[tuple[Any, ...], Any]]
"""Flags of `self.log` calls and the entries that they declared, by hook and name."""


class MetricSlot(_ResultMetric):
    """One logged key: a 0-D cell for the step's value, a 0-D accumulator for the epoch, a weight counted on the host.

    Stock Lightning sees an ordinary `_ResultMetric`; only the storage differs. A value written in a step is folded into
    the epoch when the step ends (`StepResults.commit`) or when somebody reads, whichever comes first.

    Args:
        meta: Flags of the `self.log` call.
    """

    bank: SlotBank | None
    index: int
    cell: Tensor  # shape=(), this step's value
    total: Tensor  # shape=(), accumulated over the epoch

    def __init__(self, meta: _Metadata) -> None:
        Metric.__init__(self)  # not _ResultMetric's: it would register states of its own
        self.is_tensor = True
        self.meta = meta
        self.has_reset = True  # nothing to show before the first value
        self.reduction: Reduction = meta.reduce_fx.__name__ if meta.on_epoch else "step"  # type: ignore[assignment]
        self.weight: Any = 0  # batch sizes seen this epoch; a Tensor where the user logs tensor batch sizes
        self.pending: Any = None  # batch size of a value that is not folded into the epoch yet
        self.bank = None  # chosen when the first value tells device and dtype

    def attach(self, bank: SlotBank) -> None:
        """Take a cell of `bank`; what an earlier cell accumulated comes along."""
        earlier = self.__dict__.get("total")
        self.bank = bank
        self.index, self.cell, self.total = bank.allocate()
        if earlier is not None:
            self.total.copy_(earlier)

    @property
    def value(self) -> Tensor:
        """Epoch accumulator, shape=(); for a step-only slot the last value."""
        self.settle()
        return self.cell if self.reduction == "step" else self.total

    @property
    def cumulated_batch_size(self) -> Tensor:  # type: ignore[override]
        """Sum of the batch sizes that a mean was weighted with, shape=(), dtype=int64."""
        self.settle()
        weight, device = self.weight, self.cell.device
        # filled, not copied: a copy of a host number would wait for the device
        return weight.to(device) if isinstance(weight, Tensor) else torch.full((), weight, device=device)

    def write(self, value: Tensor | float, batch_size: Any) -> None:
        """Put the step's value into the cell, to be folded into the epoch later."""
        d = self.__dict__  # nn.Module's attribute machinery costs more than the update
        if d["pending"] is not None:
            self.settle()
        if isinstance(value, Tensor):
            d["cell"].copy_(value.detach(), non_blocking=True)
        else:
            d["cell"].fill_(value)
        d["pending"] = batch_size
        bank, index = d["bank"], d["index"]
        bank.written[index] = self
        bank.fresh.add(index)

    def take(self, value: Tensor, batch_size: Any) -> None:
        """Write a value that stock Lightning has checked."""
        if not torch.is_floating_point(value):
            warn_not_floating(self.meta, self.cell.dtype)
        self.write(value, batch_size)

    def settle(self) -> None:
        """Fold a pending value into the epoch by itself."""
        if self.pending is None:
            return
        value = self.cell * self.pending if self.reduction == "mean" else self.cell
        fold(self.reduction, self.total, value)
        self.note_folded()

    def note_folded(self) -> None:
        """Do the host's share of an update: counts and stale caches."""
        d = self.__dict__
        d["weight"] = d["weight"] + d["pending"]
        d["pending"] = None
        d["has_reset"] = False
        d["_computed"] = None
        d["_update_count"] += 1

    def parts(self) -> dict[str, Tensor]:
        """Return what of the epoch's value is reduced over processes, shape=() each."""
        parts = {"value": self.value}
        if self.reduction == "mean":
            parts["weight"] = self.cumulated_batch_size
        return parts

    def compute(self) -> Tensor:
        """Return the epoch's value, reduced over processes where the user asked for it."""
        sync = self.meta.sync
        if goes_packed(sync):
            name = f"{self.meta.fx}.{self.meta.name}"
            return computed({name: self})[name]
        value: Tensor = sync(self.value.clone())
        if self.reduction == "mean":
            value = value / (sync(self.cumulated_batch_size) if sync.should else self.weight)
        return value

    def reset(self) -> None:
        """Start a new epoch at the same addresses."""
        d = self.__dict__
        if self.bank is not None:
            self.total.fill_(IDENTITY[self.reduction])
        d["weight"], d["pending"], d["_computed"], d["_update_count"], d["has_reset"] = 0, None, None, 0, True

    def to(self, *args: Any, **kwargs: Any) -> "MetricSlot":
        """Leave the bank for storage of its own, where the device changes (teardown)."""
        if self.bank is None:
            return self
        self.settle()
        d = self.__dict__
        for name in ("cell", "total", "_computed"):
            if isinstance(d[name], Tensor):
                moved = d[name].to(*args, **kwargs)
                d["bank"] = self.bank if moved is d[name] else None
                d[name] = moved
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.meta.name!r}, value={self.value}, weight={self.weight})"


class StepResults(_ResultCollection):
    """The results of one loop, with its 0-D tensors in banks.

    Values that a slot cannot hold (torchmetrics objects, values logged with their graph) stay stock `_ResultMetric`s.
    """

    layout = 0  # changes when something is logged for the first time, or moves to another cell

    def __init__(self, training: bool) -> None:
        super().__init__(training)
        self.banks: list[SlotBank] = []
        self.declared: dict[int | None, Declared] = {}  # by index of the data loader
        self.behind: Callable[[], None] | None = None  # puts the step's values into cells that are ahead of it
        self._unreduced: dict[str, MetricSlot] = {}  # whose cells hold this process's value and should hold all's
        self._reduced: dict[str, Tensor] = {}  # what the cells of such slots held after the latest reduction
        self._gathers = False

    def __setitem__(self, key: str, metric: _ResultMetric) -> None:
        """Keep what `log` declares as a slot, where a slot can hold it."""
        if metric.is_tensor and not metric.meta.enable_graph and not isinstance(metric, MetricSlot):
            metric = MetricSlot(metric.meta)
        self.layout += 1
        super().__setitem__(key, metric)

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        """Store one value that `log` has checked."""
        metric = self[key]
        if isinstance(metric, MetricSlot):
            self._fit(metric, value)
            metric.take(value, batch_size)
            if metric.meta.on_step and is_reduced(metric.meta.sync):
                self._unreduced[key] = metric
                if not self._gathers:
                    self.reduce_step()
        else:
            super().update_metrics(key, value, batch_size)

    @contextmanager
    def reduced_together(self) -> Iterator[None]:
        """Reduce the step values that the body logs with sync_dist at its end, or when somebody reads, in one go.

        The body is what every process runs to its end before anything else that processes do together.
        """
        self._gathers = True
        try:
            yield
        except BaseException:
            self._take_back_unreduced()  # the other processes may not come this far
            raise
        finally:
            self._gathers = False
        self.reduce_step()

    def _take_back_unreduced(self) -> None:
        """Let the step's values that will not be reduced make way for those of the step before."""
        for key, slot in self._unreduced.items():
            slot.pending = None
            if key in self._reduced:
                slot.cell.copy_(self._reduced[key])
            else:
                slot.reset()
        self._unreduced.clear()

    def reduce_step(self) -> None:
        """Put the values of all processes into cells that hold this process's."""
        if not self._unreduced:
            return
        slots, self._unreduced = self._unreduced, {}
        self.commit()  # the epoch is reduced once, at its end: it takes this process's values
        packed = {key: slot for key, slot in slots.items() if goes_packed(slot.meta.sync)}
        for key, slot in slots.items():
            if key not in packed:
                slot.cell.copy_(slot.meta.sync(slot.cell.clone()))
        if packed:
            reduced = reduce_packed({Name(key): (slot.cell, slot.meta.sync) for key, slot in packed.items()})
            values = {key: reduced[Name(key)] for key in packed}
            torch._foreach_copy_([slot.cell for slot in packed.values()], list(values.values()))
            self._reduced.update(values)

    def reduce_epoch(self) -> None:
        """Compute the epoch's values that are reduced over processes, in one go.

        To be called where every process has logged what it logs in steps, and none has read an epoch's value: what is
        logged later, each process may read at another time, so it is reduced by itself, in the order of the calls.
        """
        self.commit()
        compute_together(
            {
                key: entry
                for key, entry in self.valid_items()
                if isinstance(entry, MetricSlot) and entry.meta.on_epoch and entry._computed is None
            }
        )

    def _fit(self, slot: MetricSlot, value: Tensor) -> None:
        """Give `slot` a bank that `value` fits: its device, its dtype or a wider one."""
        dtype = slot_dtype(value)
        if slot.bank is not None:
            dtype = torch.promote_types(slot.cell.dtype, dtype)
            if slot.cell.device == value.device and slot.cell.dtype == dtype:
                return
            slot.settle()
        self.layout += 1
        slot.attach(self._bank(value.device, dtype, slot.reduction))

    def _bank(self, device: torch.device, dtype: torch.dtype, reduction: Reduction) -> SlotBank:
        for bank in self.banks:
            if bank.key == (device, dtype, reduction) and not bank.full:
                return bank
        self.banks.append(SlotBank(device, dtype, reduction))
        return self.banks[-1]

    def commit(self) -> None:
        """Fold the values of the step that ended into the epoch: one operation for a bank that was written whole."""
        for bank in self.banks:
            if not bank.written:
                continue
            slots = bank.written.values()
            sizes = {slot.pending for slot in slots}
            size = sizes.pop()
            if len(slots) == bank.size and not sizes and type(size) is int:
                bank.accumulate_all(size)
                for slot in slots:
                    slot.note_folded()
            else:
                for slot in slots:
                    slot.settle()
            bank.written.clear()

    def catch_up(self) -> None:
        """Let the cells hold the values of the step whose turn it is, where the device has run later ones."""
        if self.behind is not None:
            show, self.behind = self.behind, None
            show()

    def end_step(self) -> None:
        """Close the step: fold its values, let go of its batch."""
        self.commit()
        for bank in self.banks:
            bank.fresh.clear()
        self.batch = None
        self.batch_size = None

    @staticmethod
    def _get_cache(result_metric: _ResultMetric, on_step: bool) -> Tensor | None:
        if on_step and isinstance(result_metric, MetricSlot):
            # a clone, because the next step overwrites the cell
            return result_metric.cell.clone() if result_metric.meta.on_step else None
        return _ResultCollection._get_cache(result_metric, on_step)

    def metrics(self, on_step: bool) -> _METRICS:
        """Return the current values as stock does, but with progress bar values left on the device."""
        self.catch_up()
        self.reduce_step()
        self.commit()
        found = _METRICS(callback={}, log={}, pbar={})
        for _, metric in self.valid_items():
            value = self._get_cache(metric, on_step)
            if not isinstance(value, Tensor):
                continue
            name, forked_name = self._forked_name(metric, on_step)
            if metric.meta.logger:
                found["log"][forked_name] = value
            if self.training or (metric.meta.on_epoch and not on_step):
                found["callback"][name] = value
                found["callback"][forked_name] = value
            if metric.meta.prog_bar:
                found["pbar"][forked_name] = value  # type: ignore[assignment]
        return found

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        """Start a new epoch for the metrics of one kind or hook; see the base class."""
        self.commit()
        super().reset(metrics=metrics, fx=fx)

    def to(self, *args: Any, **kwargs: Any) -> "StepResults":
        """Move all data; slots leave their banks."""
        self.commit()
        self.layout += 1
        for metric in self.values():
            metric.to(*args, **kwargs)
        return self


def compute_together(slots: Mapping[str, MetricSlot]) -> None:
    """Compute the epoch's values of those `slots` that share an all-reduce."""
    for key, value in computed({key: slot for key, slot in slots.items() if goes_packed(slot.meta.sync)}).items():
        slots[key].__dict__["_computed"] = value


def computed(slots: Mapping[str, MetricSlot]) -> dict[str, Tensor]:
    """Return the epoch's values of `slots`, all of them reduced over processes, shape=() each."""
    parts = {
        Name(key, part): (value, slot.meta.sync) for key, slot in slots.items() for part, value in slot.parts().items()
    }
    reduced = reduce_packed(parts)
    values: dict[str, Tensor] = {}
    for key in slots:
        value, weight = reduced[Name(key, "value")], reduced.get(Name(key, "weight"))
        values[key] = value.clone() if weight is None else value / weight  # not a view: nobody keeps the vector alive
    return values


def slot_dtype(value: Tensor) -> torch.dtype:
    """Return the dtype that `value` is kept in: float64 stays, all else takes the default dtype, at least float32."""
    return torch.float64 if value.dtype == torch.float64 else default_dtype()


def default_dtype() -> torch.dtype:
    """Return the dtype of the tensor that stock Lightning makes of a Python number."""
    default = torch.get_default_dtype()
    return default if default in (torch.float32, torch.float64) else torch.float32


def warn_not_floating(meta: _Metadata, dtype: torch.dtype) -> None:
    """Say once that an integer metric is stored as floating point, in stock Lightning's words."""
    warning_cache.warn(
        f"You called `self.log({meta.name!r}, ...)` in your `{meta.fx}` but the value needs to"
        f" be floating to be reduced. Converting it to {dtype}."
        " You can silence this warning by converting the value to floating point yourself."
        " If you don't intend to reduce the value (for instance when logging the global step or epoch) then"
        f" you can use `self.logger.log_metrics({{{meta.name!r}: ...}})` instead."
    )
