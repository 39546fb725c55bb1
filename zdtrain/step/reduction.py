"""Metrics reduced over processes: all 0-D values that go the same way travel in one vector, with one all-reduce."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.connectors.logger_connector.result import _Sync
from torch import Tensor

_KNOWN = {strategy.reduce for strategy in (DDPStrategy, FSDPStrategy, ModelParallelStrategy)}  # all do the same
_OPERATIONS = {"mean": "SUM", "sum": "SUM", "max": "MAX", "min": "MIN"}  # by name: not every torch has processes
_HEADER = 2
_STEP = 64  # sizes are multiples of it: processes that hold different numbers of values still meet


class Name(NamedTuple):
    """What a value is called in all processes; its order is the order of the values in the vector."""

    metric: str
    part: str = ""


class _Lane(NamedTuple):
    """What the values of one all-reduce share."""

    group: Any
    operation: str
    device: torch.device


def is_reduced(sync: _Sync) -> bool:
    """Return whether `sync` changes a value at all."""
    return sync.should and not sync.rank_zero_only


def goes_packed(sync: _Sync) -> bool:
    """Return whether `sync` is an all-reduce that its values can share with others; if not, calling it is the way."""
    return (
        is_reduced(sync)
        and getattr(sync.fn, "__func__", None) in _KNOWN
        and sync.op in _OPERATIONS
        and dist.is_available()
        and dist.is_initialized()
        and dist.get_rank(sync.group) >= 0
    )


def reduce_packed(values: Mapping[Name, tuple[Tensor, _Sync]]) -> dict[Name, Tensor]:
    """Reduce `values` over processes, with one all-reduce per process group, kind of reduction and device.

    Means and sums share theirs. Sums are carried in float64 and rounded to the dtype of the value: two processes get
    the bits of stock Lightning, more may differ from it in the last bit, as an all-reduce of another size does. The
    order of the vector is that of the names, whatever order the metrics were logged in.

    Args:
        values: 0-D tensors and how to reduce each; see `goes_packed`.

    Returns:
        The reduced values by name, shape=(), with the dtype of what came in; views of few vectors.

    Raises:
        RuntimeError: The processes hold different numbers of values; on CUDA an assertion on the device fails instead.
    """
    lanes: defaultdict[_Lane, list[Name]] = defaultdict(list)
    for name in sorted(values):
        value, sync = values[name]
        group = dist.group.WORLD if sync.group is None else sync.group
        lanes[_Lane(group, _OPERATIONS[str(sync.op)], value.device)].append(name)
    reduced: dict[Name, Tensor] = {}
    for lane, names in lanes.items():
        total = _all_reduce(lane, [values[name][0] for name in names], names)
        kinds = [(values[name][0].dtype, values[name][1].op == "mean") for name in names]
        rounded = {kind: _rounded(total, *kind, lane.group).unbind() for kind in set(kinds)}
        reduced.update((name, rounded[kind][i]) for i, (name, kind) in enumerate(zip(names, kinds, strict=True)))
    return reduced


def _all_reduce(lane: _Lane, values: Sequence[Tensor], names: Sequence[Name]) -> Tensor:
    """Return the reduced `values` side by side, shape=(n,), float64, behind a check that all processes hold n."""
    held, used = len(values), _HEADER + len(values)
    vector = torch.zeros(-(-used // _STEP) * _STEP, dtype=torch.float64, device=lane.device)
    vector[0].fill_(held)
    vector[1].fill_(-held)  # so that maxima and minima tell, too
    vector[_HEADER:used].copy_(_side_by_side(values))
    expected = vector[:_HEADER].clone()
    dist.all_reduce(vector, op=getattr(dist.ReduceOp, lane.operation), group=lane.group)
    if lane.operation == "SUM":
        expected.mul_(dist.get_world_size(lane.group))
    torch._assert_async((vector[:_HEADER] == expected).all(), _message(names))
    return vector[_HEADER:used]


def _side_by_side(values: Sequence[Tensor]) -> Tensor:
    if len({value.dtype for value in values}) > 1:  # which stack would promote to a dtype that does not hold integers
        values = [value.to(torch.float64) for value in values]
    return torch.stack(list(values))


def _rounded(total: Tensor, dtype: torch.dtype, is_mean: bool, group: Any) -> Tensor:
    """Return `total` in `dtype`, divided for a mean as stock Lightning divides: integers lose their fraction."""
    result = total.to(dtype, copy=True)
    if not is_mean:
        return result
    size = dist.get_world_size(group)
    return result.div_(size) if dtype.is_floating_point else result.copy_(result / size)


def _message(names: Sequence[Name]) -> str:
    held = ", ".join(dict.fromkeys(name.metric for name in names))
    return (
        f"The processes log different numbers of values with sync_dist=True; this one logs {held}. Log the same names "
        "in every process (rank_zero_only=True for those of one process), and read trainer.callback_metrics in "
        "training_step in every process or in none."
    )
