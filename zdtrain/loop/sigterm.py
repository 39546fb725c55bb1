"""SIGTERM in a run of several processes: all of them leave when rank zero is told to."""

from collections import deque

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from zdtrain.drain import Drain

LAG = 16  # batches; no device that trains is that far behind for long


class SharedSigterm:
    """Asks rank zero before every batch, as stock Lightning does, but takes the answer without waiting for it.

    On a device that answers late the answer of `LAG` batches ago is taken, in every process that of the same batch.

    Args:
        trainer: The Trainer, in a process group.
        drain: The way to the host.
    """

    def __init__(self, trainer: Trainer, drain: Drain) -> None:
        self._trainer = trainer
        self._drain = drain
        self._device = trainer.strategy.root_device
        self._lag = 0 if drain.runtime.is_immediate else LAG
        self._num_ahead = 0  # answers asked for and not taken
        self._answers: deque[bool] = deque()  # those that have arrived

    def look(self) -> None:
        """Ask whether rank zero was told to end, and take one answer.

        Raises:
            SIGTERMException: It was.
        """
        told = torch.full((1,), int(self._trainer.received_sigterm), dtype=torch.int64, device=self._device)
        dist.broadcast(told, src=0)
        self._drain.submit([told], lambda numbers: self._answers.append(bool(numbers[0])))
        if self._num_ahead < self._lag:
            self._num_ahead += 1
            return
        while not self._answers:
            self._drain.wait_for_oldest()
        if self._answers.popleft():
            raise SIGTERMException
