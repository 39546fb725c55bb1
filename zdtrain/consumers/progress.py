"""Progress bars: drawn as often as an eye can follow, not once per step."""

from collections.abc import Callable
from time import monotonic
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

MIN_INTERVAL_SECONDS = 0.1  # Rich repaints at 10 Hz, tqdm's own default interval is the same

# What a bar does per batch, as imported: a bar that replaces any of it is called for every batch.
_PER_BATCH = {
    RichProgressBar: ("on_train_batch_end", "_update", "_update_metrics", "refresh"),
    TQDMProgressBar: ("on_train_batch_end", "_should_update"),
}
_STOCK = {(bar, name): getattr(bar, name) for bar, names in _PER_BATCH.items() for name in names}


class Throttled:
    """Calls a bar's `on_train_batch_end` at most every `MIN_INTERVAL_SECONDS`, and on an epoch's last batch.

    Args:
        call: The bar's hook.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self._due = 0.0

    def __call__(self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Draw if it is time."""
        now = monotonic()
        if now >= self._due or trainer.fit_loop.epoch_loop._num_ready_batches_reached():
            with trainer._logger_connector.bar_may_lag():  # type: ignore[attr-defined]
                self._call(trainer, module, outputs, batch, batch_idx)
            self._due = now + MIN_INTERVAL_SECONDS


def throttled(callback: Callback) -> Callable[..., Any]:
    """Return the callback's `on_train_batch_end`, throttled where it is a progress bar with stock drawing."""
    hook: Callable[..., Any] = callback.on_train_batch_end
    for bar, names in _PER_BATCH.items():
        if isinstance(callback, bar):
            stock = all(
                name not in callback.__dict__ and getattr(type(callback), name) is _STOCK[bar, name] for name in names
            )
            return Throttled(hook) if stock and draws_as_stock(callback) else hook
    return hook


def draws_as_stock(bar: Callback) -> bool:
    """Return whether a tqdm bar draws with Lightning's own tqdm and not with one put in its place."""
    return not isinstance(bar, TQDMProgressBar) or type(bar._train_progress_bar) is Tqdm
