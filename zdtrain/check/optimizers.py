"""Brings optimizers into the form they have inside a capture, and tells what a step changes about them."""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.optim import LBFGS, Optimizer, SparseAdam
from torch.optim.lr_scheduler import LRScheduler

from zdtrain.capture.optimizers import schedule_state


def make_capturable(optimizer: Optimizer) -> None:
    """Switch on `capturable` where the optimizer has it: zdtrain's Trainer does so for a capture."""
    for group in optimizer.param_groups:
        if "capturable" in group and not group.get("fused"):
            group["capturable"] = True


def is_never_capturable(optimizer: Optimizer) -> bool:
    """Whether the algorithm re-runs the step or sizes its work on the host."""
    return isinstance(optimizer, LBFGS | SparseAdam)


def group_options(optimizers: list[Optimizer]) -> list[tuple[str, object]]:
    """Every option of every group, comparable: tensors by identity, the rest by value."""
    return [
        (name, id(value) if isinstance(value, torch.Tensor) else value)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for name, value in group.items()
        if name != "params"
    ]


def schedule_states(trainer: Trainer, module: LightningModule) -> list[object]:
    """How far the learning-rate schedulers of a run are, those that only the module knows included, comparable."""
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    own = [value for part in module.modules() for value in vars(part).values()]
    return [schedule_state(one) for one in [*schedulers, *(value for value in own if isinstance(value, LRScheduler))]]
