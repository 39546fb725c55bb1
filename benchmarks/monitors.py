"""What monitors, records and averaged weights cost beside the bare step, and a long run that has to stay flat.

The MLP and the batches of `step_overhead.py`; every contender logs eight metrics. They take turns of 32 steps (see
`turns.py`); a round of eight turns holds what is done once per chunk of rows.

    python -m benchmarks.monitors [--rounds 40] [--long 10000] [--out benchmarks/results/monitors.json]
"""

import argparse
import contextlib
import gc
import io
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F

import zdtrain
from benchmarks.facts import save
from benchmarks.step_overhead import Batch, Batches, fused_adam, network
from benchmarks.turns import Turn, as_json, measure, show
from zdtrain.monitors import Monitor, NonFinite, Plateau, Spike, Threshold
from zdtrain.optim import SimpleAdam
from zdtrain.quiet import quiet
from zdtrain.records import load_run

METRICS = 8
TURNS = 8  # of 32 steps: a recorder writes once in 256 rows


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


def acting(*, norm: bool = True) -> list[Monitor]:
    """Six monitors, all of which act inside the step; with `norm` two look at the norm of the gradients."""
    return [
        Threshold("metric 0", above=1e9, then="stop"),
        NonFinite(("loss", "grad_norm") if norm else "metric 4", then="skip", stop_after=10),
        Threshold("grad_norm", above=1e9, then="clip") if norm else Threshold("metric 5", above=1e9, then="skip"),
        Spike("metric 1", factor=1e6, then="skip"),
        Plateau("metric 2", patience=10**6, then="stop"),
        NonFinite("metric 3", then="skip"),
    ]


def telling(*, norm: bool = True) -> list[Monitor]:
    """Six monitors, none of which acts inside the step; with `norm` two look at the norm of the gradients."""
    return [
        Threshold("metric 0", above=1e9),
        NonFinite(("loss", "grad_norm") if norm else "metric 4"),
        Threshold("grad_norm" if norm else "metric 5", above=1e9),
        Spike("metric 1", factor=1e6),
        Plateau("metric 2", patience=10**6),
        NonFinite("metric 3"),
    ]


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"fused Adam": fused_adam, "SimpleAdam": SimpleAdam}
CONTENDERS: dict[str, Callable[[], dict[str, Any]]] = {
    "bare": dict,
    "records": lambda: {"records": True},
    "6 telling of metrics + records": lambda: {"monitors": telling(norm=False), "records": True},
    "6 acting on metrics + records": lambda: {"monitors": acting(norm=False), "records": True},
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


def contender(
    make_options: Callable[[], dict[str, Any]], optimizer: Callable[..., torch.optim.Optimizer], turn: Turn
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        fit(Eight(optimizer), Batches(turn=turn), folder, make_options())


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
        trainer: Any = fit(Eight(), Batches(steps), folder, {"monitors": mixed(), "records": True}, memory)
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
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--long", type=int, default=10_000, help="steps of the long run; 0 for none")
    parser.add_argument("--only", nargs="*", default=list(CONTENDERS), choices=list(CONTENDERS), help="contenders")
    parser.add_argument("--optimizer", nargs="*", default=list(OPTIMIZERS), choices=list(OPTIMIZERS), help="optimizers")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/monitors.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    wanted = [name for name in CONTENDERS if name == "bare" or name in options.only]
    with quiet():
        result = {
            optimizer: measure(
                {name: partial(contender, CONTENDERS[name], OPTIMIZERS[optimizer]) for name in wanted},
                rounds=options.rounds,
                turns=TURNS,
            )
            for optimizer in options.optimizer
        }
        flat = long_run(options.long) if options.long else None
    for name, costs in result.items():
        show(costs, name, base="bare")
    print(f"long run: {flat}")
    save(options.out, {"rounds": options.rounds, "turns": TURNS, "result": as_json(result), "long_run": flat})


if __name__ == "__main__":
    main()
