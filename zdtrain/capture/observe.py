"""One watched warm-up step, and what two of them say about capturing the step."""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import nullcontext
from types import CodeType
from typing import Any

from torch import Tensor, nn

from zdtrain.capture.carried import Place, held_tensors, metric_counts, replaced, updates_between
from zdtrain.capture.counters import CounterArguments, Counters
from zdtrain.capture.host import ChangeFinder, HostLooks, change_reasons
from zdtrain.capture.modules import attributes, is_metric, python_state
from zdtrain.capture.reach import Reach
from zdtrain.capture.reads import AttributeReads
from zdtrain.capture.remedies import INSTEAD_OF_KEEPING
from zdtrain.capture.watch import HostAccess, Watch, difference, reason_at, storage_of
from zdtrain.errors import FallbackReason
from zdtrain.source.definitions import attribute_location
from zdtrain.source.location import Location


class Observation:
    """A step that ran under a `Watch`, with its module looked at before and after.

    Args:
        module: The LightningModule.
        boundary: Code of the function that drives the step.
        inputs: Tensors that change with every step.
        looks: What a replay would not change.
        reach: What the step reads past its module.
        counters: What the step asks of the host's counters.
        find_lines: Look for the lines that change what a replay would not; slow.
    """

    def __init__(
        self,
        module: nn.Module,
        boundary: CodeType,
        inputs: Iterable[Tensor],
        *,
        looks: HostLooks,
        reach: Reach,
        counters: Counters,
        find_lines: bool = False,
    ) -> None:
        self.watch = Watch(boundary, inputs)
        self.carried: tuple[Place, ...] = ()
        self.updates: dict[str, int] = {}
        self.reasons: list[FallbackReason] = []
        self.attributes: set[tuple[str, str]] = set()
        self.changes: set[str] = set()
        self.places: dict[str, Location] = {}
        self._module = module
        self._looks = looks
        self._reach = reach
        self.counters = counters
        self._finder = ChangeFinder(looks) if find_lines else None
        self._held: dict[Place, Tensor] = {}

    def run(self, region: Callable[[], Any], outputs: Callable[[], Iterable[Any]]) -> None:
        """Run the step and look at what it did.

        Args:
            region: The step.
            outputs: Returns the tensors that the step hands over, once it has run.
        """
        module = self._module
        values, counts = python_state(module), metric_counts(module)
        states = self._looks.states()
        self._held = held_tensors(module)
        reads = AttributeReads(module)
        looking = self._finder.looking() if self._finder else nullcontext()
        with (
            self._reach.looking(self.watch),
            reads.looking(),
            looking,
            HostAccess(self.watch),
            CounterArguments(),
            self.watch,
        ):
            region()
        self.attributes = reads.names()
        self._reach.take_elsewhere(reads.elsewhere())
        self.reasons += _iterators(module, self.attributes)
        held = held_tensors(module)
        self.carried = replaced(self._held, held)
        self.updates = updates_between(counts, metric_counts(module))
        self.changes = self._looks.changes(states)
        self.places = self._finder.places if self._finder else {}
        self.reasons += [*self.watch.reads, *self.counters.reasons]
        self.reasons += _changed_attributes(module, values, python_state(module))
        known = {id(t) for t in (*held.values(), *outputs()) if t is not None}
        self.reasons += _escapes(self.watch, known)

    def known_storages(self) -> set[int]:
        """Return the storages of tensors that may be others in every step, because a program is told of them."""
        return {storage_of(tensor) for tensor in self._held.values()}

    def release(self) -> None:
        """Let go of the tensors that were looked at."""
        self._held = {}
        self.watch.forget()


def obstacles(before: Observation, after: Observation) -> Iterator[FallbackReason]:
    """Yield why steps like these two can't be replayed from a recording of one of them."""
    yield from dict.fromkeys([*before.reasons, *after.reasons])
    yield from change_reasons(before.changes | after.changes, after.places)
    reason = difference(before.watch, after.watch, after.known_storages())
    if reason is not None:
        yield reason
    elif before.carried != after.carried or before.updates != after.updates:
        places = sorted(str(place) for place in set(before.carried) ^ set(after.carried))
        names = ", ".join(places) or ", ".join(sorted(after.updates))
        yield FallbackReason(code="control-flow", message=f"the step replaces {names} in some steps only")


def _changed_attributes(module: nn.Module, before: dict[Any, Any], after: dict[Any, Any]) -> Iterator[FallbackReason]:
    for (path, name), value in after.items():
        if before.get((path, name), after) != value:
            yield attribute_reason(module, path, name)
    for path, name in before.keys() - after.keys():
        yield attribute_reason(module, path, name)


def _iterators(module: nn.Module, read: Collection[tuple[str, str]]) -> Iterator[FallbackReason]:
    """Yield a reason for each iterator that the step reads: where it is cannot be looked at."""
    for path, _, name, value in attributes(module):
        if (path, name) in read and isinstance(value, Iterator):
            yield attribute_reason(module, path, name)


def attribute_reason(module: nn.Module, path: str, name: str, *, when: str = "by the step") -> FallbackReason:
    """Return the reason for a Python attribute that changes."""
    owner = module.get_submodule(path)
    label = f"{path}.{name}" if path else name
    place = attribute_location(type(owner), name, outside_init=True)
    if is_metric(owner) and isinstance(getattr(owner, name, None), list):
        what = f"{type(owner).__name__} keeps every batch in the list {label!r}, which a replay cannot grow"
        if getattr(owner, "thresholds", 0) is None:
            what += ": give it a number of thresholds="
        return FallbackReason(code="metric-list-state", message=what)
    what = f"the Python attribute {label!r} is changed {when}, which a replay would not"
    value = getattr(owner, name, None)
    if isinstance(value, list) and any(isinstance(item, Tensor) for item in value):
        what += f": {INSTEAD_OF_KEEPING}"
    return reason_at(place, "python-state", what)


def _escapes(watch: Watch, known: set[int]) -> Iterator[FallbackReason]:
    for tensor, place in watch.survivors(known):
        what = f"a tensor of shape {tuple(tensor.shape)} made here is kept by somebody after the step"
        yield reason_at(place, "kept-tensor", f"{what}: {INSTEAD_OF_KEEPING}")
        return
