"""A report in its four formats, and the table of shapes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.check.zoo.case import Base, batch
from zdtrain.check import CODES, FORMATS, CheckReport, check_step


class Faulty(Base):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        loss.item()  # line
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("rate", 0.5)


LINE = 1 + next(i for i, line in enumerate(Path(__file__).read_text().splitlines()) if line.endswith("# line"))


@pytest.fixture(scope="module")
def report() -> CheckReport:
    return check_step(Faulty(), batch(), shapes=True)


def test_text_names_place_severity_count_remedy_and_verdict(report: CheckReport) -> None:
    text = FORMATS["text"](report)
    assert f"test_check_output.py:{LINE}: error:" in text
    assert "[host-read] (training_step, 1 per step)" in text
    assert "use instead: keep the value on the device" in text
    assert "train: capturable with changes; 1 host reads per step" in text
    assert "Faulty on shadow: 1 errors, 0 warnings, 1 notes" in text


def test_json_is_complete_and_strict(report: CheckReport) -> None:
    document = json.loads(FORMATS["json"](report), parse_constant=pytest.fail)
    assert document["verdict"] == "capturable with changes"
    assert document["host_reads_per_step"] == 1
    (read,) = [finding for finding in document["findings"] if finding["code"] == "host-read"]
    assert read["file"] == __file__
    assert (read["line"], read["count"], read["hook"]) == (LINE, 1, "training_step")
    assert document["stages"][0]["fallbacks"][0]["code"] == "host-read"
    assert document["shapes"][0]["results"][0].keys() == {"shape", "dtype", "device"}


def test_github_puts_annotations_on_lines(report: CheckReport) -> None:
    lines = FORMATS["github"](report).splitlines()
    assert lines[0].startswith("::error file=")
    assert f",line={LINE},title=host-read::" in lines[0]
    assert any(line.startswith("::notice file=") and "title=logged-number" in line for line in lines)
    assert all(line.startswith("::") for line in lines)


def test_sarif_has_rules_and_locations(report: CheckReport) -> None:
    document = json.loads(FORMATS["sarif"](report))
    assert document["version"] == "2.1.0"
    (run,) = document["runs"]
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["host-read", "logged-number"]
    result = run["results"][0]
    assert (result["ruleId"], result["level"]) == ("host-read", "error")
    location = result["locations"][0]["physicalLocation"]
    assert location["region"] == {"startLine": LINE}
    assert location["artifactLocation"]["uri"].endswith("test_check_output.py")
    assert "\\" not in location["artifactLocation"]["uri"]


def test_shapes_list_every_intermediate_tensor_with_its_module(report: CheckReport) -> None:
    rows = [line.split() for line in FORMATS["text"](report).splitlines() if " cuda:0 " in line]
    assert any(row[:6] == ["addmm", "8×16", "float32", "cuda:0", "net.0", "training_step"] for row in rows)
    assert any(row[0] == "addmm" and row[1] == "8×4" and row[4] == "net.2" for row in rows)
    assert any("backward" in row for row in rows)
    assert len(rows) > 15


def test_shapes_are_kept_only_on_request() -> None:
    assert check_step(Base(), batch()).shapes == ()


def test_documentation_lists_every_code_as_it_is() -> None:
    page = (Path(__file__).parents[2] / "docs" / "check.md").read_text(encoding="utf-8")
    for code in CODES.values():
        effect = ", ".join(name for name, holds in (("reads", code.reads), ("blocks", code.blocks)) if holds)
        assert f"| `{code.name}` | {code.severity} | {effect} | {code.title} | {code.remedy} |" in page
