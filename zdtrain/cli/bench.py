"""`zdtrain bench`: what a step of the user's own model costs, from stock Lightning to a captured step."""

import copy
import json
import math
import os
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ModelSummary, ProgressBar
from lightning.pytorch.loggers import CSVLogger

from zdtrain.cli import EXIT_OK
from zdtrain.cli.configured import ConfiguredRun
from zdtrain.config import CAPTURE_VARIABLE, Capture
from zdtrain.device import Runtime, runtime_for
from zdtrain.errors import ConfigError
from zdtrain.parser import Parser, whole_number
from zdtrain.quiet import quiet
from zdtrain.records.environment import describe_environment
from zdtrain.trainer import Trainer

RUNGS: dict[str, Capture | None] = {"lightning": None, "eager": "off", "graph": "graph", "compile": "compile"}
"""What is measured: stock Lightning, and zdtrain with this `capture`."""

_LEFT_OUT = (Checkpoint, EarlyStopping, ModelSummary, ProgressBar)  # write files, end the run, or draw
_FIXED_OPTIONS: dict[str, Any] = {
    "max_epochs": -1,
    "min_epochs": None,
    "min_steps": None,
    "max_time": None,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
    "overfit_batches": 0.0,
    "fast_dev_run": False,
    "barebones": False,
    "profiler": None,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class StepClock(Callback):
    """Times a number of batches behind a number of others.

    Args:
        warmup: Batches before the clock starts.
        steps: Batches that are timed.
    """

    def __init__(self, warmup: int, steps: int) -> None:
        self.ends = (warmup, warmup + steps)
        self.times: list[float] = []
        self.replayed: list[int] = []
        self._n_batches = 0

    def on_train_batch_start(self, trainer: LightningTrainer, *_: Any) -> None:
        """Look at the clock once the device has caught up."""
        if self._n_batches in self.ends:
            runtime: Runtime = runtime_for(trainer.strategy.root_device)
            runtime.synchronize()  # twice a run, to look at the clock
            self.replayed.append(trainer.capture_report.steps_replayed if isinstance(trainer, Trainer) else 0)
            self.times.append(time.perf_counter())
        self._n_batches += 1


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One run."""

    seconds: float
    """Per batch."""
    replayed: float
    """Part of the timed batches that a program ran."""
    reasons: tuple[str, ...] = ()
    """Why others were not."""


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One line of the ladder."""

    name: str
    ms_per_step: float
    """Median over rounds."""
    times_lightning: float
    """Median over rounds of the ratio to stock Lightning's time in the same round."""
    replayed: float
    """Part of the timed batches that a captured program ran."""
    reasons: tuple[str, ...]
    """Why others ran eagerly."""


class Bench:
    """Runs the module that a config describes on each rung in turn.

    Args:
        configured: The module, its data and the Trainer's options.
        warmup: Batches before the clock starts: steps are captured and compared in them.
        steps: Batches that are timed.
    """

    def __init__(self, configured: ConfiguredRun, *, warmup: int, steps: int) -> None:
        self._module = configured.model
        self._data = configured.datamodule
        self._options = configured.trainer_options
        self._warmup, self._steps = warmup, steps

    @property
    def left_out(self) -> list[str]:
        """Callbacks that do not run."""
        return [type(c).__name__ for c in self._options["callbacks"] if isinstance(c, _LEFT_OUT)]

    def ladder(self, names: list[str], rounds: int) -> list[Rung]:
        """Measure every rung once a round; machines drift, so ratios are taken within a round."""
        runs = [{name: self.run(name) for name in names} for _ in range(rounds)]
        return [
            Rung(
                name=name,
                ms_per_step=1e3 * statistics.median(run[name].seconds for run in runs),
                times_lightning=statistics.median(run[name].seconds / run["lightning"].seconds for run in runs),
                replayed=runs[-1][name].replayed,
                reasons=runs[-1][name].reasons,
            )
            for name in names
        ]

    def run(self, name: str) -> Measured:
        """Train a copy of the module on one rung."""
        clock = StepClock(self._warmup, self._steps)
        n_batches = self._warmup + self._steps + 1
        callbacks = [copy.deepcopy(c) for c in self._options["callbacks"] if not isinstance(c, _LEFT_OUT)]
        options = {**self._options, **_FIXED_OPTIONS, "callbacks": [*callbacks, clock]}
        options["max_steps"] = math.ceil(n_batches / (options.get("accumulate_grad_batches") or 1))
        capture = RUNGS[name]
        if capture is None:
            options.pop("scalars", None)
        with tempfile.TemporaryDirectory() as folder:
            options.update(default_root_dir=folder, logger=CSVLogger(folder))
            trainer = LightningTrainer(**options) if capture is None else Trainer(**options, capture=capture)
            trainer.fit(copy.deepcopy(self._module), datamodule=copy.deepcopy(self._data))
        if len(clock.times) < 2:
            raise ConfigError(f"zdtrain bench: the data gave fewer than {n_batches} batches; lower --steps or --warmup")
        first, last = clock.replayed
        return Measured(
            seconds=(clock.times[1] - clock.times[0]) / self._steps,
            replayed=(last - first) / self._steps,
            reasons=tuple(map(str, trainer.capture_report.fallbacks)) if isinstance(trainer, Trainer) else (),
        )


def table(rungs: list[Rung]) -> str:
    """Return the ladder in words."""
    lines = [f"{'rung':12} {'ms/step':>9} {'x lightning':>12} {'replayed':>9}"]
    for rung in rungs:
        lines.append(f"{rung.name:12} {rung.ms_per_step:9.3f} {rung.times_lightning:12.2f} {rung.replayed:9.0%}")
        lines += [f"  - {reason}" for reason in rung.reasons]
    return "\n".join(lines)


def _parser() -> Parser:
    parser = Parser(
        prog="zdtrain bench",
        description="Time training steps of your model: stock Lightning, zdtrain, captured, captured and lowered.",
        epilog="Other arguments are those of `zdtrain fit`. Nothing is validated, checkpointed or recorded.",
    )
    parser.add_argument("--steps", type=whole_number(1), default=200, help="batches to time (default: 200)")
    parser.add_argument("--warmup", type=whole_number(1), default=40, help="batches before those (default: 40)")
    parser.add_argument("--rounds", type=whole_number(1), default=3, help="rounds to take medians of (default: 3)")
    parser.add_argument(
        "--rungs", nargs="+", choices=list(RUNGS), default=list(RUNGS), help="what to measure (default: all)"
    )
    parser.add_argument("--output", type=Path, help="also write the numbers into this JSON file")
    return parser


def main(argv: list[str]) -> int:
    """Measure what a config describes.

    Raises:
        ConfigError: the config or an option cannot be used.
    """
    parser = _parser()
    options, config_args = parser.parse_known_args(argv)
    if not config_args:
        raise ConfigError("zdtrain bench: name a config file: zdtrain bench configs/digits.yaml")
    if os.environ.get(CAPTURE_VARIABLE):
        raise ConfigError(f"{CAPTURE_VARIABLE}={os.environ[CAPTURE_VARIABLE]!r} captures all rungs alike: unset it")
    if options.output is not None and not os.access(options.output.absolute().parent, os.W_OK):
        raise ConfigError(f"--output {options.output}: {options.output.parent} is no folder that can be written")
    names = list(dict.fromkeys(["lightning", *options.rungs]))
    bench = Bench(ConfiguredRun(config_args, parser.option_names), warmup=options.warmup, steps=options.steps)
    with quiet():
        rungs = bench.ladder(names, options.rounds)
    print(table(rungs))
    if bench.left_out:
        print(f"left out: {', '.join(bench.left_out)}")
    if options.output is not None:
        settings = {name: getattr(options, name) for name in ("steps", "warmup", "rounds")}
        record = {**describe_environment(), **settings, "threads": torch.get_num_threads()}
        options.output.write_text(json.dumps({**record, "rungs": [asdict(rung) for rung in rungs]}, indent=1) + "\n")
    return EXIT_OK
