"""The life of a step's programs: warm up on real batches, watch, record, verify, replay."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils import _pytree as pytree

from zdtrain.errors import FallbackReason
from zdtrain.step.carried import Carried
from zdtrain.step.fingerprints import Fingerprints
from zdtrain.step.graph import LoweredGraphProgram, capture_graph
from zdtrain.step.host import HostLooks, change_reasons
from zdtrain.step.key import describe, flatten_batch, signature, unflatten_batch
from zdtrain.step.noted import NotedIndex, NotedLog
from zdtrain.step.observe import Observation, obstacles
from zdtrain.step.program import Part, Program
from zdtrain.step.recording import Recorder, Recording
from zdtrain.step.results import StepResults
from zdtrain.step.rollback import HostState
from zdtrain.step.session import MAX_FAILURES, MAX_MISFITS, WATCHED_STEPS, CaptureSession, Entry
from zdtrain.step.surroundings import Surroundings
from zdtrain.step.tape import LoweredTape, Tape, record
from zdtrain.step.verify import Mismatch, Saved, first_mismatch, rng_mismatch
from zdtrain.step.watch import reason_at, storage_of

Region = Callable[[], Any]


class Capturing(ABC):
    """Records a region of a step once per key and replays it; knows no optimizers.

    A subclass runs the step: it sets the attributes below, finds the entry with `_look_up` and sends the region through
    `_through`, which leaves what the step made in `_loss` and `_output`.
    """

    _trainer: Trainer
    _module: LightningModule
    _attributes: dict[str, Any]
    """The module's ``__dict__``."""
    _session: CaptureSession
    """Programs and counts."""
    _connector: Any
    """Lightning's logger connector."""
    _results: StepResults
    """Where the step logs."""
    _surroundings: Surroundings
    """What it works on."""
    _fingerprints: Fingerprints
    """What programs hold by value of the module."""
    _users_between: bool
    """Whether code of the user runs between two steps."""
    _inside: Sequence[Part]
    """What has to be arranged for recording and replaying."""
    _log: Any
    """What `self.log` is during the step; None for Lightning's own."""
    _batch: Any
    _batch_idx: int
    _loss: Tensor | None
    """Detached; None for a step that has none."""
    _output: Any
    """What else the step returned."""
    _entry: Entry | None = None
    """What is known of steps like this one; None where they run eagerly whatever they are."""
    _key: tuple[Hashable, ...] = ()
    _tensor_leaves: Sequence[Tensor] = ()
    """The batch's tensors."""

    @property
    @abstractmethod
    def _is_first(self) -> bool:
        """Whether this is a step in which Lightning declares or resets what is logged: an epoch's first."""

    @property
    @abstractmethod
    def _round(self) -> int:
        """What a program is compared with an eager step once in: the epoch."""

    @abstractmethod
    def _looks(self) -> HostLooks:
        """Return what a replay would not change."""

    def _reasons_against(self, seen: Observation) -> Iterator[FallbackReason]:
        """Yield what speaks against recording a step that was watched, besides what the watch itself found."""
        around = self._surroundings
        known = {storage_of(t) for t in around.tensors(self._tensor_leaves).values() if t is not None}
        known |= seen.known_storages()
        for storage, operation in seen.watch.written.items():
            if storage not in known:
                what = (
                    f"{operation.name} writes to a tensor that is neither buffer nor attribute of a module, so that no "
                    "comparison can take it back: make it a buffer"
                )
                yield reason_at(operation.place, "outside-write", what)
        for slot in around.slots():
            if isinstance(slot.weight, Tensor):
                what = f"self.log({slot.meta.name!r}, ..., batch_size=...) gets a tensor; give a number"
                yield FallbackReason(code="logged-batch-size", message=what)

    def _n_unread(self) -> int:
        """Return how many of the gradients, from the first on, the step drops without reading them."""
        return 0

    def _look_up(self, batch: Any, name: Callable[[], str], *more: Hashable) -> Entry | None:
        """Return what is known of steps like this one; None, with a reason noted, where the batch has no layout.

        Args:
            batch: The batch.
            name: Says in words what else tells steps apart.
            more: What else does.
        """
        leaves, structure = flatten_batch(batch)
        self._tensor_leaves = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        try:
            layout = signature(leaves)
        except TypeError as error:
            self._session.note(
                FallbackReason(code="batch-type", message=f"the batch holds a {error}, which is no tensor or number")
            )
            return None
        self._key = (
            self._fingerprints.current(),
            structure if isinstance(structure, type) else str(structure),
            layout,
            self._trainer.current_epoch if self._session.epoch_in_key else None,
            torch.get_default_dtype(),
            *more,
        )
        return self._session.entry(self._key, lambda: describe(leaves, name()))

    def _let_go(self) -> None:
        """Forget the step that ended."""
        self._entry, self._tensor_leaves = None, []
        if not self._session.started:
            self._session.started = True
            self._fingerprints.look_again()  # lazy modules came into being

    def _through(self, region: Region, covers: Sequence[Part] = ()) -> None:
        """Run the region: as it is, watched, recorded, compared with its program, or as a replay."""
        entry, session = self._entry, self._session
        if entry is None:
            region()
        elif entry.reason is not None:
            self._eagerly(region)
        elif entry.recording is None and (self._is_first or not entry.warm):
            entry.warm = True
            self._eagerly(region)
        elif entry.recording is None and len(entry.observations) < WATCHED_STEPS:
            self._watch(entry, region)
        elif entry.recording is None:
            self._capture(entry, region, covers)
        elif not entry.recording.fits(self._inputs(entry)):
            self._misfit(entry, region)
        elif session.verify and entry.verified_in != self._round:
            self._verify(entry, entry.recording, region)
        else:
            self._replay(entry, entry.recording)

    def _eagerly(self, region: Region) -> None:
        self._session.steps_eager += 1
        region()

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Let the watch, if there is one, know what the body logs and whether it uses the batch's index."""
        watch = self._session.watch
        if watch is None:
            yield
            return
        log = self._log
        self._log = self._attributes["log"] = NotedLog(log, watch)
        try:
            with self._noted_index():
                yield
        finally:
            self._log = log

    @contextmanager
    def _noted_index(self) -> Iterator[None]:
        """Let the watch, if there is one, know whether the body uses the batch's index."""
        watch, index = self._session.watch, self._batch_idx
        if watch is not None:
            self._batch_idx = NotedIndex(index, watch)
        try:
            yield
        finally:
            self._batch_idx = index

    def _watch(self, entry: Entry, region: Region) -> None:
        """Run the region eagerly and look at what it does; decide once there is something to compare."""
        session, around = self._session, self._surroundings
        earlier = entry.observations[0] if entry.observations else None
        known = len(session.reach)
        self._results.commit()
        seen = Observation(
            self._module,
            Capturing._through.__code__,
            [tensor for tensor in self._inputs(entry) if tensor is not None],
            looks=self._looks(),
            reach=session.reach,
            find_lines=earlier is not None and bool(earlier.changes),
        )
        counts = around.metric_counts()
        # Of tensors of the batch that the step itself makes require a gradient, nobody looks at that gradient later.
        leaves = [] if self._users_between else [leaf for leaf in self._tensor_leaves if not leaf.requires_grad]
        session.watch = seen.watch
        try:
            with self._recordable():
                seen.run(lambda: self._eagerly(region), lambda: [*self._handed_over(), *(leaf.grad for leaf in leaves)])
        finally:
            session.watch = None
        session.host_reads += seen.watch.host_reads
        session.epoch_in_key = session.epoch_in_key or seen.watch.epoch_read
        seen.reasons += [part.refusal for part in self._inside if part.refusal is not None]
        seen.reasons += self._reasons_against(seen)
        for metric, count in counts:
            if metric.is_tensor and metric._update_count != count:
                what = f"self.log({metric.meta.name!r}, ..., enable_graph=True) keeps the graph of every step"
                seen.reasons.append(FallbackReason(code="logged-graph", message=what))
        entry.observations.append(seen)
        if earlier is not None:
            session.refuse(entry, list(obstacles(earlier, seen)))
            entry.carried, entry.updates = Carried(self._module, seen.carried), seen.updates
            earlier.release()
            seen.release()
        elif not seen.changes:  # otherwise the lines are to be found first
            session.refuse(entry, list(dict.fromkeys(seen.reasons)))
        if not seen.attributes <= session.attributes or len(session.reach) > known:
            session.attributes |= seen.attributes
            self._fingerprints.look_again()
            session.move(self._key, (self._fingerprints.current(), *self._key[1:]))

    @contextmanager
    def _recordable(self) -> Iterator[None]:
        with ExitStack() as stack:
            for part in self._inside:
                stack.enter_context(part.recording())
            yield

    def _handed_over(self) -> list[Any]:
        """Return the tensors that belong to somebody after the step."""
        return [
            self._loss,
            *(leaf for leaf in pytree.tree_leaves(self._output) if isinstance(leaf, Tensor)),
            *(p.grad for p in self._surroundings.parameters),
            *(value for m in self._results.values() for value in (m._computed, m._forward_cache)),
        ]

    def _inputs(self, entry: Entry) -> list[Tensor | None]:
        """Return what a program may read and that is another tensor in every step."""
        carried = entry.carried.tensors() if entry.carried is not None else []
        return [*self._tensor_leaves, *(p.grad for p in self._surroundings.parameters), *carried]

    def _capture(self, entry: Entry, region: Region, covers: Sequence[Part]) -> None:
        """Record the region while it runs; where that fails, take it back and run it as it is.

        A device graph runs nothing while it is captured, and is not to be trusted before it is compared: what the host
        did meanwhile is taken back, and the step runs eagerly.
        """
        session, around, carried = self._session, self._surroundings, entry.carried
        assert carried is not None
        self._results.commit()
        inputs = self._inputs(entry)
        host = HostState(around)
        saved = Saved(around.tensors(self._tensor_leaves), session.runtime)
        batch = self._batch
        start = time.perf_counter()
        recorder = Recorder(around, carried)

        def recorded() -> list[Any]:
            region()
            return recorder.outputs(self._loss, self._output)

        try:
            with self._recordable():  # outside: filling the learning rates is no part of the program
                program = self._record(entry, recorded, inputs)
        except Exception as error:  # whatever the tracer cannot do; an error of the step itself comes again below
            host.restore()
            saved.restore()
            self._batch = batch
            self._eagerly(region)
            entry.failures += 1
            if not session.device_graphs or entry.failures == MAX_FAILURES:
                session.refuse(entry, [failure("recording the step failed", error)])
            return
        entry.recording = Recording(
            program, recorder, updates=entry.updates, covers=covers, inputs=inputs, n_leaves=len(self._tensor_leaves)
        )
        entry.verified_in = None
        entry.operations, entry.includes_optimizer = len(program), bool(covers)
        entry.captures += 1
        entry.capture_seconds += time.perf_counter() - start
        if session.device_graphs and session.capture == "graph":
            host.restore()
            saved.restore()  # what lies on the host is not captured but done
            self._batch = batch
            self._eagerly(region)
        else:
            session.steps_replayed += 1

    def _record(self, entry: Entry, recorded: Callable[[], list[Any]], inputs: list[Tensor | None]) -> Program:
        session, first = self._session, len(self._tensor_leaves)
        if session.capture == "compile":
            tape = record(recorded, inputs, LoweredTape)
            return LoweredGraphProgram(tape, session.runtime) if session.device_graphs else tape
        if not session.device_graphs:
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

    def _replay(self, entry: Entry, recording: Recording) -> None:
        recording.prepare()
        self._loss, self._output = recording.place(recording.run(self._inputs(entry)))
        recording.count()
        entry.misfits = 0
        entry.replays += 1
        self._session.steps_replayed += 1

    def _misfit(self, entry: Entry, region: Region) -> None:
        """Run a step eagerly whose program can't take what is there now; record again if that goes on."""
        entry.misfits += 1
        if entry.misfits == MAX_MISFITS:
            entry.recording, entry.misfits = None, 0
        self._eagerly(region)

    def _verify(self, entry: Entry, recording: Recording, region: Region) -> None:
        """Run the program, take it back, run the region eagerly and compare."""
        session, around = self._session, self._surroundings
        start = time.perf_counter()
        recording.prepare()
        inputs = self._inputs(entry)
        saved, host = Saved(around.tensors(self._tensor_leaves), session.runtime), HostState(around)
        try:
            outputs = recording.run(inputs)
        except Exception as error:  # lowering happens here, and what cannot be lowered runs eagerly
            saved.restore()
            self._eagerly(region)
            session.refuse(entry, [failure("running the program failed", error)])
            return
        if entry.verifications == 0:  # lowering is done at the first run
            entry.capture_seconds += time.perf_counter() - start
            start = time.perf_counter()
        got = Saved({**around.tensors(self._tensor_leaves), **recording.named(outputs)}, session.runtime)
        saved.restore()
        looks = self._looks()
        states = looks.states()
        before_region = time.perf_counter()
        self._eagerly(region)
        self._results.commit()
        region_seconds = time.perf_counter() - before_region
        exact = session.capture != "compile" and recording.exact
        mismatch = self._mismatch(got, exact=exact)
        if mismatch is not None and exact and session.device_graphs and not self._repeats(region, saved, host):
            exact, mismatch = False, self._mismatch(got, exact=False)
        entry.verified_in = self._round
        entry.verifications += 1
        entry.verification = str(mismatch or ("equal" if exact else "within tolerance"))
        entry.verify_seconds += time.perf_counter() - start - region_seconds
        if mismatch is not None:
            what = f"the program and an eager step from the same state disagree: {mismatch}"
            session.refuse(entry, [FallbackReason(code="verification", message=what)])
        session.refuse(entry, list(change_reasons(looks.changes(states), {})))

    def _left(self) -> dict[str, Tensor | None]:
        """Return what the step has left, by name."""
        leaves = [leaf for leaf in pytree.tree_leaves(self._output) if isinstance(leaf, Tensor)]
        outputs = {f"output {index}": leaf for index, leaf in enumerate(leaves)}
        return {"loss": self._loss, **self._surroundings.tensors(self._tensor_leaves), **outputs}

    def _mismatch(self, got: Saved, *, exact: bool) -> Mismatch | None:
        """Return the first difference between `got` and what the step has left."""
        random = self._session.runtime.rng_state()
        return rng_mismatch(random, got.rng) or first_mismatch(self._left(), got.copies, exact=exact)

    def _repeats(self, region: Region, saved: Saved, host: HostState) -> bool:
        """Take the step back and run it eagerly once more; return whether it left the same bits.

        Kernels of a device that add in the order in which threads arrive do not.
        """
        first = Saved(self._left(), self._session.runtime)
        host.restore()
        saved.restore()
        region()
        self._results.commit()
        return self._mismatch(first, exact=True) is None


def failure(what: str, error: Exception) -> FallbackReason:
    """Return the reason for an error in capturing."""
    lines = str(error).strip().splitlines() or [""]
    return FallbackReason(code="untraceable", message=f"{what}: {type(error).__name__}: {lines[0][:200]}")
