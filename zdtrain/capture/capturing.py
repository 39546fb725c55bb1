"""The life of a step's programs: warm up on real batches, watch, record, verify, replay."""

from collections.abc import Callable, Hashable, Sequence
from time import perf_counter
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from zdtrain.capture.counters import CounterReadError
from zdtrain.capture.graph import GraphProgram, LoweredGraphProgram, capture_graph
from zdtrain.capture.guarded import Guarded
from zdtrain.capture.host import change_reasons
from zdtrain.capture.key import changing_leaf, describe, flatten_batch, unflatten_batch
from zdtrain.capture.naming import CONDITIONS, LAYOUT, MODULE
from zdtrain.capture.program import Part, Program
from zdtrain.capture.recording import Recorder, Recording
from zdtrain.capture.rollback import Rollback
from zdtrain.capture.session import MAX_FAILURES, MAX_MISFITS, WATCHED_STEPS, Entry
from zdtrain.capture.shared import REPLAY_FAILED, failure
from zdtrain.capture.tape import LoweredTape, Tape, record
from zdtrain.capture.verify import Mismatch, Saved, compared, first_mismatch, rng_mismatch
from zdtrain.capture.watching import Region
from zdtrain.errors import FallbackReason


class Capturing(Guarded):
    """Records a region of a step once per key and replays it; knows no optimizers.

    A subclass runs the step: it sets the attributes of `Watching`, finds the entry with `_look_up` and sends the region
    through `_through`, which leaves what the step made in `_loss` and `_output`.
    """

    _words: tuple[str, ...] = (MODULE, CONDITIONS, LAYOUT, "epoch")
    """What the parts of a key stand for."""

    def _n_unread(self) -> int:
        """Return how many of the gradients, from the first on, the step drops without reading them."""
        return 0

    def _look_up(self, batch: Any, batch_idx: int, name: Callable[[], str], *more: Hashable) -> Entry | None:
        """Return what is known of steps like this one; None, with a reason noted, where none can be captured.

        Args:
            batch: The batch.
            batch_idx: Its index.
            name: Says in words what else tells steps apart.
            more: What else does; `_words` say what it stands for.
        """
        number = self._fingerprints.current()
        if self._fingerprints.obstacles:
            for reason in self._fingerprints.obstacles:
                self._session.note(reason)
            return None
        session, kept = self._session, self._items.kept(batch)
        leaves, structure = flatten_batch(kept)
        all_tensors = isinstance(structure, type)  # see `flatten_batch`
        self._tensor_leaves = leaves if all_tensors else [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        try:
            layout = session.layouts.number(leaves, structure)
        except TypeError as error:
            session.note(
                FallbackReason(code="batch-type", message=f"the batch holds a {error}, which is no tensor or number")
            )
            return None
        epoch = self._trainer.current_epoch if session.epoch_in_key else None
        self._key = (number, self._outcomes(batch_idx), layout, epoch, *more)
        return session.entry(
            self._key,
            lambda: describe(leaves, name()),
            self._words,
            lambda: changing_leaf(kept, session.layouts.before),
        )

    def _outcomes(self, batch_idx: int, more_steps: int = 0) -> tuple[bool, ...]:
        """Return the outcomes of conditions that watched steps met.

        Args:
            batch_idx: Index of the batch.
            more_steps: Optimizer steps between now and then.
        """
        conditions = self._session.conditions
        if not conditions:
            return ()
        return conditions.outcomes({"batch_idx": batch_idx, "global_step": self._trainer.global_step + more_steps})

    def _let_go(self) -> None:
        """Forget the step that ended."""
        self._entry, self._tensor_leaves = None, []
        if not self._session.started:
            self._session.started = True
            self._fingerprints.look_again()  # lazy modules came into being

    def _through(self, region: Region, covers: Sequence[Part] = ()) -> None:
        """Run the region: as it is, watched, recorded, compared with its program, or as a replay."""
        entry = self._entry
        if entry is None:
            region()
        elif entry.reason is not None:
            self._eagerly(region)
        elif entry.recording is None and (self._is_first or not entry.warm):
            entry.warm = True
            self._eagerly(region)
        elif entry.recording is None and len(entry.observations) < WATCHED_STEPS:
            self._look_at(entry, region)
        elif entry.recording is None:
            self._capture(entry, region, covers)
        else:
            self._run_recording(entry, entry.recording, region)

    def _run_recording(self, entry: Entry, recording: Recording, region: Region) -> None:
        inputs = self._fitting(entry, recording)
        if inputs is None:
            self._misfit(entry, region)
        elif self._session.verify and entry.verified_in != self._round:
            self._verify(entry, recording, inputs, region)
        elif entry.replays == 0:
            self._try(entry, recording, inputs, region)
        else:
            self._replay(entry, recording, inputs)

    def _capture(self, entry: Entry, region: Region, covers: Sequence[Part]) -> None:
        """Record the region while it runs; where that fails, take it back and run it as it is.

        A device graph runs nothing while it is captured, and is not to be trusted before it is compared: what the host
        did meanwhile is taken back, and the step runs eagerly.
        """
        session, batch = self._session, self._batch
        self._results.commit()
        before = self._rollback(entry)
        if before is None:
            self._eagerly(region)
            return
        start = perf_counter()
        try:
            entry.recording = self._recorded(entry, region, covers)
            reason = session.shared.lack_of_room()
        except Exception as error:  # whatever the tracer cannot do; an error of the step itself comes again below
            reason, entry.recording = failure("recording the step failed", error), None
            entry.failures = MAX_FAILURES if isinstance(error, CounterReadError) else entry.failures + 1
        else:
            entry.verified_in = None
            entry.operations, entry.includes_optimizer = len(entry.recording.program), bool(covers)
            entry.captures += 1
            entry.capture_seconds += perf_counter() - start
            if not isinstance(entry.recording.program, GraphProgram):
                session.steps_replayed += 1
                return
        before.take_back()  # what lies on the host is not captured but done
        self._batch = batch
        if reason is not None and (entry.recording or not session.device_graphs or entry.failures == MAX_FAILURES):
            session.fail(entry, reason)
        self._eagerly_with_room(region, before)

    def _recorded(self, entry: Entry, region: Region, covers: Sequence[Part]) -> Recording:
        around, carried, inputs = self._surroundings, entry.carried, self._inputs(entry)
        assert carried is not None
        recorder = Recorder(around, carried)
        counters = self._counters(self._session.conditions)

        def recorded() -> list[Any]:
            region()
            return recorder.outputs(self._loss, self._output)

        with self._recordable(), self._counting(counters):  # filling the learning rates is no part of the program
            program = self._record(entry, recorded, inputs)
        n_leaves = len(self._tensor_leaves)
        return Recording(program, recorder, updates=entry.updates, covers=covers, inputs=inputs, n_leaves=n_leaves)

    def _record(self, entry: Entry, recorded: Callable[[], list[Any]], inputs: list[Tensor | None]) -> Program:
        session, first = self._session, len(self._tensor_leaves)
        if session.capture == "compile":
            tape = record(recorded, inputs, LoweredTape)
            return LoweredGraphProgram(tape, session.runtime) if session.device_graphs else tape
        if not session.device_graphs or session.several:
            return record(recorded, inputs, Tape)
        used = [*range(first), *range(first + self._n_unread(), len(inputs))]
        program = capture_graph(recorded, inputs, used, lambda static: self._put(entry, static), session.runtime)
        self._put(entry, {index: tensor for index in program.used[first:] if (tensor := inputs[index]) is not None})
        return program

    def _put(self, entry: Entry, tensors: dict[int, Tensor]) -> None:
        """Put tensors in the places of the inputs with their index; see `_inputs`."""
        parameters = self._surroundings.parameters
        first, last = len(self._tensor_leaves), len(self._tensor_leaves) + len(parameters)
        if first and 0 in tensors:
            leaves = iter(tensors[index] for index in range(first))
            flat, structure = flatten_batch(self._batch)
            self._batch = unflatten_batch([next(leaves) if isinstance(x, Tensor) else x for x in flat], structure)
        for index, parameter in enumerate(parameters, first):
            if index in tensors:
                parameter.grad = tensors[index]
        if entry.carried is not None:
            entry.carried.put({index - last: tensor for index, tensor in tensors.items() if index >= last})

    def _replay(self, entry: Entry, recording: Recording, inputs: list[Tensor | None]) -> None:
        try:
            recording.prepare()
            self._loss, self._output = recording.place(recording.run(inputs))
        except Exception as error:  # the state may be half written: neither hide it nor go on
            error.add_note(REPLAY_FAILED)
            raise
        recording.count()
        entry.misfits = 0
        entry.replays += 1
        self._session.steps_replayed += 1

    def _try(self, entry: Entry, recording: Recording, inputs: list[Tensor | None], region: Region) -> None:
        """Run a program for the first time, which may lower it; what cannot be lowered runs eagerly."""
        before = self._rollback(entry)
        if before is None:
            self._eagerly(region)
            return
        try:
            self._replay(entry, recording, inputs)
        except Exception as error:  # whatever a compiler cannot do; an error of the step itself comes again below
            reason = failure("running the program failed", error)
        else:
            return
        before.take_back()
        self._session.fail(entry, reason)
        self._eagerly_with_room(region, before)

    def _misfit(self, entry: Entry, region: Region) -> None:
        """Run a step eagerly whose program can't take what is there now; record again if that goes on."""
        entry.misfits += 1
        if entry.misfits == MAX_MISFITS:
            entry.recording, entry.misfits = None, 0
        self._eagerly(region)

    def _verify(self, entry: Entry, recording: Recording, inputs: list[Tensor | None], region: Region) -> None:
        """Run the program, take it back, run the region eagerly and compare."""
        session = self._session
        start = perf_counter()
        recording.prepare()
        before = self._rollback(entry)
        if before is None:
            self._eagerly(region)
            return
        exact = session.capture != "compile" and recording.exact
        got = reason = None
        try:
            outputs = recording.run(inputs)
            if entry.verifications == 0:  # lowering is done at the first run
                entry.capture_seconds += perf_counter() - start
                start = perf_counter()
                reason = session.shared.lack_of_room()
            tensors = self._surroundings.tensors(self._tensor_leaves)
            got = Saved({**tensors, **recording.named(outputs)}, session.runtime)
            del recording, outputs, inputs  # what is given up is to be free
        except Exception as error:  # lowering happens here, and what cannot be lowered runs eagerly
            reason = failure("running the program failed", error)
        before.take_back()
        if got is None or reason is not None:
            assert reason is not None
            session.fail(entry, reason)
            self._eagerly_with_room(region, before)
            return
        looks = self._looks()
        states = looks.states()
        before_region = perf_counter()
        self._eagerly_with_room(region, before, got)
        region_seconds = perf_counter() - before_region
        if session.shared.given_up is None:
            self._judge(entry, got, exact, lambda: self._repeats(region, before))
            entry.verify_seconds += perf_counter() - start - region_seconds
        session.refuse(entry, list(change_reasons(looks.changes(states), {})))

    def _judge(self, entry: Entry, got: Saved, exact: bool, repeats: Callable[[], bool]) -> None:
        """Compare what a program did with what an eager step has left, and trust the program or refuse it."""
        session = self._session
        self._results.commit()
        mismatch = self._mismatch(got, exact=exact)
        if mismatch is not None and exact and session.device_graphs and not repeats():
            exact, mismatch = False, self._mismatch(got, exact=False)
        entry.verified_in = self._round
        entry.verifications += 1
        entry.verification = str(mismatch or ("equal" if exact else "within tolerance"))
        if mismatch is not None:
            what = f"the program and an eager step from the same state disagree: {mismatch}"
            session.refuse(entry, [FallbackReason(code="verification", message=what)])

    def _repeats(self, region: Region, before: Rollback) -> bool:
        """Take the step back and run it eagerly once more; return whether it left the same bits.

        Kernels of a device that add in the order in which threads arrive do not.
        """
        try:
            first = Saved(self._left(), self._session.runtime)
        except Exception:  # no room to find out: the mismatch stands, and so does the eager step
            return True
        before.take_back()
        self._eagerly_with_room(region, before, first)
        self._session.steps_eager -= 1
        self._results.commit()
        return self._session.shared.given_up is not None or self._mismatch(first, exact=True) is None

    def _left(self) -> dict[str, Tensor | None]:
        """Return what the step has left, by name."""
        leaves = [leaf for leaf in pytree.tree_leaves(self._output) if isinstance(leaf, Tensor)]
        outputs = {f"output {index}": leaf for index, leaf in enumerate(leaves)}
        return {"loss": self._loss, **self._surroundings.tensors(self._tensor_leaves), **outputs}

    def _mismatch(self, got: Saved, *, exact: bool) -> Mismatch | None:
        """Return the first difference between `got` and what the step has left; also where they can't be compared."""
        return compared(
            lambda: rng_mismatch(self._session.runtime.rng_state(), got.rng),
            lambda: first_mismatch(self._left(), got.copies, exact=exact),
        )
