"""Several training steps per replay: one program runs them, and each then takes its turn on the host."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from zdtrain.errors import FallbackReason
from zdtrain.step.captured import CapturedStep
from zdtrain.step.eager import EagerStep
from zdtrain.step.key import flatten_batch, signature
from zdtrain.step.recording import Recording
from zdtrain.step.repeated import Left, RepeatedSteps
from zdtrain.step.rollback import put_back
from zdtrain.step.session import Entry
from zdtrain.step.shared import REPLAY_FAILED, failure
from zdtrain.step.verify import Mismatch, Saved, compared, first_mismatch, rng_mismatch


class Ahead(Protocol):
    """The learning-rate schedule, stepped ahead for a block."""

    is_constant: bool
    """Whether nothing changes that a program would hold by value."""

    rates: list[list[Tensor]]
    """Values of the program's hyperparameter tensors in each step."""

    def follow(self, index: int) -> None:
        """Bring the optimizer's options to where they are after step `index`."""


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

    def ahead(self, batch_idx: int) -> Ahead | None:
        """Step the learning-rate schedule ahead; None where there is none that follows steps."""


@dataclass(kw_only=True)
class Block:
    """Steps that run as one."""

    entry: Entry
    steps: RepeatedSteps
    left: Left | None
    """What the program left; None where the steps run one by one."""
    ahead: Ahead | None
    index: int = 0
    """Steps that had their turn."""
    got: Saved | None = None
    """What the program did, where it is compared with eager steps."""
    mismatches: list[Mismatch] = field(default_factory=list)
    has_shown: bool = False
    """Whether the values of an earlier step were put where the last one's are."""


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
        return self._block is not None and self._block.index < self._count

    def run(self, batch: Any, batch_idx: int, accumulate: bool) -> dict[str, Any]:
        """Train on `batch`; see `EagerStep.run`."""
        if not self.is_open:
            self._block = self._begin(batch, batch_idx, accumulate)
        block = self._block
        if block is None:
            return self._alone(batch, batch_idx, accumulate)
        if block.got is not None:
            outputs = self._compare(block, batch, batch_idx, accumulate)
        elif block.left is not None:
            outputs = self._take_turn(block, block.left, accumulate)
        else:
            outputs = self._alone(batch, batch_idx, accumulate)
        block.index += 1
        return outputs

    def follow_schedule(self) -> bool:
        """Set the learning rate for the step after this one; return False where the schedule is not ahead."""
        block = self._block
        if block is None or block.ahead is None:
            return False
        block.ahead.follow(block.index - 1)
        return True

    def _alone(self, batch: Any, batch_idx: int, accumulate: bool) -> dict[str, Any]:
        step = self._step
        outputs = step.run(batch, batch_idx, accumulate)
        entry = self._session.known(step._key)
        if entry is not None:
            self._known[batch_idx % self._trainer.accumulate_grad_batches] = (entry, step._key)
        return outputs

    # A block begins.

    def _begin(self, batch: Any, batch_idx: int, accumulate: bool) -> Block | None:
        """Run the next steps as one; None where this step is to run alone."""
        window = self._trainer.accumulate_grad_batches
        if batch_idx % window or self._count % window or self._around.room(batch_idx) < self._count:
            return None
        recordings = self._recordings(batch, batch_idx, accumulate)
        if recordings is None:
            return None
        key = ("several", self._count, self._around.key(), *(id(recording) for recording in recordings))
        entry = self._session.entry(key, lambda: f"{self._count} steps of {self._known[0][0].name}")
        if entry.reason is not None:
            return None
        batches = self._batches(batch)
        if batches is None:
            return None
        guard = self._step._guard
        if guard is not None:
            guard.prepare(self._step._optimizer)
        ahead = self._around.ahead(batch_idx)
        steps = entry.several
        if steps is None:
            steps = entry.several = self._repeated(recordings, ahead)
        block = Block(entry=entry, steps=steps, left=None, ahead=ahead)
        if ahead is None or ahead.is_constant:
            recordings[0].prepare()
            self._launch(block, batches, steps.inputs(batches, [] if ahead is None else ahead.rates))
        return None if block.left is None and ahead is None else block

    def _recordings(self, batch: Any, batch_idx: int, accumulate: bool) -> list[Recording] | None:
        """Return the recorded step for each place in the window; None while one is not recorded or not trusted."""
        step, window = self._step, self._trainer.accumulate_grad_batches
        entry = step._find_entry(batch, batch_idx, accumulate)
        if entry is None:
            return None
        self._known[0] = (entry, step._key)
        updates = tuple([part.key() for part in step._inside])
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
        return found if found[0].fits(step._inputs(entry)) else None

    def _batches(self, batch: Any) -> list[list[Tensor]] | None:
        """Return the tensors of the next batches; None where there are not enough of the same layout."""
        batches = [batch, *self._around.peek(self._count - 1)]
        if len(batches) < self._count:
            return None
        flat = [flatten_batch(one) for one in batches]
        try:
            layouts = [(structure, signature(leaves)) for leaves, structure in flat]
        except TypeError:
            return None
        if any(layout != layouts[0] for layout in layouts):
            return None
        return [[leaf for leaf in leaves if isinstance(leaf, Tensor)] for leaves, _ in flat]

    def _repeated(self, recordings: Sequence[Recording], ahead: Ahead | None) -> RepeatedSteps:
        rates = [] if ahead is None else [rate for part in self._step._inside for rate in part.rates() or ()]
        return RepeatedSteps(
            [recordings[index % len(recordings)] for index in range(self._count)],
            shown=self._around.shown(),
            rates=rates,
            keeps="on_train_batch_end" not in self._step._hooks.nobody,
            between=self._around.between,
        )

    def _launch(self, block: Block, batches: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor | None]) -> None:
        """Run the program, for good or to compare it."""
        entry, session, around = block.entry, self._session, self._step._surroundings
        start = perf_counter()
        leaves = [leaf for batch in batches for leaf in batch]
        compares = session.verify and entry.verified_in != self._trainer.current_epoch
        tensors = {**around.tensors(leaves), **self._around.counters()}
        saved: Saved | None = None
        try:
            saved = Saved(tensors, session.runtime) if compares or not entry.captures else None
            if not entry.captures:
                block.steps.capture(inputs, session)
                entry.captures, entry.operations, entry.includes_optimizer = 1, len(block.steps), True
            left = block.steps.run(inputs)
            if compares:
                done = block.steps.recordings[-1].named_places(left.gradients, left.shares[-1].carried)
                block.got = Saved({**around.tensors(leaves), **done}, session.runtime)
        except Exception as error:  # whatever a device graph cannot hold; the steps run one by one
            if entry.replays and not compares:
                error.add_note(REPLAY_FAILED)
                raise
            if saved is not None:
                put_back(saved)
            session.fail(entry, failure(f"running {self._count} steps as one program failed", error))
            return
        if compares and saved is not None:
            put_back(saved)
            entry.verify_seconds += perf_counter() - start
        elif saved is not None:
            entry.capture_seconds += perf_counter() - start
        block.left = left

    # Every step of it has its turn.

    def _take_turn(self, block: Block, left: Left, accumulate: bool) -> dict[str, Any]:
        """Do the host's share of a step that the device has run."""
        step, share, index = self._step, left.shares[block.index], block.index
        recording = block.steps.recordings[index]
        if index == 0:
            recording.place_gradients(left.gradients)
        step._loss, step._output = recording.hand_over(
            share.loss, share.returned, share.carried, copy=block.steps.overwrites
        )
        recording.count()
        if not accumulate:
            progress = step._progress.step
            progress.increment_ready()
            progress.increment_completed()
        self._show_when_asked(block, index)
        block.entry.replays += 1
        self._session.steps_replayed += 1
        return step._outputs()

    def _show_when_asked(self, block: Block, index: int) -> None:
        """Let whoever looks at the step's values find this step's, where the last one's are."""
        results, left = self._step._results, block.left
        assert left is not None

        def show() -> None:
            block.has_shown = True
            with torch.no_grad():
                for tensor, value in zip(block.steps.shown, left.shares[index].shown, strict=True):
                    tensor.copy_(value)

        results.behind = show
        if index == self._count - 1:
            results.behind = None
            if block.has_shown:
                show()

    def _compare(self, block: Block, batch: Any, batch_idx: int, accumulate: bool) -> dict[str, Any]:
        """Run the step eagerly and compare what it leaves with the program's."""
        step, session, left, got = self._step, self._session, block.left, block.got
        assert left is not None
        assert got is not None
        step._entry = None
        session.steps_eager += 1
        outputs = EagerStep.run(step, batch, batch_idx, accumulate)
        start = perf_counter()
        step._results.commit()
        exact = session.capture != "compile" and all(recording.exact for recording in block.steps.recordings)
        share = left.shares[block.index]
        want = {f"value {index} of step {block.index + 1}": tensor for index, tensor in enumerate(block.steps.shown)}
        have: dict[str, Tensor | None] = dict(zip(want, share.shown, strict=True))
        if "loss" in outputs:
            want["loss"], have["loss"] = outputs["loss"], share.loss
        found = compared(lambda: first_mismatch(want, have, exact=exact))
        if block.index == self._count - 1 and found is None:
            if step._guard is not None:
                step._guard.end_step()
            want = {name: t for name, t in step._surroundings.tensors(()).items() if t is not None}
            found = compared(
                lambda: rng_mismatch(session.runtime.rng_state(), got.rng),
                lambda: first_mismatch(want, got.copies, exact=exact),
            )
        if found is not None:
            block.mismatches.append(found)
        if block.index == self._count - 1:
            self._judge(block, "equal" if exact else "within tolerance")
        block.entry.verify_seconds += perf_counter() - start
        return outputs

    def _judge(self, block: Block, agreement: str) -> None:
        entry = block.entry
        entry.verified_in = self._trainer.current_epoch
        entry.verifications += 1
        entry.verification = str(block.mismatches[0]) if block.mismatches else agreement
        if block.mismatches:
            what = f"{self._count} steps as one program and eager ones disagree: {block.mismatches[0]}"
            self._session.refuse(entry, [FallbackReason(code="verification", message=what)])
