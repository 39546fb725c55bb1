"""The functions that people call."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.optim import Optimizer

from zdtrain.check.driver import Plan, run
from zdtrain.check.formats import render_text
from zdtrain.check.hardware import compare_with_gpu, gpu_name
from zdtrain.check.report import CheckReport, in_order
from zdtrain.errors import ConfigError

Step = Callable[[nn.Module, Any], torch.Tensor]
MakeOptimizer = Callable[[Iterator[nn.Parameter]], Optimizer]


MIN_STEPS = 3
"""The first training step fills caches, two more are compared."""


class Repeated:
    """One batch, over and over.

    Args:
        batch: what each iteration yields.
        num_batches: how often.
    """

    def __init__(self, batch: Any, num_batches: int) -> None:
        self.batch = batch
        self.num_batches = num_batches

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.num_batches):
            yield self.batch


class _StepModule(LightningModule):
    """A plain module and its step, as a LightningModule."""

    def __init__(self, module: nn.Module, step: Step, make_optimizer: MakeOptimizer) -> None:
        super().__init__()
        self.module = module
        self._step = step
        self._make_optimizer = make_optimizer

    def training_step(self, batch: Any) -> torch.Tensor:
        return self._step(self.module, batch)

    def configure_optimizers(self) -> Optimizer:
        return self._make_optimizer(self.module.parameters())


def _as_lightning(module: nn.Module, step: Step | None, make_optimizer: MakeOptimizer | None) -> LightningModule:
    if isinstance(module, LightningModule):
        if step is not None or make_optimizer is not None:
            raise ConfigError("check_step: step= and make_optimizer= are for a plain nn.Module; this one has its own")
        return module
    if not isinstance(module, nn.Module):
        raise ConfigError(f"check_step: module must be an nn.Module, got {type(module).__name__}")
    if step is None:
        name = type(module).__name__
        raise ConfigError(f"check_step: {name} is a plain nn.Module; pass step=, a function (module, batch) -> loss")
    return _StepModule(module, step, make_optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=1e-3)))


def _copied(module: LightningModule) -> LightningModule:
    try:
        return copy.deepcopy(module)
    except Exception as error:
        raise ConfigError(
            f"check_step: {type(module).__name__} cannot be copied ({type(error).__name__}: {error}); "
            "pass copy_module=False to check the module itself, whose weights then change"
        ) from error


def check_step(
    module: nn.Module,
    batch: Any = None,
    *,
    validation_batch: Any = None,
    datamodule: LightningDataModule | None = None,
    step: Step | None = None,
    make_optimizer: MakeOptimizer | None = None,
    num_steps: int = 4,
    num_validation_steps: int = 3,
    trainer_options: Mapping[str, Any] | None = None,
    shapes: bool = False,
    copy_module: bool = True,
) -> CheckReport:
    """Run a few steps of a module on a simulated ``cuda:0`` and report what makes the GPU wait or breaks a capture.

    Training steps run in full: forward, backward, clipping, the optimizer, schedulers, callbacks; then validation
    steps, if the module has them. Nothing stops at the first finding.

    Args:
        module: a LightningModule, or any `nn.Module` together with `step`.
        batch: one batch on the CPU, used for every step. None takes batches from `datamodule` or from the module.
        validation_batch: as `batch`, for validation; `batch` by default.
        datamodule: where batches come from, instead of `batch`.
        step: for a plain module: ``step(module, batch) -> loss``, a 0-D tensor.
        make_optimizer: for a plain module: from its parameters to an optimizer; SGD by default.
        num_steps: optimizer steps to run; at least 3, because the first fills caches and two more are compared.
        num_validation_steps: validation batches to run.
        trainer_options: options for Lightning's Trainer, e.g. ``{"precision": "bf16-mixed", "callbacks": [...]}``.
        shapes: keep the table of intermediate tensors in the report.
        copy_module: check a deep copy, so that `module` stays as it is.

    Returns:
        The report.

    Raises:
        ConfigError: an argument cannot be used.

    Example::

        report = check_step(module, (torch.randn(32, 8), torch.randint(0, 4, (32,))))
        assert report.host_reads_per_step == 0, report
    """
    if num_steps < MIN_STEPS:
        raise ConfigError(f"check_step: num_steps must be at least {MIN_STEPS}, got {num_steps}")
    lightning_module = _as_lightning(module, step, make_optimizer)
    if copy_module:
        lightning_module = _copied(lightning_module)
    accumulate = (trainer_options or {}).get("accumulate_grad_batches") or 1
    has_batch = batch is not None
    for_validation = validation_batch if validation_batch is not None else batch
    has_validation = has_batch and type(lightning_module).validation_step is not LightningModule.validation_step
    return run(
        Plan(
            module=lightning_module,
            train_loader=Repeated(batch, num_steps * accumulate) if has_batch else None,
            validation_loader=Repeated(for_validation, num_validation_steps) if has_validation else None,
            datamodule=datamodule,
            num_steps=num_steps,
            num_validation_steps=num_validation_steps,
            trainer_options=trainer_options or {},
            shapes=shapes,
        )
    )


def check_configured(
    module: LightningModule,
    datamodule: LightningDataModule | None,
    *,
    num_steps: int,
    num_validation_steps: int,
    trainer_options: Mapping[str, Any],
    shapes: bool,
    on_gpu: bool,
) -> CheckReport:
    """Check a module together with its data, and on this machine's GPU too if asked to.

    Args:
        module: changed by the steps that are run.
        datamodule: where batches come from; None if the module has loaders of its own.
        num_steps: as for `check_step`.
        num_validation_steps: as for `check_step`.
        trainer_options: as for `check_step`.
        shapes: as for `check_step`.
        on_gpu: run on the GPU as well, and report where the two disagree.
    """
    on_hardware = _copied(module) if on_gpu else None
    report = check_step(
        module,
        datamodule=datamodule,
        num_steps=num_steps,
        num_validation_steps=num_validation_steps,
        trainer_options=trainer_options,
        shapes=shapes,
        copy_module=False,
    )
    if on_hardware is None:
        return report
    extra = compare_with_gpu(on_hardware, datamodule, report, trainer_options, num_steps)
    return dataclasses.replace(report, findings=in_order([*report.findings, *extra]), device=gpu_name())


def assert_no_host_reads(module: nn.Module, batch: Any = None, **options: Any) -> CheckReport:
    """Fail if a step of `module` makes the host wait for the device.

    Args:
        module: as for `check_step`.
        batch: as for `check_step`.
        options: as for `check_step`.

    Returns:
        The report, for further assertions.

    Raises:
        AssertionError: with the report as its message.
    """
    report = check_step(module, batch, **options)
    reading = [stage.name for stage in report.stages if stage.host_reads_per_step > 0]
    if reading or "step-raised" in report.codes():
        raise AssertionError(f"host reads in {' and '.join(reading) or 'a step that raised'}\n{render_text(report)}")
    return report


def assert_capturable(module: nn.Module, batch: Any = None, **options: Any) -> CheckReport:
    """Fail if a training step of `module` cannot be captured as it is.

    Args:
        module: as for `check_step`.
        batch: as for `check_step`.
        options: as for `check_step`.

    Returns:
        The report.

    Raises:
        AssertionError: with the report as its message.
    """
    report = check_step(module, batch, **options)
    if report.verdict != "capturable":
        raise AssertionError(f"the training step is {report.verdict}\n{render_text(report)}")
    return report
