import math
import re

import pytest

from zdtrain.cli import main
from zdtrain.records import RecordError, StepRecord, find_runs, load_run
from zdtrain.records.folder import create_run_folder
from zdtrain.records.writer import RunWriter
from zdtrain.report import render_page


@pytest.fixture
def root(tmp_path):
    """Three runs of two days; the last one was killed."""
    for day, (name, losses) in enumerate([("a", [3.0, 1.0]), ("b", [2.0, math.nan]), ("c", [4.0, 0.5])]):
        folder = create_run_folder(tmp_path, name, start_time=86400 * (10 + day // 2))
        writer = RunWriter(folder)
        for step, loss in enumerate(losses):
            writer.add(StepRecord(step=step, epoch=0, batch_idx=step, values={"loss": loss}, wall_time=1e9 + step))
        writer.close("running" if name == "c" else "finished")
    return tmp_path


def test_rows_become_columns(root):
    run = load_run(find_runs(root)[0])
    assert run.columns() == {
        "loss": [3.0, 1.0],
        "step": [0, 1],
        "epoch": [0, 0],
        "wall_time": [1e9, 1e9 + 1],
    }
    assert run.series("loss") == ([0, 1], [3.0, 1.0])


def test_runs_are_found_oldest_first(root):
    assert [folder.name[-1] for folder in find_runs(root)] == ["a", "b", "c"]


def test_a_killed_run_says_that_rows_may_be_missing(root):
    assert [load_run(folder).is_complete for folder in find_runs(root)] == [True, True, False]


def test_an_unknown_metric_is_refused_with_the_known_ones(root):
    with pytest.raises(RecordError, match="has no metric 'los'; it has: loss"):
        load_run(find_runs(root)[0]).series("los")


def test_what_is_not_a_run_folder_is_refused_with_one_that_is(root):
    with pytest.raises(RecordError, match=r"is not a run folder .* the newest run near it is .*-c"):
        load_run(root)
    with pytest.raises(RecordError, match=r"metrics\.jsonl is not a run folder but a part of one: .*-a"):
        load_run(find_runs(root)[0] / "metrics.jsonl")
    with pytest.raises(RecordError, match="does not exist"):
        load_run(root / "none" / "none")


def test_a_damaged_document_is_named(root):
    folder = find_runs(root)[0]
    (folder / "epochs.json").write_text("[")
    with pytest.raises(RecordError, match=r"epochs\.json is damaged"):
        load_run(folder)


ROW = b'{"step": 1, "epoch": 0, "batch_idx": 0, "wall_time": 1.0, "values": {"loss": 1}}\n'
DOCUMENTS = ("epochs.json", "summary.json", "hparams.json", "environment.json")
LINES = ("metrics.jsonl", "events.jsonl")


@pytest.mark.parametrize("file", [*DOCUMENTS, *LINES])
@pytest.mark.parametrize(
    "content", [b"", b"{", b"null", b"3\n", b'"x"\n', b'{"step": 1}\n', b"\xff\xfe\n", ROW + b'{"st']
)
def test_whatever_a_file_holds_a_run_can_be_shown_or_one_line_names_the_file(root, file, content):
    folder = find_runs(root)[0]
    (folder / file).write_bytes(content)
    try:
        run = load_run(folder)
    except RecordError as error:
        assert re.fullmatch(rf".*{re.escape(file)} is damaged: .+", str(error))  # noqa: PT017
        return
    assert render_page([run])


@pytest.mark.parametrize("values", [b'{"loss": "x"}', b'{"loss": [1]}', b"[1]"])
def test_a_row_whose_values_are_no_numbers_is_named(root, values):
    folder = find_runs(root)[0]
    (folder / "metrics.jsonl").write_bytes(ROW + ROW.replace(b'{"loss": 1}', values))
    with pytest.raises(RecordError, match=r"metrics\.jsonl is damaged: line 2 is no record"):
        load_run(folder)


@pytest.mark.parametrize("file", [name for name in (*DOCUMENTS, *LINES) if name != "summary.json"])
def test_a_run_shows_without_what_it_never_wrote(root, file):
    folder = find_runs(root)[0]
    (folder / file).unlink(missing_ok=True)
    assert render_page([load_run(folder), load_run(find_runs(root)[1])])


def test_a_damaged_run_does_not_hide_the_others(root, capsys):
    (find_runs(root)[0] / "summary.json").write_text("")
    assert main(["runs", str(root)]) == 0
    shown = capsys.readouterr()
    assert [name in shown.out for name in ("-a", "-b", "-c")] == [False, True, True]
    assert re.fullmatch(r"zdtrain: left out: .*summary\.json is damaged: .*\n", shown.err)


def test_runs_of_one_day_and_a_single_run_can_be_listed(root, capsys):
    last = find_runs(root)[-1]
    assert find_runs(last.parent) == find_runs(last) == [last]
    assert main(["runs", str(last)]) == 0
    assert "-c" in capsys.readouterr().out


def test_a_metric_s_name_is_shown_as_it_is(tmp_path, capsys):
    writer = RunWriter(create_run_folder(tmp_path, "a"))
    writer.add(StepRecord(step=0, epoch=0, values={"[/loss]": 2.5}, wall_time=1e9))
    writer.close("finished")
    assert main(["runs", str(tmp_path), "--metric=[/loss]"]) == 0
    assert re.search(r"\[/loss\].*2\.5", capsys.readouterr().out, re.DOTALL)


def test_filters_that_nothing_matches_say_what_there_is(root, capsys):
    assert main(["runs", str(root), "--name=x"]) == 0
    assert re.match(
        r"none of the 3 runs below .* matches; they are 19700111/.*-a to 19700112/.*-c", capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "abc"),
        (["--status=finished"], "ab"),
        (["--date=19700112"], "c"),
        (["--name=-b"], "b"),
        (["--where=loss"], "abc"),
        (["--where=loss>=0"], "ac"),
        (["--where=loss > 0.5", "--where=loss<2"], "a"),
        (["--sort=loss"], "cab"),
        (["--sort=loss", "--descending"], "acb"),
    ],
)
def test_runs_are_listed_filtered_and_sorted(root, capsys, arguments, expected):
    assert main(["runs", str(root), "--metric=loss", *arguments]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "19700" in line]
    assert "".join(line.split()[1][-1] for line in lines) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--metric=los"], "no run has a metric 'los'; did you mean 'loss'?"),
        (["--sort=los"], "no run has a metric 'los'; did you mean 'loss'?"),
        (["--status=finishd"], "unknown status 'finishd': use one of running, finished, interrupted, failed; did you"),
        (["--date=1970-01-12"], "--date 1970-01-12: give digits, YYYYMMDD or a prefix of it, such as 19700112"),
        (["--where=los>1"], "no run has a metric 'los'; did you mean 'loss'?"),
        (["--where=los"], "no run has a metric 'los'; did you mean 'loss'?"),
        (["--where=loss>x"], "--where 'loss>x': 'x' is no number"),
        (["--stat=done"], "unknown option '--stat'; did you mean '--status'?"),
        (["--sort"], "--sort: expected one argument"),
    ],
)
def test_wrong_filters_are_refused_in_one_line(root, capsys, arguments, message):
    assert main(["runs", str(root), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_nothing_is_cut_off_where_a_program_reads_the_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    writer = RunWriter(create_run_folder(tmp_path, "n" * 90))
    metrics = {f"metric_{number}": number / 7 for number in range(9)}
    writer.add(StepRecord(step=0, epoch=0, values=metrics, wall_time=1e9))
    writer.close("finished")
    assert main(["runs", str(tmp_path), *[f"--metric={name}" for name in metrics]]) == 0
    shown = capsys.readouterr().out
    assert "n" * 90 in shown
    assert all(text in shown for name, value in metrics.items() for text in (name, f"{value:.6g}"))


def test_a_list_of_runs_does_not_read_the_rows_of_those_that_ended(root, capsys):
    ended, _, killed = find_runs(root)
    (ended / "metrics.jsonl").unlink()
    assert main(["runs", str(root), "--sort=loss"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "19700" in line]
    assert {line[1].split("/")[0] + line[1][-1]: line[-2] for line in lines}[f"{killed.parent.name}c"] == "0.5"
    assert [line[-2] for line in lines if line[1].endswith("-a")] == ["1"]


def test_a_folder_without_runs_is_said_to_have_none(tmp_path, capsys):
    assert main(["runs", str(tmp_path)]) == 2
    assert "no runs below" in capsys.readouterr().err
