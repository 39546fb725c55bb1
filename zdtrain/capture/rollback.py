"""A step's state before it ran, so that what was tried with it can be taken back."""

from collections.abc import Sequence

from torch import Tensor

from zdtrain.capture.carried import held_tensors
from zdtrain.capture.modules import METRIC_ATTRIBUTES, is_metric
from zdtrain.capture.surroundings import Surroundings
from zdtrain.capture.verify import Saved
from zdtrain.device.base import Runtime
from zdtrain.errors import CaptureError
from zdtrain.step.results import MetricSlot

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


class Rollback:
    """A copy of all that a step may change: tensors, random generators, the host's share.

    Args:
        around: What the step works on.
        leaves: The batch's tensors.
        runtime: The device door.
    """

    def __init__(self, around: Surroundings, leaves: Sequence[Tensor], runtime: Runtime) -> None:
        self._host = HostState(around)
        self.saved = Saved(around.tensors(leaves), runtime)

    def take_back(self) -> None:
        """Put everything back.

        Raises:
            CaptureError: Something could not be, so that the run must not go on from here.
        """
        put_back(self._host, self.saved)


def put_back(*states: HostState | Saved) -> None:
    """Restore all of `states`.

    Raises:
        CaptureError: Something could not be put back, so that the run must not go on from here.
    """
    try:
        for state in states:
            state.restore()
    except Exception as error:
        raise CaptureError(
            f"the state before a step that zdtrain tried to capture could not be put back: {error}. Go on from the "
            'last checkpoint, with Trainer(capture="off") or ZDTRAIN_CAPTURE=off'
        ) from error
