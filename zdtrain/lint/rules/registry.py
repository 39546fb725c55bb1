"""All rules, by code."""

from zdtrain.lint.rules import (
    baked,
    copies,
    host_reads,
    host_waits,
    loading,
    metrics,
    modes,
    modules,
    optimizers,
    outputs,
    refused,
    scalars,
    step_order,
)
from zdtrain.lint.rules.base import Rule

_FILES = (
    host_reads,
    outputs,
    host_waits,
    copies,
    modes,
    baked,
    refused,
    optimizers,
    step_order,
    scalars,
    modules,
    loading,
    metrics,
)

ALL: dict[str, type[Rule]] = {
    rule.code: rule for rule in sorted((rule for file in _FILES for rule in file.RULES), key=lambda rule: rule.code)
}
