"""What users say of their own code, where zdtrain can't know it."""

from collections.abc import Callable
from typing import Any, TypeVar

Hook = TypeVar("Hook", bound=Callable[..., Any])
_MARK = "_zdtrain_only_reads"


def only_reads(hook: Hook) -> Hook:
    """Mark an ``on_train_batch_start`` or ``on_train_batch_end`` that may be called while the device is ahead.

    With ``Trainer(steps_per_replay=k)`` such a hook gets its own step's outputs, batch, counters, logged values and
    learning rate, but weights, gradients and optimizer state may be up to ``k - 1`` steps further. Mark a hook that
    reads none of these and changes nothing that training reads. It keeps the others one by one.

    Example:
        >>> import zdtrain
        >>> class Losses:
        ...     @zdtrain.only_reads
        ...     def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        ...         self.losses.append(outputs["loss"])
    """
    setattr(hook, _MARK, True)
    return hook


def is_marked(hook: object) -> bool:
    """Return whether a hook is marked."""
    return getattr(hook, _MARK, False) is True
