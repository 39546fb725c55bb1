import subprocess
import sys
import time

import pytest

from zdtrain.records.folder import create_run_folder, is_run_folder, run_folder_of_checkpoint

START = time.mktime((2026, 3, 28, 10, 15, 30, 0, 0, -1))


def test_folder_is_named_by_date_time_and_run(tmp_path):
    folder = create_run_folder(tmp_path, "digits", start_time=START)
    assert folder.relative_to(tmp_path).as_posix() == "20260328/101530-digits"
    assert folder.is_dir()


def test_runs_of_one_second_get_numbers(tmp_path):
    names = [create_run_folder(tmp_path, "a", start_time=START).name for _ in range(3)]
    assert names == ["101530-a", "101530-a-2", "101530-a-3"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("my model/v2", "my-model-v2"),
        ("../up", "up"),
        ("", "run"),
        ("ä", "run"),
        ("a_b-c.1", "a_b-c.1"),
        ("[red]\n\0$", "red"),
        ("x" * 500, "x" * 100),
    ],
)
def test_names_cannot_leave_the_folder(tmp_path, name, expected):
    assert create_run_folder(tmp_path, name, start_time=START).name == f"101530-{expected}"


def test_sixteen_processes_in_one_second_get_sixteen_folders(tmp_path):
    code = (
        "import sys, time; from zdtrain.records.folder import create_run_folder\n"
        "while time.time() < float(sys.argv[2]): pass\n"
        "[print(create_run_folder(sys.argv[1], 'x', start_time=0)) for _ in range(5)]"
    )
    start = str(time.time() + 1.5)
    processes = [
        subprocess.Popen([sys.executable, "-c", code, tmp_path, start], stdout=subprocess.PIPE, text=True)
        for _ in range(16)
    ]
    folders = [line for process in processes for line in process.communicate()[0].split()]
    assert len(folders) == 80
    assert len(set(folders)) == 80


def test_a_checkpoint_knows_its_run_folder(tmp_path):
    folder = create_run_folder(tmp_path, "a")
    checkpoint = folder / "checkpoints" / "last.ckpt"
    assert run_folder_of_checkpoint(checkpoint) is None
    (folder / "summary.json").write_text("{}")
    assert is_run_folder(folder)
    assert run_folder_of_checkpoint(checkpoint) == folder
