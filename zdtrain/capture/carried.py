"""Tensors that modules hold as attributes and a step replaces: programs take the old ones and return the new ones."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from zdtrain.capture.modules import LIGHTNING_ATTRIBUTES, MODULE_ATTRIBUTES, is_metric


class Place(NamedTuple):
    """Where a module keeps a tensor."""

    path: str
    """Path of the module."""
    name: str
    """Name of the buffer or attribute."""
    is_buffer: bool
    """Whether it is a registered buffer."""

    def __str__(self) -> str:
        return f"{self.path}.{self.name}" if self.path else self.name


def held_tensors(root: nn.Module) -> dict[Place, Tensor]:
    """Return the buffers of all modules and the tensors among their attributes."""
    found: dict[Place, Tensor] = {}
    for path, module in root.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                found[Place(path, name, True)] = buffer
        for name, value in module.__dict__.items():
            if isinstance(value, Tensor) and name not in MODULE_ATTRIBUTES and name not in LIGHTNING_ATTRIBUTES:
                found[Place(path, name, False)] = value
    return found


class Holder:
    """A dictionary and the name in it under which a module keeps a tensor.

    Args:
        held: The dictionary; it counts by identity.
        name: The name.
    """

    __slots__ = ("held", "name")

    def __init__(self, held: dict[str, Any], name: str) -> None:
        self.held = held
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Holder) and self.held is other.held and self.name == other.name

    def __hash__(self) -> int:
        return hash((id(self.held), self.name))

    def tensor(self) -> Tensor | None:
        """Return what is there now; None for what is no tensor."""
        value = self.held.get(self.name)
        return value if isinstance(value, Tensor) else None


def replaced(before: Mapping[Place, Tensor], after: Mapping[Place, Tensor]) -> tuple[Place, ...]:
    """Return the places that hold another tensor object afterwards."""
    return tuple(place for place, tensor in after.items() if before.get(place) is not tensor)


class Carried:
    """Tensors that modules hold and a program reads anew at every run, because others may have taken their place.

    These are all tensors that are plain attributes (``torchmetrics`` replaces its states when it resets them), and the
    buffers that the step replaces.

    Args:
        root: The module that the places refer to.
        replaced: What the step replaces, and a program returns.
    """

    def __init__(self, root: nn.Module, replaced: tuple[Place, ...]) -> None:
        self.replaced = replaced
        held = held_tensors(root)
        only_read = [place for place in held if not place.is_buffer and place not in replaced]
        self.holders = [Holder(_holder(root, place), place.name) for place in (*replaced, *only_read)]
        """Where the tensors are: those that the step replaces, then the others."""
        referenced = {place: held[place] for place in held if place.is_buffer and place not in replaced}
        self._buffers = [(_holder(root, place), place.name, tensor) for place, tensor in referenced.items()]

    @property
    def referenced(self) -> list[Tensor]:
        """The buffers that a program holds by reference."""
        return [tensor for _, _, tensor in self._buffers]

    def fits(self) -> bool:
        """Return whether the buffers that a program holds by reference are still the module's."""
        for holder, name, tensor in self._buffers:  # noqa: SIM110 - a third faster than `all`
            if holder.get(name) is not tensor:
                return False
        return True

    def tensors(self) -> list[Tensor | None]:
        """Return what the places hold now; None for what is no tensor."""
        return [holder.tensor() for holder in self.holders]

    def put(self, tensors: Mapping[int, Tensor]) -> None:
        """Put tensors in places, by their index."""
        for index, tensor in tensors.items():
            holder = self.holders[index]
            holder.held[holder.name] = tensor

    def replace(self, tensors: list[Tensor]) -> None:
        """Put a step's new tensors in the places of the replaced ones."""
        for holder, tensor in zip(self.holders, tensors, strict=False):
            holder.held[holder.name] = tensor


def _holder(root: nn.Module, place: Place) -> dict[str, Any]:
    module = root.get_submodule(place.path)
    return module._buffers if place.is_buffer else module.__dict__


def metric_counts(root: nn.Module) -> dict[str, int]:
    """Return how often each torchmetrics metric was updated, by module path."""
    return {path: module._update_count for path, module in root.named_modules() if is_metric(module)}


def count_updates(root: nn.Module, updates: Mapping[str, int]) -> None:
    """Do the host's share of a replayed metric update: count it and drop the value computed before."""
    for path, times in updates.items():
        state = root.get_submodule(path).__dict__
        state["_update_count"] += times
        state["_computed"] = None


def updates_between(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Return how often a step updated each metric that it updated."""
    return {path: count - before.get(path, 0) for path, count in after.items() if count != before.get(path, 0)}
