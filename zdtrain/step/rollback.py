"""The host's share of what a step changes, so that a capture that failed half-way can be taken back."""

from zdtrain.step.carried import held_tensors
from zdtrain.step.key import METRIC_ATTRIBUTES, is_metric
from zdtrain.step.results import MetricSlot
from zdtrain.step.surroundings import Surroundings

SLOT_STATE = ("weight", "pending", "has_reset", "_computed", "_update_count")


class HostState:
    """A copy of the Python side of a step: gradients' identity, rebound tensors, counts of metrics and of progress.

    Args:
        around: What the step works on.
    """

    def __init__(self, around: Surroundings) -> None:
        module, results = around.module, around.results
        progress = [part for counter in around.counters for part in (counter.current, counter.total)]
        self._gradients = [(parameter, parameter.grad) for parameter in around.parameters]
        self._held = held_tensors(module)
        self._module = module
        self._dicts = [(part.__dict__, METRIC_ATTRIBUTES) for part in module.modules() if is_metric(part)]
        self._dicts += [(m.__dict__, frozenset(SLOT_STATE)) for m in results.values() if isinstance(m, MetricSlot)]
        self._dicts += [(counter.__dict__, frozenset(counter.__dict__)) for counter in progress]
        self._copies = [{name: d[name] for name in names if name in d} for d, names in self._dicts]
        self._banks = [(bank, dict(bank.written), set(bank.fresh)) for bank in results.banks]

    def restore(self) -> None:
        """Put everything back."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        for place, tensor in self._held.items():
            owner = self._module.get_submodule(place.path)
            (owner._buffers if place.is_buffer else owner.__dict__)[place.name] = tensor
        for (state, _), copy in zip(self._dicts, self._copies, strict=True):
            state.update(copy)
        for bank, written, fresh in self._banks:
            bank.written, bank.fresh = written, fresh
