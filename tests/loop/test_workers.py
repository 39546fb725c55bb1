"""Data workers and the trainer's own copies leave nothing behind."""

import logging
import multiprocessing
import threading

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.parity.harness import QUIET, Net
from zdtrain import Trainer


class Chatty(Dataset):
    """Takes a lock in the worker: the one of a log handler."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        logging.getLogger("chatty").warning("item")
        return torch.ones(4) * index, torch.ones(1)


class Fed(Net):
    fails = False

    def training_step(self, batch, batch_idx):
        if self.fails and batch_idx == 2:
            raise RuntimeError("boom")
        return super().training_step(batch, batch_idx)

    def train_dataloader(self):
        return DataLoader(Chatty(), batch_size=2, num_workers=2)

    val_dataloader = train_dataloader


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("records", [False, True])
def test_forked_workers_end_with_the_fit(tmp_path, fails, records):
    handler = logging.NullHandler()
    logger = logging.getLogger("chatty")
    logger.addHandler(handler)
    logger.propagate = False
    threads = set(threading.enumerate())
    module = Fed()
    module.fails = fails
    options = {"default_root_dir": tmp_path, "logger": False, "log_every_n_steps": 1, "records": records}
    trainer = Trainer(**{**QUIET, **options})
    if fails:
        with pytest.raises(RuntimeError, match="boom"):
            trainer.fit(module)
    else:
        trainer.fit(module)
        assert trainer.current_epoch == 2
    del trainer
    logger.removeHandler(handler)
    assert not [thread for thread in set(threading.enumerate()) - threads if not thread.daemon]
    assert not multiprocessing.active_children()
