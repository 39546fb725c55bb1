"""A report as text, JSON, GitHub annotations or SARIF."""

import json
import linecache
import os
from collections.abc import Callable
from typing import Any

import zdtrain
from zdtrain.check.findings import CODES, Finding
from zdtrain.check.report import CheckReport, StageReport
from zdtrain.check.shapes import shapes_table

_SARIF_LEVEL = {"error": "error", "warning": "warning", "note": "note"}
_GITHUB_LEVEL = {"error": "error", "warning": "warning", "note": "notice"}


def _path(file: str) -> str:
    """Relative to the working directory where it lies below it."""
    relative = os.path.relpath(file)
    return file if relative.startswith("..") else relative


def _place(finding: Finding) -> str:
    return f"{_path(finding.file)}:{finding.line}" if finding.file else (finding.library or finding.hook or "module")


def _when(finding: Finding) -> str:
    if finding.stage == "module":
        return "module"
    hook = finding.hook or finding.stage
    how_often = f"{finding.count:g} per step"
    return f"{hook}, {how_often}" if finding.in_step else f"{hook}, around the step, {how_often}"


def _finding_text(finding: Finding) -> list[str]:
    lines = [f"{_place(finding)}: {finding.severity}: {CODES[finding.code].title} [{finding.code}] ({_when(finding)})"]
    lines.append(f"    {finding.message}")
    source = linecache.getline(finding.file, finding.line).strip() if finding.file and finding.line else ""
    if source and source not in finding.message:
        lines.append(f"    | {source}")
    lines.append(f"    use instead: {finding.remedy}")
    return lines


def _stage_text(stage: StageReport) -> str:
    return (
        f"{stage.name}: {stage.verdict}; {stage.host_reads_per_step:g} host reads per step; "
        f"{stage.num_tensors_per_step} device tensors ({stage.num_bytes_per_step / 1e6:.2f} MB) made per step; "
        f"{stage.num_steps} steps run"
    )


def render_text(report: CheckReport) -> str:
    """For people."""
    lines: list[str] = []
    for finding in report.findings:
        lines += [*_finding_text(finding), ""]
    counts = report.counts()
    totals = ", ".join(f"{counts[severity]} {severity}s" for severity in ("error", "warning", "note"))
    lines.append(f"{report.subject} on {report.device}: {totals}")
    lines += [_stage_text(stage) for stage in report.stages]
    for stage in report.stages:
        for reason in stage.fallbacks:
            lines.append(f"  {stage.name} falls back: {reason}")
    lines += report.remarks
    if report.skipped_callbacks:
        lines.append(f"not run, they read values that have already arrived: {', '.join(report.skipped_callbacks)}")
    if report.shapes:
        lines += ["", shapes_table(report.shapes)]
    return "\n".join(lines)


def _stage_dict(stage: StageReport) -> dict[str, Any]:
    return {
        "name": stage.name,
        "verdict": stage.verdict,
        "num_steps": stage.num_steps,
        "host_reads_per_step": stage.host_reads_per_step,
        "num_tensors_per_step": stage.num_tensors_per_step,
        "num_bytes_per_step": stage.num_bytes_per_step,
        "fallbacks": [
            {"code": reason.code, "message": reason.message, "file": reason.file, "line": reason.line}
            for reason in stage.fallbacks
        ],
    }


def render_json(report: CheckReport) -> str:
    """For programs; every key is always there."""
    shapes = [
        {
            "operation": operation.name,
            "results": [
                {"shape": info.shape, "dtype": info.dtype_name, "device": info.device} for info in operation.results
            ],
            "module": operation.context.module,
            "hook": operation.context.hook,
            "backward": operation.context.in_backward,
            "file": operation.context.location.file or None,
            "line": operation.context.location.line or None,
        }
        for operation in report.shapes
    ]
    document = {
        "version": 1,
        "subject": report.subject,
        "device": report.device,
        "verdict": report.verdict,
        "host_reads_per_step": report.host_reads_per_step,
        "stages": [_stage_dict(stage) for stage in report.stages],
        "findings": [finding.to_dict() for finding in report.findings],
        "skipped_callbacks": report.skipped_callbacks,
        "remarks": report.remarks,
        "shapes": shapes,
    }
    return json.dumps(document, indent=2)


def _github_escape(text: str, *, is_property: bool = False) -> str:
    text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text.replace(":", "%3A").replace(",", "%2C") if is_property else text


def render_github(report: CheckReport) -> str:
    """Workflow commands that GitHub shows beside the lines of a pull request."""
    lines = []
    for finding in report.findings:
        properties = [f"title={_github_escape(finding.code, is_property=True)}"]
        if finding.file:
            properties.insert(0, f"file={_github_escape(_path(finding.file), is_property=True)},line={finding.line}")
        text = _github_escape(f"{CODES[finding.code].title}: {finding.message}. Use instead: {finding.remedy}")
        lines.append(f"::{_GITHUB_LEVEL[finding.severity]} {','.join(properties)}::{text}")
    lines += [f"::notice title=zdtrain check::{_github_escape(_stage_text(stage))}" for stage in report.stages]
    return "\n".join(lines)


def _sarif_result(finding: Finding) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": finding.code,
        "level": _SARIF_LEVEL[finding.severity],
        "message": {"text": f"{finding.message}. Use instead: {finding.remedy}"},
        "properties": {"count": finding.count, "stage": finding.stage, "hook": finding.hook},
    }
    if finding.file:
        location = {
            "artifactLocation": {"uri": _path(finding.file).replace(os.sep, "/")},
            "region": {"startLine": finding.line},
        }
        result["locations"] = [{"physicalLocation": location}]
    return result


def render_sarif(report: CheckReport) -> str:
    """SARIF 2.1.0, for code scanning."""
    used = sorted(report.codes())
    rules = [
        {
            "id": name,
            "shortDescription": {"text": CODES[name].title},
            "help": {"text": CODES[name].remedy},
            "defaultConfiguration": {"level": _SARIF_LEVEL[CODES[name].severity]},
        }
        for name in used
    ]
    driver = {"name": "zdtrain check", "version": zdtrain.__version__, "rules": rules}
    document = {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": [_sarif_result(finding) for finding in report.findings]}],
    }
    return json.dumps(document, indent=2)


FORMATS: dict[str, Callable[[CheckReport], str]] = {
    "text": render_text,
    "json": render_json,
    "github": render_github,
    "sarif": render_sarif,
}
"""The output formats by name."""
