"""Options of an optimizer's parameter groups as they were at some time, and whether somebody wrote them since."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from zdtrain.optim import SimpleAdam

Groups = Sequence[dict[str, Any]]
_version = attrgetter("_version")


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Options:
    """Options at some time."""

    groups: Groups
    """Options of each group, the objects themselves."""
    tensors: Sequence[Tensor]
    """Tensors among them."""
    versions: list[int]
    """How often each tensor had been written."""
    copies: Sequence[Tensor]
    """What the tensors held; empty where nobody needs it."""

    def are_those_of(self, optimizer: Optimizer) -> bool:
        """Return whether nobody has written an option since."""
        groups = optimizer.param_groups
        if len(groups) != len(self.groups) or not all(map(_holds_the_same, groups, self.groups)):
            return False
        return list(map(_version, self.tensors)) == self.versions

    def put_back(self, optimizer: Optimizer) -> None:
        """Give the optimizer these options again."""
        for group, then in zip(optimizer.param_groups, self.groups, strict=False):
            for name, value in then.items():
                if group.get(name) is not value:
                    group[name] = value
        for tensor, copy in zip(self.tensors, self.copies, strict=False):
            tensor.copy_(copy)

    def put_back_numbers(self, optimizer: Optimizer, left: "Options") -> "Options":
        """Give the optimizer these numbers again, except where somebody wrote another one.

        Args:
            optimizer: The optimizer.
            left: What was there before anybody wrote.

        Returns:
            What is there now, but for what somebody wrote.
        """
        groups = []
        for group, then, before in zip(optimizer.param_groups, self.groups, left.groups, strict=False):
            now = dict(before)
            for name, value in then.items():
                if name in before and group.get(name) is before[name] is not value:
                    group[name] = now[name] = value
            groups.append(now)
        return Options(groups=groups, tensors=left.tensors, versions=left.versions, copies=left.copies)


def _holds_the_same(group: dict[str, Any], then: dict[str, Any]) -> bool:
    """Return whether the options are the same objects, in the same order."""
    return len(group) == len(then) and all(map(is_, group.values(), then.values()))


def options_of(optimizer: Optimizer, known: Options | None, *, with_copies: bool = True) -> Options:
    """Return the options as they are now.

    Args:
        optimizer: The optimizer.
        known: The options at an earlier time; returned where nobody has written since.
        with_copies: Copy what tensors hold.
    """
    if known is not None and known.are_those_of(optimizer):
        return known
    groups = [dict(group) for group in optimizer.param_groups]
    tensors: list[Tensor] = []
    if not (isinstance(optimizer, SimpleAdam) and optimizer.schedule is not None):  # which writes its own
        options = [value for group in groups for name, value in group.items() if name != "params"]
        tensors = [leaf for leaf in tree_leaves(options) if isinstance(leaf, Tensor)]
    return Options(
        groups=groups,
        tensors=tensors,
        versions=[tensor._version for tensor in tensors],
        copies=[tensor.detach().clone() for tensor in tensors] if with_copies else (),
    )
