"""What a warm-up step does, operation by operation, so that two of them can be compared before one is captured."""

import sys
import weakref
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from zdtrain.capture.remedies import host_read
from zdtrain.errors import FallbackReason
from zdtrain.source.location import Location, locate

# Operations whose result, or whose result's size, the host has to wait for.
HOST_READS = {
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "allclose"),
    *("nonzero", "bincount", "masked_select", "argwhere", "repeat_interleave.Tensor", "_pack_padded_sequence"),
    *("unique", "_unique", "_unique2", "unique_dim", "unique_consecutive"),
}
MASKABLE = {"index", "index_put", "index_put_", "_index_put_impl_"}
# Calls that look at a tensor's memory past all operations.
HOST_ACCESS: dict[Any, str] = {
    Tensor.__repr__: "repr",
    Tensor.tolist: "tolist",
    Tensor.numpy: "numpy",
    Tensor.__array__: "numpy",
    Tensor.__dlpack__: "dlpack",
    Tensor.untyped_storage: "storage",
    Tensor._typed_storage: "storage",
    Tensor.__deepcopy__: "deepcopy",
}
_MAKERS = frozenset({torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor})
"""What reads the tensors in a list of them."""
MAX_LITERAL = 4096  # elements of a tensor made from Python numbers that are compared one by one


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One ATen operation of a watched step."""

    name: str
    """Name and overload, e.g. ``"add.Tensor"``."""
    values: tuple[Hashable, ...]
    """Its Python arguments: what a recording holds for good."""
    place: Location
    """The user's line it comes from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Logged:
    """One `self.log` call of a watched step, as far as a recording holds it for good."""

    hook: str
    """Where it was made, e.g. ``"training_step"``."""
    name: str
    """What it logs."""
    number: float | None
    """The value, where it is a Python number."""
    batch_size: int | None
    """The ``batch_size=`` that was given, where it is a Python number."""
    place: Location
    """The user's line it comes from."""


class Watch(TorchDispatchMode):
    """Notes the operations of the body, and what a recording of them would get wrong.

    Args:
        boundary: Code of the function that drives the step; frames around it are not the step's.
        inputs: Tensors that change with every step: the batch's, the gradients.
    """

    def __init__(self, boundary: CodeType, inputs: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self.logged: list[Logged] = []
        self.reads: list[FallbackReason] = []
        self.host_reads = 0
        self.epoch_read = False
        self.function = ""  # of torch, which is being called
        self.outside: dict[int, tuple[Tensor, Operation]] = {}  # tensors that the step did not make, by storage
        self.written: dict[int, Operation] = {}  # the first that writes to each of them
        self._boundary = boundary
        self._inputs = {storage_of(tensor) for tensor in inputs}
        self._made: dict[int, tuple[weakref.ref[Tensor], Location]] = {}  # by id

    def note(self, code: str, message: str) -> None:
        """Add a reason against capturing, at the line of the user that is running; nothing where a library is."""
        place, _ = locate(self._boundary)
        if place.is_user:
            self.reads.append(reason_at(place, code, message))

    def note_read(self, name: str) -> None:
        """Note that the step reads a property of the Trainer; the number of the epoch can be served."""
        if name == "current_epoch":
            place, _ = locate(self._boundary)
            self.epoch_read = self.epoch_read or place.is_user
            return
        self.note("trainer-state", f"the step reads trainer.{name}, which a replay does not see")

    def note_logged(self, hook: str, name: str, number: float | None, batch_size: int | None) -> None:
        """Note a `self.log` call; see `Logged`."""
        place, _ = locate(self._boundary)
        self.logged.append(Logged(hook=hook, name=name, number=number, batch_size=batch_size, place=place))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func._schema.name
        if packet.startswith("profiler::"):
            return func(*args, **(kwargs or {}))
        if torch.is_inference_mode_enabled():  # which hands over composite operations whole, host reads and all
            with self:
                out = func.decompose(*args, **(kwargs or {}))
            if out is not NotImplemented:
                return out
        name = packet.split("::")[1]
        place, _ = locate(self._boundary)
        full_name = f"{name}.{func._overloadname}" if func._overloadname else name
        tensors: list[Tensor] = []
        values = tuple(_plain_values((args, kwargs or {}), tensors))
        if name == "lift_fresh":
            literal = _literal(tensors[0])
            if literal is not None:
                values, tensors = literal, []  # made by Python just now, handed to torch here
        operation = Operation(name=full_name, values=values, place=place)
        self.operations.append(operation)
        if name in HOST_READS or full_name in HOST_READS or (name in MASKABLE and _counts_mask(name, args)):
            self._note_host_read(f"{name} with a mask" if name in MASKABLE else name, place)
        self._note_outside(tensors, operation)
        if func._schema.is_mutable:
            self._note_written(func, args, kwargs or {}, operation)
        out = func(*args, **(kwargs or {}))
        self._note_made(out, tensors, place)
        return out

    def note_host_access(self, name: str) -> None:
        """Note that a tensor's values are looked at without an operation."""
        self._note_host_read(name, locate(self._boundary)[0])

    def _note_host_read(self, how: str, place: Location) -> None:
        self.host_reads += 1
        self.reads.append(reason_at(place, "host-read", host_read(how, self.function, place.library, sys._getframe())))

    def _note_outside(self, tensors: list[Tensor], operation: Operation) -> None:
        for tensor in tensors:
            made = self._made.get(id(tensor))
            if made is not None and made[0]() is tensor:
                continue
            storage = storage_of(tensor)
            if storage and storage not in self._inputs:
                self.outside.setdefault(storage, (tensor, operation))

    def _note_written(self, func: Any, args: Any, kwargs: Any, operation: Operation) -> None:
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            for tensor in value if isinstance(value, list | tuple) else (value,):
                if isinstance(tensor, Tensor) and (storage := storage_of(tensor)) in self.outside:
                    self.written.setdefault(storage, operation)

    def _note_made(self, out: Any, tensors: list[Tensor], place: Location) -> None:
        arguments = {id(tensor) for tensor in tensors}
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and id(tensor) not in arguments:
                self._made[id(tensor)] = (weakref.ref(tensor), place)

    def forget(self) -> None:
        """Let go of everything but the reasons."""
        self.operations.clear()
        self.logged.clear()
        self.outside.clear()
        self.written.clear()
        self._made.clear()

    def survivors(self, known: set[int]) -> Iterator[tuple[Tensor, Location]]:
        """Yield the tensors that the step made and somebody still holds, other than those whose id is `known`."""
        for key, (reference, place) in self._made.items():
            tensor = reference()
            if tensor is not None and key not in known:
                yield tensor, place


class HostAccess(TorchFunctionMode):
    """Tells a watch when the body prints a tensor or hands its memory to Python, NumPy or a file.

    Args:
        watch: Whom to tell.
    """

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = HOST_ACCESS.get(func)
        if func is Tensor.__format__ and args[0].dim() > 0:
            name = "format"
        if func in _MAKERS and args and any(isinstance(leaf, Tensor) for leaf in _items(args[-1])):
            name = "tensor of tensors"
        watch, outer = self._watch, self._watch.function
        watch.function = getattr(func, "__name__", "")
        try:
            if name is not None:
                watch.note_host_access(name)
            return func(*args, **(kwargs or {}))
        finally:
            watch.function = outer


def difference(before: Watch, after: Watch, known: set[int]) -> FallbackReason | None:
    """Return why the operations of two steps can't be one recording; None if they can.

    Args:
        before: An earlier step of the same key.
        after: A later one.
        known: Storages of tensors that may differ because a program is told of them.
    """
    for logged in zip(before.logged, after.logged, strict=False):
        if reason := _logged_difference(*logged):
            return reason
    for old, new in zip(before.operations, after.operations, strict=False):
        if old.name != new.name:
            what = f"the step ran {new.name} where an earlier one ran {old.name}: its path depends on more than shapes"
            return reason_at(new.place if new.place.is_user else old.place, "control-flow", what)
        if old.values != new.values:
            pairs = zip(old.values, new.values, strict=False)
            was, now = next(((a, b) for a, b in pairs if a != b), (old.values, new.values))
            what = (
                f"{new.name} takes a Python number that changes from step to step ({was} -> {now}): "
                "make it a tensor that is filled in place"
            )
            return reason_at(new.place, "python-number", what)
    if len(before.operations) != len(after.operations):
        longer = max(before, after, key=lambda watch: len(watch.operations)).operations
        extra = longer[min(len(before.operations), len(after.operations))]
        what = f"{extra.name} runs in some steps only: the step's path depends on more than shapes"
        return reason_at(extra.place, "control-flow", what)
    for storage, (_, operation) in after.outside.items():
        if storage not in before.outside and storage not in known:
            what = f"{operation.name} takes a tensor that is another one in every step and is not part of the batch"
            return reason_at(operation.place, "outside-tensor", what)
    return None


def _logged_difference(old: Logged, new: Logged) -> FallbackReason | None:
    """Return why a replay can't do what two steps' `self.log` calls did; None if it can."""
    if (old.hook, old.name) != (new.hook, new.name):
        what = (
            f"the step logs {new.name!r} where an earlier one logged {old.name!r}: what it logs is not part of the key"
        )
        return reason_at(new.place, "control-flow", what)
    for kind, was, now in (("value", old.number, new.number), ("batch_size", old.batch_size, new.batch_size)):
        if was is not None and now is not None and was != now and (was == was or now == now):
            what = (
                f"the {kind} of self.log({new.name!r}, ...) is a Python number that changes from step to step "
                f"({was} -> {now}): log a tensor, or log it in a hook around the step"
            )
            return reason_at(new.place, "logged-number", what)
    return None


def reason_at(place: Location, code: str, message: str) -> FallbackReason:
    """Return a reason that points at `place`, as far as that is known."""
    return FallbackReason(code=code, message=message, file=place.file or None, line=place.line or None)


def storage_of(tensor: Tensor) -> int:
    """Return the address of a tensor's memory; 0 where it has none."""
    with torch._C.DisableTorchFunction():  # this is no access of the step's
        return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


def _plain_values(value: Any, tensors: list[Tensor]) -> Iterator[Hashable]:
    if isinstance(value, Tensor):
        tensors.append(value)
        yield "tensor"
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _plain_values(item, tensors)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _plain_values(item, tensors)
    elif isinstance(value, float) and value != value:
        yield "nan"
    elif isinstance(value, torch.Generator):
        yield id(value)
    else:
        yield value


def _items(value: Any) -> Iterator[Any]:
    """Yield what is in a list or tuple, however deep."""
    for item in value if isinstance(value, list | tuple) else ():
        yield item
        yield from _items(item)


def _literal(tensor: Tensor) -> tuple[Hashable, ...] | None:
    """Return the numbers that a tensor was made of, which ``torch.tensor(x)`` bakes in; None if there are too many."""
    if tensor.numel() > MAX_LITERAL or tensor.device.type != "cpu":
        return None
    with torch.utils._python_dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
        return tuple("nan" if x != x else x for x in tensor.flatten().tolist())


def _counts_mask(name: str, args: Any) -> bool:
    """Return whether a mask among the indices has to be counted; filling it with a number needs no count."""
    indices = [index for index in args[1] if isinstance(index, Tensor)] if len(args) > 1 else []
    masks = [index for index in indices if index.dtype in (torch.bool, torch.uint8)]
    if not masks or name == "index":
        return bool(masks)
    value, accumulate = args[2], len(args) > 3 and args[3]
    fills = value.numel() == 1 and value.device.type == "cpu" and not accumulate
    return not (fills and len(masks) == len(indices))
