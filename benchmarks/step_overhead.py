"""What a training step costs beyond its arithmetic: raw PyTorch, stock Lightning and zdtrain, side by side.

An MLP 32-64-64-2 with batch 32 on one thread, fused Adam, batches made ahead. For each contender the marginal cost of a
step is (time of 2N steps - time of N steps) / N, so that start-up and tear-down cancel. Contenders are interleaved in
one process and compared as ratios within a round, because machines drift. The captured contender lowers the whole step
with `capture="compile"` and SimpleAdam, one, 4 and 16 steps per replay; where jax is installed its jit-compiled step is
measured too, logging nothing.

    python -m benchmarks.step_overhead [--rounds 7] [--steps 500] [--out benchmarks/results/step_overhead.json]
"""

import argparse
import contextlib
import gc
import io
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import CSVLogger
from torch import nn

import zdtrain
from benchmarks.facts import save
from zdtrain.optim import SimpleAdam
from zdtrain.quiet import quiet

Batch = tuple[torch.Tensor, torch.Tensor]
LOGS = {"none": 0, "two": 2, "64": 64}
WARMUP_STEPS = 64  # not timed: first steps allocate, and capture


class Batches:
    """A loader that costs nothing: batches made ahead, cycled. Its clock starts after the warm-up batches."""

    def __init__(self, steps: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.batches = [
            (torch.randn(32, 32, generator=generator), torch.randint(0, 2, (32,), generator=generator))
            for _ in range(64)
        ]
        self.length = WARMUP_STEPS + steps
        self.start = 0.0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Batch]:
        for i in range(self.length):
            if i == WARMUP_STEPS:
                self.start = time.perf_counter()
            yield self.batches[i % 64]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))


class Classifier(pl.LightningModule):
    def __init__(self, logs: int, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__()
        self.net = network()
        self.logs = logs
        self.optimizer = optimizer

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
        return self.optimizer(self.parameters(), lr=1e-3)


fused_adam = partial(torch.optim.Adam, fused=True)


def raw_seconds(steps: int, logs: int) -> float:  # noqa: ARG001 - the raw loop logs nothing, whatever is asked
    net = network()
    optimizer = fused_adam(net.parameters(), lr=1e-3)
    batches = Batches(steps)
    for x, y in batches:
        loss = F.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return time.perf_counter() - batches.start


class Stopwatch(pl.Callback):
    """Stops the time when the last batch is done."""

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.stop = time.perf_counter()


def jax_seconds(steps: int, logs: int) -> float:  # noqa: ARG001 - logs nothing, like the raw loop
    import jax
    import jax.numpy as jnp

    weights = [(layer.weight.detach().numpy().T, layer.bias.detach().numpy()) for layer in network()[::2]]
    state = jax.tree.map(
        jnp.asarray, (weights, jax.tree.map(jnp.zeros_like, weights), jax.tree.map(jnp.zeros_like, weights))
    )

    def loss_of(parameters: Any, x: Any, y: Any) -> Any:
        for weight, bias in parameters[:-1]:
            x = jax.nn.relu(x @ weight + bias)
        logits = x @ parameters[-1][0] + parameters[-1][1]
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1).mean()

    @jax.jit
    def step(state: Any, count: Any, x: Any, y: Any) -> Any:
        parameters, mean, square = state
        loss, grads = jax.value_and_grad(loss_of)(parameters, x, y)
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, grads)
        square = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g * g, square, grads)
        first, second = 1 - 0.9**count, 1 - 0.999**count
        parameters = jax.tree.map(
            lambda p, m, s: p - 1e-3 * (m / first) / (jnp.sqrt(s / second) + 1e-8), parameters, mean, square
        )
        return (parameters, mean, square), loss

    batches = [(jnp.asarray(x.numpy()), jnp.asarray(y.numpy())) for x, y in Batches(steps).batches]
    jax.block_until_ready(step(state, jnp.float32(1), *batches[0]))
    start = time.perf_counter()
    for i in range(steps):
        state, loss = step(state, jnp.float32(i + 1), *batches[i % len(batches)])
    jax.block_until_ready((state, loss))
    return time.perf_counter() - start


def fit_seconds(
    trainer_class: type[pl.Trainer],
    options: dict[str, Any],
    steps: int,
    logs: int,
    optimizer: Callable[..., torch.optim.Optimizer] = fused_adam,
) -> float:
    stopwatch, batches = Stopwatch(), Batches(steps)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        callbacks: list[pl.Callback] = [stopwatch]
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
        ).fit(Classifier(logs, optimizer), batches)
    return stopwatch.stop - batches.start


@dataclass(frozen=True, kw_only=True)
class Contender:
    """Who is measured."""

    name: str
    seconds: Callable[[int, int], float]
    """(steps, logs) -> seconds spent on the batches."""


def contenders() -> list[Contender]:
    def captured(steps: int, logs: int, per_replay: int = 1) -> float:
        options = {"capture": "compile", "steps_per_replay": per_replay}
        return fit_seconds(zdtrain.Trainer, options, steps, logs, SimpleAdam)

    found = [
        Contender(name="raw", seconds=raw_seconds),
        Contender(name="lightning", seconds=lambda steps, logs: fit_seconds(pl.Trainer, {}, steps, logs)),
        Contender(name="zdtrain", seconds=lambda steps, logs: fit_seconds(zdtrain.Trainer, {}, steps, logs)),
        Contender(name="zdtrain captured", seconds=captured),
        Contender(name="captured, 4 a replay", seconds=partial(captured, per_replay=4)),
        Contender(name="captured, 16 a replay", seconds=partial(captured, per_replay=16)),
    ]
    if find_spec("jax") is not None:
        found.append(Contender(name="jax jit", seconds=jax_seconds))
    return found


def marginal_us(contender: Contender, steps: int, logs: int) -> float:
    gc.collect()
    once = contender.seconds(steps, logs)
    twice = contender.seconds(2 * steps, logs)
    return (twice - once) / steps * 1e6


def measure(rounds: int, steps: int) -> dict[str, Any]:
    runs = contenders()
    for contender in runs:
        for count in LOGS.values():
            contender.seconds(50, count)  # imports, caches, compiled programs
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
    with quiet():
        result = measure(options.rounds, options.steps)
    print(f"{'logged':8} {'contender':21} {'us/step':>9} {'x raw':>7}  (min-max)")
    for logs, by_name in result.items():
        for name, r in by_name.items():
            spread = f"({r['times_raw_min']:.2f}-{r['times_raw_max']:.2f})"
            print(f"{logs:8} {name:21} {r['us_per_step']:9.1f} {r['times_raw']:7.2f}  {spread}")
    record = {
        "rounds": options.rounds,
        "steps": options.steps,
        "result": result,
    }
    save(options.out, record)


if __name__ == "__main__":
    main()
