"""Runs a few real steps of a LightningModule on the shadow device, under stock Lightning's Trainer."""

import contextlib
import copy
import gc
import os
import random
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, LearningRateMonitor, ModelSummary, ProgressBar
from lightning.pytorch.loggers.logger import DummyLogger

from zdtrain.check.analysis import analyse
from zdtrain.check.findings import Finding, make_finding
from zdtrain.check.observe import ObservedTrainer, Observer
from zdtrain.check.report import CheckReport
from zdtrain.check.shadow import ShadowDevice
from zdtrain.check.shapes import ModulePath
from zdtrain.errors import ConfigError
from zdtrain.loop.run_scalars import run_scalars
from zdtrain.quiet import quiet
from zdtrain.readless import readless_metrics
from zdtrain.source.location import claim, code_kind

_SERVED_CALLBACKS = (Checkpoint, EarlyStopping, LearningRateMonitor, ModelSummary, ProgressBar)
"""These read values that have already arrived under zdtrain's Trainer, or write files that a check must not write."""

FIXED_OPTIONS: dict[str, Any] = {
    "accelerator": "gpu",
    "devices": 1,
    "num_nodes": 1,
    "strategy": "auto",
    "max_epochs": 1,
    "max_steps": -1,
    "max_time": None,
    "min_epochs": None,
    "min_steps": None,
    "num_sanity_val_steps": 0,
    "overfit_batches": 0.0,
    "fast_dev_run": False,
    "val_check_interval": 1.0,
    "check_val_every_n_epoch": 1,
    "limit_test_batches": 0,
    "limit_predict_batches": 0,
    "profiler": None,
    "detect_anomaly": False,
    "barebones": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""Options of the Trainer that a check decides itself."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to run."""

    module: LightningModule
    train_loader: Any = None
    """Batches to train on; None leaves it to the data module or to the module's own `train_dataloader`."""
    validation_loader: Any = None
    """Batches to validate on; None as above."""
    datamodule: LightningDataModule | None = None
    num_steps: int = 4
    """Training steps; at least 3: the first one fills caches, two more are compared."""
    num_validation_steps: int = 3
    trainer_options: Mapping[str, Any]
    """Options for the Trainer; those in `FIXED_OPTIONS` are overruled."""
    shapes: bool = False
    """Whether to keep the table of intermediate tensors."""


@contextlib.contextmanager
def _same_randomness() -> Iterator[None]:
    """Give the random generators back as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@contextlib.contextmanager
def _same_environment() -> Iterator[None]:
    """Give the environment back as it was: Lightning sets variables for the processes that it might start."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Collect no garbage inside: the records of a step would trigger full collections, each longer than the step."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def leaving_no_trace() -> Iterator[None]:
    """Change nothing for whoever runs next, and run compiled functions eagerly, so that their operations are seen.

    Metrics update as they do in a run.
    """
    eagerly = torch.compiler.set_stance("force_eager")
    with _same_environment(), _same_randomness(), _no_collection(), eagerly, readless_metrics():
        yield


def split_callbacks(options: Mapping[str, Any]) -> tuple[list[Callback], tuple[str, ...]]:
    """The configured callbacks that a check runs, and the names of those that it leaves out."""
    given = options.get("callbacks") or []
    callbacks = given if isinstance(given, list | tuple) else [given]
    run = [callback for callback in callbacks if not isinstance(callback, _SERVED_CALLBACKS)]
    skipped = tuple(type(callback).__name__ for callback in callbacks if isinstance(callback, _SERVED_CALLBACKS))
    return run, skipped


def make_trainer(
    given: Mapping[str, Any], callbacks: list[Callback], num_steps: int, num_validation_steps: int
) -> ObservedTrainer:
    """A Trainer for a few steps.

    Args:
        given: options of the user; those in `FIXED_OPTIONS` are overruled.
        callbacks: instead of the user's.
        num_steps: optimizer steps to take.
        num_validation_steps: validation batches to run.
    """
    options = {**given, **FIXED_OPTIONS}
    scalars = options.pop("scalars", None)
    accumulate = options.get("accumulate_grad_batches") or 1
    trainer = ObservedTrainer(
        **{
            **options,
            "callbacks": callbacks,
            "logger": DummyLogger(),
            "limit_train_batches": num_steps * accumulate,
            "limit_val_batches": num_validation_steps,
        }
    )
    trainer.device_scalars = run_scalars(copy.deepcopy(scalars))
    return trainer


def _fit(trainer: ObservedTrainer, plan: Plan) -> Exception | None:
    """Train; frames around this function are nobody's. Returns what the user's code raised."""
    try:
        trainer.fit(plan.module, plan.train_loader, plan.validation_loader, datamodule=plan.datamodule)
    except Exception as error:  # whatever the user's step raises becomes a finding
        return error
    return None


def _raised(error: Exception, stage: str) -> Finding:
    """The innermost line of the user's code that an exception passed."""
    message = f"{type(error).__name__}: {error}".splitlines()[0]
    passed = traceback.walk_tb(error.__traceback__)
    lines = [(frame.f_code, line) for frame, line in passed if code_kind(frame.f_code) == "user"]
    if not lines:
        return make_finding("step-raised", message, stage=stage)
    code, line = lines[-1]
    return make_finding(
        "step-raised", message, stage=stage, file=code.co_filename, line=line, function=code.co_qualname
    )


def run(plan: Plan) -> CheckReport:
    """Run the plan on the shadow device and report."""
    claim(type(plan.module))
    with quiet(), leaving_no_trace(), ShadowDevice(boundary=_fit.__code__) as device:
        observer = Observer(device, plan.module)
        callbacks, skipped = split_callbacks(plan.trainer_options)
        with ModulePath() if plan.shapes else contextlib.nullcontext() as path, observer.attached():
            if path is not None:
                path.name_modules(plan.module)
                device.track_modules(path)
            trainer = make_trainer(
                plan.trainer_options, [observer, *callbacks], plan.num_steps, plan.num_validation_steps
            )
            trainer.recorder, trainer.counters = observer.recorder, observer.counters
            error = _fit(trainer, plan)
            if error is None and not observer.steps:
                raise ConfigError("check: no training step ran, because the training loader gave no batch")
            raised = [] if error is None else [_raised(error, observer.recorder.stage)]
            return analyse(
                observer,
                trainer,
                extra=raised,
                keep_shapes=plan.shapes,
                skipped_callbacks=skipped,
            )
