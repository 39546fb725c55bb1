"""A recorded step: the program, and the host's share of what the step did, to be done again at every replay."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from zdtrain.monitor.guard import StepGuard
from zdtrain.step.carried import Carried, count_updates, held_tensors
from zdtrain.step.log import note_metric
from zdtrain.step.optimizers import Inside
from zdtrain.step.program import Program
from zdtrain.step.results import MetricSlot, StepResults


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a training step works on besides its batch; the same objects for a whole fit."""

    module: LightningModule
    """The module."""
    optimizers: list[Optimizer]
    """The optimizers: one, unless the module optimizes by hand."""
    parameters: list[nn.Parameter]
    """Everything that may have a gradient: the optimizers' parameters, then the rest of the module's."""
    results: StepResults
    """Where the step logs."""
    connector: Any
    """Lightning's logger connector: knows when logged values have to be reset."""
    zero_grad: Any
    """Lightning's progress counter of zeroed gradients."""
    updates_by_hand: Any = None
    """Lightning's progress counter of optimizer steps that the module makes itself."""
    guard: StepGuard | None = None
    """What the step does for monitors."""

    def tensors(self, batch: Sequence[Tensor]) -> dict[str, Tensor | None]:
        """Return all tensors that a step may write to, by name, in the order in which they are compared."""
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        found: dict[str, Any] = {f"gradient of {names.get(id(p), id(p))}": p.grad for p in self.parameters}
        for place, tensor in held_tensors(self.module).items():
            found[str(place)] = tensor
        for index, bank in enumerate(self.results.banks):
            found[f"logged values ({bank.reduction} {index})"] = bank._values
            found[f"logged epoch values ({bank.reduction} {index})"] = bank._totals
        for parameter in self.parameters:
            found[f"parameter {names.get(id(parameter), id(parameter))}"] = parameter
        for number, optimizer in enumerate(self.optimizers):
            for owner, state in optimizer.state.items():
                for name, value in state.items() if isinstance(state, dict) else ():
                    found[f"optimizer {number}'s {name} of {names.get(id(owner), id(owner))}"] = value
            for index, group in enumerate(optimizer.param_groups):
                found.update({f"optimizer {number}'s group {index} {name!r}": v for name, v in group.items()})
            found.update({f"optimizer {number}'s {name}": value for name, value in vars(optimizer).items()})
        if self.guard is not None:
            found.update(self.guard.tensors())
        found.update({f"batch tensor {index}": value for index, value in enumerate(batch)})
        return {name: value for name, value in found.items() if value is None or isinstance(value, Tensor)}

    def slots(self) -> list[MetricSlot]:
        """Return the logged values that are kept in banks."""
        return [metric for metric in self.results.values() if isinstance(metric, MetricSlot)]

    def metric_counts(self) -> list[tuple[Any, int]]:
        """Return what is logged and is no slot, with its number of updates."""
        return [(m, m._update_count) for m in self.results.values() if not isinstance(m, MetricSlot)]


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
        self._zeroed = surroundings.zero_grad.total.completed
        self._by_hand = self._count_by_hand()
        self.updates_by_hand = 0
        self._weights = {id(slot): (slot.weight, slot._update_count) for slot in surroundings.slots()}
        self.slots: list[LoggedValue] = []
        self.metrics: list[Any] = []
        self.zeroes = False
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
        self.zeroes = around.zero_grad.total.completed != self._zeroed
        self.updates_by_hand = self._count_by_hand() - self._by_hand
        self.metrics = [metric for metric, count in self._counts if metric._update_count != count]
        around.results.commit()
        self.slots = [*self._logged()]
        leaves, self.structure = pytree.tree_flatten(output)
        self.leaves = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        returned = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)]
        self.n_returned = len(returned)
        replaced = self.carried.tensors()[: len(self.carried.replaced)]
        carried = [tensor.detach() for tensor in replaced if tensor is not None]
        return [loss, *returned, *(p.grad for p in around.parameters), *carried]

    def _count_by_hand(self) -> int:
        counter = self.surroundings.updates_by_hand
        return 0 if counter is None else counter.total.completed

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
        covers: How optimizers are part of the program; empty where they step behind it.
        inputs: What it was recorded with.
        n_leaves: How many of the inputs are the batch's, whose layout is part of the key.
    """

    def __init__(
        self,
        program: Program,
        taken: Recorder,
        *,
        updates: dict[str, int],
        covers: Sequence[Inside],
        inputs: Sequence[Tensor | None],
        n_leaves: int,
    ) -> None:
        self.program = program
        self.covers = covers
        self._taken = taken
        self._updates = updates
        read = {index for index in program.used if index >= n_leaves}
        absent = {index for index in range(n_leaves, len(inputs)) if inputs[index] is None}
        if taken.zeroes:  # gradients that the step drops may be there or not
            n_zeroed = n_parameters(taken.surroundings.optimizers)
            absent -= set(range(n_leaves, n_leaves + n_zeroed))
        self._checked = sorted(read | absent)
        self._layout = layout_of([inputs[index] for index in self._checked])

    def fits(self, inputs: Sequence[Tensor | None]) -> bool:
        """Return whether the program may run on `inputs`, and logged values still lie where it writes them."""
        if any(logged.slot.cell is not logged.cell for logged in self._taken.slots):
            return False
        return self._taken.carried.fits() and layout_of([inputs[index] for index in self._checked]) == self._layout

    def prepare(self) -> None:
        """Do what has to be done before the program runs: reset what is logged, hand over learning rates."""
        connector = self._taken.surroundings.connector
        if self._taken.slots or self._taken.metrics:  # what the first self.log of a step does
            if connector.should_reset_tensors("training_step"):
                self._taken.surroundings.results.reset(metrics=False, fx="training_step")
            connector._current_fx = "training_step"
        for part in self.covers:
            part.refill()

    def named(self, outputs: Sequence[Any]) -> dict[str, Tensor | None]:
        """Return the outputs of a run by the names that `Surroundings.tensors` gives them."""
        loss, returned, gradients, carried = self._split(outputs)
        names = {id(parameter): name for name, parameter in self._taken.surroundings.module.named_parameters()}
        found: dict[str, Tensor | None] = {"loss": loss}
        found.update({f"output {index}": tensor for index, tensor in enumerate(returned)})
        parameters = self._taken.surroundings.parameters
        found.update({f"gradient of {names.get(id(p), id(p))}": g for p, g in zip(parameters, gradients, strict=True)})
        found.update({str(place): t for place, t in zip(self._taken.carried.replaced, carried, strict=True)})
        return found

    def place(self, outputs: Sequence[Any]) -> tuple[Tensor | None, Any]:
        """Put a run's outputs in their places; return the loss and what else the step returned.

        Gradients alias the outputs of a program that overwrites them, as they do in any captured step; the rest is
        copied there, because users keep it.
        """
        taken = self._taken
        loss, returned, gradients, carried = self._split(outputs)
        if self.program.overwrites:
            loss = None if loss is None else loss.clone()
            returned, carried = [t.clone() for t in returned], [t.clone() for t in carried]
        for parameter, gradient in zip(taken.surroundings.parameters, gradients, strict=True):
            if parameter.grad is not gradient:
                parameter.grad = gradient
        taken.carried.replace(list(carried))
        tensors = iter(returned)
        leaves = [next(tensors) if leaf is _TENSOR else leaf for leaf in taken.leaves]
        return loss, pytree.tree_unflatten(leaves, taken.structure)

    def count(self) -> None:
        """Do the host's share of a replay: everything that the step's Python would have counted."""
        taken, around = self._taken, self._taken.surroundings
        count_updates(around.module, self._updates)
        for logged in taken.slots:
            logged.replay()
        for metric in taken.metrics:
            note_metric(metric)
        if taken.zeroes:
            around.zero_grad.increment_ready()
            around.zero_grad.increment_started()
            around.zero_grad.increment_completed()
        if self.covers:
            for optimizer in around.optimizers:
                optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers ask whether step was called
        for _ in range(taken.updates_by_hand):
            around.updates_by_hand.increment_ready()
            around.updates_by_hand.increment_completed()

    def _split(self, outputs: Sequence[Any]) -> tuple[Any, Sequence[Any], Sequence[Any], Sequence[Any]]:
        first = 1 + self._taken.n_returned
        last = first + len(self._taken.surroundings.parameters)
        return outputs[0], outputs[1:first], outputs[first:last], outputs[last:]


def n_parameters(optimizers: Sequence[Optimizer]) -> int:
    """Return how many parameters `optimizers` update."""
    return sum(len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups)


def layout_of(inputs: Sequence[Tensor | None]) -> tuple[Hashable, ...]:
    """Return what has to be the same of inputs for a program to run on them."""
    return tuple([None if t is None else (t.shape, t.dtype, t.device) for t in inputs])
