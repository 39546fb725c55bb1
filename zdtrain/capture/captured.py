"""The training step as a captured program, with its gradients, its accumulation window and its optimizer."""

from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from zdtrain.capture.capturing import Capturing
from zdtrain.capture.fingerprints import Fingerprint, Fingerprints
from zdtrain.capture.guards import Guards
from zdtrain.capture.host import HostLooks, looks_of
from zdtrain.capture.items import BatchItems
from zdtrain.capture.noted import NotedInteger
from zdtrain.capture.observe import Observation
from zdtrain.capture.obstacles import HOOKS_INSIDE, callbacks_inside, changes_between_steps, own_hooks_inside
from zdtrain.capture.optimizers import guard_way
from zdtrain.capture.recording import Recording
from zdtrain.capture.session import CaptureSession, Entry
from zdtrain.capture.surroundings import TrainingSurroundings
from zdtrain.errors import FallbackReason
from zdtrain.step.eager import EagerStep
from zdtrain.step.hooks import Hooks, overrides


class CapturedStep(Capturing, EagerStep):
    """An `EagerStep` that records what it does once per key and replays it.

    The *region* that a program covers is the closure of the optimizer's step, or, where the optimizer's math can be
    recorded, the whole of ``optimizer.step(closure)``, and the fold of logged values into the epoch.

    Args:
        trainer: The Trainer, with its module attached.
        hooks: The overridden step hooks.
        session: Programs and counts, kept for the whole fit.
    """

    _surroundings: TrainingSurroundings
    _words = (
        *(*Capturing._words, "place", "optimizers", "loss scaling", "gradient_clip_val", "gradient_clip_algorithm"),
        "hooks of the module",
    )
    _needs_loss = True
    _outside: tuple[FallbackReason, ...] = ()  # what else keeps it from being captured
    _drops_gradients = True  # whether the first batch of a window does not need the gradients of the last

    def __init__(self, trainer: Trainer, hooks: Hooks, session: CaptureSession) -> None:
        self._session = session
        self._results = trainer.fit_loop.epoch_loop._results  # type: ignore[assignment]
        self._connector = trainer._logger_connector
        self._items = BatchItems(trainer.lightning_module, "training_step")
        super().__init__(trainer, hooks)
        self._users_between = changes_between_steps(self._module, trainer.callbacks)  # type: ignore[attr-defined]
        self._own_hooks = own_hooks_inside(self._module)
        self._reads_old_gradients = overrides(self._module, "on_before_zero_grad", LightningModule)
        self._fingerprints = Fingerprints(self._module, session)
        self._updates = Fingerprint(session.updates, self._look_at_updates, self._guard_updates)

    @property
    def _log(self) -> Any:
        return self._hooks.log

    @_log.setter
    def _log(self, log: Any) -> None:
        self._hooks.log = log

    @property
    def session(self) -> CaptureSession:
        """Programs and counts."""
        return self._session

    def _use(self, optimizer: torch.optim.Optimizer) -> None:
        super()._use(optimizer)
        self._surround([optimizer])
        found = self._session.inside(optimizer)
        self._inside = [] if found is None else [found]

    def _surround(self, optimizers: list[torch.optim.Optimizer], updates_by_hand: Any = None) -> None:
        own = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        self._optimizer_ids = tuple([id(optimizer) for optimizer in optimizers])
        everything = {id(p): p for p in (*own, *self._module.parameters())}
        zero_grad = self._progress.zero_grad
        self._surroundings = TrainingSurroundings(
            module=self._module,
            results=self._results,
            connector=self._connector,
            parameters=list(everything.values()),
            counters=[zero_grad] if updates_by_hand is None else [zero_grad, updates_by_hand],
            optimizers=optimizers,
            zero_grad=zero_grad,
            guard=self._trainer.fit_loop.epoch_loop.guard,
            scaling=self._trainer.fit_loop.epoch_loop.scaling,
        )

    def run(self, batch: Any, batch_idx: int, accumulate: bool) -> dict[str, Any]:
        """Train on `batch`; see `EagerStep.run`."""
        self._follow_optimizers()
        self._entry = self._find_entry(batch, batch_idx, accumulate)
        if self._entry is None:
            self._session.steps_eager += 1
        try:
            return super().run(batch, batch_idx, accumulate)
        finally:
            self._let_go()

    @property
    def updates(self) -> int:
        """The number that stands for what a program would hold by value of the optimizers."""
        return self._updates.current()

    def _look_at_updates(self) -> Hashable:
        if any(self._session.is_new(one) for one in self._surroundings.optimizers):
            self._use(self._optimizer)
        return tuple([part.key() for part in self._inside])

    def _guard_updates(self, guards: Guards) -> None:
        guards.hold(vars(self), "_inside", meaning=id)
        for optimizer in self._surroundings.optimizers:
            guard_way(guards, optimizer)
        for part in self._inside:
            part.guard(guards)

    def _entry_of(self, batch: Any, batch_idx: int, accumulate: bool) -> Entry | None:
        reasons = self._outside
        if not self._hooks.nobody >= HOOKS_INSIDE:
            callbacks = self._trainer.callbacks  # type: ignore[attr-defined]
            reasons = (*reasons, *callbacks_inside(callbacks, self._hooks))
        if reasons:
            for reason in reasons:
                self._session.note(reason)
            return None
        if not self._knows_updates():
            return None
        trainer = self._trainer
        place = self._place(batch_idx, accumulate) if trainer.accumulate_grad_batches > 1 else ALONE
        return self._look_up(
            batch,
            batch_idx,
            place.__str__,
            PlaceKey(
                place,
                tuple([p.grad is None for p in self._surroundings.parameters]) if self._heeds_gradients else None,
                None if accumulate else self.updates,
            ),
            self._optimizer_ids,
            None if self._scaling is None else self._scaling.key(),
            trainer.gradient_clip_val,
            trainer.gradient_clip_algorithm,
            self._own_hooks,
        )

    @property
    def _heeds_gradients(self) -> bool:
        """Whether a step does other things where a parameter has no gradient yet."""
        return self._heeds_old_gradients or self._trainer.accumulate_grad_batches > 1

    def _place(self, batch_idx: int, accumulate: bool) -> "Place":
        window = self._trainer.accumulate_grad_batches
        is_open = self._trainer.num_training_batches == float("inf")
        index = batch_idx % window
        return Place(index == 0, accumulate, self._optimization.divisor(batch_idx), index if is_open else None)

    def _knows_updates(self) -> bool:
        """Return whether it is settled how a loss scaler holds updates back; programs leave out what waits for it."""
        if self._scaling is None:
            return True
        for optimizer in self._surroundings.optimizers:
            update = self._scaling.update_of(optimizer)
            if not update.is_known:
                return False
            if update.reads is not None:
                self._inside = [] if self._inside else self._inside
                self._session.note(FallbackReason(code="scaler-on-host", message=update.reads))
        return True

    @staticmethod
    def place_in(key: tuple[Any, ...]) -> "PlaceKey":
        """Return the part of a step's key that its place in the accumulation window decides."""
        place: PlaceKey = next(part for part in key if isinstance(part, PlaceKey))
        return place

    @staticmethod
    def beyond_place(key: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the rest of the key, which all batches of a window share."""
        return tuple([part for part in key if not isinstance(part, PlaceKey)])

    # The region is the closure, or everything around it.

    def _accumulate(self) -> None:
        self._through(super()._accumulate)

    def _step_optimizer(self) -> None:
        if self._inside and self._entry is not None:
            self._through(super()._step_optimizer, self._inside)
        else:
            super()._step_optimizer()

    def _closure(self) -> Tensor | None:
        if self._inside or self._entry is None:
            return super()._closure()
        if not torch.is_grad_enabled():
            with torch.enable_grad():
                return self._closure()
        if self._scaling is None:
            self._through(super()._closure)
        else:
            self._through(self._unscaled_closure)
            self._scaling.unscaled = True
        return self._loss

    def _unscaled_closure(self) -> None:
        """Do what a kernel would that is no part of the program: its host state could not be replayed."""
        super()._closure()
        if self._scaling is not None and self._loss is not None:
            self._scaling.unscale(self._optimizer)

    def _training_step(self) -> Any:
        with self._noted_index():
            return super()._training_step()

    def _zero_grad(self) -> None:
        with self._noted_index():
            super()._zero_grad()

    @property
    def _epoch(self) -> int:
        epoch, watch = super()._epoch, self._session.watch
        return epoch if watch is None else NotedInteger(epoch, lambda: watch.note_read("current_epoch"))

    def _replay(self, entry: Entry, recording: Recording, inputs: list[Tensor | None]) -> None:
        super()._replay(entry, recording, inputs)
        self._ran = True

    @property
    def _is_first(self) -> bool:
        return self._connector._first_loop_iter is not False

    @property
    def _round(self) -> int:
        return self._trainer.current_epoch

    def _looks(self) -> HostLooks:
        return looks_of(self._trainer, self._surroundings.optimizers)

    def _reasons_against(self, seen: Observation) -> Iterator[FallbackReason]:
        yield from super()._reasons_against(seen)
        if self._loss is None and self._needs_loss:
            yield FallbackReason(code="no-loss", message="training_step returned None")

    def _n_unread(self) -> int:
        drops = self._batch_idx % self._trainer.accumulate_grad_batches == 0 and not self._heeds_old_gradients
        return self._surroundings.n_trained if drops and self._drops_gradients else 0

    @property
    def _heeds_old_gradients(self) -> bool:
        """Whether code of the module may look at the gradients of the last window before they are dropped."""
        return self._zeroes_its_own_way or self._reads_old_gradients


class Place(NamedTuple):
    """A batch's place in its accumulation window."""

    is_first: bool
    accumulates: bool
    """Whether it is not the last."""
    divisor: int
    """What the loss is divided by."""
    number: int | None
    """Its number in the window, where it is not known how many batches the epoch has."""

    def __str__(self) -> str:
        if self == ALONE:
            return ""
        part = "middle" if self.accumulates else "last"
        if self.is_first:
            part = "first" if self.accumulates else "only"
        return f"{part} batch of {self.divisor}"


ALONE = Place(is_first=True, accumulates=False, divisor=1, number=None)


class PlaceKey(NamedTuple):
    """What a step's place in its accumulation window decides."""

    place: "Place"
    """Where in the window it is."""
    without_gradient: tuple[bool, ...] | None
    """Which parameters have no gradient yet; None where that is clear."""
    updates: int | None
    """See `CapturedStep.updates`; None where the optimizers do not step."""
