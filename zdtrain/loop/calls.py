"""Calls of loggers that callbacks and modules make, while a monitor may still say that a step did not count."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor
from torch.utils._pytree import tree_map

from zdtrain.monitor.listener import RowListener


class LoggerCalls:
    """Keeps a call of ``logger.log_metrics`` back until the step it was made in is known to count, or drops it.

    The calls keep their order and their arguments; tensors are copied. Those of the Trainer's own connector pass.

    Args:
        trainer: The Trainer, whose loggers are held back until `close`.
        listener: Who hears of steps.
    """

    def __init__(self, trainer: Trainer, listener: RowListener) -> None:
        self._loop = trainer.fit_loop.epoch_loop
        self._listener = listener
        self._held: deque[tuple[int, Callable[[], None]]] = deque()
        self._passes = False
        self._before: list[tuple[Logger, Any]] = [(one, vars(one).get("log_metrics")) for one in trainer.loggers]
        for logger, _ in self._before:
            logger.log_metrics = partial(self._log, logger.log_metrics)  # type: ignore[method-assign]

    def _log(self, log: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if self._passes:
            log(*args, **kwargs)
            return
        args, kwargs = tree_map(_kept, (args, kwargs))
        self._held.append((self._loop._batches_that_stepped, partial(log, *args, **kwargs)))
        self.release()

    def release(self) -> None:
        """Make the calls of steps that have been heard of."""
        while self._held and self._held[0][0] <= self._listener.heard:
            self._make(*self._held.popleft())

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Let calls pass that the body makes, after those that are due."""
        self.release()
        before, self._passes = self._passes, True
        try:
            yield
        finally:
            self._passes = before

    def close(self, end: float = float("inf")) -> None:
        """Make the calls that are left, unless a stop lies before them; from here on, calls pass.

        Args:
            end: The first step that is known not to count, though its row may not have arrived.
        """
        self._passes = True
        before, self._before = self._before, []
        for logger, patched in before:
            del logger.log_metrics
            if patched is not None:
                logger.log_metrics = patched  # type: ignore[method-assign]
        held, self._held = self._held, deque()
        for step, call in held:
            if step < end:
                self._make(step, call)

    def _make(self, step: int, call: Callable[[], None]) -> None:
        stop = self._listener.stop
        if stop is None or step < stop.step:
            call()


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
