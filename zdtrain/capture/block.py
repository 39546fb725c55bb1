"""Steps that run as one program: it is launched once, and then each of them has its turn on the host."""

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from zdtrain.capture.captured import CapturedStep
from zdtrain.capture.repeated import Left, RepeatedSteps, Share
from zdtrain.capture.rollback import put_back
from zdtrain.capture.session import Entry
from zdtrain.capture.shared import REPLAY_FAILED, failure
from zdtrain.capture.verify import Mismatch, Saved, compared, first_mismatch, rng_mismatch
from zdtrain.errors import FallbackReason
from zdtrain.step.eager import EagerStep


class Ahead(Protocol):
    """What the host computes for the steps of a block before any of them runs: learning rates, numbers of updates."""

    is_constant: bool
    """Whether nothing changes that a program would hold by value."""

    rates: list[list[Tensor]]
    """Values of the program's hyperparameter tensors in each step."""

    def follow(self, index: int) -> None:
        """Bring the optimizer's options to where they are after step `index`."""


class Block:
    """A number of steps: run as one program, or one by one with a schedule that is ahead of them.

    Args:
        entry: What is known of such blocks.
        steps: Their program.
        step: Runs a step eagerly, where the program is compared.
        ahead: What the host computed for the steps; None where nothing changes from step to step.
    """

    def __init__(self, entry: Entry, steps: RepeatedSteps, step: CapturedStep, ahead: Ahead | None) -> None:
        self._entry = entry
        self._steps = steps
        self._step = step
        self._session = step.session
        self._ahead = ahead
        self._index = 0  # steps that had their turn
        self._left: Left | None = None  # what the program left
        self._got: Saved | None = None  # what the program did, where it is compared with eager steps
        self._mismatches: list[Mismatch] = []
        self._has_shown = False  # whether the values of an earlier step were put where the last one's are

    @property
    def is_open(self) -> bool:
        """Whether steps still wait for their turn."""
        return self._index < len(self._steps.recordings)

    @property
    def has_run(self) -> bool:
        """Whether the program has run the steps."""
        return self._left is not None

    @property
    def _is_last(self) -> bool:
        return self._index == len(self._steps.recordings) - 1

    def end_turn(self) -> None:
        """Go on to the next step."""
        self._index += 1

    def follow(self) -> bool:
        """Bring options to where they are after the step whose turn was last; return False where none are ahead."""
        if self._ahead is None:
            return False
        self._ahead.follow(self._index - 1)
        return True

    def launch(self, batches: Sequence[Sequence[Tensor]], counters: Mapping[str, Tensor]) -> None:
        """Run the program, for good or to compare it; where that fails, nothing has run.

        Args:
            batches: The tensors of each step's batch.
            counters: What steps count in on the device, by name.
        """
        entry, session, steps = self._entry, self._session, self._steps
        start = perf_counter()
        tensors = self._step._surroundings.tensors([leaf for batch in batches for leaf in batch])
        compares = session.verify and entry.verified_in != self._step._round
        saved: Saved | None = None
        try:
            saved = Saved({**tensors, **counters}, session.runtime) if compares or not entry.captures else None
            left = self._run(steps.inputs(batches, [] if self._ahead is None else self._ahead.rates))
            if compares:
                done = steps.recordings[-1].named_places(left.gradients, left.shares[-1].carried)
                self._got = Saved({**tensors, **done}, session.runtime)
        except Exception as error:  # whatever a device graph cannot hold; the steps run one by one
            if entry.replays and not compares:
                error.add_note(REPLAY_FAILED)
                raise
            if saved is not None:
                put_back(saved)
            session.fail(entry, failure(f"running {len(steps.recordings)} steps as one program failed", error))
            return
        if compares and saved is not None:
            put_back(saved)
            entry.verify_seconds += perf_counter() - start
        elif saved is not None:
            entry.capture_seconds += perf_counter() - start
        self._left = left

    def _run(self, inputs: Sequence[Tensor | None]) -> Left:
        entry, steps = self._entry, self._steps
        if not entry.captures:
            steps.capture(inputs, self._session)
            entry.captures, entry.operations, entry.includes_optimizer = 1, len(steps), True
        left = steps.run(inputs)
        for part in steps.recordings[-1].parts:
            part.ran()
        return left

    def take_turn(self, batch: Any, batch_idx: int, accumulate: bool) -> dict[str, Any]:
        """Let the next step have its turn; see `EagerStep.run`."""
        assert self._left is not None
        share = self._left.shares[self._index]
        if self._got is not None:
            return self._compare(share, self._got, batch, batch_idx, accumulate)
        return self._replay(share, self._left.gradients, accumulate)

    def _replay(self, share: Share, gradients: Sequence[Tensor | None], accumulate: bool) -> dict[str, Any]:
        """Do the host's share of a step that the device has run."""
        step, recording = self._step, self._steps.recordings[self._index]
        if self._index == 0:
            recording.place_gradients(gradients)
        step._loss, step._output = recording.hand_over(
            share.loss, share.returned, share.carried, copy=self._steps.overwrites
        )
        recording.count()
        if not accumulate:
            progress = step._progress.step
            progress.increment_ready()
            progress.increment_completed()
        self._show_when_asked(share)
        self._entry.replays += 1
        self._session.steps_replayed += 1
        return step._outputs()

    def _show_when_asked(self, share: Share) -> None:
        """Let whoever looks at the step's values find this step's, where the last one's are."""
        results = self._step._results

        def show() -> None:
            self._has_shown = True
            with torch.no_grad():
                for tensor, value in zip(self._steps.shown, share.shown, strict=True):
                    tensor.copy_(value)

        results.behind = show
        if self._is_last:
            results.behind = None
            if self._has_shown:
                show()

    def _compare(self, share: Share, got: Saved, batch: Any, batch_idx: int, accumulate: bool) -> dict[str, Any]:
        """Run the step eagerly and compare what it leaves with the program's."""
        step, session = self._step, self._session
        step._entry = None
        session.steps_eager += 1
        outputs = EagerStep.run(step, batch, batch_idx, accumulate)
        start = perf_counter()
        step._results.commit()
        exact = session.capture != "compile" and all(recording.exact for recording in self._steps.recordings)
        found = self._mismatch(share, outputs.get("loss"), exact=exact)
        if self._is_last and found is None:
            found = self._final_mismatch(got, exact=exact)
        if found is not None:
            self._mismatches.append(found)
        if self._is_last:
            self._judge("equal" if exact else "within tolerance")
        self._entry.verify_seconds += perf_counter() - start
        return outputs

    def _mismatch(self, share: Share, loss: Tensor | None, *, exact: bool) -> Mismatch | None:
        """Return the first difference in what may be seen after this step."""
        want = {f"value {index} of step {self._index + 1}": tensor for index, tensor in enumerate(self._steps.shown)}
        have: dict[str, Tensor | None] = dict(zip(want, share.shown, strict=True))
        if loss is not None:
            want["loss"], have["loss"] = loss, share.loss
        return compared(lambda: first_mismatch(want, have, exact=exact))

    def _final_mismatch(self, got: Saved, *, exact: bool) -> Mismatch | None:
        """Return the first difference in what all of them have left."""
        step, runtime = self._step, self._session.runtime
        if step._guard is not None:
            step._guard.end_step()
        want = {name: tensor for name, tensor in step._surroundings.tensors(()).items() if tensor is not None}
        return compared(
            lambda: rng_mismatch(runtime.rng_state(), got.rng),
            lambda: first_mismatch(want, got.copies, exact=exact),
        )

    def _judge(self, agreement: str) -> None:
        entry = self._entry
        entry.verified_in = self._step._round
        entry.verifications += 1
        entry.verification = str(self._mismatches[0]) if self._mismatches else agreement
        if self._mismatches:
            count = len(self._steps.recordings)
            what = f"{count} steps as one program and eager ones disagree: {self._mismatches[0]}"
            self._session.refuse(entry, [FallbackReason(code="verification", message=what)])
