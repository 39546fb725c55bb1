"""The training epoch: stock Lightning's loop with a short path from one batch to the next."""

from functools import partial
from typing import Any, NoReturn

from lightning.pytorch import Trainer
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.utilities.exceptions import SIGTERMException

from zdtrain.capture.session import CaptureSession
from zdtrain.errors import ConfigError, FallbackReason
from zdtrain.loop.connector import LoggerConnector
from zdtrain.loop.evaluation import EvaluationLoop
from zdtrain.loop.monitoring import Monitoring
from zdtrain.loop.plan import StepPlan, reasons_for_stock
from zdtrain.monitor.guard import StepGuard
from zdtrain.step.optimization import WindowedOptimization
from zdtrain.step.results import StepResults
from zdtrain.step.scaling import LossScaling, scaling_of


class EpochLoop(_TrainingEpochLoop):
    """Runs an epoch's batches; counters, checkpoints, validation and restarts stay stock.

    Attribute names are part of Lightning's checkpoint format and stay as they are.

    Args:
        trainer: The Trainer.
        stock: The loop it replaces.
        lightning_quirks: See `TrainerOptions.lightning_quirks`.
    """

    def __init__(self, trainer: Trainer, stock: _TrainingEpochLoop, *, lightning_quirks: bool) -> None:
        super().__init__(trainer, min_steps=stock.min_steps, max_steps=stock.max_steps)
        self.automatic_optimization = WindowedOptimization(trainer, lightning_quirks=lightning_quirks)
        self._results = self.results = StepResults(training=True)
        self.val_loop = EvaluationLoop(trainer, stock.val_loop)
        self.plan: StepPlan | None = None
        self.captures: CaptureSession | None = None  # the Trainer's, while it captures steps
        self.monitoring: Monitoring | None = None  # the Trainer's, while it watches steps
        self.scaling: LossScaling | None = None  # what steps do for a loss scaler, while there is one
        self.fallbacks: list[FallbackReason] = []

    @property
    def guard(self) -> StepGuard | None:
        """What a step does for its monitors."""
        return None if self.monitoring is None else self.monitoring.guard

    def run(self, data_fetcher: _DataFetcher) -> None:
        """Run an epoch."""
        try:
            super().run(data_fetcher)
        finally:
            if self.plan is not None:
                self.plan.feed.close()
        if self.monitoring is not None:
            self.monitoring.settle(flush=True)

    def on_run_start(self, data_fetcher: _DataFetcher) -> None:
        """Prepare the epoch, and resolve once what its steps need."""
        super().on_run_start(data_fetcher)
        self.scaling = scaling_of(self.trainer, self.scaling)
        reasons = list(reasons_for_stock(self.trainer, data_fetcher))
        self._watch(reasons)
        self.plan = None if reasons else StepPlan(self.trainer, data_fetcher, self.say)
        for reason in reasons:
            self._note(reason, "steps run on stock Lightning's loop: ")
        options = self.trainer.options
        asked = {"prefetch": options.prefetch, "steps_per_replay": options.steps_per_replay > 1}
        for option in (option for option, is_set in asked.items() if reasons and is_set):
            what = f"{option}= has no effect here: steps run on stock Lightning's loop"
            self.say(FallbackReason(code=option.replace("_", "-"), message=what))

    def _watch(self, reasons: list[FallbackReason]) -> None:
        """Let the Trainer's monitors watch this epoch's steps, or none where there is nothing to hold back."""
        monitoring = self.trainer._monitoring
        if monitoring is None:
            return
        if reasons:
            if any(reason.code != "skip-backward" for reason in reasons):
                self._refuse_to_watch(reasons[0])
            monitoring.rest()
            what = "monitors and averaged weights rest in an epoch without backward passes"
            self.say(FallbackReason(code="monitors-rest", message=what))
        self.trainer.watch(None if reasons else monitoring)

    def _refuse_to_watch(self, reason: FallbackReason) -> NoReturn:
        trainer = self.trainer
        if trainer.options.nonfinite != "off":
            option = f"nonfinite={trainer.options.nonfinite!r}"
        elif trainer.options.ema_decay is not None:
            option = f"ema_decay={trainer.options.ema_decay}"
        else:
            watching = [*trainer.monitors, *trainer.statistics.values()]
            option = f"monitors=[{', '.join(type(one).__name__ for one in watching)}]"
        raise ConfigError(
            f"trainer.{option} needs steps on zdtrain's own loop, but {reason.message}; change that, or leave the "
            "option out."
        )

    def _note(self, reason: FallbackReason, what: str) -> None:
        if reason not in self.fallbacks:
            self.fallbacks.append(reason)
            self.trainer.tell(reason)
            self._warning_cache.info(f"zdtrain: {what}{reason}")

    def say(self, reason: FallbackReason) -> None:
        """Keep a reason why an option has no effect, and tell of it once."""
        self._note(reason, "")

    def advance(self, data_fetcher: _DataFetcher) -> None:
        """Run one batch.

        Raises:
            StopIteration: The batches are used up, or the module ended the epoch by returning -1.
        """
        plan = self.plan
        self.trainer.write_counters()
        monitoring = self.monitoring
        if plan is None or (self.restarting and (monitoring is None or self._resumes_validation(data_fetcher))):
            super().advance(data_fetcher)
            return
        if self.val_loop.restarting:
            self.val_loop.restarting = False
        if plan.sigterm is not None:
            plan.sigterm.look()
        progress = self.batch_progress
        batch_idx = progress.current.ready
        starts_step = batch_idx % self.trainer.accumulate_grad_batches == 0
        if starts_step and monitoring is not None and monitoring.start_step():
            raise StopIteration
        batch = plan.feed.next()
        progress.is_last_batch = data_fetcher.done
        progress.increment_ready()
        connector: LoggerConnector = self.trainer._logger_connector
        connector.start_step(self.results, batch)
        last = self._num_ready_batches_reached()
        outputs: Any = None
        stop = False
        if batch is None:
            self._warning_cache.warn("train_dataloader yielded None. If this was on purpose, ignore this warning...")
        else:
            stop = plan.hooks("on_train_batch_start", batch, batch_idx) == -1
            if stop:
                progress.increment_by(0, is_last_batch=True)
            else:
                progress.increment_started()
                if monitoring is not None:
                    monitoring.keep_batch(batch, batch_idx)
                outputs = plan.run(batch, batch_idx, self._should_accumulate())
        progress.increment_processed()
        if plan.step_schedulers:
            self._step_schedulers(plan)
        if monitoring is not None and not stop and not self._should_accumulate():
            monitoring.ran_step()
        if (last or stop) and plan.epoch_schedulers:
            self._step_epoch_schedulers()
        if stop:
            raise StopIteration
        counts = monitoring is None or not monitoring.has_stopped
        if counts:
            plan.hooks("on_train_batch_end", outputs, batch, batch_idx)
        connector.end_step(self.results)
        progress.increment_completed()
        if counts:
            self._log_step(connector)

    def _step_schedulers(self, plan: StepPlan) -> None:
        if (plan.several is not None and plan.several.follow_schedule()) or self._should_accumulate():
            return
        move = partial(self.update_lr_schedulers, "step", update_plateau_schedulers=False)
        if self.monitoring is None:
            move()
        else:
            self.monitoring.move_schedule(move)

    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        """Let schedulers follow a step or an epoch; one that looks at a metric does not follow a skipped step."""
        looks_at_step = update_plateau_schedulers and interval == "step"
        if looks_at_step and self.monitoring is not None and self.monitoring.has_skipped(self._batches_that_stepped):
            return
        super().update_lr_schedulers(interval, update_plateau_schedulers)

    def _step_epoch_schedulers(self) -> None:
        """Step the schedulers that follow epochs, unless a monitor turns out to have ended the run."""
        monitoring = self.monitoring
        if monitoring is not None:
            monitoring.settle_now()
            if monitoring.has_stopped:
                return
        self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        if monitoring is not None:
            monitoring.end_schedule()

    def _should_accumulate(self) -> bool:
        return self.trainer.accumulate_grad_batches != 1 and super()._should_accumulate()

    @property
    def done(self) -> bool:
        """Whether the epoch ends here; stock decides, where there is anything to decide."""
        if self._in_block:
            return False  # the device has run steps that have to be counted
        undecided = self.restarting or self.max_steps != -1 or self.trainer.should_stop
        return (undecided or self._num_ready_batches_reached()) and super().done

    @property
    def may_run_ahead(self) -> bool:
        """Whether the device may run steps that the loop has not come to yet."""
        return self.plan is not None and self.plan.several is not None

    @property
    def _in_block(self) -> bool:
        """Whether the device has run such steps."""
        plan = self.plan
        return plan is not None and plan.several is not None and plan.several.is_open

    def _resumes_validation(self, data_fetcher: _DataFetcher) -> bool:
        """Return whether a restart begins with a validation; otherwise do what stock does before it trains."""
        if not self._should_check_val_fx(data_fetcher):
            return False
        if self.val_loop.restarted_mid_evaluation or self.restarted_on_last:
            return True
        self.val_loop.increment_progress_to_evaluation_end()
        return False

    def _log_step(self, connector: LoggerConnector) -> None:
        trainer = self.trainer
        every = trainer.log_every_n_steps
        due = every and (self._batches_that_stepped + 1) % every == 0
        if (due or trainer.should_stop or trainer.fast_dev_run) and not self._should_accumulate():
            connector.update_train_step_metrics()

    def on_advance_end(self, data_fetcher: _DataFetcher) -> None:
        """Validate, update plateau schedulers and count, where there is any of it to do."""
        plan, trainer = self.plan, self.trainer
        trainer._logger_connector.drain.poll()
        monitoring, in_block = self.monitoring, self._in_block
        if monitoring is not None:
            knows = in_block or monitoring.is_settled or not self._has_to_know(plan)
            if monitoring.settle(flush=not knows):
                raise StopIteration
        if in_block:
            if not self._should_accumulate():
                self._batches_that_stepped += 1
            return
        if plan is None or plan.step_plateaus or trainer.should_stop or self._skip_next_val or self._may_validate(plan):
            super().on_advance_end(data_fetcher)
            return
        if not self._should_accumulate():
            self._batches_that_stepped += 1
        if trainer.received_sigterm and not self._is_training_done:
            raise SIGTERMException

    def _has_to_know(self, plan: StepPlan | None) -> bool:
        """Return whether all monitors have to be heard before the next step: something looks at the run now."""
        trainer, progress = self.trainer, self.batch_progress
        if plan is None or plan.step_plateaus or progress.is_last_batch or self._num_ready_batches_reached():
            return True
        ends = trainer.should_stop or trainer.received_sigterm or self._is_training_done
        return ends or self._skip_next_val or self._may_validate(plan)

    def _may_validate(self, plan: StepPlan) -> bool:
        """Return False where validation is certainly not due; whether it is, stock decides."""
        trainer = self.trainer
        every = trainer.val_check_batch
        if not plan.validates:
            return False
        if self.batch_progress.is_last_batch or not isinstance(every, int):
            return True
        ready = self.batch_progress.current if trainer.check_val_every_n_epoch else self.batch_progress.total
        return ready.ready % every == 0


# The profiler names its actions after the class.
EpochLoop.__name__ = "_TrainingEpochLoop"
