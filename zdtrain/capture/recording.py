"""A recorded step: the program, and the host's share of what the step did, to be done again at every replay."""

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zdtrain.capture.carried import Carried, count_updates
from zdtrain.capture.program import Part, Program
from zdtrain.capture.surroundings import Surroundings
from zdtrain.step.log import note_metric
from zdtrain.step.results import MetricSlot

_TENSOR = object()  # stands for a tensor among the leaves of what a step returned


class Recorder:
    """Runs a step while it is recorded, and takes down what the host did.

    Args:
        surroundings: What the step works on.
        carried: Tensor attributes that it replaces.
    """

    def __init__(self, surroundings: Surroundings, carried: Carried) -> None:
        self.surroundings = surroundings
        self.carried = carried
        self._counts = surroundings.metric_counts()
        self._progress = [(counter, progress_of(counter)) for counter in surroundings.counters]
        self._weights = {id(slot): (slot.weight, slot._update_count) for slot in surroundings.slots()}
        self.slots: list[LoggedValue] = []
        self.metrics: list[Any] = []
        self.moves: list[tuple[dict[str, int], str, int]] = []
        self.n_dropped = 0
        self.n_returned = 0
        self.leaves: list[Any] = []
        self.structure: Any = None

    def outputs(self, loss: Tensor | None, output: Any) -> list[Any]:
        """Take down what the step left behind; return the tensors that a replay has to put in place.

        Args:
            loss: The detached loss.
            output: What training_step returned besides.
        """
        around = self.surroundings
        moved = [counter for counter, before in self._progress if progress_of(counter) != before]
        self.moves = [move for counter, before in self._progress for move in moves_of(counter, before)]
        self.n_dropped = around.n_dropped(moved)
        self.metrics = [metric for metric, count in self._counts if metric._update_count != count]
        around.results.commit()
        self.slots = [*self._logged()]
        leaves, self.structure = ([], None) if output is None else pytree.tree_flatten(output)
        self.leaves = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        returned = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)]
        self.n_returned = len(returned)
        replaced = self.carried.tensors()[: len(self.carried.replaced)]
        carried = [tensor.detach() for tensor in replaced if tensor is not None]
        return [loss, *returned, *(p.grad for p in around.parameters), *carried]

    def _logged(self) -> Iterator["LoggedValue"]:
        for slot in self.surroundings.slots():
            weight, count = self._weights.get(id(slot), (0, 0))
            if slot._update_count != count:
                yield LoggedValue(slot, slot.weight - weight, slot._update_count - count, slot.cell)


class LoggedValue(NamedTuple):
    """What a step logged under one name, as far as the host counts it."""

    slot: MetricSlot
    """Where it goes."""
    weight: int
    """Batch sizes, summed."""
    times: int
    """How often it was logged."""
    cell: Tensor
    """Where the program writes the value."""

    def replay(self) -> None:
        """Do the host's share of a replay."""
        slot, state = self.slot, self.slot.__dict__
        state["weight"] += self.weight
        state["_update_count"] += self.times
        state["has_reset"], state["_computed"] = False, None
        slot.bank.fresh.add(slot.index)  # type: ignore[union-attr]


class Recording:
    """A program with everything a replay needs.

    Args:
        program: The recorded operations.
        taken: What the host did meanwhile.
        updates: Updates of torchmetrics metrics in one step, by module path.
        covers: What needs arranging for a replay: the optimizers that are part of the program.
        inputs: What it was recorded with.
        n_leaves: How many of the inputs are the batch's, whose layout is part of the key.
    """

    def __init__(
        self,
        program: Program,
        taken: Recorder,
        *,
        updates: dict[str, int],
        covers: Sequence[Part],
        inputs: Sequence[Tensor | None],
        n_leaves: int,
    ) -> None:
        self.program = program
        self.exact = all(part.exact for part in covers)
        self.parts = [part.recorded() for part in covers]
        self.n_leaves = n_leaves
        self.carried = taken.carried
        self.parameters = taken.surroundings.parameters
        self._taken = taken
        entries = [*(logged.slot for logged in taken.slots), *taken.metrics]
        self._logging_hooks = list(dict.fromkeys(entry.meta.fx.partition(".")[0] for entry in entries))
        self._updates = updates
        self._no_gradients: list[Tensor | None] = [None] * len(self.parameters)
        read = {index for index in program.used if index >= n_leaves}
        absent = {index for index in range(n_leaves, len(inputs)) if inputs[index] is None}
        absent -= set(range(n_leaves, n_leaves + taken.n_dropped))  # what the step drops may be there or not
        self._checked = sorted(read | absent)
        self._layout = layout_of([inputs[index] for index in self._checked])
        gradients = range(n_leaves, n_leaves + len(self.parameters))
        self._takes_gradients = any(index in gradients for index in (*self._checked, *program.used))
        self._memory = Memory([*self.parameters, *self.carried.referenced], fixed=program.overwrites)

    def inputs(self, leaves: Sequence[Tensor]) -> list[Tensor | None]:
        """Return what the program runs on besides what it holds by reference; None for gradients that it doesn't take.

        Args:
            leaves: The batch's tensors.
        """
        gradients = [p.grad for p in self.parameters] if self._takes_gradients else self._no_gradients
        return [*leaves, *gradients, *self.carried.tensors()]

    def fits(self, inputs: Sequence[Tensor | None]) -> bool:
        """Return whether the program may run on `inputs`, and what it holds by reference is where it was."""
        for logged in self._taken.slots:
            if logged.slot.cell is not logged.cell:
                return False
        if not (self.carried.fits() and self._memory.fits()):
            return False
        checked = self._checked
        return not checked or layout_of([inputs[index] for index in checked]) == self._layout

    def prepare(self) -> None:
        """Do what comes before a run of the program."""
        self.open()
        for part in self.parts:
            part.refill()

    def open(self) -> None:
        """Spare what is kept, and reset what is logged."""
        self.program.spare_kept()
        around = self._taken.surroundings
        for hook in self._logging_hooks:  # what a hook's first self.log of a step does
            if around.connector.should_reset_tensors(hook):
                around.results.reset(metrics=False, fx=hook)
            around.connector._current_fx = hook

    def run(self, inputs: Sequence[Tensor | None]) -> list[Any]:
        """Run the program; return its outputs."""
        outputs = self.program.run(inputs)
        for part in self.parts:
            part.ran()
        return outputs

    def named(self, outputs: Sequence[Any]) -> dict[str, Tensor | None]:
        """Return the outputs of a run by the names that `Surroundings.tensors` gives them."""
        loss, returned, gradients, carried = self.split(outputs)
        found: dict[str, Tensor | None] = {"loss": loss}
        found.update({f"output {index}": tensor for index, tensor in enumerate(returned)})
        return {**found, **self.named_places(gradients, carried)}

    def named_places(self, gradients: Sequence[Tensor | None], carried: Sequence[Tensor]) -> dict[str, Tensor | None]:
        """Return gradients, and what the step replaces, by name."""
        names = self._taken.surroundings.names()
        found: dict[str, Tensor | None] = {}
        parameters = self.parameters
        found.update({f"gradient of {names.get(id(p), id(p))}": g for p, g in zip(parameters, gradients, strict=True)})
        found.update({str(place): t for place, t in zip(self._taken.carried.replaced, carried, strict=True)})
        return found

    def place(self, outputs: Sequence[Any]) -> tuple[Tensor | None, Any]:
        """Put a run's outputs in their places; return the loss and what else the step returned."""
        loss, returned, gradients, carried = self.split(outputs)
        self.place_gradients(gradients)
        return self.hand_over(loss, returned, carried, copy=self.program.overwrites)

    def place_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Give parameters their gradients, which alias what a program overwrites, as they do in any captured step."""
        if not self.program.overwrites:  # they are new in every run
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient
            return
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if parameter.grad is not gradient:
                parameter.grad = gradient

    def hand_over(
        self, loss: Tensor | None, returned: Sequence[Tensor], carried: Sequence[Tensor], *, copy: bool
    ) -> tuple[Tensor | None, Any]:
        """Put the rest in its places; return the loss and what else the step returned.

        Args:
            loss: The loss.
            returned: Tensors that the step returned besides.
            carried: What it replaces.
            copy: Copy what users keep, because the next run writes over it.
        """
        taken = self._taken
        if copy:
            loss = None if loss is None else loss.clone()
            returned, carried = [t.clone() for t in returned], [t.clone() for t in carried]
        if carried:
            taken.carried.replace(list(carried))
        if taken.structure is None:
            return loss, None
        tensors = iter(returned)
        leaves = [next(tensors) if leaf is _TENSOR else leaf for leaf in taken.leaves]
        return loss, pytree.tree_unflatten(leaves, taken.structure)

    def count(self) -> None:
        """Do the host's share of a replay: everything that the step's Python would have counted."""
        taken, around = self._taken, self._taken.surroundings
        if self._updates:
            count_updates(around.module, self._updates)
        for logged in taken.slots:
            logged.replay()
        for metric in taken.metrics:
            note_metric(metric)
        for progress, name, times in taken.moves:
            progress[name] += times
        for part in self.parts:
            part.count()

    def split(self, outputs: Sequence[Any]) -> tuple[Any, Sequence[Any], Sequence[Any], Sequence[Any]]:
        """Return a run's outputs by kind: loss, what else the step returned, gradients, what it replaces."""
        first = 1 + self._taken.n_returned
        last = first + len(self._taken.surroundings.parameters)
        return outputs[0], outputs[1:first], outputs[first:last], outputs[last:]


class Memory:
    """Where tensors lie that a program holds by reference: ``tensor.data = other`` moves one.

    Args:
        tensors: The tensors.
        fixed: The program holds addresses and not the tensors themselves.
    """

    def __init__(self, tensors: Sequence[Tensor], *, fixed: bool) -> None:
        self._tensors = [tensor for tensor in tensors if tensor.layout is torch.strided]
        self._fixed = fixed
        self._addresses = self._look()
        self._layouts = self._describe()

    def fits(self) -> bool:
        """Return whether the program finds them."""
        addresses = self._look()
        if addresses != self._addresses:
            if self._fixed or self._describe() != self._layouts:
                return False
            self._addresses = addresses
        return True

    def _look(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self._tensors]

    def _describe(self) -> list[Hashable]:
        return [(tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in self._tensors]


def layout_of(inputs: Sequence[Tensor | None]) -> tuple[Hashable, ...]:
    """Return what has to be the same of inputs for a program to run on them."""
    return tuple([None if t is None else (t.shape, t.dtype, t.device) for t in inputs])


def progress_of(counter: Any) -> list[dict[str, int]]:
    """Return copies of the fields of one of Lightning's progress counters: of the current run, and in total."""
    return [dict(vars(counter.current)), dict(vars(counter.total))]


def moves_of(counter: Any, before: list[dict[str, int]]) -> Iterator[tuple[dict[str, int], str, int]]:
    """Yield the fields of `counter` that moved on since `before`: where each is kept, its name, by how much."""
    for part, earlier in zip((counter.current, counter.total), before, strict=True):
        fields = vars(part)
        yield from ((fields, name, n - earlier[name]) for name, n in fields.items() if n != earlier[name])
