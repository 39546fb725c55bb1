"""An early stop that comes before the minimum lasts until its callback says otherwise."""

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping

from tests.parity.harness import QUIET, Net
from zdtrain import Trainer

RECOVERS = [1.0, 2.0, 3.0, 4.0, 0.5, 0.4, 0.3, 0.2]
FLAT = [1.0] * 8
NAN_FIRST = [float("nan"), *FLAT]


class Follows(Net):
    """Logs given values, one an epoch."""

    def __init__(self, values, other=FLAT):
        super().__init__()
        self.values, self.other = values, other

    def on_train_epoch_end(self):
        self.log("value", torch.tensor(self.values[self.current_epoch]))
        self.log("other", self.other[self.current_epoch])


def epochs(tmp_path, module, callbacks, **options):
    trainer = Trainer(
        **{**QUIET, "max_epochs": 8, "default_root_dir": tmp_path, "logger": False, "limit_val_batches": 0, **options},
        callbacks=callbacks,
    )
    trainer.fit(module)
    return trainer.current_epoch


@pytest.mark.parametrize("minimum", [{"min_epochs": 6}, {"min_steps": 30}], ids=str)
def test_a_metric_that_recovers_trains_on(tmp_path, minimum):
    stopper = EarlyStopping("value", patience=2)
    assert epochs(tmp_path, Follows(RECOVERS), [stopper], **minimum) == 8
    assert stopper.stopped_epoch == 0
    assert stopper.stopping_reason_message is None


@pytest.mark.parametrize("minimum", [{"min_epochs": 6}, {"min_steps": 30}], ids=str)
def test_a_metric_that_does_not_recover_stops_at_the_minimum(tmp_path, minimum):
    stopper = EarlyStopping("value", patience=2)
    assert epochs(tmp_path, Follows(FLAT), [stopper], **minimum) == 6
    assert stopper.stopped_epoch == 5


def test_quirks_keep_the_first_verdict(tmp_path):
    stopper = EarlyStopping("value", patience=2)
    assert epochs(tmp_path, Follows(RECOVERS), [stopper], min_epochs=6, lightning_quirks=True) == 6


@pytest.mark.parametrize("order", [1, -1])
def test_one_callback_does_not_take_back_the_verdict_of_another(tmp_path, order):
    stoppers = [EarlyStopping("value", patience=2), EarlyStopping("other", patience=2)][::order]
    assert epochs(tmp_path, Follows(RECOVERS, FLAT), stoppers, min_epochs=6) == 6


def test_a_stop_asked_for_by_hand_stands(tmp_path):
    class Asks(Callback):
        def on_train_epoch_end(self, trainer, module):
            trainer.should_stop = trainer.should_stop or trainer.current_epoch == 1

    assert epochs(tmp_path, Follows(RECOVERS), [Asks(), EarlyStopping("value", patience=5)], min_epochs=6) == 6


def test_a_stop_asked_for_by_hand_can_be_taken_back_by_hand(tmp_path):
    class Wavers(Callback):
        def on_train_epoch_end(self, trainer, module):
            trainer.should_stop = trainer.current_epoch == 1

    assert epochs(tmp_path, Follows(FLAT), [Wavers()], min_epochs=6) == 8


def test_a_verdict_after_the_minimum_stops_at_once(tmp_path):
    assert epochs(tmp_path, Follows(FLAT), [EarlyStopping("value", patience=2)], min_epochs=2) == 3


@pytest.mark.parametrize("check_finite", [True, False])
def test_a_metric_that_is_not_finite_counts_as_stock_counts_it(tmp_path, check_finite):
    stopper = EarlyStopping("value", patience=2, check_finite=check_finite)
    assert epochs(tmp_path, Follows(NAN_FIRST), [stopper]) == (1 if check_finite else 4)
