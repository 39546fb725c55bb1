"""A step under a watch: what it reads, keeps and changes, and whether that speaks against recording it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils import _pytree as pytree

from zdtrain.capture.carried import Carried
from zdtrain.capture.conditions import Conditions
from zdtrain.capture.counters import Counters, counters_in, is_counter, plain
from zdtrain.capture.fingerprints import Fingerprints
from zdtrain.capture.host import HostLooks
from zdtrain.capture.items import BatchItems
from zdtrain.capture.key import flatten_batch
from zdtrain.capture.modules import attributes
from zdtrain.capture.noted import NotedLog
from zdtrain.capture.observe import Observation, obstacles
from zdtrain.capture.program import Part
from zdtrain.capture.session import MAX_FIRST_LOGS, CaptureSession, Entry
from zdtrain.capture.surroundings import Surroundings
from zdtrain.capture.watch import Watch, reason_at, storage_of
from zdtrain.errors import FallbackReason
from zdtrain.source.location import NOWHERE
from zdtrain.step.results import StepResults

Region = Callable[[], Any]


class Watching(ABC):
    """What is known of a step that is to be captured, and how it is watched.

    A subclass runs the step and sets the attributes below.
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
    _items: BatchItems
    """What of a batch it reads."""
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
    """Number of the fingerprint, outcomes of the conditions, and what else tells steps apart."""
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

    @abstractmethod
    def _through(self, region: Region, covers: Sequence[Part] = ()) -> None:
        """Run the region in whatever way it is due; the user's code begins inside."""

    def _eagerly(self, region: Region) -> None:
        self._session.steps_eager += 1
        region()

    @contextmanager
    def _noted_index(self) -> Iterator[None]:
        """Let whoever watches or records, if anybody, know whether the body uses the batch's index."""
        counters, index = self._session.counters, self._batch_idx
        if counters is not None:
            self._batch_idx = counters.stand_in("batch_idx", index)
        try:
            yield
        finally:
            self._batch_idx = index

    @contextmanager
    def _noted_log(self, watch: Watch) -> Iterator[None]:
        """Let the watch know what the body logs."""
        log = self._log
        self._log = NotedLog(self._module, log, watch)
        try:
            yield
        finally:
            self._log = log

    def _watch(self, entry: Entry, region: Region) -> None:
        """Run the region eagerly and look at what it does; decide once there is something to compare."""
        session, around = self._session, self._surroundings
        earlier = entry.observations[0] if entry.observations else None
        known = len(session.reach)
        logged = self._n_logged()
        self._items.look_again()
        self._results.commit()
        seen = Observation(
            self._module,
            type(self)._through.__code__,
            [tensor for tensor in self._inputs(entry) if tensor is not None],
            looks=self._looks(),
            reach=session.reach,
            counters=self._counters(),
            find_lines=earlier is not None and bool(earlier.changes),
        )
        counts = around.metric_counts()
        batch = batch_parts(self._batch)
        # Of tensors of the batch that the step itself makes require a gradient, nobody looks at that gradient later.
        leaves = [] if self._users_between else [leaf for leaf in self._tensor_leaves if not leaf.requires_grad]
        session.watch = seen.watch
        try:
            with self._recordable(), self._counting(seen.counters), self._noted_log(seen.watch):
                seen.run(lambda: self._eagerly(region), lambda: [*self._handed_over(), *(leaf.grad for leaf in leaves)])
        finally:
            session.watch = None
        session.host_reads += seen.watch.host_reads
        session.epoch_in_key = session.epoch_in_key or seen.watch.epoch_read
        seen.reasons += [part.refusal for part in self._inside if part.refusal is not None]
        seen.reasons += self._reasons_against(seen)
        seen.reasons += self._kept_counters(seen.counters)
        if batch_parts(self._batch) != batch:
            what = "the step takes something out of the batch or puts something in, which a replay would not"
            seen.reasons.append(FallbackReason(code="python-state", message=what))
        for metric, count in counts:
            if metric.is_tensor and metric._update_count != count:
                what = f"self.log({metric.meta.name!r}, ..., enable_graph=True) keeps the graph of every step"
                seen.reasons.append(FallbackReason(code="logged-graph", message=what))
        learned = self._learn_conditions(seen)
        if learned:  # then it was the first step of its kind, in which things come into being
            entry.observations.clear()
        elif self._n_logged() > logged and entry.first_logs < MAX_FIRST_LOGS:  # Lightning has more to do then
            entry.first_logs += 1
        else:
            self._keep_seen(entry, earlier, seen)
        if learned or not seen.attributes <= session.attributes or len(session.reach) > known:
            session.attributes |= seen.attributes
            self._fingerprints.look_again()
            outcomes = session.conditions.outcomes(seen.counters.values)
            session.move(self._key, (self._fingerprints.current(), outcomes, *self._key[2:]))

    def _n_logged(self) -> int:
        """Return how many names were logged in this epoch."""
        return 0 if self._log is None else len(self._log)

    def _keep_seen(self, entry: Entry, earlier: Observation | None, seen: Observation) -> None:
        entry.observations.append(seen)
        if earlier is not None:
            self._session.refuse(entry, list(obstacles(earlier, seen)))
            entry.carried, entry.updates = Carried(self._module, seen.carried), seen.updates
            earlier.release()
            seen.release()
        elif not seen.changes:  # otherwise the lines are to be found first
            self._session.refuse(entry, list(dict.fromkeys(seen.reasons)))

    def _counters(self, known: Conditions | None = None) -> Counters:
        """Return what hands out the counters of the step that begins; see `Counters`."""
        values = {"batch_idx": self._batch_idx, "global_step": self._trainer.global_step}
        return Counters(values, type(self)._through.__code__, known)

    @contextmanager
    def _counting(self, counters: Counters) -> Iterator[None]:
        """Let the body find `counters`.

        Raises:
            CounterReadError: The body is recorded and uses a counter in a way that no replay can repeat.
        """
        self._session.counters = counters
        try:
            with counters.listening():
                yield
        finally:
            self._session.counters = None
            counters.check()

    def _learn_conditions(self, seen: Observation) -> bool:
        """Make what a step asked of counters part of the key; return whether anything of it is new."""
        refusal = seen.counters.too_many(self._session.conditions)
        if refusal is not None:
            seen.reasons.append(refusal)
            return False
        return self._session.conditions.learn(seen.counters.conditions)

    def _kept_counters(self, counters: Counters) -> Iterator[FallbackReason]:
        """Yield a reason for each counter that the step returned; put integers in the places of those that it left."""
        for counter in counters_in(pytree.tree_leaves(self._output)):
            yield counters.reason(counter.number, NOWHERE)
            self._output = pytree.tree_map(plain, self._output)
        for _, module, name, value in attributes(self._module):
            if is_counter(value):
                module.__dict__[name] = plain(value)

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


def batch_parts(batch: Any) -> tuple[Any, ...]:
    """Return which objects a batch holds, and how."""
    leaves, structure = flatten_batch(batch)
    return (structure, *map(id, leaves))
