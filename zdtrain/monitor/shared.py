"""Verdicts of several processes: what one of them sees in its share of a step, all of them act on in that step."""

import torch
import torch.distributed as dist
from torch import Tensor


class SharedVerdicts:
    """Brings the verdicts of all processes together, with one all-reduce and without a look by the host.

    Args:
        count: How many verdicts there are, the same in every process.
        device: The training device.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._flags = torch.zeros(count, dtype=torch.uint8, device=device)  # not every backend reduces bool

    def share(self, holds: Tensor) -> None:
        """Set what is set in any process, in place; every process has to call it in every step.

        Args:
            holds: Whether each condition holds here, shape=(count,), bool.
        """
        self._flags.copy_(holds)
        dist.all_reduce(self._flags, op=dist.ReduceOp.MAX)
        holds.copy_(self._flags)
