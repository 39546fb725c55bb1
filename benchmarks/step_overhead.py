"""What a training step costs beyond its arithmetic: raw PyTorch, stock Lightning and zdtrain, side by side.

An MLP 32-64-64-2 with batch 32 on one thread, fused Adam, batches made ahead. Contenders take turns of 32 steps (see
`turns.py`), because machines drift. The captured contender lowers the whole step with `capture="compile"` and
SimpleAdam, one, 4 and 16 steps per replay; where jax is installed its jit-compiled step is measured too, logging
nothing.

    python -m benchmarks.step_overhead [--rounds 15] [--turns 4] [--out benchmarks/results/step_overhead.json]
"""

import argparse
import contextlib
import io
import tempfile
from collections.abc import Callable, Iterator
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
from benchmarks.turns import Contender, Turn, as_json, measure, show
from zdtrain.optim import SimpleAdam
from zdtrain.quiet import quiet

Batch = tuple[torch.Tensor, torch.Tensor]
LOGS = {"none": 0, "two": 2, "64": 64}
STEPS = 10**7  # more than anybody takes


class Batches:
    """A loader that costs nothing: batches made ahead, cycled.

    Args:
        length: Number of batches.
        turn: Whom to ask before a batch, if anybody.
    """

    def __init__(self, length: int = STEPS, turn: Turn | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        self.batches = [
            (torch.randn(32, 32, generator=generator), torch.randint(0, 2, (32,), generator=generator))
            for _ in range(64)
        ]
        self.length, self.turn = length, turn

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Batch]:
        for i in range(self.length):
            if self.turn is not None:
                self.turn()
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


def raw(turn: Turn) -> None:
    """Train with a plain loop, which logs nothing whatever the others log."""
    net = network()
    optimizer = fused_adam(net.parameters(), lr=1e-3)
    for x, y in Batches(turn=turn):
        loss = F.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def jax_jit(turn: Turn) -> None:
    """Train with a compiled step, which logs nothing either."""
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

    batches = [(jnp.asarray(x.numpy()), jnp.asarray(y.numpy())) for x, y in Batches().batches]
    for i in range(STEPS):
        turn()
        state, loss = step(state, jnp.float32(i + 1), *batches[i % len(batches)])
        jax.block_until_ready((state, loss))


def fit(
    turn: Turn,
    *,
    trainer_class: type[pl.Trainer],
    logs: int,
    optimizer: Callable[..., torch.optim.Optimizer] = fused_adam,
    **options: Any,
) -> None:
    """Train with a Trainer that logs `logs` values per step."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        trainer_class(
            max_epochs=1,
            accelerator="cpu",
            default_root_dir=folder,
            logger=CSVLogger(folder) if logs else False,
            enable_progress_bar=bool(logs),
            enable_checkpointing=False,
            enable_model_summary=False,
            callbacks=[RichProgressBar()] if logs else [],
            **options,
        ).fit(Classifier(logs, optimizer), Batches(turn=turn))


def contenders(logs: int) -> dict[str, Contender]:
    """Return who is measured, the base of the comparison first."""
    captured = partial(fit, trainer_class=zdtrain.Trainer, logs=logs, optimizer=SimpleAdam, capture="compile")
    found: dict[str, Contender] = {
        "raw": raw,
        "lightning": partial(fit, trainer_class=pl.Trainer, logs=logs),
        "zdtrain": partial(fit, trainer_class=zdtrain.Trainer, logs=logs),
        "zdtrain captured": captured,
        "captured, 4 a replay": partial(captured, steps_per_replay=4),
        "captured, 16 a replay": partial(captured, steps_per_replay=16),
    }
    if find_spec("jax") is not None:
        found["jax jit"] = jax_jit
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--turns", type=int, default=4, help="turns of 32 steps per round")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/step_overhead.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    with quiet():
        result = {
            name: measure(contenders(logs), rounds=options.rounds, turns=options.turns) for name, logs in LOGS.items()
        }
    for name, costs in result.items():
        show(costs, f"logged {name}", base="raw")
    save(options.out, {"rounds": options.rounds, "turns": options.turns, "result": as_json(result)})


if __name__ == "__main__":
    main()
