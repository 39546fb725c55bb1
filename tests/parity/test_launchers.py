"""Processes that torchrun, SLURM or a Ray cluster started train as with stock Lightning, in one run folder."""

import json
import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.parity.launched import PROCESSES

pytestmark = pytest.mark.slow


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def run_all(commands, environments):
    """Run processes side by side; return what they said if one failed."""
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PL_", "RANK", "WORLD"))
    }
    clean["PYTHONPATH"] = str(Path.cwd())  # for workers that a launcher starts elsewhere
    running = [
        subprocess.Popen(
            command, env={**clean, **env}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=Path.cwd()
        )
        for command, env in zip(commands, environments, strict=True)
    ]
    said = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [0] * len(running), "\n".join(said)


def assert_alike(folder):
    for rank in range(PROCESSES):
        found = json.loads((folder / f"{rank}.json").read_text())
        assert found["world_size"] == PROCESSES
        assert found["different"] == found["fallbacks"] == []
        assert found["names"][0] == found["names"][1]
    assert len(list(folder.glob("runs/*/*/metrics.jsonl"))) == 1


def test_torchrun(tmp_path):
    launch = ["-m", "torch.distributed.run", f"--nproc_per_node={PROCESSES}", f"--master_port={free_port()}"]
    run_all([[sys.executable, *launch, "-m", "tests.parity.launched", str(tmp_path)]], [{"OMP_NUM_THREADS": "1"}])
    assert_alike(tmp_path)


def test_slurm(tmp_path):
    job = {
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": str(PROCESSES),
        "SLURM_NTASKS_PER_NODE": str(PROCESSES),
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "localhost",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "OMP_NUM_THREADS": "1",
    }
    tasks = [{**job, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(PROCESSES)]
    run_all([[sys.executable, "-m", "tests.parity.launched", str(tmp_path)]] * PROCESSES, tasks)
    assert_alike(tmp_path)


def test_a_ray_cluster(tmp_path):
    if find_spec("ray") is None:  # imported, it would change this process's environment
        pytest.skip("needs ray: pip install 'ray[train]'")
    run_all([[sys.executable, "-m", "tests.parity.on_ray", str(tmp_path)]], [{"OMP_NUM_THREADS": "1"}])
    assert_alike(tmp_path)
