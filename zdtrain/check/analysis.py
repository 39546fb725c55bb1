"""From what was observed over the steps to findings and verdicts."""

import dataclasses
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from zdtrain.check import state
from zdtrain.check.findings import Finding, make_finding
from zdtrain.check.observe import ObservedTrainer, Observer, Step
from zdtrain.check.optimizers import is_never_capturable
from zdtrain.check.recorder import is_served
from zdtrain.check.report import CheckReport, StageReport, in_order, judge
from zdtrain.check.trace import Difference, Operation, compare
from zdtrain.source.definitions import method_location
from zdtrain.source.location import Location

_OPTIMIZERS = ("torch.optim.", "zdtrain.optim.")
_FIRST_STEP = 1
"""The first step fills caches, metric states and optimizer state; a capture comes after it."""


def _finding(code: str, message: str, place: Location, **fields: Any) -> Finding:
    return make_finding(
        code,
        message,
        file=place.file or None,
        line=place.line or None,
        function=place.function or None,
        library=place.library,
        **fields,
    )


def _comparable(steps: list[Step]) -> Iterator[tuple[Step, Step]]:
    """Successive steps that one captured program would serve, the first step left out."""
    groups: dict[object, list[Step]] = {}
    for step in steps[_FIRST_STEP:]:
        groups.setdefault(step.signature, []).append(step)
    for group in groups.values():
        yield from pairwise(group)


def _name(operation: Operation) -> str:
    return operation.name.removesuffix(".default")


def _change(before: tuple[Any, ...], after: tuple[Any, ...]) -> str:
    pairs = [(old, new) for old, new in zip(before, after, strict=False) if old != new]
    return f"{pairs[0][0]} became {pairs[0][1]}" if pairs else "another number of arguments"


def _explain(difference: Difference) -> tuple[str, str] | None:
    """The code and the message for a difference; None for one that is no fault of the step."""
    before, after = difference.before, difference.after
    place = before.context.location
    in_optimizer = (place.library or "").startswith(_OPTIMIZERS)
    if in_optimizer and difference.kind in ("scalars", "host-values"):
        return None  # a program is handed these numbers, and other optimizers step outside of it
    if not place.is_user or in_optimizer or is_served(place):
        return None  # e.g. a loss scaler that skips the optimizer: the Trainer masks the update instead
    if difference.kind == "operations":
        return "python-branch", f"one step ran {_name(before)} here, another did not"
    assert after is not None
    if difference.kind == "shapes":
        return "python-branch", f"the result of {_name(before)} changed its shape"
    if difference.kind == "scalars":
        change = _change(before.scalars, after.scalars)
        return "baked-value", f"a number given to {_name(before)} changes: {change}"
    change = _change(before.host_values, after.host_values)
    return "baked-value", f"a 0-D CPU tensor given to {_name(before)} changes: {change}"


def _trace_findings(
    stage: str, steps: list[Step], configure: Location, explained: set[tuple[str | None, int | None]]
) -> Iterator[Finding]:
    """What differs between steps that should be alike, each place once.

    Lines in `explained` have an error already, of which the difference is a consequence.
    """
    seen = set()
    for before, after in _comparable(steps):
        for difference in compare(before.operations, after.operations):
            reason = _explain(difference)
            if reason is None:
                continue
            code, message = reason
            place = difference.before.context.location
            if not place.is_user:
                place = configure._replace(library=place.library)
            key = (code, place.file, place.line)
            if key not in seen and (place.file, place.line) not in explained:
                seen.add(key)
                yield _finding(code, message, place, stage=stage)


def _kept_findings(observer: Observer, explained: set[tuple[str | None, int | None]]) -> Iterator[Finding]:
    last = max((item.step for item in observer.device.born), default=0)
    seen = set()
    for item, tensor in state.kept_tensors(observer.device.born, last):
        code = "kept-graph" if tensor.grad_fn is not None else "kept-tensor"
        path = state.holder_of(observer.module, tensor)
        place = state.change_location(observer.module, path) if path else item.location
        holder = f"`{path}` holds" if path else "something holds"
        key = (code, place.file, place.line)
        if key not in seen and place.is_user and (place.file, place.line) not in explained:
            seen.add(key)
            yield _finding(code, f"{holder} results of {item.name} from earlier steps", place)


def _logged_findings(observer: Observer, explained: set[tuple[str | None, int | None]]) -> Iterator[Finding]:
    for (stage, name), values in observer.logged.items():
        place = values[0][0]
        if len({number for _, number in values}) > 1 and (place.file, place.line) not in explained:
            yield _finding("baked-value", f"self.log({name!r}) is given another number each step", place, stage=stage)


def _metric_findings(observer: Observer) -> Iterator[Finding]:
    for path, metric in state.growing_metrics(observer.module):
        place = state.metric_location(observer.module, path)
        yield _finding("metric-list-state", f"`{path}` ({type(metric).__name__}) keeps every batch in a list", place)


def _optimizer_findings(observer: Observer, configure: Location) -> Iterator[Finding]:
    for optimizer, reason in observer.outside:
        if reason is None:
            continue
        if not observer.module.automatic_optimization:
            yield _finding("optimizer-by-hand", reason.message, configure)
        elif is_never_capturable(optimizer):
            yield _finding("optimizer-not-capturable", type(optimizer).__name__, configure)
        else:
            yield _finding("optimizer-outside", reason.message, configure)


def _by_stage(observer: Observer) -> dict[str, list[Step]]:
    """The steps of training, which are always there, and of validation, if any ran."""
    stages = {name: [step for step in observer.steps if step.stage == name] for name in ("train", "validation")}
    return {name: steps for name, steps in stages.items() if steps or name == "train"}


def _remarks(stages: dict[str, list[Step]]) -> Iterator[str]:
    """What was not looked for, because it shows only in the difference between two steps."""
    for name, steps in stages.items():
        if len(steps) < _FIRST_STEP + 2:
            reason = f"only {len(steps)} ran and the first is left out"
        elif not list(_comparable(steps)):
            reason = "each has inputs of other shapes"
        else:
            continue
        yield f"{name}: no two steps could be compared ({reason}), so changing numbers and branches were not looked for"


def _stage_report(name: str, steps: list[Step], findings: list[Finding]) -> StageReport:
    verdict, fallbacks = judge(findings, name)
    return StageReport(
        name=name,
        num_steps=len(steps),
        verdict=verdict,
        host_reads_per_step=sum(finding.count for finding in findings if finding.reads and finding.stage == name),
        num_tensors_per_step=steps[-1].num_tensors if steps else 0,
        num_bytes_per_step=steps[-1].num_bytes if steps else 0,
        fallbacks=fallbacks,
    )


def _recorded(observer: Observer, configure: Location) -> list[Finding]:
    """The notes taken while the steps ran; what an optimizer did on its own is laid at the line that made it."""
    num_steps = {stage: len(steps) for stage, steps in _by_stage(observer).items()}
    found = observer.recorder.findings(_FIRST_STEP, num_steps)
    return [_at_the_optimizer(finding, configure) if _is_optimizers_own(finding) else finding for finding in found]


def _is_optimizers_own(finding: Finding) -> bool:
    return finding.file is None and finding.in_step and (finding.library or "").startswith(_OPTIMIZERS)


def _at_the_optimizer(finding: Finding, configure: Location) -> Finding:
    """Such an optimizer steps eagerly, outside the captured part."""
    file, line = configure.file or None, configure.line or None
    return dataclasses.replace(finding, file=file, line=line, in_step=False)


def analyse(
    observer: Observer,
    trainer: ObservedTrainer,
    *,
    extra: list[Finding],
    keep_shapes: bool,
    skipped_callbacks: tuple[str, ...],
) -> CheckReport:
    """Turn observations into a report."""
    configure = method_location(observer.module, "configure_optimizers")
    findings = [*extra, *observer.audits, *_recorded(observer, configure)]
    explained = {(finding.file, finding.line) for finding in findings if finding.severity == "error"}
    for stage, steps in _by_stage(observer).items():
        findings += _trace_findings(stage, steps, configure, explained)
    findings += _logged_findings(observer, explained)
    findings += _metric_findings(observer)
    findings += _optimizer_findings(observer, configure)
    findings += _kept_findings(observer, explained)
    if observer.gradients is not None and not extra:
        scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        findings += observer.gradients.audit(trainer.optimizers, scaled=scaled)
    stages = _by_stage(observer)
    training = stages["train"]
    return CheckReport(
        subject=type(observer.module).__name__,
        device="shadow",
        findings=in_order(findings),
        stages=tuple(_stage_report(name, steps, findings) for name, steps in stages.items()),
        shapes=tuple(training[-1].operations) if keep_shapes and training else (),
        skipped_callbacks=skipped_callbacks,
        remarks=tuple(_remarks(stages)),
    )
