"""What an optimizer step costs: SimpleAdam against torch's fused AdamW, with and without clipping.

    python -m benchmarks.optimizer [--rounds 25] [--out benchmarks/results/optimizer.json]

One thread. Contenders take turns in one process, in a new order each round, and are compared as ratios within a round,
because machines drift; figures are medians over rounds. "Times traffic" divides by the time the memory traffic of the
step takes at the copy bandwidth measured in the same round: parameter, gradient and two moments read, all but the
gradient written, and with clipping the gradient read once more and written. Less than 1 is possible: a copy also
fetches the lines it overwrites, and what fits into the caches does not reach memory.
"""

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.facts import save
from zdtrain.optim import SimpleAdam

SHAPES = {"24 x 400 k": (24, 400_000), "500 x 1 k": (500, 1_000), "3 x 10 M": (3, 10_000_000)}
TRAFFIC = {"plain": 7, "clip": 9}  # tensors of the parameters' size read or written
WEIGHT_DECAY = 0.01
MAX_NORM = 1.0
COPY_FLOATS = 32_000_000  # 128 MB, more than caches hold


def parameters(count: int, size: int) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.randn(size)) for _ in range(count)]
    for param in params:
        param.grad = torch.randn(size) * 1e-3
    return params


def contenders(params: list[nn.Parameter]) -> dict[str, Callable[[], Any]]:
    lr = {"lr": torch.tensor(1e-3)}
    adamw = torch.optim.AdamW(params, weight_decay=WEIGHT_DECAY, fused=True, **lr)

    def clip_and_step() -> None:
        nn.utils.clip_grad_norm_(params, MAX_NORM)
        adamw.step()

    return {
        "AdamW": adamw.step,
        "SimpleAdam": SimpleAdam(params, weight_decay=WEIGHT_DECAY, **lr).step,
        "clip + AdamW": clip_and_step,
        "SimpleAdam max_norm": SimpleAdam(params, weight_decay=WEIGHT_DECAY, max_norm=MAX_NORM, **lr).step,
        "SimpleAdam tensor decay": SimpleAdam(params, weight_decay=torch.tensor(WEIGHT_DECAY), **lr).step,
    }


def seconds(run: Callable[[], Any], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - start) / repeats


def measure(count: int, size: int, rounds: int) -> dict[str, Any]:
    params = parameters(count, size)
    runs = contenders(params)
    source, target = torch.ones(COPY_FLOATS), torch.zeros(COPY_FLOATS)
    runs["copy"] = lambda: target.copy_(source)
    for run in runs.values():
        run()
        run()
    repeats = max(1, 2_000_000 // (count * size))
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in random.sample(list(runs.items()), len(runs)):
            taken[name].append(seconds(run, 1 if name == "copy" else repeats))
    median = {name: statistics.median(values) for name, values in taken.items()}

    def ratio(name: str, base: str) -> float:
        return statistics.median(a / b for a, b in zip(taken[name], taken[base], strict=True))

    def times_traffic(name: str, tensors: int) -> float:
        return ratio(name, "copy") * 2 * COPY_FLOATS / (tensors * count * size)

    return {
        "milliseconds": {name: round(value * 1e3, 3) for name, value in median.items()},
        "SimpleAdam / AdamW": round(ratio("SimpleAdam", "AdamW"), 3),
        "SimpleAdam max_norm / clip + AdamW": round(ratio("SimpleAdam max_norm", "clip + AdamW"), 3),
        "SimpleAdam tensor decay / AdamW": round(ratio("SimpleAdam tensor decay", "AdamW"), 3),
        "times traffic": {
            "SimpleAdam": round(times_traffic("SimpleAdam", TRAFFIC["plain"]), 2),
            "SimpleAdam max_norm": round(times_traffic("SimpleAdam max_norm", TRAFFIC["clip"]), 2),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/optimizer.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures = {}
    for name, (count, size) in SHAPES.items():
        figures[name] = measure(count, size, args.rounds)
        print(f"{name} float32 parameters")
        for key, value in figures[name].items():
            print(f"  {key}: {value}")
    save(args.out, {"load": round(os.getloadavg()[0], 1), "rounds": args.rounds, "figures": figures})


if __name__ == "__main__":
    main()
