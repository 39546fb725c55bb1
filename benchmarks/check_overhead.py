"""What a step costs under `zdtrain check`, against the same step in a plain loop and under stock Lightning.

    python -m benchmarks.check_overhead

CPU time of one thread, medians of interleaved rounds, on the clean modules of the tests.
"""

import logging
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from lightning.pytorch import Callback, Trainer

from tests.check.zoo import CLEAN, Case
from zdtrain.check.api import Repeated
from zdtrain.check.driver import Plan, run

NUM_STEPS = 14
NUM_WARMUP = 3
NUM_ROUNDS = 3
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
        self._started = time.thread_time()

    def on_train_batch_end(self, *args: object) -> None:
        self.seconds.append(time.thread_time() - self._started)


def _log_nothing(*_args: object, **_kwargs: object) -> None: ...


def plain(case: Case) -> list[float]:
    module, data = case.make(), case.batch()
    module.log = module.log_dict = _log_nothing
    configured = module.configure_optimizers()
    optimizer = configured["optimizer"] if isinstance(configured, dict) else configured
    seconds = []
    for _ in range(NUM_STEPS):
        started = time.thread_time()
        loss = module.training_step(data, 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seconds.append(time.thread_time() - started)
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


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    ways: tuple[Callable[[Case], list[float]], ...] = (plain, stock, checked)
    print(f"{'module':24} {'plain':>8} {'stock':>8} {'checked':>8}  checked/plain  checked/stock   (ms)")
    for case in CLEAN:
        if case.name in ("ManualTwoOptimizers", "ScalarsOfTheRun"):
            continue  # need a Trainer
        rounds: dict[str, list[float]] = {way.__name__: [] for way in ways}
        for _ in range(NUM_ROUNDS):
            for way in ways:
                rounds[way.__name__] += way(case)[NUM_WARMUP:]
        p, s, c = (statistics.median(seconds) * 1e3 for seconds in rounds.values())
        print(f"{case.name:24} {p:8.2f} {s:8.2f} {c:8.2f} {c / p:14.1f} {c / s:14.1f}", flush=True)


if __name__ == "__main__":
    main()
