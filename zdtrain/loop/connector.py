"""Where logged values become visible: the dictionaries of the Trainer and, through the drain, the loggers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _METRICS, _OUT_DICT, _PBAR_DICT
from torch import Tensor

from zdtrain.drain import Drain, Value
from zdtrain.loop.monitoring import Monitoring
from zdtrain.loop.rows import StepRows
from zdtrain.step.results import StepResults


class LoggerConnector(_LoggerConnector):
    """Stock Lightning's connector, with two things made lazy.

    A step's metrics enter ``callback_metrics``, ``logged_metrics`` and ``progress_bar_metrics`` when one of them is
    read or when the results are about to change, not after every batch. Loggers are called when their numbers have
    arrived.

    Args:
        trainer: The Trainer.
        stock: The connector it replaces, whose state is taken over.
        drain: The way to the host.
    """

    def __init__(self, trainer: Trainer, stock: _LoggerConnector, drain: Drain) -> None:
        super().__init__(trainer)
        self.__dict__.update(stock.__dict__)
        self.drain = drain
        self.rows: StepRows | None = None  # where every step's values go, if anybody wants them
        self._bar_lags = False
        self._bar_numbers: dict[str, Value] = {}
        self.monitoring: Monitoring | None = None  # the Trainer's, while it watches steps
        self._unpublished: StepResults | None = None  # results of a step that ended, not in the dictionaries yet

    def on_batch_start(self, batch: Any, dataloader_idx: int | None = None) -> None:
        """Take note of the new batch."""
        if self._unpublished is not None and self._unpublished is not self.trainer._results:
            self.publish()
        super().on_batch_start(batch, dataloader_idx)

    def start_step(self, results: StepResults, batch: Any, dataloader_idx: int | None = None) -> None:
        """Do what `on_batch_start` does, for results that are already at hand."""
        if self._unpublished is not None and self._unpublished is not results:
            self.publish()
        self._first_loop_iter = self._first_loop_iter is None
        results.batch = batch
        results.batch_size = None
        results.dataloader_idx = dataloader_idx

    def on_batch_end(self) -> None:
        """Fold the step's values into the epoch and drop the batch."""
        results = self.trainer._results
        assert isinstance(results, StepResults)
        self.end_step(results)

    def end_step(self, results: StepResults) -> None:
        """Do what `on_batch_end` does, for results that are already at hand."""
        rows, monitoring = self.rows, self.monitoring
        heard = results.training and (rows is not None or monitoring is not None)
        fit = self.trainer.fit_loop
        loop = fit.epoch_loop
        ends_window = heard and not loop._should_accumulate()
        if rows is not None and ends_window:
            rows.push(loop._batches_that_stepped, fit.epoch_progress.current.completed, loop.batch_idx)
        results.end_step()
        if monitoring is not None and ends_window:
            monitoring.end_step()
        self._unpublished = results

    def flush(self) -> None:
        """Bring everything that was logged to whoever it is for."""
        if self.rows is not None:
            self.rows.stream.send()
        self.drain.flush()

    def publish(self) -> None:
        """Put the last step's values into the dictionaries."""
        results, self._unpublished = self._unpublished, None
        if results is not None:
            self._update(results.metrics(on_step=True))

    def _update(self, metrics: _METRICS) -> None:
        self._progress_bar_metrics.update(metrics["pbar"])
        self._callback_metrics.update(metrics["callback"])
        self._logged_metrics.update(metrics["log"])

    def epoch_end_reached(self) -> None:
        """Switch from step values to epoch values."""
        self.publish()
        if self.rows is not None:
            self.rows.stream.send()
        super().epoch_end_reached()
        results = self.trainer._results
        if isinstance(results, StepResults):
            results.reduce_epoch()

    def reset_metrics(self) -> None:
        """Empty the dictionaries."""
        self._unpublished = None
        self._bar_numbers = {}
        super().reset_metrics()

    def reset_results(self) -> None:
        """Start a new epoch."""
        self.publish()
        super().reset_results()

    @property
    def callback_metrics(self) -> _OUT_DICT:
        """Current values for callbacks: the live dictionary, holding tensors."""
        self.publish()
        return super().callback_metrics

    @property
    def logged_metrics(self) -> _OUT_DICT:
        """Current values for loggers: the live dictionary, holding tensors."""
        self.publish()
        return super().logged_metrics

    @property
    def progress_bar_metrics(self) -> _PBAR_DICT:
        """Current values for a progress bar, as numbers; inside `bar_may_lag` those that have arrived so far."""
        self.publish()
        shown: dict[str, Any] = super().progress_bar_metrics
        tensors = {name: value for name, value in shown.items() if isinstance(value, Tensor)}
        arrived = self._bar_numbers
        if tensors:
            self.drain.submit(
                list(tensors.values()), lambda numbers: arrived.update(zip(tensors, numbers, strict=True))
            )
        if self._bar_lags:
            ready = shown.keys() - (tensors.keys() - arrived.keys())
            return {name: arrived[name] if name in tensors else shown[name] for name in shown if name in ready}
        self.drain.flush()
        shown.update((name, arrived[name]) for name in tensors)
        return shown

    @contextmanager
    def bar_may_lag(self) -> Iterator[None]:
        """Let the body's reads of `progress_bar_metrics` take what has arrived, instead of waiting for the device."""
        self._bar_lags = True
        try:
            yield
        finally:
            self._bar_lags = False

    def log_metrics(self, metrics: _OUT_DICT, step: int | None = None) -> None:
        """Send `metrics` to the loggers once their numbers are on the host; see the base class."""
        if not self.trainer.loggers or not metrics:
            return
        self._logged_metrics.update(metrics)
        if self.rows is not None:
            self.rows.stream.send()  # loggers hear of a step after the rows up to it
        names, default, deliver = list(metrics), self._default_step(), self._delivery()
        if not all(isinstance(value, Tensor) and value.numel() == 1 for value in metrics.values()):
            self.drain.flush()
            deliver(convert_tensors_to_scalars(metrics), step, default)
            return
        self.drain.submit(
            list(metrics.values()),
            lambda numbers: deliver(dict(zip(names, numbers, strict=True)), step, default),
        )

    def _delivery(self) -> Callable[[dict[str, Value], int | None, tuple[int, int]], None]:
        """Return what hands numbers to the loggers, unless they turn out to lie behind a stop."""
        monitoring = self.monitoring
        if monitoring is None or monitoring.has_stopped:
            return self._deliver

        def deliver(scalars: dict[str, Value], step: int | None, default: tuple[int, int]) -> None:
            monitoring.deliver(default[1], lambda: self._deliver(scalars, step, default))

        return deliver

    def _default_step(self) -> tuple[int, int]:
        return self.trainer.current_epoch, self.trainer.fit_loop.epoch_loop._batches_that_stepped

    def _deliver(self, scalars: dict[str, Value], step: int | None, default: tuple[int, int]) -> None:
        if step is None:
            logged_step = scalars.pop("step", None)
            if logged_step is not None:
                step = int(logged_step)
            else:
                epoch, step = default
                scalars.setdefault("epoch", epoch)
        for logger in self.trainer.loggers:
            logger.log_metrics(metrics=scalars, step=step)
            logger.save()

    def teardown(self) -> None:
        """Bring everything to the host."""
        self.publish()
        self.flush()
        super().teardown()
