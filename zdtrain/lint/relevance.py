"""Tells from its text alone that a file can hold no finding, so that it need not be parsed."""

import re

from zdtrain.lint.heat import LOOP_HOOKS, STEP_HOOKS
from zdtrain.lint.rules.base import Rules
from zdtrain.lint.source import step_calls

_MENTIONS = ("torch", "lightning", ".item()", ".cpu()", ".numpy()", ".backward(", "training_step")
# Begin with literal text: searching for them costs next to nothing.
_HOT_FUNCTION = re.compile(rf"def\s+(?:{'|'.join(sorted(STEP_HOOKS | LOOP_HOOKS))}|forward|\w*train\w*)\s*\(")
_BASES = re.compile(r"class\s+\w+\s*\(([^)]*)\)")
_SPECIAL_BASE = re.compile(r"\b(?:nn|\w*Module|Sequential|ModuleList|Transformer|PreTrainedModel|Metric|Optimizer)\b")


def may_matter(text: str, rules: Rules, *, everything: bool = False) -> bool:
    """Whether a text can hold a finding, or call what can hold one.

    Args:
        text: Python source.
        rules: the rules to apply.
        everything: also notes, which may be anywhere that torch is spoken of.
    """
    if not any(word in text for word in _MENTIONS):
        return False
    return (
        everything
        or _HOT_FUNCTION.search(text) is not None
        or any(trigger.search(text) for trigger in rules.triggers)
        or _has_special_class(text)
        or next(step_calls(text), None) is not None
    )


def _has_special_class(text: str) -> bool:
    """Whether a class has a base that makes its methods run in steps, or one whose name may hide such a base."""
    bases = ",".join(_BASES.findall(text))
    if not bases:
        return False
    if _SPECIAL_BASE.search(bases) or re.search(r"from torch\.nn\b|from torch\.optim\b", text):
        return True
    return any(alias in bases for alias in re.findall(r" as (\w+)", text))
