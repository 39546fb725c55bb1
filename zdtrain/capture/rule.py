"""What is known of a kind of optimizer whose update a program can hold."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Group = Mapping[str, Any]
State = Mapping[str, Tensor]
Numbers = Sequence[float]
Scalars = Sequence[Tensor]


def adds_decay(group: Group) -> bool:
    """Return whether a group's weight decay is added to the gradient."""
    return group.get("weight_decay", 0) != 0 and not group.get("decoupled_weight_decay")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How one kind of optimizer updates a parameter."""

    numbers: Callable[..., tuple[Numbers, Numbers]]
    """The host's share: from the group and the values of `counts` before the update, their values after it and the
    numbers that the update takes."""
    update: Callable[[Tensor, Tensor, State, Group, Scalars], None]
    """Write a parameter and its state in place; gets the parameter, its gradient, its state, the group for its flags
    and the numbers as 0-D tensors."""
    counts: tuple[str, ...] = ("step",)
    """0-D state that the host counts in, in the order in which `numbers` takes it."""
    state: Callable[[Group], tuple[str, ...]]
    """Names of the tensors that have to be there."""
    held: tuple[str, ...] = ()
    """Options that an update holds by value."""
    in_double: bool = False
    """Whether the numbers are handed over in float64, whatever the parameters are; such a rule knows no half ones."""
    adds_multiples: Callable[[Group], bool] = adds_decay
    """Whether an update adds a multiple of one tensor to another, which torch rounds in two ways if they are half."""
    foreach_alike: bool = True
    """Whether ``foreach=True`` computes the same bits on a CPU."""
