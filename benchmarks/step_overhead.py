"""What a training step costs beyond its arithmetic: raw PyTorch, stock Lightning and zdtrain, side by side.

An MLP 32-64-64-2 with batch 32 on one thread, fused Adam, batches made ahead. For each contender the marginal cost of a
step is (time of 2N steps - time of N steps) / N, so that start-up and tear-down cancel. Contenders are interleaved in one
process and compared as ratios within a round, because machines drift.

    python benchmarks/step_overhead.py [--rounds 7] [--steps 500] [--out benchmarks/results/step_overhead.json]
"""

import argparse
import contextlib
import gc
import io
import json
import logging
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import lightning
import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import CSVLogger
from torch import nn

import zdtrain

Batch = tuple[torch.Tensor, torch.Tensor]
LOGS = {"none": 0, "two": 2, "64": 64}


class Batches:
    """A loader that costs nothing: batches made ahead, cycled."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.batches = [
            (torch.randn(32, 32, generator=generator), torch.randint(0, 2, (32,), generator=generator)) for _ in range(64)
        ]
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Batch]:
        for i in range(self.length):
            yield self.batches[i % 64]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))


class Classifier(pl.LightningModule):
    def __init__(self, logs: int) -> None:
        super().__init__()
        self.net = network()
        self.logs = logs

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        if self.logs:
            self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
            self.log("half", loss, on_step=True)
        for i in range(2, self.logs):
            self.log(f"metric_{i}", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3, fused=True)


def raw_seconds(steps: int, logs: int) -> float:  # noqa: ARG001 - the raw loop logs nothing, whatever is asked
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)
    start = time.perf_counter()
    for x, y in Batches(steps):
        loss = F.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return time.perf_counter() - start


class Clock(pl.Callback):
    """Times the batches of a fit, without its set-up."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.start = time.perf_counter()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.seconds = time.perf_counter() - self.start


def fit_seconds(trainer_class: type[pl.Trainer], options: dict[str, Any], steps: int, logs: int) -> float:
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        callbacks: list[pl.Callback] = [clock]
        if logs:
            callbacks.append(RichProgressBar())
        trainer_class(
            max_epochs=1,
            accelerator="cpu",
            default_root_dir=folder,
            logger=CSVLogger(folder) if logs else False,
            enable_progress_bar=bool(logs),
            enable_checkpointing=False,
            enable_model_summary=False,
            callbacks=callbacks,
            **options,
        ).fit(Classifier(logs), Batches(steps))
    return clock.seconds


@dataclass(frozen=True, kw_only=True)
class Contender:
    """Who is measured."""

    name: str
    seconds: Callable[[int, int], float]
    """(steps, logs) -> seconds spent on the batches."""


def contenders() -> list[Contender]:
    def fit(trainer_class: type[pl.Trainer], **options: Any) -> Callable[[int, int], float]:
        return lambda steps, logs: fit_seconds(trainer_class, options, steps, logs)

    return [
        Contender(name="raw", seconds=raw_seconds),
        Contender(name="lightning", seconds=fit(pl.Trainer)),
        Contender(name="zdtrain", seconds=fit(zdtrain.Trainer)),
    ]


def marginal_us(contender: Contender, steps: int, logs: int) -> float:
    gc.collect()
    once = contender.seconds(steps, logs)
    twice = contender.seconds(2 * steps, logs)
    return (twice - once) / steps * 1e6


def measure(rounds: int, steps: int) -> dict[str, Any]:
    runs = contenders()
    for contender in runs:
        contender.seconds(50, 2)  # imports, caches
    cost: dict[str, dict[str, list[float]]] = {logs: {c.name: [] for c in runs} for logs in LOGS}
    for _ in range(rounds):
        for logs, count in LOGS.items():
            for contender in runs:
                cost[logs][contender.name].append(marginal_us(contender, steps, count))
    return {
        logs: {
            name: {
                "us_per_step": statistics.median(values),
                "times_raw": statistics.median(v / r for v, r in zip(values, by_name["raw"], strict=True)),
                "times_raw_min": min(v / r for v, r in zip(values, by_name["raw"], strict=True)),
                "times_raw_max": max(v / r for v, r in zip(values, by_name["raw"], strict=True)),
            }
            for name, values in by_name.items()
        }
        for logs, by_name in cost.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=500, help="N of the marginal cost")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/step_overhead.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    result = measure(options.rounds, options.steps)
    print(f"{'logged':8} {'contender':12} {'us/step':>9} {'x raw':>7}  (min-max)")
    for logs, by_name in result.items():
        for name, r in by_name.items():
            spread = f"({r['times_raw_min']:.2f}-{r['times_raw_max']:.2f})"
            print(f"{logs:8} {name:12} {r['us_per_step']:9.1f} {r['times_raw']:7.2f}  {spread}")
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "zdtrain": zdtrain.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "rounds": options.rounds,
        "steps": options.steps,
        "result": result,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
