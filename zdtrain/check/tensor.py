"""Tensors that keep their CPU values and claim to be on ``cuda:0``.

Only the Python class of a tensor is swapped: the object, its storage, its autograd history and every C++ kernel stay,
so values, gradients and updates are the real ones, and the swap is undone by swapping back.
"""

from typing import Any

import torch
from torch import nn
from torch._C._nn import _parse_to

from zdtrain.check import recorder as recording

DEVICE = torch.device("cuda", 0)
HOST = torch.device("cpu")

_true_device = torch.Tensor.device.__get__


def _in_kernel() -> bool:
    return recording.active is not None and recording.active.kernel_depth > 0


class ShadowTensor(torch.Tensor):
    """A CPU tensor that claims to be on ``cuda:0``, except inside a kernel."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    device = property(lambda self: _true_device(self) if _in_kernel() else DEVICE)
    is_cuda = property(lambda self: not _in_kernel())
    is_cpu = property(lambda self: _in_kernel())

    def get_device(self) -> int:
        """Index of the claimed device."""
        return 0

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Move or convert."""
        return move(self, args, kwargs)

    def cuda(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Stay where it is."""
        return self

    def cpu(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Copy to the host."""
        return move(self, (HOST,), {})

    def is_pinned(self, *args: Any) -> bool:
        """Device memory is not pinned."""
        return False

    def new_tensor(  # type: ignore[override]
        self, data: Any, *, dtype: torch.dtype | None = None, device: Any = None, requires_grad: bool = False
    ) -> torch.Tensor:
        """Make a tensor from host data."""
        if device is not None and torch.device(device).type != "cuda":
            return torch.tensor(data, dtype=dtype or self.dtype, requires_grad=requires_grad, device="cpu")
        recording.note("copy-to-device", "Tensor.new_tensor copies host data")
        return to_shadow(torch.tensor(data, dtype=dtype or self.dtype, device="cpu")).requires_grad_(requires_grad)

    def tolist(self) -> Any:
        """Read all values."""
        recording.note("host-read", "Tensor.tolist()")
        return alias_on_host(self).tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        """Read all values."""
        recording.note("host-read", "Tensor.numpy(), which raises TypeError on a GPU")
        return alias_on_host(self).numpy(*args, **kwargs)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        recording.note("implicit-host-read", "conversion to a NumPy array, which raises TypeError on a GPU")
        return alias_on_host(self).__array__(*args, **kwargs)

    def __repr__(self, *args: Any, **kwargs: Any) -> str:  # type: ignore[override]
        recording.note("implicit-host-read", "printing a device tensor")
        return repr(alias_on_host(self))

    def __format__(self, spec: str) -> str:
        recording.note("implicit-host-read", "formatting a device tensor")
        return format(alias_on_host(self), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        recording.note("copy-to-host", "pickling a device tensor")
        return alias_on_host(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            with torch.no_grad():
                copy = alias_on_host(self).clone()
            copy.__class__ = _PLAIN_OF[type(self)]
            memo[id(self)] = to_shadow(copy).requires_grad_(self.requires_grad)
        result: torch.Tensor = memo[id(self)]
        return result


class ShadowParameter(ShadowTensor, nn.Parameter):
    """An `nn.Parameter` that claims to be on ``cuda:0``."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


_SHADOW_OF: dict[type, type] = {torch.Tensor: ShadowTensor, nn.Parameter: ShadowParameter}
_PLAIN_OF: dict[type, type] = {shadow: plain for plain, shadow in _SHADOW_OF.items()}


def is_shadow(value: object) -> bool:
    """Whether `value` claims to be on the device."""
    return isinstance(value, ShadowTensor)


def to_shadow(tensor: torch.Tensor) -> torch.Tensor:
    """Make `tensor` claim to be on the device, in place; tensors of other classes stay as they are."""
    shadow = _SHADOW_OF.get(type(tensor))
    if shadow is not None:
        tensor.__class__ = shadow
        if recording.active is not None:
            recording.active.adopt(tensor)
    return tensor


def to_plain(tensor: torch.Tensor) -> torch.Tensor:
    """Undo `to_shadow`, in place."""
    plain = _PLAIN_OF.get(type(tensor))
    if plain is not None:
        tensor.__class__ = plain
    return tensor


def alias_on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor over the same memory, made without anyone noticing."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction(), torch.no_grad():
        alias = torch.Tensor.detach(tensor)
    alias.__class__ = torch.Tensor
    return alias


def target_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, bool, Any, bool]:
    """Read the arguments of `Tensor.to` in Python: torch's own parser would ask C++ for the device of a tensor.

    Returns:
        device, dtype, non_blocking, memory_format, copy
    """
    kwargs = dict(kwargs)
    copy = bool(kwargs.pop("copy", False))
    if "other" in kwargs:
        args = (kwargs.pop("other"), *args)
    if args and isinstance(args[0], torch.Tensor):
        other, rest = args[0], args[1:]
        non_blocking = kwargs.get("non_blocking", rest[0] if rest else False)
        return other.device, other.dtype, bool(non_blocking), None, copy or bool(rest[1:2] and rest[1])
    positional = list(args)
    if len(positional) == 4 or (len(positional) == 3 and isinstance(positional[0], torch.dtype)):
        copy = bool(positional.pop())
    device, dtype, non_blocking, memory_format = _parse_to(*positional, **kwargs)
    return device, dtype, bool(non_blocking), memory_format, copy


def move(tensor: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """`Tensor.to` for tensors of which at least one side is the shadow device."""
    device, dtype, non_blocking, memory_format, copy = target_of(args, kwargs)
    to_device = is_shadow(tensor) if device is None else device.type == "cuda"
    layout = {} if memory_format is None else {"memory_format": memory_format}
    if to_device == is_shadow(tensor):
        return torch.Tensor.to(tensor, dtype=dtype or tensor.dtype, copy=copy, **layout)
    recorder = recording.active
    if recorder is not None and not to_device:
        recorder.leaving_depth += 1
    try:
        result: torch.Tensor = torch.ops.aten._to_copy(
            tensor, device=DEVICE if to_device else HOST, dtype=dtype, non_blocking=non_blocking, **layout
        )
        return result
    finally:
        if recorder is not None and not to_device:
            recorder.leaving_depth -= 1
