"""The monitors of one fit: what the step asks for them, what the host hears of them, and how a run ends by one."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from zdtrain.consumers.steps import CHUNK_ROWS, StepConsumer, StepStream
from zdtrain.drain import Drain, Value
from zdtrain.errors import FallbackReason
from zdtrain.loop.calls import LoggerCalls
from zdtrain.loop.history import History
from zdtrain.loop.looks import Logged, may_save_now
from zdtrain.loop.rows import StepRows
from zdtrain.loop.suspects import Suspects
from zdtrain.monitor.average import WeightAverage
from zdtrain.monitor.base import Monitor
from zdtrain.monitor.by_hand import refuse_by_hand
from zdtrain.monitor.conditions import NonFinite
from zdtrain.monitor.events import MonitorEvent, MonitorWarning, nearest
from zdtrain.monitor.guard import StepGuard
from zdtrain.monitor.listener import RowListener
from zdtrain.monitor.statistics import Statistics
from zdtrain.step.results import StepResults

RecordEvent = Callable[..., None]
RecordStatistics = Callable[[int, str, dict[str, Value]], None]


class Monitoring:
    """Puts the monitors of one fit to work.

    Args:
        trainer: The Trainer, with its module attached and optimizers made.
        monitors: The monitors.
        statistics: What to keep of metrics on the device.
        average: Weights to average in every step, if any.
        scalars: The run's scalars, by name.
        drain: The way to the host.
        consumers: Who gets the rows of steps.
        max_lag_steps: Steps that the host may be behind before it waits.
        record: Where events go, if anywhere.
    """

    def __init__(
        self,
        trainer: Trainer,
        monitors: Sequence[Monitor],
        *,
        statistics: Sequence[Statistics] = (),
        average: WeightAverage | None,
        scalars: Mapping[str, Tensor],
        drain: Drain,
        consumers: Sequence[StepConsumer],
        max_lag_steps: int,
        record: RecordEvent | None,
    ) -> None:
        self._trainer = trainer
        self._drain = drain
        self._max_lag_steps = max_lag_steps
        self._record = record
        loop = self._loop = trainer.fit_loop.epoch_loop
        results: StepResults = loop._results  # type: ignore[assignment]
        device = trainer.strategy.root_device
        by_hand = not trainer.lightning_module.automatic_optimization
        if by_hand:
            refuse_by_hand(monitors)
        acting = [monitor for monitor in monitors if monitor.acts_in_step]
        anything = any(monitor.metrics is None for monitor in monitors)
        wanted = {name for monitor in monitors for name in monitor.metrics or ()} | {s.metric for s in statistics}
        in_step = {name for monitor in acting for name in monitor.metrics or ()} | {s.metric for s in statistics}
        for monitor in monitors:
            monitor.to(device)
        for kept in statistics:
            kept.to(device)
            kept.reset()
        self._statistics = list(statistics)
        logged = Logged(results, None if any(monitor.metrics is None for monitor in acting) else in_step)
        self.guard = StepGuard(
            acting,
            device,
            logged.cells,
            {name: value for name, value in scalars.items() if anything or name in wanted},
            trainer.lightning_module,
            results.banks,
            statistics=statistics,
            average=average,
            norm=anything or "grad_norm" in wanted,
            visible=drain.runtime.is_immediate and (by_hand or trainer.capture_in_effect == "off"),  # type: ignore[attr-defined]
            several=trainer.world_size > 1,
        )
        # Processes hear of the same row at different times, and yet have to do the same in the same step. Where a step
        # that acts is not heard of in itself, each takes in what it has heard only `max_lag_steps` behind.
        self._hears_together = trainer.world_size > 1 and not drain.runtime.is_immediate
        self._certain = -1  # the newest step that every process has heard of
        self.rows: StepRows | None = None
        self.listener: RowListener | None = None
        if monitors:
            self.listener = RowListener(
                [monitor for monitor in monitors if not monitor.acts_in_step],
                self.guard.verdicts,
                self.guard.acted,
                self.guard.values,
                drain,
                self._tell,
                loop._batches_that_stepped,
            )
            # one chunk may be under way while the next one fills, where rows do not arrive as soon as they are sent
            chunk_rows = max(1, min(CHUNK_ROWS, max_lag_steps // (1 if drain.runtime.is_immediate else 2)))
            stream = StepStream(drain, consumers, chunk_rows=chunk_rows, watcher=self.listener)
            self.rows = StepRows(results, stream, self.listener)
        self._calls: LoggerCalls | None = None
        if self.listener is not None and any(v.action == "stop" for v in self.guard.verdicts):
            self._calls = LoggerCalls(trainer, self.listener)
        self._history: History | None = None
        self._knows_skips = False  # whether the host asks of each step if its update is held back
        if self.guard.holds:
            skips = any(verdict.action == "skip" for verdict in self.guard.verdicts)
            hears_late = skips and not drain.runtime.is_immediate
            late = (self.guard.hold, max_lag_steps) if hears_late else None
            self._history = History(trainer, at_once=drain.runtime.is_immediate, late=late)
            self._knows_skips = drain.runtime.is_immediate or (skips and self._history.rates is None)
        self._hold_here = self.guard.hold.numpy() if drain.runtime.is_immediate else None
        self._has_started = False
        self._in_doubt = False  # a step has run whose row is not on its way yet
        keeps = any(isinstance(monitor, NonFinite) and monitor.find_module for monitor in monitors)
        if keeps and trainer.world_size > 1:  # a SyncBatchNorm, for one, would wait for processes that do not come
            what = "find_module=True has no effect in several processes: none can run a step again by itself"
            loop.say(FallbackReason(code="find-module", message=what))
            keeps = False
        self._suspects = Suspects(trainer) if keeps else None
        self._minimum: tuple[Any, Any] | None = None
        self._signature = [f"{type(m).__name__} {m.metrics or ''} {m.action}" for m in monitors]
        self.has_stopped = False
        self.num_skipped = 0
        self._last_skipped = -1
        self.lag_steps = 0  # the most that the host was behind

    @property
    def stopped_by(self) -> dict[str, Any] | None:
        """The monitor that ended the run and the step that it did not let count; None while it goes on."""
        stop = self.listener.stop if self.listener is not None else None
        return None if stop is None else {"monitor": stop.monitor, "step": stop.step}

    def start_step(self) -> bool:
        """Keep what the host counts, before the first batch of a step; return whether a monitor has ended the run."""
        if not self._has_started:  # only now a resumed loop knows
            self._has_started = True
            self.guard.gates.start(self._loop._batches_that_stepped)
            if self._history is not None:
                self._history.start()
                if self._history.reason is not None:
                    self._loop.say(self._history.reason)
        if self._history is not None:
            self._follow_others(self._history)
            if not self.has_stopped:
                self._history.mark()
        return self.has_stopped

    def _follow_others(self, history: History) -> None:
        """Hear of all steps where others wrote the learning rate: what is taken back later must not reach behind it."""
        if history.rates is None or history.is_as_left:
            return
        if not self.settle(flush=True):
            history.start()

    def keep_batch(self, batch: Any, batch_idx: int) -> None:
        """Keep a batch until the host has heard of its step, where it may have to be looked at again."""
        if self._suspects is not None and self.listener is not None:
            self._suspects.keep(batch, batch_idx, step=self._loop._batches_that_stepped, heard=self.listener.heard)

    def ran_step(self) -> None:
        """Take note that a step ran; settle at once where a checkpoint may follow."""
        self._in_doubt = True
        if self._hold_here is not None and not self._loop.may_run_ahead:
            self.guard.look()
        if (
            self._history is not None
            and not self.guard.is_quiet
            and any(may_save_now(c, self._trainer) for c in self._trainer.checkpoint_callbacks)
        ):
            self.settle_now()

    def move_schedule(self, move: Callable[[], None]) -> None:
        """Let the schedulers that follow steps move, where a step has just been run.

        Args:
            move: Moves them.
        """
        history = self._history
        if history is None:
            move()
        elif history.rates is None:
            if not (self._knows_skips and self._is_held_back()):
                move()
        else:
            self._follow_others(history)
            if not self.has_stopped:
                with history.moving():
                    move()

    def end_schedule(self) -> None:
        """Take note that the schedulers of an epoch moved, where all steps have been heard of."""
        if self._history is not None:
            self._history.start()

    def end_step(self) -> None:
        """Mask what the step logged; hurry where a monitor is known to have acted, wait where the host is late."""
        self._in_doubt = False
        self.guard.end_step()
        listener = self.listener
        if listener is None:
            return
        if not self.guard.is_quiet and listener.is_urgent():
            self._flush()
        step = self._loop._batches_that_stepped
        oldest = step - self._max_lag_steps
        if step - listener.heard > self.lag_steps:
            self.lag_steps = min(step - listener.heard, self._max_lag_steps)
        while listener.heard < oldest and listener.stop is None:
            if not self._drain.wait_for_oldest():
                self._flush()
        self._certain = oldest

    def _flush(self) -> None:
        if self.rows is not None:
            self.rows.stream.send()
        self._drain.flush()

    @property
    def is_settled(self) -> bool:
        """Whether the host knows, without having heard, that no monitor acted in the step or in one before it."""
        return self.guard.is_quiet

    def has_skipped(self, step: int) -> bool:
        """Return whether `step` is the newest one known to be skipped."""
        return self._last_skipped == step

    def settle(self, *, flush: bool = False) -> bool:
        """Let the host's counts follow what has arrived; return whether a monitor ended the run.

        Args:
            flush: Wait for what is under way.
        """
        if flush:
            self._flush()
        listener, history = self.listener, self._history
        if listener is None or history is None:
            return False
        if self._calls is not None:
            self._calls.release()
        heard = listener.heard if flush or not self._hears_together else min(listener.heard, self._certain)
        if listener.skipped:
            for step in listener.take_skipped(heard):
                self.num_skipped += 1
                self._last_skipped = step
                history.forget(step)
        if listener.stop is not None and listener.stop.step <= heard:
            self._go_back(listener.stop.step)
            self._look_for_the_cause(listener.stop)
        else:
            history.trim(heard)
        return self.has_stopped

    def rest(self) -> None:
        """Settle before steps that nobody watches; the gradients of a skipped step are not left for them to use."""
        self.settle(flush=True)
        if self.has_skipped(self._loop._batches_that_stepped - 1):
            for optimizer in self._trainer.optimizers:
                optimizer.zero_grad(set_to_none=True)

    def settle_now(self) -> None:
        """Settle for a checkpoint: all steps so far are accounted for, also the one whose row is still to be sent."""
        if self.settle(flush=True) or self._history is None or not self._in_doubt:
            return
        step = self._loop._batches_that_stepped
        if self._drain.runtime.read(self.guard.stopped):
            self._go_back(step)
        elif self._is_held_back():
            self._history.forget(step)  # again when its row arrives, for what is counted until then

    def state_dict(self) -> dict[str, Any]:
        """Return what monitors did and know so far; call it where `settle_now` was called."""
        acting = {name: value.clone() for name, value in self.guard.state().items()}
        kept = {s.metric: {name: value.clone() for name, value in s.tensors().items()} for s in self._statistics}
        return {
            "skipped_steps": self.num_skipped + (self._in_doubt and not self.has_stopped and self._is_held_back()),
            "stopped": self.stopped_by,
            "monitors": self._signature,
            "acting": acting,
            "informing": [] if self.listener is None else self.listener.state(self._look()),
            "statistics": kept,
        }

    def _look(self) -> Any:
        """Return the row that is still to be sent, where the checkpoint counts its step already."""
        if not self._in_doubt or self.rows is None:
            return None
        return self.rows.look(self._loop._batches_that_stepped, self._trainer.current_epoch, self._loop.batch_idx)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what monitors did and knew; those of another list than the checkpoint's start anew."""
        self.num_skipped = state.get("skipped_steps", 0)
        for kept in self._statistics:
            for name, value in state.get("statistics", {}).get(kept.metric, {}).items():
                kept.tensors()[name].copy_(value)
        if state.get("monitors") != self._signature:
            if state.get("monitors"):
                rank_zero_info("monitors are not those of the checkpoint: patience, cooldown and memory start anew")
            return
        for name, value in self.guard.state().items():
            value.copy_(state["acting"][name])
        if self.listener is not None:
            self.listener.load_state(state["informing"])

    def _is_held_back(self) -> bool:
        if not self.guard.holds or self.guard.is_quiet:
            return False
        return bool(self._drain.runtime.read(self.guard.hold) if self._hold_here is None else self._hold_here)

    def _go_back(self, step: int) -> None:
        """Return to the end of the last good step and let the run end."""
        trainer, fit_loop = self._trainer, self._trainer.fit_loop
        assert self._history is not None
        self._history.rewind(step)
        self.guard.put_back()
        if self._calls is not None:
            self._calls.close(step)
        if not self.has_stopped:
            self.has_stopped = True
            self._minimum = fit_loop.min_epochs, self._loop.min_steps
            fit_loop.min_epochs = self._loop.min_steps = None  # behind the latch there is nothing left to train
            trainer.should_stop = True

    def _look_for_the_cause(self, stop: MonitorEvent) -> None:
        suspects, self._suspects = self._suspects, None
        monitor = self.listener.stop_monitor if self.listener is not None else None
        if suspects is None or not isinstance(monitor, NonFinite) or not monitor.find_module:
            return
        said = suspects.look_at(stop.step)
        if self._record is not None:
            self._record("monitor-cause", step=stop.step, message=said)

    def deliver(self, step: int, call: Callable[[], None]) -> None:
        """Let `call` tell loggers what was logged at `step`, unless that lies behind a stop.

        What callbacks told loggers themselves before that comes first.
        """
        stop = None if self.listener is None else self.listener.stop
        if stop is None or step < stop.step:
            with nullcontext() if self._calls is None else self._calls.passing():
                call()

    def close(self) -> None:
        """Leave optimizer and loops as they were found."""
        self.guard.release()
        if self._calls is not None:
            self._calls.close()
        if self._minimum is not None:
            self._trainer.fit_loop.min_epochs, self._loop.min_steps = self._minimum

    def end_epoch(self, epoch: int, record: RecordStatistics | None) -> None:
        """Send the epoch's statistics on their way, and start those anew that belong to one epoch."""
        for kept in self._statistics:
            if record is not None:
                numbers = kept.as_dict()
                self._drain.submit(
                    list(numbers.values()),
                    lambda values, kept=kept, names=tuple(numbers): record(  # type: ignore[misc]
                        epoch, kept.metric, dict(zip(names, values, strict=True))
                    ),
                )
            if kept.per_epoch:
                kept.reset()

    def report_unknown_metrics(self) -> None:
        """Warn of monitors whose metric did not appear so far."""
        logged = self._trainer.callback_metrics
        for line in self.listener.unknown_metrics(logged) if self.listener is not None else []:
            self._warn_of_unknown(line)
        for kept in self._statistics:
            self._warn_if_unseen(kept)

    def _warn_if_unseen(self, kept: Statistics) -> None:
        """Warn of statistics that no value has entered, once the number of values has arrived at the host."""
        logged = sorted(self._trainer.callback_metrics)
        said = f"Statistics({kept.metric!r}): training_step logged no {kept.metric!r}; {nearest(kept.metric, logged)}"
        self._drain.submit([kept.count], lambda values: None if values[0] else self._warn_of_unknown(said))

    def _warn_of_unknown(self, line: str) -> None:
        rank_zero_warn(line, category=MonitorWarning)
        if self._record is not None:
            self._record("monitor-unknown-metric", message=line)

    def _tell(self, event: MonitorEvent, monitor: Monitor) -> None:
        if self._record is not None:
            self._record(
                "monitor",
                monitor=event.monitor,
                action=event.action,
                step=event.step,
                epoch=event.epoch,
                batch_idx=event.batch_idx,
                values=dict(event.values),
                first_nonfinite=event.first_nonfinite,
            )
        if callable(monitor.then):
            if self._trainer.is_global_zero:
                monitor.then(event)
        elif event.action == "warn":
            rank_zero_warn(f"{event}", category=MonitorWarning)
        elif event.action == "stop":
            rank_zero_info(f"Training ends: {event}. The weights are those before this step.")
        else:
            rank_zero_info(f"{event}")
