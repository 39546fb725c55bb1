"""How long a run takes to start: eager, captured, and lowered with Inductor's cache empty and filled.

Each figure is a process of its own that trains the MLP of step_overhead.py for a few steps; a round is one process per
contender, the lowered one twice with a cache folder of its own. CPU time is what a busy machine does not stretch.

    python -m benchmarks.startup [--rounds 3] [--out benchmarks/results/startup.json]
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.facts import save

STEPS = 16
PROGRAM = """
import json, logging, sys, time, warnings
import torch, zdtrain
from zdtrain.optim import SimpleAdam
from benchmarks.step_overhead import Batches, Classifier
warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
torch.set_num_threads(1)
trainer = zdtrain.Trainer(max_epochs=1, accelerator="cpu", capture=sys.argv[1], limit_train_batches=int(sys.argv[2]),
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
start = time.perf_counter(), time.process_time()
trainer.fit(Classifier(2, SimpleAdam), Batches(100))
wall, cpu = time.perf_counter() - start[0], time.process_time() - start[1]
report = trainer.capture_report
print(json.dumps({"fit_wall_s": wall, "fit_cpu_s": cpu, "replayed": report.steps_replayed,
    "capture_s": sum(program.capture_seconds for program in report.programs)}))
"""


def start(capture: str, cache: Path) -> dict[str, float]:
    """Train a few steps in a process of its own."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    environment.pop("ZDTRAIN_CAPTURE", None)
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-c", PROGRAM, capture, str(STEPS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return {**result, "process_wall_s": time.perf_counter() - began, "process_cpu_s": cpu}


def measure(rounds: int) -> dict[str, Any]:
    figures: dict[str, list[dict[str, float]]] = {"off": [], "graph": [], "compile, first": [], "compile, second": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            cache = Path(folder)
            for name, runs in figures.items():
                runs.append(start(name.partition(",")[0], cache))
    return {
        name: {key: round(statistics.median(run[key] for run in runs), 2) for key in runs[0]}
        for name, runs in figures.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/startup.json"))
    options = parser.parse_args()
    load = os.getloadavg()[0]
    result = measure(options.rounds)
    columns = list(next(iter(result.values())))
    print(f"{'':16}", *[f"{column:>15}" for column in columns])
    for name, figures in result.items():
        print(f"{name:16}", *[f"{figures[column]:15.2f}" for column in columns])
    record = {
        "load_before": round(load, 1),
        "rounds": options.rounds,
        "steps": STEPS,
        "result": result,
    }
    save(options.out, record)


if __name__ == "__main__":
    main()
