"""Metrics whose update never waits, equal to those of torchmetrics."""

import pytest
import torch
import torchmetrics
from torch.utils._python_dispatch import TorchDispatchMode
from torchmetrics import classification

from zdtrain.errors import ConfigError
from zdtrain.metrics import Accuracy, Max, Mean, Min, Sum, without_host_reads

WAITING = ("_local_scalar_dense", "nonzero", "bincount", "aten.equal", "_unique2", "masked_select")


class Waits(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += any(name in str(func) for name in WAITING)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def batches():
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 3, generator=generator), torch.randint(0, 3, (8,), generator=generator)) for _ in range(4)]


@pytest.mark.parametrize(
    ("ours", "stock"),
    [
        (Mean, torchmetrics.MeanMetric),
        (Sum, torchmetrics.SumMetric),
        (Min, torchmetrics.MinMetric),
        (Max, torchmetrics.MaxMetric),
    ],
)
def test_aggregates_equal_torchmetrics_without_waiting(ours, stock, batches):
    metric, reference = ours(), stock()
    with Waits() as waits:
        for scores, _ in batches:
            metric.update(scores)
    for scores, _ in batches:
        reference.update(scores)
    assert waits.count == 0
    assert torch.equal(metric.compute(), reference.compute())


def test_mean_takes_weights(batches):
    mean, stock = Mean(), torchmetrics.MeanMetric()
    for scores, labels in batches:
        mean.update(scores.mean(1), labels + 1.0)
        stock.update(scores.mean(1), labels + 1.0)
    assert torch.equal(mean.compute(), stock.compute())
    for metric in (mean, stock):
        metric.reset()
        metric.update(2.0, weight=3)
        metric.update(torch.tensor(5.0, dtype=torch.bfloat16))
    assert mean.compute().item() == stock.compute().item() == 2.75


@pytest.mark.parametrize("as_labels", [False, True])
def test_multiclass_accuracy_equals_torchmetrics_without_waiting(batches, as_labels):
    metric, stock = Accuracy(), classification.MulticlassAccuracy(3, average="micro")
    with Waits() as waits:
        for scores, target in batches:
            metric.update(scores.argmax(1) if as_labels else scores, target)
    for scores, target in batches:
        stock.update(scores, target)
    assert waits.count == 0
    assert torch.equal(metric.compute(), stock.compute())


@pytest.mark.parametrize(("threshold", "activation"), [(0.5, torch.sigmoid), (0.0, lambda x: x)])
def test_binary_accuracy_equals_torchmetrics(batches, threshold, activation):
    metric, stock = Accuracy(threshold=threshold), classification.BinaryAccuracy()
    for scores, target in batches:
        metric.update(activation(scores[:, 0]), target > 0)
        stock.update(scores[:, 0].sigmoid(), (target > 0).long())
    assert metric.compute().item() == pytest.approx(stock.compute().item())


def test_ignored_labels_are_not_counted(batches):
    metric, stock = Accuracy(ignore_index=1), classification.MulticlassAccuracy(3, average="micro", ignore_index=1)
    for scores, target in batches:
        metric.update(scores, target)
        stock.update(scores, target)
    assert torch.equal(metric.compute(), stock.compute())


def test_accuracy_over_extra_dimensions_and_reset():
    metric = Accuracy()
    metric.update(torch.randn(2, 3, 4), torch.zeros(2, 4, dtype=torch.long))
    assert metric.total.item() == 8
    metric.reset()
    assert metric.total.item() == 0


@pytest.mark.parametrize(
    ("preds", "target", "message"),
    [
        (torch.randn(4, 3), torch.zeros(4, 3, 2).long(), r"shape \(4, 3\) for targets of shape \(4, 3, 2\)"),
        (
            torch.zeros(4, dtype=torch.long),
            torch.zeros(1, dtype=torch.long),
            r"shape \(4,\) for targets of shape \(1,\)",
        ),
        (torch.randn(4, 3), torch.zeros(4), "needs integer or bool targets, got torch.float32"),
    ],
)
def test_shapes_and_dtypes_that_do_not_fit_are_refused(preds, target, message):
    with pytest.raises(ConfigError, match=message):
        Accuracy().update(preds, target)


def test_switching_checks_off_keeps_the_result(batches):
    metric = classification.MulticlassAccuracy(3, average="micro")
    stock = classification.MulticlassAccuracy(3, average="micro")
    report = without_host_reads(metric, *batches[0])
    assert report.switched == ("MulticlassAccuracy.validate_args",)
    assert report.left == ()
    with Waits() as waits:
        for batch in batches:
            metric.update(*batch)
    for batch in batches:
        stock.update(*batch)
    assert waits.count == 0
    assert torch.equal(metric.compute(), stock.compute())


def test_what_cannot_be_switched_off_is_named(batches):
    scores, target = batches[0]
    collection = torchmetrics.MetricCollection(
        {"macro": classification.MulticlassAccuracy(3), "auroc": classification.MulticlassAUROC(3)}
    )
    report = without_host_reads(collection, scores.softmax(1), target)
    assert "macro (MulticlassAccuracy).validate_args" in report.switched
    assert "macro: update waits for the device in bincount" in report.left
    assert any("auroc" in line and "keeps every batch in the list preds" in line for line in report.left)


def test_a_sample_leaves_the_metric_as_it_was(batches):
    metric = torchmetrics.SumMetric()
    report = without_host_reads(metric, batches[0][0])
    assert report.switched == ("SumMetric.nan_strategy",)
    assert report.left == ()
    assert metric.update_count == 0


def test_a_mean_that_would_forget_its_weights_is_left_and_named(batches):
    metric = torchmetrics.MeanMetric()
    report = without_host_reads(metric, batches[0][0])
    assert report.switched == ()
    assert report.left == (
        "MeanMetric: looks for NaN, and forgets its weights if told not to; use zdtrain.metrics.Mean",
        "MeanMetric: update waits for the device in _local_scalar_dense",
    )
    metric.update(torch.tensor([1.0, 4.0]), weight=torch.tensor([2.0, 1.0]))
    assert metric.compute().item() == 2.0
