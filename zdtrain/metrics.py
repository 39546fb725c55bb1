"""torchmetrics whose `update` never waits for the device, and a switch for those of others."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torchmetrics import MaxMetric, MeanMetric, Metric, MetricCollection, MinMetric, SumMetric

from zdtrain.errors import ConfigError

_WAITING_OPS = {
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "allclose"),
    *("nonzero", "bincount", "masked_select", "repeat_interleave.Tensor"),
    *("unique", "_unique", "_unique2", "unique_dim", "unique_consecutive"),
}


class Mean(MeanMetric):
    """Weighted mean; NaN is averaged like any value instead of being looked for, which would wait for the device.

    ``torchmetrics.MeanMetric(nan_strategy="disable")`` does not wait either, but ignores the weights.

    Example:
        >>> mean = Mean()
        >>> mean.update(torch.tensor([1.0, 3.0]), weight=torch.tensor([3.0, 1.0]))
        >>> mean.compute()
        tensor(1.5000)
    """

    mean_value: Tensor
    weight: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(nan_strategy="disable", **kwargs)

    def update(self, value: float | Tensor, weight: float | Tensor | None = None) -> None:
        """Take in values.

        Args:
            value: A number or a tensor of any shape.
            weight: Broadcast to the shape of `value`; every value counts once if None.
        """
        values, weights = self._on_device(value), self._on_device(1.0 if weight is None else weight)
        weights = weights.broadcast_to(values.shape)
        self.mean_value += (values * weights).sum()
        self.weight += weights.sum()

    def _on_device(self, value: float | Tensor) -> Tensor:
        if isinstance(value, Tensor):
            return value.to(self.mean_value.dtype)
        return torch.full((), value, dtype=self.mean_value.dtype, device=self.mean_value.device)


class Sum(SumMetric):
    """Sum, without a search for NaN.

    Example:
        >>> total = Sum()
        >>> total.update(torch.tensor([1.0, 3.0]))
        >>> total.compute()
        tensor(4.)
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(nan_strategy="disable", **kwargs)


class Min(MinMetric):
    """Smallest value, without a search for NaN.

    Example:
        >>> smallest = Min()
        >>> smallest.update(torch.tensor([1.0, 3.0]))
        >>> smallest.compute()
        tensor(1.)
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(nan_strategy="disable", **kwargs)


class Max(MaxMetric):
    """Largest value, without a search for NaN.

    Example:
        >>> largest = Max()
        >>> largest.update(torch.tensor([1.0, 3.0]))
        >>> largest.compute()
        tensor(3.)
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(nan_strategy="disable", **kwargs)


class Accuracy(Metric):
    r"""Share of predictions that are right, :math:`\frac{1}{N} \sum_i [\hat y_i = y_i]`.

    The kind of prediction follows from shapes and dtypes alone, never from values: floating-point predictions with a
    class dimension more than the target (``(N, C, ...)`` for ``(N, ...)``) are scores, of which the largest wins;
    floating-point predictions of the target's shape are binary and compared with `threshold`; integer or bool
    predictions are labels.

    Args:
        threshold: A binary prediction above it means class 1: 0.5 for probabilities, 0.0 for logits.
        ignore_index: Targets with this label are not counted.
        kwargs: Options of ``torchmetrics.Metric``.

    Example:
        >>> accuracy = Accuracy()
        >>> accuracy.update(torch.tensor([[2.0, 1.0], [0.0, 3.0]]), torch.tensor([0, 0]))
        >>> accuracy.compute()
        tensor(0.5000)
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    correct: Tensor
    total: Tensor

    def __init__(self, *, threshold: float = 0.5, ignore_index: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.threshold = threshold
        self.ignore_index = ignore_index
        self.add_state("correct", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")  # shape=()
        self.add_state("total", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")  # shape=()

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Count a batch.

        Args:
            preds: Scores ``(N, C, ...)``, binary scores ``(N, ...)`` or labels ``(N, ...)``.
            target: Labels ``(N, ...)``, integer or bool.
        """
        labels = self._labels(preds, target)
        right = labels == target
        if self.ignore_index is None:
            self.total += target.numel()
        else:
            counted = target != self.ignore_index
            right = right & counted
            self.total += counted.sum()
        self.correct += right.sum()

    def _labels(self, preds: Tensor, target: Tensor) -> Tensor:
        if target.is_floating_point():
            raise ConfigError(f"Accuracy needs integer or bool targets, got {target.dtype}: use target.long()")
        if preds.is_floating_point() and preds.dim() == target.dim() + 1:
            preds = preds.argmax(dim=1 if preds.dim() > 1 else 0)
        elif preds.is_floating_point() and preds.shape == target.shape:
            preds = preds > self.threshold
        if preds.shape != target.shape:
            raise ConfigError(
                f"Accuracy got predictions of shape {tuple(preds.shape)} for targets of shape {tuple(target.shape)}: "
                "it needs (N, C, ...) or (N, ...) for targets (N, ...)"
            )
        return preds

    def compute(self) -> Tensor:
        """Return the share of right predictions, 0-D float32; NaN before the first."""
        return self.correct.float() / self.total


@dataclass(frozen=True, kw_only=True)
class ReadReport:
    """What `without_host_reads` did to a metric and what it could not do."""

    switched: tuple[str, ...]
    """Checks that were switched off, as ``metric.option``."""
    left: tuple[str, ...]
    """Metrics that still wait for the device or cannot be captured, each with why."""


def without_host_reads(metric: Metric | MetricCollection, *sample: Any) -> ReadReport:
    """Switch off, in place, the checks by which a torchmetrics metric waits for the device in `update`.

    Args:
        metric: A metric or a collection; metrics inside wrappers are found too.
        sample: Arguments of `update`. If given, every metric is updated once with them, on a copy, and what still waits
            is named. Without them only what is known without running is named.

    Returns:
        What was switched off and what is left.

    Example:
        >>> from torchmetrics.classification import BinaryAccuracy
        >>> without_host_reads(BinaryAccuracy()).switched
        ('BinaryAccuracy.validate_args',)
    """
    switched, left = [], []
    for name, part in _metrics(metric):
        if getattr(part, "validate_args", None) is True:
            part.validate_args = False
            switched.append(f"{name}.validate_args")
        if isinstance(part, MeanMetric) and part.nan_strategy != "disable":
            left.append(f"{name}: looks for NaN, and forgets its weights if told not to; use zdtrain.metrics.Mean")
        elif getattr(part, "nan_strategy", "disable") in ("error", "warn", "ignore"):
            part.nan_strategy = "disable"
            switched.append(f"{name}.nan_strategy")
        lists = [state for state, default in part._defaults.items() if isinstance(default, list)]
        if lists:
            left.append(f"{name}: keeps every batch in the list {lists[0]}, which a captured step cannot grow")
    if sample:
        left += [f"{name}: {ops}" for name, ops in _waits(metric, sample) if ops]
    return ReadReport(switched=tuple(switched), left=tuple(left))


def _metrics(metric: torch.nn.Module) -> Iterator[tuple[str, Metric]]:
    for path, part in metric.named_modules():
        if isinstance(part, Metric):
            kind = type(part).__name__
            yield (f"{path} ({kind})" if path else kind), part


def _waits(metric: Metric | MetricCollection, sample: tuple[Any, ...]) -> Iterator[tuple[str, str]]:
    members = (
        metric.items(keep_base=True) if isinstance(metric, MetricCollection) else [(type(metric).__name__, metric)]
    )
    for name, member in members:
        probe = member.clone()
        with _WaitingOps() as seen:
            probe.update(*sample)
        yield str(name), f"update waits for the device in {', '.join(seen.names)}" if seen.names else ""


class _WaitingOps(TorchDispatchMode):
    """Notes operations whose result size or value the host has to wait for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if name in _WAITING_OPS or f"{name}.{func._overloadname}" in _WAITING_OPS:
            self.names[name] = None
        elif name in ("index", "index_put_", "index_put") and _has_mask(args):
            self.names[f"{name} with a mask"] = None
        return func(*args, **(kwargs or {}))


def _has_mask(args: Any) -> bool:
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])
