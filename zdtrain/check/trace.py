"""The operations of a step, and what differs between two steps that should be alike."""

from collections.abc import Iterable, Iterator
from difflib import SequenceMatcher
from typing import Any, NamedTuple

import torch

from zdtrain.check.tensor import alias_on_host, is_shadow
from zdtrain.source.location import Location

_SCALARS = (int, float, bool, str, complex)
Scalar = int | float | bool | str | complex


class TensorInfo(NamedTuple):
    """Shape, dtype and device of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @property
    def dtype_name(self) -> str:
        """E.g. ``"float32"``."""
        return str(self.dtype).removeprefix("torch.")


class Context(NamedTuple):
    """Where in the program an operation ran."""

    location: Location
    hook: str
    module: str
    """Dotted path of the submodule whose forward runs, where that is tracked."""
    in_backward: bool


class Operation(NamedTuple):
    """One operation of a step."""

    name: str
    scalars: tuple[Scalar, ...]
    """Python numbers and strings among the arguments, in order."""
    host_values: tuple[float, ...]
    """Values of 0-D CPU tensors among the arguments of device work."""
    results: tuple[TensorInfo, ...]
    context: Context


class Difference(NamedTuple):
    """Where two steps part."""

    kind: str
    """``operations``, ``shapes``, ``scalars`` or ``host-values``."""
    before: Operation
    after: Operation | None


class Arguments(NamedTuple):
    """The leaves of an operation's arguments."""

    shadows: list[torch.Tensor]
    """Tensors on the shadow device."""
    host: list[torch.Tensor]
    """All other tensors."""
    scalars: list[Scalar]
    """Python numbers and strings, in order."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors, those on the device first."""
        return self.shadows + self.host


def sort_arguments(args: Iterable[Any]) -> Arguments:
    """Sort the leaves of an operation's arguments, or of its results."""
    found = Arguments([], [], [])
    shadows, host, scalars = found
    pending = list(args)
    pending.reverse()
    while pending:
        value = pending.pop()
        if is_shadow(value):
            shadows.append(value)
        elif isinstance(value, _SCALARS):
            scalars.append(value)
        elif isinstance(value, torch.Tensor):
            host.append(value)
        elif isinstance(value, (list, tuple)):
            pending += reversed(value)
    return found


def flatten(args: Iterable[Any]) -> list[Any]:
    """The leaves of an operation's arguments: lists and tuples only, which is all that operations take."""
    leaves = []
    for value in args:
        if isinstance(value, (list, tuple)):
            leaves += flatten(value)
        else:
            leaves.append(value)
    return leaves


def tensor_info(tensor: torch.Tensor) -> TensorInfo:
    """Shape, dtype and claimed device."""
    device = "cuda:0" if is_shadow(tensor) else str(tensor.device)
    return TensorInfo(tuple(tensor.shape), tensor.dtype, device)


def host_value(tensor: torch.Tensor) -> float:
    """The value of a 0-D CPU tensor, read without anyone noticing."""
    value = alias_on_host(tensor).item()
    return float(value.real) if isinstance(value, complex) else float(value)


def record(name: str, given: Arguments, results: list[torch.Tensor], context: Context) -> Operation:
    """Make the record of one operation."""
    host_values: tuple[float, ...] = ()
    if given.host and not context.in_backward:
        scalars = [tensor for tensor in given.host if tensor.dim() == 0]
        if given.shadows or len(scalars) < len(given.host):
            host_values = tuple(map(host_value, scalars))
    return Operation(name, tuple(given.scalars), host_values, tuple(map(tensor_info, results)), context)


def _same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return len(a) == len(b) and all(x == y or (x != x and y != y) for x, y in zip(a, b, strict=True))


def _key(operation: Operation) -> tuple[str, str, int, bool]:
    place = operation.context.location
    return operation.name, place.file, place.line, operation.context.in_backward


def _aligned(before: list[Operation], after: list[Operation]) -> Iterator[tuple[Operation | None, Operation | None]]:
    """Pairs of operations that correspond; None stands for an operation that the other step did not run."""
    old_keys, new_keys = [_key(operation) for operation in before], [_key(operation) for operation in after]
    if old_keys == new_keys:
        yield from zip(before, after, strict=True)
        return
    matcher = SequenceMatcher(None, old_keys, new_keys, autojunk=False)
    for tag, old_start, old_end, new_start, new_end in matcher.get_opcodes():
        if tag == "equal":
            yield from zip(before[old_start:old_end], after[new_start:new_end], strict=True)
        else:
            for operation in before[old_start:old_end]:
                yield operation, None
            for operation in after[new_start:new_end]:
                yield None, operation


def compare(before: list[Operation], after: list[Operation]) -> list[Difference]:
    """All differences, up to the first result whose shape differs: what follows differs because of it."""
    differences = []
    for old, new in _aligned(before, after):
        if old is None or new is None:
            only = old or new
            assert only is not None
            differences.append(Difference("operations", only, None))
        elif [info.shape for info in old.results] != [info.shape for info in new.results]:
            differences.append(Difference("shapes", old, new))
            break
        elif not _same(old.scalars, new.scalars):
            differences.append(Difference("scalars", old, new))
        elif not _same(old.host_values, new.host_values):
            differences.append(Difference("host-values", old, new))
    return differences
