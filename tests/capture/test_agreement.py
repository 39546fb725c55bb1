"""What `zdtrain check` says of a module is what capturing its training step then does."""

import copy

import lightning.pytorch as pl
import pytest
import torch

from tests.check.zoo import CASES
from zdtrain import Trainer

STEPS = 12


class Repeated:
    """The case's batch, again and again."""

    def __init__(self, batch):
        self.batch = batch

    def __len__(self):
        return STEPS

    def __iter__(self):
        return (copy.deepcopy(self.batch) for _ in range(STEPS))


def fit(case, folder, capture):
    pl.seed_everything(0, verbose=False)
    module = case.make()
    trainer = Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        max_epochs=1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        capture=capture,
        **{k: v for k, v in case.trainer_options.items() if k not in ("logger", "enable_checkpointing")},
    )
    pl.seed_everything(1, verbose=False)
    trainer.fit(module, Repeated(case.batch()))
    return trainer, module


def trained(case, folder, capture):
    """Return the Trainer and the final weights, or the error that stopped the run."""
    try:
        trainer, module = fit(case, folder, capture)
    except (RuntimeError, ValueError, pl.utilities.exceptions.MisconfigurationException) as error:
        return None, f"{type(error).__name__}: {error}"
    return trainer, {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_captured_step_trains_what_the_check_says_it_can(case, tmp_path):
    _, eager = trained(case, tmp_path / "eager", "off")
    trainer, captured = trained(case, tmp_path / "captured", "graph")
    if isinstance(eager, str):
        assert captured == eager
        return
    assert eager.keys() == captured.keys()
    for name, value in eager.items():
        assert torch.allclose(value, captured[name], rtol=0, atol=0, equal_nan=True), f"{name} differs"
    assert (trainer.capture_report.steps_replayed > 0) == case.captures_on_cpu, trainer.capture_report.fallbacks
