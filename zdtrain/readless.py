"""torchmetrics' own updates without host reads, for as long as a run lasts.

Many classification metrics count with ``torch.bincount`` or leave out what a mask says, whose results are as long as
the values ask for, and look at the values they were given (``validate_args=True``); aggregations look for NaN. All of
it waits for the device. Here counts are additions in place, what is left out has no weight, and values are looked at
by the host once for each layout, and on the device from then on. Results are torchmetrics' own.
"""

import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import MaxMetric, MeanMetric, MinMetric, SumMetric
from torchmetrics.aggregation import BaseAggregator

Function = Callable[..., Any]

_IGNORED = -(2**40)  # a label that stands for one that is left out; no number of classes brings it near 0
_NEUTRAL = {MeanMetric: 0.0, SumMetric: 0.0, MaxMetric: -math.inf, MinMetric: math.inf}  # where there is NaN
_FUNCTIONAL = "torchmetrics.functional.classification"


class Substitute(NamedTuple):
    """What takes the place of a function that reads."""

    module: str
    """Where the function is defined."""
    name: str
    make: Callable[[Any], Function]
    """Makes the substitute from the function."""
    where: str = ""
    """The module whose calls change; empty for all of torchmetrics."""


@contextmanager
def readless_metrics() -> Iterator[None]:
    """Let torchmetrics' classification metrics update without host reads in the body.

    Raises:
        RuntimeError: In the body, where a metric meets values that it does not allow: from torchmetrics itself at the
            first batch of a layout, later from the operation on the device, which on CUDA is a failed assertion.
    """
    places = list(_places())
    for owner, name, _, substitute in places:
        setattr(owner, name, substitute)
    try:
        yield
    finally:
        for owner, name, original, _ in places:
            setattr(owner, name, original)


def _places() -> Iterator[tuple[Any, str, Any, Any]]:
    """Yield whose names are to stand for something else, the name, what it stands for and what it is to stand for."""
    checks_nan = BaseAggregator._cast_and_nan_check_input
    yield BaseAggregator, checks_nan.__name__, checks_nan, _nan_check(checks_nan)
    loaded = {name: module for name, module in sys.modules.items() if name.startswith(("torchmetrics.", "torch.nn."))}
    for wanted in _SUBSTITUTES:
        original = getattr(loaded.get(wanted.module), wanted.name, None)
        if original is not None:  # as in other versions of torchmetrics
            substitute = wanted.make(original)
            for module in loaded:
                if module.startswith(wanted.where) and vars(loaded[module]).get(wanted.name) is original:
                    yield loaded[module], wanted.name, original, substitute


def remedy(frame: FrameType | None) -> str:
    """Return what helps against a host read that runs now, where it is inside a metric; else an empty text.

    Args:
        frame: The function that reads.
    """
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("torchmetrics."):
            return (
                f" in {module}.{frame.f_code.co_name}; zdtrain.metrics.without_host_reads says what in a metric waits"
            )
        frame = frame.f_back
    return ""


# Counting.


def _count(x: Tensor, minlength: int) -> Tensor:
    """Count non-negative integers below `minlength`; others are an error, but for those that stand for nothing.

    Args:
        x: shape=(N,), integer.
        minlength: Length of the result.

    Returns:
        How often each number occurs; shape=(minlength,), int64.
    """
    x = x.long()
    if x.device.type not in ("cpu", "cuda") or torch.are_deterministic_algorithms_enabled():  # as torchmetrics does
        return (x.unsqueeze(1) == torch.arange(minlength, device=x.device)).sum(0)
    counted = (x > _IGNORED // 2).long()
    return torch.zeros(minlength, dtype=torch.long, device=x.device).scatter_add_(0, x * counted, counted)


def _bincount(bincount: Function) -> Function:
    def count(x: Tensor, minlength: int | None = None) -> Tensor:
        counts: Tensor = bincount(x) if minlength is None else _count(x, minlength)
        return counts

    return count


def _one_hot(one_hot: Function) -> Function:
    """On a CPU torch's own looks at the labels; on CUDA it does not."""

    def encode(tensor: Tensor, num_classes: int = -1) -> Tensor:
        if num_classes <= 0 or tensor.device.type != "cpu" or tensor.dtype != torch.long:
            return one_hot(tensor, num_classes)  # type: ignore[no-any-return]
        encoded = torch.zeros(*tensor.shape, num_classes, dtype=torch.long)
        return encoded.scatter_(-1, tensor.unsqueeze(-1), 1)

    return encode


def _probabilities(normalize: Function) -> Function:
    """On a CPU torchmetrics looks whether scores are probabilities; on CUDA it does not."""

    def normalized(tensor: Tensor, normalization: str | None) -> Tensor:
        if not normalization or tensor.device.type != "cpu":
            return normalize(tensor, normalization)  # type: ignore[no-any-return]
        scores = tensor.sigmoid() if normalization == "sigmoid" else tensor.softmax(1)
        return torch.where(((tensor >= 0) & (tensor <= 1)).all(), tensor, scores)

    return normalized


# Looking for NaN.


def _nan_check(check: Function) -> Function:
    def cast(self: Any, x: Any, weight: Any = None) -> tuple[Tensor, Tensor]:
        """Return values and weights in the dtype of the metric; what is NaN has no part in it, or ends the run."""
        neutral = next((value for kind, value in _NEUTRAL.items() if isinstance(self, kind)), None)
        weight = torch.ones_like(x) if weight is None and isinstance(x, Tensor) else weight
        tensors = [one for one in (x, weight) if isinstance(one, Tensor) and 0 not in one.stride()]
        if self.nan_strategy not in ("error", "warn", "ignore") or neutral is None or len(tensors) < 2:
            return check(self, x, weight)  # type: ignore[no-any-return]
        x, weight = x.to(self.dtype), weight.to(self.dtype)
        is_nan = x.isnan() | weight.isnan()
        if self.nan_strategy == "error":
            _require(~is_nan, "there is NaN", "nan_strategy='error'")
            return x, weight
        return _filled(x, is_nan, neutral), _filled(weight, is_nan, 0.0)

    return cast


def _filled(x: Tensor, where: Tensor, value: float) -> Tensor:
    """Return `x` with `value` in some places, laid out as it is: that decides the order in which it is summed."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(torch.where(where, value, x))


# Leaving out.


def _multiclass_scores(update: Function) -> Function:
    def scores(
        preds: Tensor,
        target: Tensor,
        num_classes: int,
        top_k: int = 1,
        average: str | None = "macro",
        multidim_average: str = "global",
        ignore_index: int | None = None,
    ) -> tuple[Tensor, ...]:
        """Return true and false positives, true and false negatives; int64."""
        if ignore_index is None or multidim_average == "samplewise" or top_k != 1:
            return update(preds, target, num_classes, top_k, average, multidim_average, ignore_index)  # type: ignore[no-any-return]
        preds, target = preds.flatten(), target.flatten()
        kept = target != ignore_index
        if average == "micro":
            right, wrong = ((preds == target) & kept).sum(), ((preds != target) & kept).sum()
            return right, wrong, num_classes * kept.sum() - (2 * wrong + right), wrong
        pairs = torch.where(kept, target.long() * num_classes + preds.long(), _IGNORED)
        confusion = _count(pairs, num_classes**2).reshape(num_classes, num_classes)
        right = confusion.diag()
        false_positive, false_negative = confusion.sum(0) - right, confusion.sum(1) - right
        return right, false_positive, confusion.sum() - (false_positive + false_negative + right), false_negative

    return scores


def _labels(label: Function) -> Function:
    """Mark the pairs of labels that are left out instead of taking them out."""
    signature = inspect.signature(label)

    @functools.wraps(label)
    def labels(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        given = signature.bind(*args, **kwargs)
        ignored = given.arguments.get("ignore_index")
        if ignored is None:
            return label(*args, **kwargs)  # type: ignore[no-any-return]
        target = given.arguments["target"]
        left_out = target == ignored
        if given.arguments["preds"].shape == target.shape:  # binary scores that are left out do not count as logits
            given.arguments["preds"] = given.arguments["preds"].masked_fill(left_out, 0)
        given.arguments["ignore_index"] = None
        given.arguments["target"] = torch.where(left_out, _IGNORED, target.long())
        return label(*given.args, **given.kwargs)  # type: ignore[no-any-return]

    return labels


def _multilabel_confusion(update: Function) -> Function:  # noqa: ARG001
    def confusion(preds: Tensor, target: Tensor, num_labels: int) -> Tensor:
        """Return counts by label, target and prediction, shape=(num_labels, 2, 2)."""
        cells = 2 * target + preds + 4 * torch.arange(num_labels, device=preds.device)
        return _count_from_zero(cells, 4 * num_labels).reshape(num_labels, 2, 2)

    return confusion


def _multilabel_curve(update: Function) -> Function:
    def curve(preds: Tensor, target: Tensor, num_labels: int, thresholds: Tensor | None) -> Any:
        """Return counts by threshold, label, target and prediction, shape=(thresholds, num_labels, 2, 2)."""
        if thresholds is None:
            return update(preds, target, num_labels, thresholds)
        above = (preds.unsqueeze(-1) >= thresholds).long()  # shape=(N, num_labels, thresholds)
        size = num_labels * len(thresholds)
        first = 4 * torch.arange(size, device=preds.device).reshape(-1, num_labels).T
        cells = above + 2 * target.long().unsqueeze(-1) + first
        return _count_from_zero(cells, 4 * size).reshape(len(thresholds), num_labels, 2, 2)

    return curve


def _count_from_zero(cells: Tensor, length: int) -> Tensor:
    """Count, but for negative numbers, which stand for what is left out."""
    return _count(torch.where(cells < 0, _IGNORED, cells).flatten(), length)


# Looking at values.


def _once_on_host(on_device: Callable[[dict[str, Any]], None], check: Function) -> Function:
    """Return `check` done by itself at the first call for a layout, and by `on_device` later."""
    signature = inspect.signature(check)
    seen: set[Any] = set()

    @functools.wraps(check)
    def checked(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs).arguments
        layout = tuple([(v.shape, v.dtype) if isinstance(v, Tensor) else (k, v) for k, v in given.items()])
        if layout in seen:
            on_device(given)
        else:
            check(*args, **kwargs)
            seen.add(layout)

    return checked


def _check_binary(given: dict[str, Any]) -> None:
    """Check labels that have to be 0 or 1, and predictions that are labels."""
    preds, target, ignored = given["preds"], given["target"], given.get("ignore_index")
    allowed = (target == 0) | (target == 1)
    if ignored is not None:
        allowed = allowed | (target == ignored)
    _require(allowed, "`target` holds other values than 0, 1 and an ignored one")
    if not preds.is_floating_point():
        _require((preds == 0) | (preds == 1), "`preds` are labels and hold other values than 0 and 1")


def _check_classes(given: dict[str, Any], *, of_scores: bool) -> None:
    """Check that there are not more labels than classes; `of_scores` where those beside scores are looked at, too."""
    num_classes, are_labels = given["num_classes"], not given["preds"].is_floating_point()
    if num_classes is None:
        return
    most = num_classes + (given.get("ignore_index") is not None)
    for name in ("target", "preds") if are_labels else ("target",) if of_scores else ():
        ordered = given[name].flatten().sort().values
        changes = (ordered[1:] != ordered[:-1]).sum()
        _require(changes < most, f"`{name}` holds more different values than there are classes")


def _require(holds: Tensor, message: str, option: str = "validate_args=True") -> None:
    torch._assert_async(holds.all(), f"{message} ({option} of a torchmetrics metric)")


_binary = functools.partial(_once_on_host, _check_binary)
_classes = functools.partial(_once_on_host, functools.partial(_check_classes, of_scores=False))
_classes_of_scores = functools.partial(_once_on_host, functools.partial(_check_classes, of_scores=True))
_SCORES, _CONFUSION, _CURVE = (
    f"{_FUNCTIONAL}.{name}" for name in ("stat_scores", "confusion_matrix", "precision_recall_curve")
)
_SUBSTITUTES = (
    Substitute("torchmetrics.utilities.data", "_bincount", _bincount),
    Substitute("torchmetrics.utilities.compute", "normalize_logits_if_needed", _probabilities),
    Substitute("torch.nn.functional", "one_hot", _one_hot),
    Substitute(_SCORES, "_multiclass_stat_scores_update", _multiclass_scores),
    Substitute(_CONFUSION, "_multilabel_confusion_matrix_update", _multilabel_confusion),
    Substitute(_CURVE, "_multilabel_precision_recall_curve_update", _multilabel_curve),
    # other metrics call these two as well, and work with what is left
    Substitute(_CONFUSION, "_binary_confusion_matrix_format", _labels, "torchmetrics.classification.confusion_matrix"),
    Substitute(
        _CONFUSION, "_multiclass_confusion_matrix_format", _labels, "torchmetrics.classification.confusion_matrix"
    ),
    Substitute(_SCORES, "_binary_stat_scores_tensor_validation", _binary),
    Substitute(_SCORES, "_multilabel_stat_scores_tensor_validation", _binary),
    Substitute(_SCORES, "_multiclass_stat_scores_tensor_validation", _classes),
    Substitute(_CONFUSION, "_binary_confusion_matrix_tensor_validation", _binary),
    Substitute(_CONFUSION, "_multilabel_confusion_matrix_tensor_validation", _binary),
    Substitute(_CONFUSION, "_multiclass_confusion_matrix_tensor_validation", _classes),
    Substitute(_CURVE, "_binary_precision_recall_curve_tensor_validation", _binary),
    Substitute(_CURVE, "_multiclass_precision_recall_curve_tensor_validation", _classes_of_scores),
)
