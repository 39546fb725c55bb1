"""``zdtrain lint`` and ``zdtrain rule``: exit status, formats, selection, and files in any state."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zdtrain.lint.cli import main, rule_main
from zdtrain.lint.rules.registry import ALL

BAD = """\
import torch

def train(model, loader, optimizer):
    for x in loader:
        loss = model(x).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item())
"""
GOOD = "import torch\n\ndef double(x):\n    return 2 * x\n"


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    path = tmp_path / "bad.py"
    path.write_text(BAD)
    return path


def test_exit_status_says_clean_findings_or_wrong_usage(bad: Path, tmp_path: Path) -> None:
    good = tmp_path / "good.py"
    good.write_text(GOOD)
    assert main([str(good), "--isolated"]) == 0
    assert main([str(bad), "--isolated"]) == 1
    assert main([str(tmp_path / "nowhere"), "--isolated"]) == 2
    assert main([str(bad), "--isolated", "--select", "ZD9"]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--format", "jsn"],
            "expected one of concise, json, github, sarif, got 'jsn'; did you mean 'json'?",
        ),
        (["--level", "eror"], "--level: expected one of note, warning, error, got 'eror'; did you mean 'error'?"),
        (["--jobs", "x"], "--jobs: use a whole number that is at least 1, got 'x'"),
        (["--lvel", "note"], "unknown option '--lvel'; did you mean '--level'?"),
        (["--level"], "--level: expected one argument"),
    ],
)
def test_wrong_usage_is_one_line_with_the_nearest_choice(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("zdtrain: error: ")
    assert message in line


def test_a_wrong_option_of_rule_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert rule_main(["--al"]) == 2
    assert capsys.readouterr().err == "zdtrain: error: unknown option '--al'; did you mean '--all'?\n"


def test_a_finding_is_one_line_with_place_code_and_message(bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(bad), "--isolated"])
    assert capsys.readouterr().out == (
        f"{bad}:9:20: ZD101 `loss.item()` makes the host wait for the device; keep the tensor\n"
        "1 error in 1 file (9 lines)\n"
    )


def test_json_has_a_record_per_finding(bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(bad), "--isolated", "--format", "json"])
    (record,) = json.loads(capsys.readouterr().out)
    message = record.pop("message")
    assert "loss.item()" in message
    assert record == {
        "path": str(bad),
        "line": 9,
        "column": 20,
        "end_line": 9,
        "code": "ZD101",
        "name": "item-read",
        "severity": "error",
        "runs": "loop",
        "fixable": False,
        "confirmed": False,
    }


def test_columns_count_characters_not_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "umlaut.py"
    path.write_text(BAD.replace("print(loss", 'print("größe", loss'), encoding="utf-8")
    main([str(path), "--isolated", "--format", "json"])
    assert json.loads(capsys.readouterr().out)[0]["column"] == 29


def test_github_annotations_escape_what_would_end_them(bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = bad.rename(bad.with_name("a,b%.py"))
    main([str(odd), "--isolated", "--format", "github"])
    out = capsys.readouterr().out
    assert out.startswith("::error file=")
    assert "a%2Cb%25.py,line=9,col=20,title=ZD101::" in out


def test_sarif_names_every_rule_and_points_at_the_line(bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(bad), "--isolated", "--format", "sarif"])
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == list(ALL)
    (result,) = run["results"]
    assert result["ruleId"] == run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == "ZD101"
    assert result["locations"][0]["physicalLocation"]["region"]["startLine"] == 9


def test_statistics_count_by_rule(bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(bad), "--isolated", "--statistics"])
    assert capsys.readouterr().out.splitlines()[0].split() == ["1", "ZD101", "item-read"]


def test_selection_takes_the_most_specific_prefix(bad: Path) -> None:
    assert main([str(bad), "--isolated", "--ignore", "ZD1"]) == 0
    assert main([str(bad), "--isolated", "--ignore", "ZD1", "--select", "ZD101"]) == 1
    assert main([str(bad), "--isolated", "--select", "ZD1", "--ignore", "ZD101"]) == 0


@pytest.mark.parametrize(
    ("comment", "status"),
    [
        ("  # noqa", 0),
        ("  # noqa: ZD101", 0),
        ("  # noqa: E501, ZD101", 0),
        ("  # NOQA : zd101", 0),
        ("  # noqa: ZD102", 1),
        ("  # nothing", 1),
    ],
)
def test_noqa_on_the_line_allows_it(bad: Path, comment: str, status: int) -> None:
    bad.write_text(BAD.rstrip("\n") + comment + "\n")
    assert main([str(bad), "--isolated"]) == status


def test_noqa_stands_on_the_line_of_the_method_or_at_the_end_of_the_expression(bad: Path) -> None:
    chained = BAD.replace(
        "print(loss.item())", "a = (\n            loss\n            .item()  # noqa: ZD101\n        )"
    )
    bad.write_text(chained)
    assert main([str(bad), "--isolated"]) == 0


def test_a_comment_of_its_own_switches_a_rule_off_in_the_file(bad: Path) -> None:
    bad.write_text("# zdtrain: noqa: ZD101\n" + BAD)
    assert main([str(bad), "--isolated"]) == 0
    bad.write_text("# zdtrain: noqa: ZD102\n" + BAD)
    assert main([str(bad), "--isolated"]) == 1


def test_pyproject_sets_options_and_the_command_line_wins(bad: Path) -> None:
    config = bad.with_name("pyproject.toml")
    config.write_text('[tool.zdtrain.lint]\nignore = ["ZD101"]\n')
    assert main([str(bad)]) == 0
    assert main([str(bad), "--ignore", "ZD2"]) == 1
    assert main([str(bad), "--isolated"]) == 1


@pytest.mark.parametrize("pattern", ["bad.py", "*/bad.py", "b*.py"])
def test_per_file_ignores_match_the_end_of_a_path(bad: Path, pattern: str) -> None:
    bad.with_name("pyproject.toml").write_text(f'[tool.zdtrain.lint.per-file-ignores]\n"{pattern}" = ["ZD1"]\n')
    assert main([str(bad)]) == 0
    other = bad.rename(bad.with_name("other.py"))
    assert main([str(other)]) == 1


def test_excluded_folders_are_not_walked_and_the_summary_says_so(bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (bad.parent / "skipped").mkdir()
    moved = bad.rename(bad.parent / "skipped" / "bad.py")
    (bad.parent / "pyproject.toml").write_text('[tool.zdtrain.lint]\nexclude = ["skipped", "others"]\n')
    assert main([str(bad.parent)]) == 0
    assert "0 files (0 lines); exclude in pyproject.toml leaves out 'skipped': name files" in capsys.readouterr().out
    assert main([str(moved)]) == 1
    assert "leaves out" not in capsys.readouterr().out
    assert main([str(bad.parent), "--isolated"]) == 1


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('selct = ["ZD1"]', "no option `selct`; did you mean `select`"),
        ('select = "ZD1"', "select must be a list of strings, got 'ZD1'"),
        ('select = ["ZD109x"]', "no rule begins with 'ZD109x'; did you mean ZD109"),
        ('level = "loud"', "level must be one of note, warning, error, got 'loud'"),
        ("max-file-bytes = 0", "max-file-bytes must be a positive integer, got 0"),
        ("level = ", "could not be read"),
    ],
)
def test_a_wrong_option_is_named_with_a_remedy(
    bad: Path, table: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bad.with_name("pyproject.toml").write_text(f"[tool.zdtrain.lint]\n{table}\n")
    assert main([str(bad)]) == 2
    assert message in capsys.readouterr().err


def test_level_note_adds_what_is_not_hot(bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad.write_text("import torch\n\ndef helper(loss):\n    return loss.item()\n")
    assert main([str(bad), "--isolated"]) == 0
    assert main([str(bad), "--isolated", "--level", "note"]) == 1
    assert "1 note in 1 file" in capsys.readouterr().out


def test_broken_files_get_a_line_each_and_the_rest_is_linted(
    bad: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "syntax.py").write_text("def f(:\n")
    (tmp_path / "tabs.py").write_text("if True:\n\tx = 1\n        y = 2\n")
    (tmp_path / "nul.py").write_bytes(b"x = 1\0\n")
    (tmp_path / "bytes.py").write_bytes(b"x = '\xff\xfe'\n")
    (tmp_path / "codec.py").write_bytes(b"# -*- coding: klingon -*-\nx = 1\n")
    (tmp_path / "huge.py").write_text("x = 1\n" * 400_000)
    (tmp_path / "deep.py").write_text("x = " + "(" * 3000 + ")" * 3000 + "\n")
    (tmp_path / "empty.py").write_text("")
    os.symlink(tmp_path / "loop.py", tmp_path / "loop.py")
    os.symlink(tmp_path, tmp_path / "again")
    assert main([str(tmp_path), "--isolated"]) == 1
    lines = capsys.readouterr().out.splitlines()
    broken = {Path(line.split(":")[0]).name: line for line in lines if " ZD000 " in line}
    assert set(broken) == {"syntax.py", "tabs.py", "nul.py", "bytes.py", "codec.py", "huge.py", "deep.py", "loop.py"}
    assert "not Python: " in broken["syntax.py"]
    assert "max-file-bytes" in broken["huge.py"]
    assert sum("ZD101" in line for line in lines) == 1


@pytest.mark.parametrize("encoding", ["utf-8-sig", "latin-1", "utf-8"])
def test_odd_encodings_are_read(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "odd.py"
    cookie = "# coding: latin-1\n" if encoding == "latin-1" else ""
    path.write_bytes((cookie + BAD + "# größe\n").encode(encoding))
    assert main([str(path), "--isolated"]) == 1


def test_a_notebook_is_linted_by_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "note.ipynb"
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n"]},
        {"cell_type": "code", "source": ["%matplotlib inline\n", "!ls\n", "import torch\n"]},
        {"cell_type": "code", "source": BAD.splitlines(keepends=True)},
    ]
    path.write_text(json.dumps({"cells": cells}))
    assert main([str(path), "--isolated"]) == 1
    assert f"{path}:cell 3:9:20: ZD101 " in capsys.readouterr().out
    path.write_text("{}")
    assert main([str(path), "--isolated"]) == 1
    assert "ZD000 not a notebook" in capsys.readouterr().out


def test_a_cell_that_is_not_python_gets_a_line_and_the_others_are_linted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "note.ipynb"
    sources = [
        "%%bash\nls | grep (",
        "%%time\n!pip install x \\\n    y\nif True:\n    %cd ..\nfiles = !ls\nfiles?",
        "import torch\ndef f(:\n",
        BAD,
    ]
    path.write_text(json.dumps({"cells": [{"cell_type": "code", "source": source} for source in sources]}))
    assert main([str(path), "--isolated"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":", 1)[1].split(" ")[:3] for line in lines[:-1]] == [
        ["cell", "3:2:1:", "ZD000"],
        ["cell", "4:9:20:", "ZD101"],
    ]


@pytest.mark.parametrize("separator", ["\f", "\v", "\x1c", "\u2028"])
def test_what_only_looks_like_a_line_end_moves_no_finding(bad: Path, separator: str, capsys) -> None:
    bad.write_text(f"# a{separator}b\n" + BAD, encoding="utf-8")
    assert main([str(bad), "--isolated"]) == 1
    assert f"{bad}:10:20: ZD101 " in capsys.readouterr().out
    bad.write_text(bad.read_text(encoding="utf-8").replace(".item())", ".item())  # noqa: ZD101"), encoding="utf-8")
    assert main([str(bad), "--isolated"]) == 0


def test_a_broken_file_without_a_step_is_reported_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.py").write_text("import os\n\ndef f(:\n")
    (tmp_path / "torch.py").write_text("import torch\n\ndef f(:\n")
    assert main([str(tmp_path), "--isolated"]) == 1
    assert capsys.readouterr().out.count("3:1: ZD000 not Python: invalid syntax") == 2


def test_a_missing_path_does_not_stop_the_others(bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nowhere.py", str(bad), "--isolated"]) == 2
    out = capsys.readouterr().out
    assert "nowhere.py:1:1: ZD000 No such file or directory" in out
    assert "ZD101" in out


def test_a_file_named_twice_is_linted_once(bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(bad), str(bad.parent), "--isolated"])
    assert "1 error in 1 file" in capsys.readouterr().out


def test_a_pool_of_processes_finds_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(8):
        (tmp_path / f"f{number}.py").write_text(BAD)
    main([str(tmp_path), "--isolated", "--jobs", "1"])
    one = capsys.readouterr().out
    main([str(tmp_path), "--isolated", "--jobs", "2"])
    assert capsys.readouterr().out == one


def test_a_check_report_confirms_findings(bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = bad.with_name("check.json")
    report.write_text(json.dumps({"findings": [{"file": str(bad), "line": 9}, {"file": None, "line": 1}]}))
    main([str(bad), "--isolated", "--with-check", str(report)])
    assert capsys.readouterr().out.splitlines()[0].endswith("(confirmed by check)")
    report.write_text("[]")
    assert main([str(bad), "--isolated", "--with-check", str(report)]) == 2
    assert "not a report of `zdtrain check --format json`" in capsys.readouterr().err


def test_rule_prints_its_page_by_code_or_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert rule_main(["zd101"]) == 0
    by_code = capsys.readouterr().out
    assert by_code.startswith("# ZD101 item-read\n")
    assert rule_main(["item-read"]) == 0
    assert capsys.readouterr().out == by_code
    assert rule_main(["itm-read"]) == 2
    assert "did you mean item-read" in capsys.readouterr().err
    assert rule_main(["--all"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(ALL)


def test_the_linter_loads_neither_torch_nor_lightning(bad: Path) -> None:
    code = (
        "import sys; from zdtrain.lint.cli import main; main(sys.argv[1:]); "
        "sys.exit(3 if {'torch', 'lightning', 'numpy'} & set(sys.modules) else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(bad), "--isolated"], capture_output=True).returncode == 0


def test_it_runs_as_a_module(bad: Path) -> None:
    run = subprocess.run([sys.executable, "-m", "zdtrain.lint", str(bad), "--isolated"], capture_output=True, text=True)
    assert run.returncode == 1
    assert "ZD101" in run.stdout
