"""What monitors and records add to a step in processor instructions, which no other load on the machine changes.

The contenders of `monitors.py`, each in a process of its own under valgrind, which has to be installed. It counts the
instructions of 600 steps, that is of two writes of the recorder; the clock goes slower, as the steps do. That is not
time: how far away memory is, and how well the processor guesses, does not show.

    python -m benchmarks.instructions [--only NAME ...] [--out benchmarks/results/instructions.json]
"""

import argparse
import gc
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import zdtrain.consumers.steps
import zdtrain.records.writer
from benchmarks.facts import save
from benchmarks.monitors import CONTENDERS, OPTIMIZERS, Eight, fit
from benchmarks.step_overhead import Batches
from zdtrain.quiet import quiet

NAMES = [name for name, make_options in CONTENDERS.items() if "capture" not in make_options()]  # else it compiles
WARM_UP, STEPS = 320, 600
SLOWER = 100  # than without valgrind, about


class Over(BaseException):
    """Ends a contender that would go on for ever."""


class Counted:
    """Counts the instructions of some steps of this process: it is called before every step."""

    def __init__(self) -> None:
        self._step = 0

    def __call__(self) -> None:
        self._step += 1
        if self._step == WARM_UP:
            gc.collect()
            gc.freeze()
            _control("on")
        elif self._step == WARM_UP + STEPS:
            _control("off")
            raise Over


def _control(state: str) -> None:
    subprocess.run(["callgrind_control", "-i", state, str(os.getpid())], check=True, capture_output=True)


def contend(name: str, optimizer: str) -> None:
    torch.set_num_threads(1)
    clock: Callable[[], float] = time.monotonic
    time.monotonic = lambda: clock() / SLOWER
    zdtrain.consumers.steps.monotonic = time.monotonic  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder, quiet():
        try:
            fit(Eight(OPTIMIZERS[optimizer]), Batches(turn=Counted()), folder, CONTENDERS[name]())  # type: ignore[arg-type]
        except Over:
            return


def instructions_per_step(name: str, optimizer: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        counts = Path(folder, "counts")
        valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={counts}"]
        own = [sys.executable, "-m", "benchmarks.instructions", "--contend", name, optimizer]
        subprocess.run([*valgrind, *own], check=True, capture_output=True, env={**os.environ, "PYTHONHASHSEED": "0"})
        found = re.findall(r"^totals: (\d+)", counts.read_text(), flags=re.MULTILINE)
    return int(found[-1]) / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=NAMES, choices=NAMES, help="contenders")
    parser.add_argument("--optimizer", default="SimpleAdam", choices=list(OPTIMIZERS))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/instructions.json"))
    parser.add_argument("--contend", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contend:
        contend(*options.contend)
        return
    result: dict[str, Any] = {}
    for name in [name for name in NAMES if name == "bare" or name in options.only]:
        count = instructions_per_step(name, options.optimizer)
        ratio = count / result["bare"]["instructions_per_step"] if result else 1.0
        result[name] = {"instructions_per_step": round(count), "ratio": ratio}
        print(f"{name:30} {count:12.0f} {ratio:7.3f}", flush=True)
    save(options.out, {"steps": STEPS, "optimizer": options.optimizer, "result": result})


if __name__ == "__main__":
    main()
