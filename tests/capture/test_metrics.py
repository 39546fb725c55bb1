"""torchmetrics in captured steps: which are captured with their default arguments, which are not, and why."""

import sys

import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import aggregation, classification, regression

from zdtrain.readless import readless_metrics

from .runs import CLASSES, FEATURES, Classifier, assert_same, batches, both, codes, fit

COUNTING = (
    *("Accuracy", "F1Score", "Precision", "Recall", "Specificity", "StatScores", "HammingDistance"),
    *("ConfusionMatrix", "JaccardIndex", "MatthewsCorrCoef", "NegativePredictiveValue"),
)
CURVES = ("AUROC", "AveragePrecision", "ROC", "PrecisionRecallCurve")
REGRESSION = (
    *("MeanSquaredError", "MeanAbsoluteError", "R2Score", "ExplainedVariance", "PearsonCorrCoef", "LogCoshError"),
    *("ConcordanceCorrCoef", "MeanAbsolutePercentageError", "SymmetricMeanAbsolutePercentageError"),
    *("WeightedMeanAbsolutePercentageError", "RelativeSquaredError", "NormalizedRootMeanSquaredError"),
    "MeanSquaredLogError",
)


def scores(out, y):
    return out.softmax(1), y


def logits(out, y):
    return out, y


def labels(out, y):
    return out.argmax(1), y


def binary_scores(out, y):
    return out.sigmoid()[:, 0], (y == 0).long()


def binary_logits(out, y):
    return 3 * out[:, 0], (y == 0).long()


def binary_labels(out, y):
    return (out[:, 0] > 0).long(), (y == 0).long()


def multilabel(out, y):
    return out.sigmoid(), nn.functional.one_hot(y, CLASSES)


def numbers(out, y):
    return out[:, 0].exp(), y + 1.0


def of_values(out, y):
    return (out[:, 0],)


def of(kind, names, task_options, inputs, **options):
    """Return metrics of a task by name, with what they take."""
    found = {}
    for name in names:
        metric = getattr(classification, kind + name)
        label = "_".join([kind, name, inputs.__name__, *options])
        found[label] = (lambda metric=metric: metric(**task_options, **options), inputs)
    return found


MULTICLASS, MULTILABEL = {"num_classes": CLASSES}, {"num_labels": CLASSES}
CAPTURED = {
    **of("Multiclass", (*COUNTING, "CohenKappa"), MULTICLASS, logits),
    **of("Multiclass", ("Accuracy", "JaccardIndex"), MULTICLASS, labels),
    **of("Multiclass", ("Accuracy", "F1Score", "StatScores", "ConfusionMatrix"), MULTICLASS, scores, ignore_index=1),
    **of("Multiclass", ("Accuracy", "StatScores"), MULTICLASS, labels, ignore_index=-100, average="micro"),
    **of("Multiclass", ("Accuracy",), MULTICLASS, logits, top_k=2),
    **of("Multiclass", ("Precision",), MULTICLASS, labels, average="weighted"),
    **of("Multiclass", CURVES, MULTICLASS, logits, thresholds=5),
    **of("Binary", (*COUNTING, "CohenKappa"), {}, binary_logits),
    **of("Binary", ("Accuracy", "JaccardIndex"), {}, binary_labels),
    **of("Binary", ("Accuracy", "ConfusionMatrix", "CohenKappa"), {}, binary_logits, ignore_index=1),
    **of("Binary", ("ConfusionMatrix",), {}, binary_scores, ignore_index=-1),
    **of("Binary", CURVES, {}, binary_logits, thresholds=5),
    **of("Multilabel", COUNTING, MULTILABEL, multilabel),
    **of("Multilabel", ("Accuracy", "ConfusionMatrix"), MULTILABEL, multilabel, ignore_index=0),
    **of("Multilabel", CURVES, MULTILABEL, multilabel, thresholds=5),
    **of("Multilabel", ("ROC",), MULTILABEL, multilabel, thresholds=5, ignore_index=1),
    **of("Multilabel", ("ExactMatch", "CoverageError"), MULTILABEL, multilabel),
    **{name: (getattr(regression, name), numbers) for name in REGRESSION},
    **{name: (getattr(aggregation, f"{name}Metric"), of_values) for name in ("Mean", "Sum", "Max", "Min")},
    "mean_error": (lambda: aggregation.MeanMetric(nan_strategy="error"), of_values),
    "mean_weighted": (aggregation.MeanMetric, lambda out, y: (out[0], (y[:CLASSES] + 1).float())),
    "collection": (
        lambda: torchmetrics.MetricCollection(
            [classification.MulticlassAccuracy(CLASSES), classification.MulticlassF1Score(CLASSES)]
        ),
        logits,
    ),
    "classwise": (
        lambda: torchmetrics.wrappers.ClasswiseWrapper(classification.MulticlassAccuracy(CLASSES, average=None)),
        logits,
    ),
    "task": (lambda: torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES, average="macro"), logits),
}


def measured(metrics, inputs):
    """Return a module that updates metrics in its step and computes them at an epoch's end."""

    class Measured(Classifier):
        def __init__(self):
            super().__init__()
            self.metrics = nn.ModuleDict({name: make() for name, make in metrics.items()})
            self.computed = []

        def training_step(self, batch, batch_idx):
            x, y = batch
            out = self.net(x)
            for name, metric in self.metrics.items():
                metric.update(*inputs[name](out.detach(), y))
            loss = nn.functional.cross_entropy(out, y)
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

        def on_train_epoch_end(self):
            for metric in self.metrics.values():
                self.computed.append(metric.compute())
                metric.reset()

    return Measured


def flat(value):
    return torch.utils._pytree.tree_leaves(value)


@pytest.mark.parametrize("first", range(0, len(CAPTURED), 20))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_metric_with_default_arguments_is_captured_and_equals_torchmetrics(tmp_path, first):
    cases = dict(list(CAPTURED.items())[first : first + 20])
    module = measured({name: make for name, (make, _) in cases.items()}, {name: of for name, (_, of) in cases.items()})
    options = {"max_epochs": 2, "loader": lambda: batches(7, rest=5)}
    eager, captured = (fit(tmp_path, module, capture, **options) for capture in ("off", "graph"))
    assert_same(eager, captured)
    assert codes(captured) == set()
    assert captured.report.steps_replayed >= 8
    assert len(captured.module.computed) == 2 * len(cases)
    for name, want, have in zip([*cases] * 2, eager.module.computed, captured.module.computed, strict=True):
        for one, other in zip(flat(want), flat(have), strict=True):
            assert one.dtype == other.dtype, name
            assert torch.equal(one.nan_to_num(-1), other.nan_to_num(-1)), f"{name}: {one} != {other}"


REFUSED = {
    "curve": (lambda: classification.MulticlassAUROC(CLASSES), logits, "metric-list-state", "thresholds="),
    "calibration": (lambda: classification.MulticlassCalibrationError(CLASSES), logits, "metric-list-state", "list"),
    "rank correlation": (lambda: regression.SpearmanCorrCoef(), numbers, "metric-list-state", "list"),
    "curve that ignores": (
        lambda: classification.BinaryAUROC(thresholds=5, ignore_index=1),
        binary_logits,
        "host-read",
        "without_host_reads",
    ),
    "hinge": (lambda: classification.MulticlassHingeLoss(CLASSES), logits, "host-read", "without_host_reads"),
    "ranking": (lambda: classification.MultilabelRankingLoss(CLASSES), multilabel, "host-read", "without_host_reads"),
    "filled": (lambda: aggregation.MeanMetric(nan_strategy=0.0), of_values, "host-read", "without_host_reads"),
    "all": (lambda: aggregation.CatMetric(), lambda out, y: (out[0, 0],), "metric-list-state", "list"),
    "running": (lambda: aggregation.RunningMean(3), lambda out, y: (out[0, 0],), "python-state", "_num_vals_seen"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_metric_that_is_not_captured_is_named_with_what_helps(tmp_path, name):
    make, inputs, code, says = REFUSED[name]
    module = measured({"metric": make}, {"metric": inputs})
    captured = both(tmp_path, module, max_epochs=1, loader=lambda: batches(7))
    assert any(reason.code == code and says in reason.message for reason in captured.report.fallbacks), codes(captured)
    assert captured.report.steps_replayed == 0


def labelled(*values):
    """Return a loader of six batches of four with these labels, the last repeated."""
    y = torch.tensor([*values[:-1], *[values[-1]] * (25 - len(values))])
    x = torch.randn(len(y), FEATURES, generator=torch.Generator().manual_seed(0))
    return lambda: DataLoader(TensorDataset(x, y), batch_size=4)


class Counted(Classifier):
    """Has no loss that would look at labels."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.count(self.net(x).detach(), y)
        return self.net(x).square().mean()


def counted(make, inputs):
    class Module(Counted):
        def __init__(self):
            super().__init__()
            self.metric = make()

        def count(self, out, y):
            self.metric.update(*inputs(out, y))

    return Module


def binary_targets(out, y):
    return out[:, 0], y


def binary_columns(out, y):
    return out[:, :2], y[:, None].repeat(1, 2)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    ("make", "inputs", "good", "bad", "says"),
    [
        (lambda: classification.BinaryAccuracy(), binary_targets, 1, 2, "`target`"),
        (lambda: classification.MultilabelROC(2, thresholds=3), binary_columns, 1, 2, "`target`"),
        (lambda: classification.BinaryAUROC(thresholds=3), binary_targets, 1, 3, "index|shape"),
        (lambda: classification.MulticlassAccuracy(CLASSES), logits, 1, CLASSES, "index|shape"),
        (lambda: classification.MulticlassAccuracy(CLASSES), logits, 1, -1, "index|non-negative"),
        (lambda: classification.MulticlassConfusionMatrix(CLASSES, ignore_index=0), logits, 1, CLASSES, "index|shape"),
    ],
)
@pytest.mark.parametrize("capture", ["off", "graph"])
def test_labels_that_are_not_allowed_end_the_run(tmp_path, make, inputs, good, bad, says, first, capture):
    loader = labelled(*[bad if first else good] * 4, *[good] * 16, bad)
    with pytest.raises(RuntimeError, match=says):
        fit(tmp_path, counted(make, inputs), capture, loader=loader, max_epochs=1)


@pytest.mark.parametrize("replays", [False, True])
def test_more_different_labels_than_classes_end_the_run(tmp_path, replays):
    make = lambda: classification.MulticlassAUROC(CLASSES, thresholds=3)  # noqa: E731
    loader = labelled(*[0, 1, 2, 2] * (5 if replays else 1), 0, 1, 2, 3, 0)
    with pytest.raises(RuntimeError, match=r"more (different|unique) values"):
        fit(tmp_path, counted(make, logits), "graph", loader=loader, max_epochs=1)


def test_torchmetrics_is_as_it_was_after_a_run(tmp_path):
    stat_scores = sys.modules["torchmetrics.functional.classification.stat_scores"]
    before = {name: value for name, value in vars(stat_scores).items() if callable(value)}
    one_hot = nn.functional.one_hot
    seen = []

    class Looks(Classifier):
        def on_train_start(self):
            seen.append(stat_scores._bincount)

    fit(tmp_path, Looks, "graph", max_epochs=1, loader=lambda: batches(2))
    assert seen[0] is not before["_bincount"]
    assert {name: value for name, value in vars(stat_scores).items() if callable(value)} == before
    assert nn.functional.one_hot is one_hot


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_ignored_labels_of_every_dtype_are_left_out(dtype):
    y = torch.tensor([0, 1, 2, 2, 1, 0], dtype=dtype)
    metrics = [classification.MulticlassJaccardIndex(CLASSES, ignore_index=2) for _ in range(2)]
    metrics[0].update(y.flip(0), y)
    with readless_metrics():
        metrics[1].update(y.flip(0), y)
    assert torch.equal(metrics[0].confmat, metrics[1].confmat)


def test_counts_are_those_of_deterministic_algorithms(monkeypatch):
    y = torch.tensor([0, 1, 2, 2, 1, 0])
    metrics = [classification.MulticlassConfusionMatrix(CLASSES, ignore_index=2) for _ in range(2)]
    with readless_metrics():
        for metric, deterministic in zip(metrics, (False, True), strict=True):
            monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda d=deterministic: d)
            metric.update(y.flip(0), y)
    assert torch.equal(metrics[0].confmat, metrics[1].confmat)


@pytest.mark.parametrize("weights", [torch.tensor([1, 2, 3]), torch.tensor([0.3, float("nan"), 0.1]), 0.3])
def test_weights_count_as_in_torchmetrics(weights):
    metrics = [aggregation.MeanMetric(nan_strategy="ignore") for _ in range(2)]
    values = torch.tensor([[1.0, float("nan"), 2.0], [7.0, 0.1, 1e-3]])
    metrics[0].update(values, weights)
    with readless_metrics():
        metrics[1].update(values, weights)
    assert torch.equal(metrics[0].compute(), metrics[1].compute())


@pytest.mark.parametrize("kind", [aggregation.MeanMetric, aggregation.SumMetric, aggregation.MaxMetric])
@pytest.mark.parametrize("strategy", ["ignore", "warn"])
@pytest.mark.filterwarnings("ignore:Encountered `nan` values:UserWarning")
def test_nan_has_the_part_that_the_strategy_says(kind, strategy):
    metrics = [kind(nan_strategy=strategy) for _ in range(2)]
    values = [torch.tensor([1.0, float("nan"), 2.0]), torch.tensor(float("nan")), 3.0, torch.tensor(4)]
    for value in values:
        metrics[0].update(value.clone() if isinstance(value, torch.Tensor) else value)
    with readless_metrics():
        for value in values:
            metrics[1].update(value)
    assert torch.equal(metrics[0].compute(), metrics[1].compute())
    assert values[0].isnan().any()


def test_nan_ends_the_run_where_it_is_an_error(tmp_path):
    x, y = batches(6).dataset.tensors
    x[-1] = float("nan")
    loader = lambda: DataLoader(TensorDataset(x, y), batch_size=8)  # noqa: E731
    with pytest.raises(RuntimeError, match="there is NaN"):
        fit(tmp_path, counted(lambda: aggregation.SumMetric(nan_strategy="error"), of_values), "graph", loader=loader)
