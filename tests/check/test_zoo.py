"""The check on modules whose findings are known: nothing missed, nothing made up, each on the right line."""

import linecache

import pytest

from tests.check.zoo import CASES, CLEAN, FAULTY, Case
from zdtrain.check import CODES, check_step

NEEDS_HARDWARE = {"simulation-disagrees"}


def run(case: Case):
    return check_step(case.make(), case.batch(), trainer_options=case.trainer_options)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_finds_exactly_what_is_planted(case: Case) -> None:
    report = run(case)
    assert report.codes("error", "warning") == case.expected
    assert report.codes("note") == case.notes
    assert report.verdict == case.verdict
    elsewhere = [
        (finding.code, finding.file, finding.line)
        for finding in report.findings
        if "# fault" not in linecache.getline(finding.file or "", finding.line or 0)
    ]
    assert not elsewhere, "findings on lines that are not faulty"


def test_zoo_is_large_enough_and_covers_every_code() -> None:
    assert len(CLEAN) >= 20
    assert len(FAULTY) >= 20
    planted = set().union(*(case.expected | case.notes for case in FAULTY))
    assert planted == set(CODES) - NEEDS_HARDWARE


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true"])
@pytest.mark.parametrize("name", ["Classifier", "ConvNet", "Attention", "ManualTwoOptimizers"])
def test_clean_modules_are_clean_in_low_precision(name: str, precision: str) -> None:
    case = next(case for case in CLEAN if case.name == name)
    report = check_step(case.make(), case.batch(), trainer_options={"precision": precision})
    assert report.codes() == set()
    assert report.host_reads_per_step == 0
