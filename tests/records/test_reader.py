import math

import pytest

from zdtrain.cli import main
from zdtrain.records import RecordError, StepRecord, find_runs, load_run
from zdtrain.records.folder import create_run_folder
from zdtrain.records.writer import RunWriter


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
    with pytest.raises(RecordError, match="does not exist"):
        load_run(root / "none" / "none")


def test_a_damaged_document_is_named(root):
    folder = find_runs(root)[0]
    (folder / "epochs.json").write_text("[")
    with pytest.raises(RecordError, match=r"epochs\.json is damaged"):
        load_run(folder)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "abc"),
        (["--status=finished"], "ab"),
        (["--date=19700112"], "c"),
        (["--name=-b"], "b"),
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
        (["--status=done"], "unknown status 'done'"),
    ],
)
def test_wrong_filters_are_refused(root, capsys, arguments, message):
    assert main(["runs", str(root), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_runs_is_said_to_have_none(tmp_path, capsys):
    assert main(["runs", str(tmp_path)]) == 2
    assert "no runs below" in capsys.readouterr().err
