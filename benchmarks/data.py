"""What serving data costs: whole batches against per-sample collation, padding with buckets, workers, their start.

    python -m benchmarks.data [--rounds 7] [--out benchmarks/results/data.json]

Contenders take turns in one process and are compared as ratios within a round, because machines drift; figures are
medians over rounds. The device of the worker comparison is simulated: it takes a fixed time per step and the host runs
one step ahead of it. Workers share the cores with whatever else runs: see the load noted with the figures. Pinning is
measured only where there is an accelerator.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.facts import save
from zdtrain.data import BucketBatchSampler, PadCollate, available_cores, bucket_boundaries, default_num_workers, loader

Figures = dict[str, Any]


class Costly(Dataset[torch.Tensor]):
    """Samples that keep a core busy for a while, as decoding does, or wait, as reading from a network does."""

    def __init__(self, num_samples: int, cost_us: float, kind: str = "compute") -> None:
        self.rows = torch.randn(num_samples, 16)
        self.cost_us = cost_us
        self.kind = kind

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.kind == "wait":
            time.sleep(self.cost_us * 1e-6)
        end = time.perf_counter() + self.cost_us * 1e-6
        while self.kind == "compute" and time.perf_counter() < end:
            pass
        return self.rows[index]


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def exhaust(batches: Iterable[Any]) -> None:
    for _ in batches:
        pass


def in_memory(rounds: int) -> list[Figures]:
    num_samples = 32_000
    x, y = torch.randn(num_samples, 32), torch.randint(0, 10, (num_samples,))
    results = []
    for batch_size in (32, 256):
        options = {"batch_size": batch_size, "shuffle": True}
        contenders = {
            "stock": DataLoader(TensorDataset(x, y), **options),
            "zdtrain": loader(TensorDataset(x, y), **options),
        }
        times = [{name: seconds(lambda c=c: exhaust(c)) for name, c in contenders.items()} for _ in range(rounds)]
        results.append(
            {
                "batch_size": batch_size,
                **{
                    f"{name}_samples_per_second": round(num_samples / statistics.median(t[name] for t in times))
                    for name in contenders
                },
                "ratio": round(statistics.median(t["stock"] / t["zdtrain"] for t in times), 1),
                "lowest_ratio": round(min(t["stock"] / t["zdtrain"] for t in times), 1),
            }
        )
    return results


def bucketing() -> list[Figures]:
    results = []
    for sigma in (0.6, 1.0):
        generator = torch.Generator().manual_seed(0)
        lengths = torch.empty(20_000).log_normal_(5.0, sigma, generator=generator).long().clamp(1, 2048)
        samples = [torch.zeros(n, dtype=torch.int8) for n in lengths.tolist()]
        collate = PadCollate(add_lengths=False)
        shuffled = padding(DataLoader(samples, 32, shuffle=True, collate_fn=collate), lengths)
        results.append({"sigma": sigma, "batches": "shuffled, padded to the longest", **shuffled})
        for num_buckets in (8, 16, None):
            boundaries = bucket_boundaries(lengths, num_buckets=num_buckets)
            sampler = BucketBatchSampler(lengths, 32, boundaries=boundaries)
            collate = PadCollate(boundaries=boundaries, add_lengths=False)
            batches = DataLoader(samples, batch_sampler=sampler, collate_fn=collate)
            how = f"{len(boundaries)} buckets" + (" (default)" if num_buckets is None else "")
            results.append({"sigma": sigma, "batches": how, **padding(batches, lengths)})
    return results


def padding(batches: Iterable[torch.Tensor], lengths: torch.Tensor) -> Figures:
    shapes = [tuple(batch.shape) for batch in batches]
    padded = sum(rows * columns for rows, columns in shapes)
    return {"padding": round(1 - int(lengths.sum()) / padded, 4), "shapes": len(set(shapes))}


def worker_counts(rounds: int, step_ms: float = 2.0) -> list[Figures]:
    results = []
    for kind, cost_us in (("compute", 2), ("compute", 60), ("compute", 200), ("wait", 100)):
        counts = sorted({0, 1, 2, default_num_workers()})
        data = Costly(32 * 60, cost_us, kind)
        contenders = {count: loader(data, 32, num_workers=count) for count in counts}
        for batches in contenders.values():
            exhaust(batches)  # starts the workers
        busy = {count: [] for count in counts}
        for _ in range(rounds):
            for count, batches in contenders.items():
                busy[count].append(device_busy(batches, step_ms * 1e-3))
        results.append(
            {
                "sample": kind,
                "sample_us": cost_us,
                "step_ms": step_ms,
                "device_busy": {str(count): round(statistics.median(values), 3) for count, values in busy.items()},
            }
        )
    return results


def device_busy(batches: Iterable[Any], step_seconds: float) -> float:
    """Return which part of an epoch a simulated device computes: the host launches one step ahead of it."""
    start = device_free = time.perf_counter()
    num_steps = 0
    for _ in batches:
        while time.perf_counter() < device_free - step_seconds:
            time.sleep(1e-4)
        device_free = max(device_free, time.perf_counter()) + step_seconds
        num_steps += 1
    return num_steps * step_seconds / (device_free - start)


def starting(rounds: int) -> list[Figures]:
    results = []
    for method in ("default", "fork", "spawn"):
        first, again, next_epoch, next_epoch_persistent = [], [], [], []
        for number in range(1 + rounds):
            options: dict[str, Any] = {} if method == "default" else {"multiprocessing_context": method}
            batches = loader(Costly(256, 0), 32, num_workers=2, **options)
            (again if number else first).append(seconds(lambda b=batches: next(iter(b))))
            exhaust(batches)
            next_epoch_persistent.append(seconds(lambda b=batches: next(iter(b))))
            del batches
            if method != "spawn":  # each epoch of it costs what the first one did
                batches = loader(Costly(256, 0), 32, num_workers=2, persistent_workers=False, **options)
                exhaust(batches)
                next_epoch.append(seconds(lambda b=batches: next(iter(b))))
        results.append(
            {
                "start_method": method,
                "first_loader_s": round(first[0], 3),
                "later_loaders_s": round(statistics.median(again), 3),
                "next_epoch_s": round(statistics.median(next_epoch or again), 4),
                "next_epoch_persistent_s": round(statistics.median(next_epoch_persistent), 4),
            }
        )
    return results


def pinning(rounds: int) -> Figures:
    if not torch.accelerator.is_available():
        return {"measured": False, "reason": "no accelerator"}
    pageable = torch.randn(256, 3, 224, 224)
    pinned = pageable.pin_memory()
    target = torch.empty_like(pageable, device=torch.accelerator.current_accelerator())

    def host_seconds(source: torch.Tensor) -> float:
        torch.accelerator.synchronize()
        return seconds(lambda: target.copy_(source, non_blocking=True))

    times = [(host_seconds(pageable), host_seconds(pinned)) for _ in range(rounds)]
    return {
        "measured": True,
        "host_blocked_pageable_ms": round(1e3 * statistics.median(t[0] for t in times), 3),
        "host_blocked_pinned_ms": round(1e3 * statistics.median(t[1] for t in times), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/data.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    result = {
        "cores": available_cores(),
        "load_before": round(os.getloadavg()[0], 1),
        "in_memory": in_memory(arguments.rounds),
        "bucketing": bucketing(),
        "starting_workers": starting(min(arguments.rounds, 3)),
        "workers": worker_counts(arguments.rounds),
        "pinning": pinning(arguments.rounds),
    }
    print(json.dumps(result, indent=1))
    save(arguments.out, result)


if __name__ == "__main__":
    main()
