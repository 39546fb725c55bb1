"""Several training steps per replay: which batches make a block, and which run one by one."""

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

from lightning.pytorch import Trainer
from torch import Tensor

from zdtrain.capture.block import Ahead, Block
from zdtrain.capture.captured import CapturedStep
from zdtrain.capture.key import flatten_batch, signature
from zdtrain.capture.program import RecordedPart
from zdtrain.capture.recording import Recording
from zdtrain.capture.repeated import RepeatedSteps
from zdtrain.capture.session import Entry


class Surroundings(Protocol):
    """What the loop knows of the steps to come."""

    def room(self, batch_idx: int) -> int:
        """Return how many batches may run from this one on before anybody has to look."""

    def peek(self, count: int) -> list[Any]:
        """Return the next batches; fewer where the epoch ends."""

    def shown(self) -> list[Tensor]:
        """Return the tensors that the host may look at after a step."""

    def key(self) -> Hashable:
        """Return what else a program for several steps holds by value."""

    def counters(self) -> dict[str, Tensor]:
        """Return what `between` counts in, by name."""

    def between(self, index: int) -> None:
        """Do on the device what the loop does between two steps."""

    def ahead(self, batch_idx: int, parts: Sequence[RecordedPart]) -> Ahead | None:
        """Compute what the host has to for each step of a block; None where nothing changes from step to step.

        Args:
            batch_idx: The block's first batch.
            parts: The optimizers in its program.
        """


class SeveralSteps:
    """Runs training steps in blocks of several per replay, and one by one where a block does not fit.

    The first batch of a block runs the program for all of them. Every batch then takes its own turn in the loop, with
    its own counters, logged values and outputs; only what lives on the device is ahead, by less than a block.

    Args:
        trainer: The Trainer, with its module attached.
        step: The step.
        count: Steps per replay.
        around: What the loop knows.
    """

    def __init__(self, trainer: Trainer, step: CapturedStep, count: int, around: Surroundings) -> None:
        self._trainer = trainer
        self._step = step
        self._session = step.session
        self._count = count
        self._around = around
        self._block: Block | None = None
        self._known: dict[int, tuple[Entry, tuple[Any, ...]]] = {}  # by place in the window, with its key

    @property
    def is_open(self) -> bool:
        """Whether steps that the device has run still wait for their turn."""
        return self._block is not None and self._block.is_open

    def run(self, batch: Any, batch_idx: int, accumulate: bool) -> dict[str, Any]:
        """Train on `batch`; see `EagerStep.run`."""
        if not self.is_open:
            self._block = self._begin(batch, batch_idx, accumulate)
        block = self._block
        if block is None:
            return self._alone(batch, batch_idx, accumulate)
        run = block.take_turn if block.has_run else self._alone
        outputs = run(batch, batch_idx, accumulate)
        block.end_turn()
        return outputs

    def follow_schedule(self) -> bool:
        """Set the learning rate for the step after this one; return False where the schedule is not ahead."""
        return self._block is not None and self._block.follow()

    def _alone(self, batch: Any, batch_idx: int, accumulate: bool) -> dict[str, Any]:
        step = self._step
        outputs = step.run(batch, batch_idx, accumulate)
        entry = self._session.known(step._key)
        if entry is not None:
            self._known[batch_idx % self._trainer.accumulate_grad_batches] = (entry, step._key)
        return outputs

    def _begin(self, batch: Any, batch_idx: int, accumulate: bool) -> Block | None:
        """Run the next steps as one; None where this step is to run alone."""
        window = self._trainer.accumulate_grad_batches
        if batch_idx % window or self._count % window or self._around.room(batch_idx) < self._count:
            return None
        recordings = self._recordings(batch, batch_idx, accumulate)
        if recordings is None:
            return None
        if not self._asks_alike(batch_idx):
            return None
        key = ("several", self._count, self._around.key(), *(id(recording) for recording in recordings))
        entry = self._session.entry(key, lambda: f"{self._count} steps of {self._known[0][0].name}")
        batches = self._batches(batch) if entry.reason is None else None
        if batches is None:
            return None
        guard = self._step._guard
        if guard is not None:
            guard.prepare(self._step._optimizer)
        parts = recordings[-1].parts  # of the batch that ends a window
        ahead = self._around.ahead(batch_idx, parts)
        if entry.several is None:
            entry.several = self._repeated(recordings, [] if ahead is None else parts)
        block = Block(entry, entry.several, self._step, ahead)
        if ahead is None or ahead.is_constant:
            recordings[0].open()
            for part in parts if ahead is None else ():
                part.refill()
            block.launch(batches, self._around.counters())
        return block if block.has_run or ahead is not None else None

    def _asks_alike(self, batch_idx: int) -> bool:
        """Return whether conditions on counters have the same outcomes for all of the next steps."""
        step, window = self._step, self._trainer.accumulate_grad_batches
        outcomes = {step._outcomes(batch_idx + index, index // window) for index in range(self._count)}
        return len(outcomes) == 1

    def _recordings(self, batch: Any, batch_idx: int, accumulate: bool) -> list[Recording] | None:
        """Return the recorded step for each place in the window; None while one is not recorded or not trusted."""
        step, window = self._step, self._trainer.accumulate_grad_batches
        entry = step._find_entry(batch, batch_idx, accumulate)
        if entry is None:
            return None
        self._known[0] = (entry, step._key)
        updates = step.updates
        found = []
        for place in range(window):
            known, key = self._known.get(place, (None, ()))
            if known is None or known.recording is None or known.reason is not None:
                return None
            if self._session.verify and not known.verifications:
                return None
            if step.beyond_place(key) != step.beyond_place(step._key):
                return None
            if place == window - 1 and step.place_in(key).updates != updates:
                return None
            found.append(known.recording)
        return found if found[0].fits(found[0].inputs(step._tensor_leaves)) else None

    def _batches(self, batch: Any) -> list[list[Tensor]] | None:
        """Return the tensors of the next batches; None where there are not enough of the same layout."""
        batches = [batch, *self._around.peek(self._count - 1)]
        if len(batches) < self._count:
            return None
        flat = [flatten_batch(self._step._items.kept(one)) for one in batches]
        try:
            layouts = [(structure, signature(leaves)) for leaves, structure in flat]
        except TypeError:
            return None
        if any(layout != layouts[0] for layout in layouts):
            return None
        return [[leaf for leaf in leaves if isinstance(leaf, Tensor)] for leaves, _ in flat]

    def _repeated(self, recordings: Sequence[Recording], changing: Sequence[RecordedPart]) -> RepeatedSteps:
        return RepeatedSteps(
            [recordings[index % len(recordings)] for index in range(self._count)],
            shown=self._around.shown(),
            rates=[rate for part in changing for rate in part.rates()],
            keeps="on_train_batch_end" not in self._step._hooks.nobody,
            between=self._around.between,
        )
