"""The lists of tensors the update takes, kept ready between steps."""

from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from itertools import repeat
from operator import is_, is_not, methodcaller
from typing import Any

import torch
from torch import Tensor

from zdtrain.errors import ConfigError

State = MutableMapping[Tensor, dict[str, Any]]
STATE_KEYS = ("step", "exp_avg", "exp_avg_sq")
MAX_SELECTIONS = 64  # patterns of missing gradients kept ready; never evicted, a captured step may point into them


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The parameters of a bucket that have a gradient, with their state."""

    params: list[Tensor]
    """Parameters, in the order of the bucket."""
    exp_avgs: list[Tensor]
    """First moments, in the parameters' dtype and strides."""
    exp_avg_sqs: list[Tensor]
    """Second moments, in the parameters' dtype and strides."""
    steps: list[Tensor]
    """Update counts: 0-D views, float32, device-resident."""
    positions: Tensor
    """Places of the parameters in the bucket, int64."""
    increment: Tensor
    """1 where a parameter takes part and 0 elsewhere, shape of the bucket's `steps`."""
    strides: list[tuple[int, ...]]
    """Strides that the kernels need the gradients to have."""

    def dense_grads(self, grads: list[Tensor]) -> list[Tensor]:
        """Return the gradients in the parameters' memory layout, copied only where it differs.

        torch's fused CPU kernel walks raw memory and would read a transposed or expanded gradient in the wrong order.
        """
        if [grad.stride() for grad in grads] == self.strides:
            return grads
        return [
            grad if grad.stride() == stride else torch.empty_like(moment).copy_(grad)
            for grad, stride, moment in zip(grads, self.strides, self.exp_avgs, strict=True)
        ]


class Bucket:
    """Parameters of one group with the same dtype.

    Args:
        group: The param group they belong to.
        params: Parameters of one device and dtype.
        state: The optimizer's state. Missing entries are created; the ``step`` of each parameter becomes a 0-D view of
            one float32 buffer, so that counting a step is one operation whatever the number of parameters.
    """

    def __init__(self, group: dict[str, Any], params: list[Tensor], state: State) -> None:
        self.group = group  # shared with the optimizer, so that options are read when the step runs
        self.params = params
        self.steps = torch.zeros(len(params), dtype=torch.float32, device=params[0].device)
        self.state = [state[p] for p in params]
        for param, entry, step in zip(params, self.state, self.steps.unbind(), strict=True):
            if "step" in entry:
                step.copy_(torch.as_tensor(entry["step"]))
            entry["step"] = step
            for key in STATE_KEYS[1:]:
                if key not in entry:
                    entry[key] = torch.zeros_like(param, memory_format=torch.preserve_format)
        self._tensors = [[entry[key] for entry in self.state] for key in STATE_KEYS]
        self._selections: dict[tuple[bool, ...] | None, Selection] = {}

    def holds_current_state(self) -> bool:
        """Whether nobody replaced a state tensor since the bucket was made."""
        return all(
            all(map(is_, map(methodcaller("get", key), self.state), tensors))
            for key, tensors in zip(STATE_KEYS, self._tensors, strict=True)
        )

    def belongs_to(self, state: State) -> bool:
        """Whether `state` is still what the bucket was made from."""
        entries = (state.get(param) for param in self.params)
        return all(map(is_, entries, self.state)) and self.holds_current_state()

    def select(self) -> tuple[Selection, list[Tensor]] | None:
        """Return what a step works on: the parameters with a gradient, and the gradients."""
        grads = [p.grad for p in self.params]
        key = None  # stands for "all of them", the common case
        if not all(map(is_not, grads, repeat(None))):
            key = tuple(grad is not None for grad in grads)
            if not any(key):
                return None
        present = [grad for grad in grads if grad is not None]
        selection = self._selections.get(key)
        if selection is None:
            _refuse_sparse(present)
            selection = self._make_selection(key)
            if len(self._selections) < MAX_SELECTIONS:
                self._selections[key] = selection
        return selection, selection.dense_grads(present)

    def _make_selection(self, key: tuple[bool, ...] | None) -> Selection:
        taken = list(range(len(self.params))) if key is None else [i for i, has in enumerate(key) if has]
        steps, exp_avgs, exp_avg_sqs = ([tensors[i] for i in taken] for tensors in self._tensors)
        positions = torch.tensor(taken, dtype=torch.int64)
        increment = torch.zeros(len(self.params), dtype=torch.float32).index_fill_(0, positions, 1)
        return Selection(
            params=[self.params[i] for i in taken],
            exp_avgs=exp_avgs,
            exp_avg_sqs=exp_avg_sqs,
            steps=steps,
            positions=positions.to(self.steps.device),
            increment=increment.to(self.steps.device),
            strides=[tensor.stride() for tensor in exp_avgs],
        )

    def selected_steps(self, selection: Selection) -> Tensor:
        """Return the counts of a selection as one vector."""
        if len(selection.params) == len(self.params):
            return self.steps
        return self.steps.index_select(0, selection.positions)

    def load(self, saved: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Write saved state in place; a parameter that has none starts anew."""
        for param, entry in zip(self.params, self.state, strict=True):
            for key in STATE_KEYS:
                if param in saved:
                    entry[key].copy_(torch.as_tensor(saved[param][key]))
                else:
                    entry[key].zero_()


def _refuse_sparse(grads: Iterable[Tensor]) -> None:
    for grad in grads:
        if grad.layout is not torch.strided:
            raise ConfigError(
                f"SimpleAdam needs dense gradients, got {grad.layout} of shape {tuple(grad.shape)}: "
                "use sparse=False in the embedding, or torch.optim.SparseAdam for these parameters"
            )
