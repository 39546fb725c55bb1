"""Every rule's page is true: its example is found, and what it says to use instead is clean."""

import inspect
import re

import pytest

from zdtrain.lint.finding import Severity
from zdtrain.lint.linter import lint_source
from zdtrain.lint.rules.base import Rule
from zdtrain.lint.rules.registry import ALL
from zdtrain.lint.settings import LintSettings

IMPORTS = """\
import math
import random
import time

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F

"""
EVERYTHING = LintSettings(level=Severity.NOTE)


def section(rule: type[Rule], title: str) -> str:
    page = inspect.cleandoc(rule.__doc__ or "")
    return page.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]


def code_of(rule: type[Rule], title: str) -> str:
    found = re.search(r"```python\n(.*?)```", section(rule, title), re.DOTALL)
    assert found, f"{rule.code} has no code under {title}"
    return IMPORTS + found[1]


@pytest.mark.parametrize("rule", ALL.values(), ids=ALL)
def test_the_example_of_a_page_is_found_with_the_severity_of_the_rule(rule: type[Rule]) -> None:
    findings = lint_source(code_of(rule, "Example"), settings=EVERYTHING)
    assert rule.severity in [finding.severity for finding in findings if finding.code == rule.code]


@pytest.mark.parametrize("rule", ALL.values(), ids=ALL)
def test_what_a_page_says_to_use_instead_has_no_warning_of_any_rule(rule: type[Rule]) -> None:
    findings = lint_source(code_of(rule, "Use instead"), settings=EVERYTHING)
    assert [finding for finding in findings if finding.severity > Severity.NOTE or finding.code == rule.code] == [
        finding for finding in findings if finding.code == rule.code and rule.severity > finding.severity
    ]


@pytest.mark.parametrize("rule", ALL.values(), ids=ALL)
def test_a_page_has_its_sections_in_order(rule: type[Rule]) -> None:
    titles = re.findall(r"^## (.*)$", rule.page(), re.MULTILINE)
    assert titles == ["Why", "Example", "Use instead", "When to allow"]
    assert rule.page().startswith(f"# {rule.code} {rule.name}\n\nFinds ")
    assert len(section(rule, "When to allow").strip()) > 5


def test_codes_and_names_are_unique() -> None:
    assert len({rule.name for rule in ALL.values()}) == len(ALL)
    assert all(re.fullmatch(r"ZD[1-5]\d\d", code) and rule.code == code for code, rule in ALL.items())


def test_an_example_is_found_by_its_own_rule_when_only_that_is_selected() -> None:
    for code, rule in ALL.items():
        findings = lint_source(code_of(rule, "Example"), settings=LintSettings(select=(code,), level=Severity.NOTE))
        assert {finding.code for finding in findings} == {code}


@pytest.mark.parametrize(
    ("made", "used", "found"),
    [
        ("torchmetrics.Accuracy(task='binary')", "self.metric(batch[0], batch[1])", True),
        ("torchmetrics.MeanMetric()", "self.metric.update(batch[0])", True),
        ("torchmetrics.MeanMetric(nan_strategy='disable')", "self.metric.update(batch[0])", False),
        ("torchmetrics.Accuracy(task='binary', validate_args=False)", "self.metric(batch[0], batch[1])", False),
        ("torchmetrics.Accuracy(**options)", "self.metric(batch[0], batch[1])", False),
        ("torchmetrics.Accuracy(task='binary')", "pass", False),
        ("torchmetrics.MeanSquaredError()", "self.metric(batch[0], batch[1])", False),
    ],
)
def test_metrics_that_check_their_arguments_are_found_where_the_step_updates_them(made, used, found) -> None:
    source = f"""\
import lightning as L
import torchmetrics

class Net(L.LightningModule):
    def __init__(self, options):
        super().__init__()
        self.metric = {made}

    def training_step(self, batch, batch_idx):
        {used}
        return self.layer(batch[0]).mean()
"""
    assert ("ZD515" in [finding.code for finding in lint_source(source)]) == found
