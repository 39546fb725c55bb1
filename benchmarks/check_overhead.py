"""What a step costs under `zdtrain check`, against the same step in a plain loop and under stock Lightning.

    python -m benchmarks.check_overhead [--rounds 5] [--out benchmarks/results/check_overhead.json]

CPU time of the process on one thread, medians of interleaved rounds, on the clean modules of the tests.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from lightning.pytorch import Callback, Trainer

from benchmarks.facts import save
from tests.check.zoo import CLEAN, Case
from zdtrain.check.api import Repeated
from zdtrain.check.driver import Plan, run
from zdtrain.quiet import quiet

NUM_STEPS = 14
NUM_WARMUP = 3
QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "limit_val_batches": 0,
    "max_epochs": 1,
}


class StepTimer(Callback):
    """CPU time between the start and the end of each training batch."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_start(self, *args: object) -> None:
        self._started = time.process_time()

    def on_train_batch_end(self, *args: object) -> None:
        self.seconds.append(time.process_time() - self._started)


def _log_nothing(*_args: object, **_kwargs: object) -> None: ...


def plain(case: Case) -> list[float]:
    module, data = case.make(), case.batch()
    module.log = module.log_dict = _log_nothing
    configured = module.configure_optimizers()
    optimizer = configured["optimizer"] if isinstance(configured, dict) else configured
    seconds = []
    for _ in range(NUM_STEPS):
        started = time.process_time()
        loss = module.training_step(data, 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seconds.append(time.process_time() - started)
    return seconds


def stock(case: Case) -> list[float]:
    timer = StepTimer()
    Trainer(accelerator="cpu", callbacks=[timer], **QUIET).fit(case.make(), Repeated(case.batch(), NUM_STEPS))
    return timer.seconds


def checked(case: Case) -> list[float]:
    timer = StepTimer()
    options = {"callbacks": [timer], "limit_val_batches": 0}
    loader = Repeated(case.batch(), NUM_STEPS)
    run(Plan(module=case.make(), train_loader=loader, num_steps=NUM_STEPS, trainer_options=options))
    return timer.seconds


def measure(case: Case, num_rounds: int) -> dict[str, float]:
    """Median milliseconds per step of each way, and the ratios."""
    ways: tuple[Callable[[Case], list[float]], ...] = (plain, stock, checked)
    rounds: dict[str, list[float]] = {way.__name__: [] for way in ways}
    for _ in range(num_rounds):
        for way in ways:
            rounds[way.__name__] += way(case)[NUM_WARMUP:]
    medians = {name: statistics.median(seconds) * 1e3 for name, seconds in rounds.items()}
    return {
        **{f"{name}_ms": round(value, 3) for name, value in medians.items()},
        "checked_by_plain": round(medians["checked"] / medians["plain"], 1),
        "checked_by_stock": round(medians["checked"] / medians["stock"], 1),
    }


def main(num_rounds: int, out: Path) -> None:
    """Print a line per module and write all of them."""
    torch.set_num_threads(1)
    print(f"{'module':24} {'plain':>8} {'stock':>8} {'checked':>8}  checked/plain  checked/stock   (ms)")
    result = {}
    for case in CLEAN:
        if case.name.startswith(("Manual", "ScalarsOfTheRun")):
            continue  # need a Trainer
        with quiet():
            row = result[case.name] = measure(case, num_rounds)
        print(
            f"{case.name:24} {row['plain_ms']:8.2f} {row['stock_ms']:8.2f} {row['checked_ms']:8.2f}"
            f" {row['checked_by_plain']:14.1f} {row['checked_by_stock']:14.1f}",
            flush=True,
        )
    save(out, {"rounds": num_rounds, "clock": "CPU time of the process", "result": result})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/check_overhead.json"))
    given = parser.parse_args()
    main(given.rounds, given.out)
