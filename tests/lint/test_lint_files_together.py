"""Files that are linted together: a training loop in one makes helpers in another hot; and our own code is clean."""

from pathlib import Path

import pytest

from zdtrain.lint.linter import lint_paths
from zdtrain.lint.settings import LintSettings, find_pyproject, load_settings

ROOT = Path(__file__).parents[2]
HELPERS = """\
import torch

def mean_of(x):
    return x.mean().item()

class Meter:
    def update(self, value: torch.Tensor):
        self.total = value.item()

class Unused:
    def update(self, value: torch.Tensor):
        self.total = value.item()
"""
LOOP = """\
import torch
{imports}

def train(model, loader, optimizer):
    meter = {meter}()
    for x in loader:
        loss = model(x).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        meter.update(loss)
        {mean}(loss)
"""


@pytest.mark.parametrize(
    ("imports", "meter", "mean"),
    [
        ("from util.helpers import Meter, mean_of", "Meter", "mean_of"),
        ("from .util.helpers import Meter, mean_of as m", "Meter", "m"),
        ("import util.helpers as h", "h.Meter", "h.mean_of"),
        ("from .util import helpers", "helpers.Meter", "helpers.mean_of"),
    ],
)
def test_what_a_training_loop_imports_and_calls_is_hot(tmp_path: Path, imports: str, meter: str, mean: str) -> None:
    (tmp_path / "util").mkdir()
    helpers = tmp_path / "util" / "helpers.py"
    helpers.write_text(HELPERS)
    loop = tmp_path / "train.py"
    loop.write_text(LOOP.format(imports=imports, meter=meter, mean=mean))
    together = lint_paths([str(tmp_path)], LintSettings())
    assert [(Path(f.path).name, f.line, f.code) for f in together.findings] == [
        ("helpers.py", 4, "ZD101"),
        ("helpers.py", 8, "ZD101"),
    ]
    assert lint_paths([str(helpers)], LintSettings()).findings == []


def test_zdtrain_and_its_examples_are_clean() -> None:
    settings = load_settings(find_pyproject(ROOT / "zdtrain"))
    report = lint_paths([str(ROOT / "zdtrain"), str(ROOT / "examples")], settings)
    assert [f"{f.path}:{f.line} {f.code}" for f in report.findings] == []
    assert report.files > 20


@pytest.mark.parametrize("tree", ["zdtrain/capture", "zdtrain/step", "zdtrain/optim", "tests/check", "examples"])
def test_what_is_not_parsed_holds_no_finding(tree: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = LintSettings()
    quick = lint_paths([str(ROOT / tree)], settings, jobs=1).findings
    monkeypatch.setattr("zdtrain.lint.linter.may_matter", lambda *_args, **_options: True)
    assert quick == lint_paths([str(ROOT / tree)], settings, jobs=1).findings
