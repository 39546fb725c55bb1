import json
import math
import os
import random
import signal
import subprocess
import sys
import time
import warnings

import pytest

from zdtrain.records import RecordError, RecordWarning, StepRecord, load_run
from zdtrain.records.folder import create_run_folder
from zdtrain.records.writer import RunWriter

KILLED = """
import sys
from pathlib import Path
from zdtrain.records import StepRecord
from zdtrain.records.writer import RunWriter
writer = RunWriter(Path(sys.argv[1]), chunk_rows=3)
writer.summarize(status="running")
writer.write_state()
print("ready", flush=True)
for step in range(int(sys.argv[2]), 10**9):
    writer.add(StepRecord(step=step, epoch=step // 50, batch_idx=step, values={"m": step / 7}, wall_time=float(step)))
    if step % 100 == 0:
        writer.write_state()
"""


def record(step, epoch=0, **values):
    return StepRecord(step=step, epoch=epoch, batch_idx=step, values=values, wall_time=1e9 + step)


def write_run(folder, steps, **values):
    writer = RunWriter(folder)
    writer.write_state()
    for step in steps:
        writer.add(record(step, loss=float(step), **values))
    writer.close("finished")
    return writer


def test_every_step_becomes_one_strict_row(tmp_path):
    writer = RunWriter(tmp_path)
    for step, value in enumerate([1.0, math.nan, math.inf, -math.inf, 2.0]):
        writer.add(record(step, m=value))
    writer.close("finished")
    rows = [json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "metrics.jsonl").open()]
    assert [row["values"]["m"] for row in rows] == [1.0, "NaN", "Infinity", "-Infinity", 2.0]
    assert [str(v) for v in load_run(tmp_path).metrics["m"]] == ["1.0", "nan", "inf", "-inf", "2.0"]


def test_values_are_written_in_chunks_but_flush_leaves_only_the_newest_step(tmp_path):
    writer = RunWriter(tmp_path, chunk_rows=1000, chunk_seconds=1000)
    for step in range(5):
        writer.add(record(step, m=0.0))
    assert not (tmp_path / "metrics.jsonl").exists()
    writer.flush()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4


def test_a_step_that_is_known_to_be_finished_is_written_though_it_is_the_newest(tmp_path):
    writer = RunWriter(tmp_path, chunk_rows=1000, chunk_seconds=1000)
    for step in range(5):
        writer.add(record(step, m=0.0))
    writer.flush(below=5)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 5


def test_a_continued_run_replaces_the_rows_it_trains_again(tmp_path):
    write_run(tmp_path, range(10), old=1.0)
    write_run(tmp_path, range(6, 12), new=1.0)
    run = load_run(tmp_path)
    assert run.steps == list(range(12))
    assert run.metrics["old"] == [1.0] * 6 + [None] * 6
    assert run.epoch_statistics[0]["metrics"]["loss"]["count"] == 12
    assert run.summary["num_steps"] == 12
    superseded = [json.loads(line) for line in (tmp_path / "superseded.jsonl").open()]
    assert [row["step"] for row in superseded] == [6, 7, 8, 9]


def test_a_continued_run_took_the_seconds_of_all_its_sessions(tmp_path):
    write_run(tmp_path, range(3))
    summary = json.loads((tmp_path / "summary.json").read_text())
    (tmp_path / "summary.json").write_text(json.dumps({**summary, "seconds": 1000.5}))
    write_run(tmp_path, range(3, 5))
    continued = load_run(tmp_path).summary
    assert continued["seconds"] >= 1000.5
    assert continued["steps_per_second"] > 1, "that of the last session"


def test_more_records_after_the_end_are_appended(tmp_path):
    writer = write_run(tmp_path, range(3))
    writer.add(record(3, test=1.0))
    writer.close("finished")
    assert load_run(tmp_path).steps == [0, 1, 2, 3]


def test_a_torn_last_line_is_reported_and_then_repaired(tmp_path):
    write_run(tmp_path, range(3))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "epo')
    torn = load_run(tmp_path)
    assert torn.steps == [0, 1, 2]
    assert not torn.is_complete
    write_run(tmp_path, range(3, 5))
    assert load_run(tmp_path).steps == list(range(5))
    assert load_run(tmp_path).is_complete


def test_two_processes_cannot_record_into_one_folder(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, tmp_path, "0"], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout.readline() == "ready\n"
    with pytest.raises(RecordError, match="another process is recording into"):
        RunWriter(tmp_path).write_state()
    process.kill()
    process.communicate()
    RunWriter(tmp_path).write_state()


def test_an_unwritable_folder_warns_once_and_training_goes_on(tmp_path):
    writer = RunWriter(tmp_path / "missing", chunk_rows=1)
    with pytest.warns(RecordWarning, match=r"cannot write the run folder .*missing.*Training goes on"):
        writer.event("start")
    with warnings.catch_warnings(action="error"):
        writer.add(record(0, m=0.0))
        writer.close("finished")


def test_an_unwritable_folder_stops_training_when_asked(tmp_path):
    writer = RunWriter(tmp_path / "missing", on_error="raise")
    with pytest.raises(RecordError, match=r"cannot write the run folder .*records=PATH"):
        writer.event("start")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_warns_once(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    writer = RunWriter(tmp_path, chunk_rows=2)
    writer.add(record(0, m=0.0))
    with pytest.warns(RecordWarning, match="No space left on device"):
        writer.add(record(1, m=0.0))
    writer.add(record(2, m=0.0))
    (tmp_path / "metrics.jsonl").unlink()  # there is room again for how the run ended
    with warnings.catch_warnings(action="error"):
        writer.close("finished")
    run = load_run(tmp_path)
    assert (run.summary["status"], run.summary["record_error"]) == ("finished", "No space left on device")
    assert run.summary["last_step"] == 2
    assert not run.is_complete


def test_a_document_that_does_not_fit_leaves_the_last_one_and_no_scratch_file(tmp_path):
    code = (
        "import resource, sys; from pathlib import Path; from zdtrain.records.writer import RunWriter\n"
        "writer = RunWriter(Path(sys.argv[1])); writer.text('config.yaml', 'old')\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)); writer.text('config.yaml', 'x' * 1000)"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert "RecordWarning: cannot write the run folder" in done.stderr
    assert (tmp_path / "config.yaml").read_text() == "old"
    assert not list(tmp_path.glob("*.tmp"))
    assert not list(tmp_path.glob(".*.tmp"))


def test_a_run_that_goes_on_behind_its_last_row_says_which_are_missing(tmp_path):
    folder = create_run_folder(tmp_path, "gap")
    for first in (0, 5):
        writer = RunWriter(folder)
        for step in (first, first + 1):
            writer.add(StepRecord(step=step, epoch=0, batch_idx=step, values={"m": 1.0}, wall_time=0.0))
        writer.close("finished")
    run = load_run(folder)
    assert run.steps == [0, 1, 5, 6]
    (event,) = [event for event in run.events if event["kind"] == "rows_missing"]
    assert (event["after"], event["before"]) == (1, 5)


def test_kill_at_random_moments_leaves_readable_folders_that_continue_cleanly(tmp_path):
    chance = random.Random(0)
    folder = create_run_folder(tmp_path, "killed")
    first_step = 0
    for _ in range(50):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, folder, str(first_step)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout.readline() == "ready\n"
        time.sleep(chance.uniform(0.0, 0.05))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        run = load_run(folder)
        assert run.steps == list(range(len(run.steps)))
        assert run.metrics.get("m", []) == [step / 7 for step in run.steps]
        assert not run.is_complete
        first_step = max(0, len(run.steps) - 5)


@pytest.mark.parametrize(("file", "content"), [("metrics.jsonl", "3\n"), ("epochs.json", ""), ("summary.json", "[]")])
def test_a_folder_whose_files_are_damaged_is_not_continued(tmp_path, file, content):
    RunWriter(tmp_path).close("finished")
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / file).write_text(content)
    with pytest.raises(RecordError, match=f"{file} is damaged"):
        RunWriter(tmp_path)
