"""docs/rules holds exactly what the rules say."""

import re
import shlex
from pathlib import Path

import pytest

from zdtrain.lint.cli import main as lint
from zdtrain.lint.pages import main, pages
from zdtrain.lint.rules.registry import ALL

DOCS = Path(__file__).parents[2] / "docs" / "rules"


def test_the_pages_in_docs_are_those_of_the_rules() -> None:
    written = {path.name: path.read_text(encoding="utf-8") for path in DOCS.glob("*.md")}
    assert written == pages(), "run: python -m zdtrain.lint.pages docs/rules"


def test_writing_pages_removes_those_of_rules_that_are_gone(tmp_path: Path) -> None:
    (tmp_path / "ZD999.md").write_text("old")
    main(str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == set(pages())


def test_pages_link_to_rules_that_exist() -> None:
    linked = {
        code
        for page in ("lint.md", "claims.md", "troubleshooting.md")
        for code in re.findall(r"\bZD[1-9]\d\d\b", (DOCS.parent / page).read_text(encoding="utf-8"))
    }
    assert linked <= set(ALL)


def test_the_commands_of_the_troubleshooting_page_run_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "good.py").write_text("import torch\n")
    monkeypatch.chdir(tmp_path)
    page = (DOCS.parent / "troubleshooting.md").read_text(encoding="utf-8")
    commands = set(re.findall(r"`zdtrain lint ([^`]+)`", page))
    assert len(commands) > 8
    assert {command: lint(shlex.split(command)) for command in commands} == dict.fromkeys(commands, 0)
