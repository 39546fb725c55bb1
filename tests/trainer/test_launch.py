"""A Trainer that a launcher sends to other processes."""

import pickle

import torch

from zdtrain import Trainer

QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}


def test_a_trainer_travels_without_its_device_door():
    trainer = Trainer(**QUIET, enable_checkpointing=False)
    trainer.drain.submit([torch.ones(())], lambda numbers: None)
    copy = pickle.loads(pickle.dumps(trainer.drain))
    assert "runtime" not in vars(copy)
    got = []
    copy.submit([torch.full((), 2.0)], got.extend)
    assert got == [2.0]
    assert copy.runtime is not trainer.drain.runtime
