"""The result of a check."""

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from zdtrain.check.findings import CODES, SEVERITIES, Finding, Severity
from zdtrain.check.trace import Operation
from zdtrain.errors import FallbackReason

Verdict = Literal["capturable", "capturable with changes", "not capturable"]


@dataclass(frozen=True, kw_only=True)
class StageReport:
    """What was measured of the training steps or of the validation steps."""

    name: str
    """``train`` or ``validation``."""
    num_steps: int
    """Steps that ran."""
    verdict: Verdict
    """Whether a captured program can replace the step."""
    host_reads_per_step: float
    """How often the host waits for the device in one step, hooks around it included."""
    num_tensors_per_step: int
    """Device tensors that the last step made."""
    num_bytes_per_step: int
    """Their bytes."""
    fallbacks: tuple[FallbackReason, ...]
    """What keeps the step from being captured."""


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """Everything a check found.

    Example::

        report = check_step(module, batch)
        report.verdict, report.host_reads_per_step  # ('capturable', 0.0)
    """

    subject: str
    """Name of the module's class."""
    device: str
    """``shadow`` or the name of the GPU."""
    findings: tuple[Finding, ...]
    """Worst first, then by file and line."""
    stages: tuple[StageReport, ...]
    """Training first."""
    shapes: tuple[Operation, ...] = ()
    """Every operation of one training step, if asked for."""
    skipped_callbacks: tuple[str, ...] = ()
    """Callbacks that were not run because zdtrain serves them from values that have already arrived."""
    remarks: tuple[str, ...] = ()
    """What could not be looked for in this run."""

    @property
    def verdict(self) -> Verdict:
        """The verdict on the training step."""
        return self.stages[0].verdict

    @property
    def host_reads_per_step(self) -> float:
        """Host reads per training step."""
        return self.stages[0].host_reads_per_step

    def codes(self, *severities: Severity) -> set[str]:
        """The codes that were found, of the given severities (all by default)."""
        chosen = severities or SEVERITIES
        return {finding.code for finding in self.findings if finding.severity in chosen}

    def counts(self) -> Counter[str]:
        """Number of findings by severity."""
        return Counter(finding.severity for finding in self.findings)


def fallback_reason(finding: Finding) -> FallbackReason:
    """A finding that blocks a capture, as the Trainer would name it."""
    message = f"{CODES[finding.code].title} ({finding.message})"
    return FallbackReason(code=finding.code, message=message, file=finding.file, line=finding.line)


def judge(findings: list[Finding], stage: str) -> tuple[Verdict, tuple[FallbackReason, ...]]:
    """The verdict on a stage, and what stands in the way."""
    blocking = [finding for finding in findings if finding.blocks and finding.stage in (stage, "module")]
    reasons = tuple(fallback_reason(finding) for finding in blocking)
    if not blocking:
        return "capturable", reasons
    if all(CODES[finding.code].fixable for finding in blocking):
        return "capturable with changes", reasons
    return "not capturable", reasons


def in_order(findings: list[Finding]) -> tuple[Finding, ...]:
    """Worst first, then by place."""
    return tuple(
        sorted(findings, key=lambda f: (SEVERITIES.index(f.severity), f.file or "~", f.line or 0, f.code, f.stage))
    )
