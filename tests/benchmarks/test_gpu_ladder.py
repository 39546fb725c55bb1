"""The ladder's own logic, on the host; its numbers need a GPU."""

import json

import pytest
import torch

from benchmarks import gpu_ladder

SMALL = ["--steps", "4", "--rounds", "1", "--width", "8", "--vocabulary", "32", "--batch", "4", "--tokens", "4"]

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec"),
]


def test_the_ladder_runs_on_the_host_and_writes_what_it_measured(tmp_path, capsys):
    out = tmp_path / "results" / "ladder.json"
    rungs = ["baseline", "no sync", "tensor scalars", "full stack", "raw graph"]
    gpu_ladder.main(["--device", "cpu", *SMALL, "--out", str(out), "--only", *rungs])
    result = json.loads(out.read_text())
    assert {"date", "torch", "cuda", "lightning", "zdtrain", "python", "device"} <= set(result)
    assert result["size"] == {"vocabulary": 32, "width": 8, "batch": 4, "tokens": 4}
    assert set(result["rungs"]) == set(rungs) - {"raw graph"}
    assert "device cpu has no graphs" in result["skipped"]["raw graph"]
    full = result["rungs"]["full stack"]
    assert [program["verification"] for program in full["programs"]] == ["equal"]
    assert full["steps_replayed"] > 20
    assert full["fallbacks"] == []
    assert result["rungs"]["baseline"]["speed_up"] == 1
    assert full["utilisation"] is full["memory"] is None  # the host has neither
    assert result["goals"]["full stack x baseline"]["measured"] == full["speed_up"]
    assert result["goals"]["full stack / bare replay"]["reached"] is False
    assert "full stack" in capsys.readouterr().out


def test_an_unknown_rung_is_refused_by_name(capsys):
    with pytest.raises(SystemExit):
        gpu_ladder.main(["--device", "cpu", "--only", "fullstack"])
    assert "no rung is called fullstack" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_is_told_so(capsys):
    with pytest.raises(SystemExit):
        gpu_ladder.main([])
    assert "finds no GPU" in capsys.readouterr().err


@pytest.mark.gpu
def test_the_ladder_runs_on_a_gpu(tmp_path):
    out = tmp_path / "ladder.json"
    gpu_ladder.main([*SMALL, "--out", str(out)])
    result = json.loads(out.read_text())
    assert not result["skipped"]
    for name in ("full stack", "full stack compiled"):
        rung = result["rungs"][name]
        assert all(program["memory_bytes"] > 0 for program in rung["programs"]), name
        assert rung["steps_replayed"] > 20, (name, rung["fallbacks"])
    for name, rung in result["rungs"].items():
        assert rung["memory"]["fragmentation"] >= 1, name
        assert rung["busy_ms_per_step"] > 0, name
