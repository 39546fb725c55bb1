# ruff: noqa: D102 -- what each check sees is documented at Rule
"""ZD515: metrics that look at their arguments on the host."""

import ast
import re

from zdtrain.lint.expressions import Walk
from zdtrain.lint.infer import is_constant, keyword
from zdtrain.lint.rules.base import AnywhereRule

_CLASSIFICATION = re.compile(
    r"^(?:Binary|Multiclass|Multilabel)\w+$|^(?:Accuracy|Precision|Recall|F1Score|FBetaScore|Specificity|StatScores|"
    r"AUROC|ROC|AveragePrecision|PrecisionRecallCurve|ConfusionMatrix|JaccardIndex|CohenKappa|MatthewsCorrCoef|"
    r"CalibrationError|HingeLoss|ExactMatch|HammingDistance)$"
)
_AGGREGATION = frozenset(
    {"MeanMetric", "SumMetric", "MaxMetric", "MinMetric", "CatMetric", "RunningMean", "RunningSum"}
)


class MetricChecks(AnywhereRule):
    """Finds a torchmetrics metric that is updated in the step and checks its arguments there.

    ## Why
    Classification metrics compare the labels with the number of classes, aggregations look for NaN; both decide in
    Python, so every update waits for the device.

    ## Example
    ```python
    import torchmetrics

    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.accuracy = torchmetrics.classification.BinaryAccuracy()

        def training_step(self, batch, batch_idx):
            out = self.layer(batch[0])
            self.accuracy(out, batch[1])
            return F.binary_cross_entropy_with_logits(out, batch[1])
    ```

    ## Use instead
    `validate_args=False`, for aggregations `nan_strategy="disable"`, or the metrics of `zdtrain.metrics`. Multiclass
    metrics also count labels in a way that waits; `zdtrain.metrics.Accuracy` does not.
    ```python
    import torchmetrics

    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.accuracy = torchmetrics.classification.BinaryAccuracy(validate_args=False)

        def training_step(self, batch, batch_idx):
            out = self.layer(batch[0])
            self.accuracy(out, batch[1])
            return F.binary_cross_entropy_with_logits(out, batch[1])
    ```

    ## When to allow
    While the labels are not trusted yet.
    """

    code = "ZD515"
    name = "metric-checks"
    statements = (ast.Assign,)

    def check_statement(self, node: ast.stmt, flow: Walk) -> None:
        assert isinstance(node, ast.Assign)
        if flow.owner is None or not isinstance(node.value, ast.Call):
            return
        name = flow.dotted(node.value.func)
        remedy = _remedy(name.rpartition(".")[2], node.value) if name.startswith("torchmetrics.") else ""
        target = node.targets[0]
        if not remedy or not isinstance(target, ast.Attribute) or not flow.is_self(target.value):
            return
        step = flow.source.method(flow.owner, "training_step")
        text = flow.source.segment(step) if step is not None else ""
        if f"self.{target.attr}(" in text or f"self.{target.attr}.update(" in text:
            flow.report(
                self, node.value, f"every update of `self.{target.attr}` reads its arguments back; pass {remedy}"
            )


def _remedy(metric: str, made: ast.Call) -> str:
    """The option that switches a metric's checks off; empty if it has none or is given it."""
    if any(item.arg is None for item in made.keywords):
        return ""
    if _CLASSIFICATION.match(metric):
        return "" if is_constant(keyword(made, "validate_args"), False) else "validate_args=False"
    if metric in _AGGREGATION:
        given = keyword(made, "nan_strategy")
        disabled = isinstance(given, ast.Constant) and given.value == "disable"
        return "" if disabled else 'nan_strategy="disable"'
    return ""


RULES = (MetricChecks,)
