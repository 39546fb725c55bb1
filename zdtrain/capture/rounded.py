"""Arithmetic in bfloat16 and float16 with numbers that are tensors, rounded as torch rounds it with Python numbers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor


class Rounded:
    """A tensor of few bits: an operation with a number that is a tensor is done in float32 and rounded once.

    That is what torch's kernels do with a Python number; one that is a tensor they would round before they use it.
    Every operand that is not `Rounded` is such a number, or the inside of an operation (see `scaled`). Numbers that are
    added are rounded first, as torch does with both.

    Args:
        tensor: bfloat16 or float16.

    Example:
        >>> half, decay = torch.full((1,), 3.0, dtype=torch.bfloat16), torch.tensor(0.999)
        >>> (Rounded(half) * decay).tensor == half * 0.999
        tensor([True])
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dtype = next(arg.tensor.dtype for arg in args if isinstance(arg, Rounded))
        out = func(*_operands(args, dtype, sums=func in _SUMS), **(kwargs or {}))
        return cls(out.to(dtype)) if out.is_floating_point() else out

    def __getattr__(self, name: str) -> Any:
        return partial(self._in_place if name.endswith("_") else self._apply, getattr(Tensor, name))

    def _apply(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.__torch_function__(method, (), (self, *args), kwargs)

    def _in_place(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> "Rounded":
        target, *others = _operands((self, *args), self.tensor.dtype, sums=method in _SUMS)
        result = method(target, *others, **kwargs)
        if result is not self.tensor:
            self.tensor.copy_(result)
        return self


_SUMS = frozenset({Tensor.add, Tensor.add_, Tensor.__add__, Tensor.sub, Tensor.sub_, Tensor.__sub__})


def _operands(args: Any, dtype: torch.dtype, *, sums: bool) -> list[Any]:
    """Return the tensors to compute with: those of few bits, or all of them in float32 where there is a number."""
    numbers = [arg for arg in args if isinstance(arg, Tensor)]
    if numbers and not sums:
        return [wide(arg) for arg in args]
    return [
        arg.tensor if isinstance(arg, Rounded) else arg.to(dtype) if isinstance(arg, Tensor) else arg for arg in args
    ]


def _operator(name: str) -> Callable[..., Any]:
    method = getattr(Tensor, name)
    return lambda self, *others: self._apply(method, *others)


for _name in ("add", "sub", "mul", "truediv", "neg", "lt", "gt", "eq"):
    setattr(Rounded, f"__{_name}__", _operator(f"__{_name}__"))


def wide(value: Any) -> Any:
    """Return a rounded tensor in float32, and everything else as it is."""
    return value.tensor.float() if isinstance(value, Rounded) else value


def rounded(tensor: Tensor) -> Any:
    """Return `tensor` so that operations on it round once; itself where numbers have its dtype."""
    return Rounded(tensor) if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def scaled(tensor: Any, number: Tensor) -> Tensor:
    """Return the product inside of an operation such as ``addcdiv``, which is not rounded on its own."""
    product: Tensor = wide(tensor) * number
    return product
