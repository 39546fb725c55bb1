"""What monitors, records and averaged weights cost beside the bare step, and a long run that has to stay flat.

The MLP and the batches of `step_overhead.py`; every contender logs eight metrics. A run is timed in blocks of 256 steps
behind its first ones, so that each holds what is done once per chunk of rows, and its cost is the median block. All
contenders of a round run in one process, one after the other, and are compared with the bare step of that round;
figures are medians over rounds. Time is the processor time of the process, because machines are shared.

    python -m benchmarks.monitors [--rounds 9] [--steps 1025] [--long 10000] [--out benchmarks/results/monitors.json]
"""

import argparse
import contextlib
import gc
import io
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F

import zdtrain
from benchmarks.facts import save
from benchmarks.step_overhead import WARMUP_STEPS, Batch, Batches, fused_adam, network
from zdtrain.monitors import Monitor, NonFinite, Plateau, Spike, Threshold
from zdtrain.optim import SimpleAdam
from zdtrain.quiet import quiet
from zdtrain.records import load_run

METRICS = 8
BLOCK_STEPS = 256  # rows that a recorder keeps before it writes them


class Eight(pl.LightningModule):
    """The classifier of the step benchmark, logging eight metrics."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer] = fused_adam) -> None:
        super().__init__()
        self.net, self.optimizer = network(), optimizer

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        for index in range(METRICS):
            self.log(f"metric {index}", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters(), lr=1e-3)


class Clock(pl.Callback):
    """Takes the processor time of each block of steps behind the warm-up batches."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % BLOCK_STEPS == WARMUP_STEPS:
            self.times.append(time.process_time())

    def step_us(self) -> float:
        """Return the time of a step in the median block, in microseconds."""
        blocks = [end - start for start, end in pairwise(self.times)]
        return statistics.median(blocks) / BLOCK_STEPS * 1e6


def mixed() -> list[Monitor]:
    """Six monitors of the kinds a run has: three that may hold a step back or change it, three that tell."""
    return [
        Threshold("metric 0", above=1e9, then="stop"),
        NonFinite(then="skip", stop_after=10),
        Threshold("grad_norm", above=1e9, then="clip"),
        Spike("metric 1", factor=1e6, then=print),
        Plateau("metric 2", patience=10**6),
        NonFinite("metric 3"),
    ]


def acting() -> list[Monitor]:
    """Six monitors, all of which act inside the step."""
    return [
        Threshold("metric 0", above=1e9, then="stop"),
        NonFinite(then="skip", stop_after=10),
        Threshold("grad_norm", above=1e9, then="clip"),
        Spike("metric 1", factor=1e6, then="skip"),
        Plateau("metric 2", patience=10**6, then="stop"),
        NonFinite("metric 3", then="skip"),
    ]


def telling() -> list[Monitor]:
    """Six monitors, none of which acts inside the step."""
    return [
        Threshold("metric 0", above=1e9),
        NonFinite(),
        Threshold("grad_norm", above=1e9),
        Spike("metric 1", factor=1e6),
        Plateau("metric 2", patience=10**6),
        NonFinite("metric 3"),
    ]


CONTENDERS: dict[str, Callable[[], dict[str, Any]]] = {
    "bare": dict,
    "records": lambda: {"records": True},
    "6 telling": lambda: {"monitors": telling()},
    "6 telling + records": lambda: {"monitors": telling(), "records": True},
    "nonfinite=skip": lambda: {"nonfinite": "skip"},
    "6 mixed": lambda: {"monitors": mixed()},
    "6 mixed + records": lambda: {"monitors": mixed(), "records": True},
    "6 acting": lambda: {"monitors": acting()},
    "6 acting + records": lambda: {"monitors": acting(), "records": True},
    "ema": lambda: {"ema_decay": 0.99},
    "captured": lambda: {"capture": "compile"},
    "captured, 6 mixed + records": lambda: {"capture": "compile", "monitors": mixed(), "records": True},
}


def fit(
    module: pl.LightningModule, batches: Any, folder: str, options: dict[str, Any], *callbacks: pl.Callback
) -> zdtrain.Trainer:
    if options.get("records"):
        options["records"] = folder
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = zdtrain.Trainer(
            max_epochs=1,
            accelerator="cpu",
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            callbacks=list(callbacks),
            **options,
        )
        trainer.fit(module, batches)
    return trainer


def step_us(options: dict[str, Any], steps: int, optimizer: Callable[..., torch.optim.Optimizer]) -> float:
    gc.collect()
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        fit(Eight(optimizer), Batches(steps), folder, options, clock)
    return clock.step_us()


def measure(rounds: int, steps: int, optimizer: Callable[..., Any], wanted: list[str]) -> dict[str, Any]:
    chosen = {name: make for name, make in CONTENDERS.items() if name == "bare" or name in wanted}
    for make in chosen.values():
        step_us(make(), BLOCK_STEPS + 1, optimizer)
    cost: dict[str, list[float]] = {name: [] for name in chosen}
    for _ in range(rounds):
        for name, make in chosen.items():
            cost[name].append(step_us(make(), steps, optimizer))
    ratios = {name: [v / b for v, b in zip(values, cost["bare"], strict=True)] for name, values in cost.items()}
    return {
        name: {
            "us_per_step": statistics.median(cost[name]),
            "times_bare": statistics.median(ratios[name]),
            "times_bare_min": min(ratios[name]),
            "times_bare_max": max(ratios[name]),
        }
        for name in chosen
    }


class Memory(pl.Callback):
    """Notes the resident memory after the warm-up and at the end, and counts what the host read in between."""

    def __init__(self, warm: int) -> None:
        self.warm = warm
        self.mib: list[float] = []
        self.reads: list[int] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx in (self.warm, trainer.num_training_batches - 1):
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.mib.append(pages * 4096 / 2**20)
            self.reads.append(trainer.drain.runtime.counters.host_reads)


def long_run(steps: int) -> dict[str, Any]:
    """Train with records and the six mixed monitors; return memory, host reads and lag."""
    memory = Memory(warm=steps // 5)
    with tempfile.TemporaryDirectory() as folder:
        trainer: Any = fit(
            Eight(), Batches(steps - WARMUP_STEPS), folder, {"monitors": mixed(), "records": True}, memory
        )
        summary = load_run(trainer.recorder.folder).summary
    return {
        "steps": steps,
        "rss_growth_mib": memory.mib[1] - memory.mib[0],
        "host_reads_after_warm_up": memory.reads[1] - memory.reads[0],
        "host_reads": trainer.drain.runtime.counters.host_reads,
        "monitor_lag_steps": summary["monitor_lag_steps"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=1025, help="steps that are timed per run")
    parser.add_argument("--long", type=int, default=10_000, help="steps of the long run; 0 for none")
    parser.add_argument("--only", nargs="*", default=list(CONTENDERS), choices=list(CONTENDERS), help="contenders")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/monitors.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    optimizers = {"fused Adam": fused_adam, "SimpleAdam": partial(SimpleAdam)}
    with quiet():
        result = {name: measure(options.rounds, options.steps, make, options.only) for name, make in optimizers.items()}
        flat = long_run(options.long) if options.long else None
    print(f"{'optimizer':12} {'contender':28} {'us/step':>9} {'x bare':>7}  (min-max)")
    for optimizer, by_name in result.items():
        for name, r in by_name.items():
            spread = f"({r['times_bare_min']:.2f}-{r['times_bare_max']:.2f})"
            print(f"{optimizer:12} {name:28} {r['us_per_step']:9.1f} {r['times_bare']:7.2f}  {spread}")
    print(f"long run: {flat}")
    record = {
        "rounds": options.rounds,
        "steps": options.steps,
        "time": "processor time of the process",
        "result": result,
        "long_run": flat,
    }
    save(options.out, record)


if __name__ == "__main__":
    main()
