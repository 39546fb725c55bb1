"""What a step works on besides its batch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer

from zdtrain.capture.carried import held_tensors
from zdtrain.monitor.guard import StepGuard
from zdtrain.step.results import MetricSlot, StepResults
from zdtrain.step.scaling import LossScaling


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What any step works on; the same objects for a whole run."""

    module: LightningModule
    """The module."""
    results: StepResults
    """Where the step logs."""
    connector: Any
    """Lightning's logger connector: knows when logged values have to be reset."""
    parameters: list[nn.Parameter] = field(default_factory=list)
    """Those whose gradients the step may read or leave."""
    counters: list[Any] = field(default_factory=list)
    """Lightning's progress counters that the step itself moves."""

    def n_dropped(self, moved: Sequence[Any]) -> int:  # noqa: ARG002
        """Return how many gradients, from the first on, a step drops that moved the counters `moved`."""
        return 0

    def names(self) -> dict[int, str]:
        """Return the names of parameters by id."""
        return {id(parameter): name for name, parameter in self.module.named_parameters()}

    def tensors(self, batch: Sequence[Tensor]) -> dict[str, Tensor | None]:
        """Return all tensors that a step may write to, by name, in the order in which they are compared."""
        names = self.names()
        found: dict[str, Any] = {f"gradient of {names.get(id(p), id(p))}": p.grad for p in self.parameters}
        for place, tensor in held_tensors(self.module).items():
            found[str(place)] = tensor
        for index, bank in enumerate(self.results.banks):
            found[f"logged values ({bank.reduction} {index})"] = bank._values
            found[f"logged epoch values ({bank.reduction} {index})"] = bank._totals
        found.update(self.more_tensors(names))
        found.update({f"batch tensor {index}": value for index, value in enumerate(batch)})
        return {name: value for name, value in found.items() if value is None or isinstance(value, Tensor)}

    def more_tensors(self, names: dict[int, str]) -> dict[str, Any]:  # noqa: ARG002
        """Return what else a step of this kind may write to, by name; what is no tensor is left out later.

        Args:
            names: See `names`.
        """
        return {}

    def slots(self) -> list[MetricSlot]:
        """Return the logged values that are kept in banks."""
        return [metric for metric in self.results.values() if isinstance(metric, MetricSlot)]

    def metric_counts(self) -> list[tuple[Any, int]]:
        """Return what is logged and is no slot, with its number of updates."""
        return [(m, m._update_count) for m in self.results.values() if not isinstance(m, MetricSlot)]


@dataclass(frozen=True, kw_only=True)
class TrainingSurroundings(Surroundings):
    """What a training step works on."""

    optimizers: list[Optimizer]
    """The optimizers: one, unless the module optimizes by hand. `parameters` begins with theirs."""
    zero_grad: Any
    """Lightning's progress counter of zeroed gradients, one of `counters`."""
    guard: StepGuard | None = None
    """What the step does for monitors."""
    scaling: LossScaling | None = None
    """What it does for a loss scaler."""

    @property
    def n_trained(self) -> int:
        """How many parameters the optimizers update."""
        return sum(len(group["params"]) for optimizer in self.optimizers for group in optimizer.param_groups)

    def n_dropped(self, moved: Sequence[Any]) -> int:
        """Return how many gradients, from the first on, a step drops that moved the counters `moved`."""
        return self.n_trained if any(counter is self.zero_grad for counter in moved) else 0

    def more_tensors(self, names: dict[int, str]) -> dict[str, Any]:
        """Return parameters, the optimizers' state and the guard's."""
        found: dict[str, Any] = {f"parameter {names.get(id(p), id(p))}": p for p in self.parameters}
        for number, optimizer in enumerate(self.optimizers):
            for owner, state in optimizer.state.items():
                for name, value in state.items() if isinstance(state, dict) else ():
                    found[f"optimizer {number}'s {name} of {names.get(id(owner), id(owner))}"] = value
            for index, group in enumerate(optimizer.param_groups):
                found.update({f"optimizer {number}'s group {index} {name!r}": v for name, v in group.items()})
            found.update({f"optimizer {number}'s {name}": value for name, value in vars(optimizer).items()})
        if self.guard is not None:
            found.update(self.guard.tensors())
        if self.scaling is not None:
            found.update(self.scaling.tensors())
        return found
