"""What has to be replaced in torch and in the host libraries while the shadow device is on; all undone on exit."""

import builtins
import contextlib
import functools
import random
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from torch.amp.autocast_mode import autocast
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils

from zdtrain.check import fake_cuda
from zdtrain.check.recorder import Recorder
from zdtrain.check.tensor import DEVICE, ShadowParameter, ShadowTensor, is_shadow, to_shadow

_RANDOM = ("random", "randint", "uniform", "choice", "choices", "shuffle", "sample", "gauss", "randrange")
_NUMPY_RANDOM = ("rand", "randn", "randint", "random", "uniform", "normal", "choice", "permutation", "shuffle")
_CLOCK = ("time", "perf_counter", "monotonic")

Replacement = tuple[Any, str, Any]


def _devices() -> Iterator[Replacement]:
    for module, replacements in ((torch.cuda, fake_cuda.CUDA), (torch.accelerator, fake_cuda.ACCELERATOR)):
        for name, value in replacements.items():
            if hasattr(module, name):  # older torch versions lack some
                yield module, name, value
    yield torch.backends.cuda, "is_built", lambda: True


def _tensors(recorder: Recorder) -> Iterator[Replacement]:
    new_parameter = nn.Parameter.__new__

    def parameter(cls: type, data: Any = None, requires_grad: bool = True) -> Any:
        if not is_shadow(data):
            return new_parameter(cls, data, requires_grad)
        result = torch.Tensor.detach(data)
        result.__class__ = nn.Parameter
        return to_shadow(result).requires_grad_(requires_grad)

    def pin_memory(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        recorder.note("graph-refused", "Tensor.pin_memory() allocates host memory")
        tensor._zd_pinned = True  # type: ignore[attr-defined]
        return tensor

    true_generator = torch.Generator

    class Generator(true_generator):  # type: ignore[valid-type, misc]
        def __new__(cls, device: Any = "cpu") -> Any:
            return true_generator.__new__(cls)

    yield nn.Parameter, "__new__", staticmethod(parameter)
    yield torch.Tensor, "pin_memory", pin_memory
    yield torch.Tensor, "record_stream", lambda tensor, stream: None
    yield torch, "Generator", Generator
    yield nn.RNNBase, "flatten_parameters", lambda module: None  # packs weights for cuDNN: not part of the step


def _optimizers() -> Iterator[Replacement]:
    group_by_device = torch._C._group_tensors_by_device_and_dtype

    def group(lists: Any, with_indices: bool = False) -> dict[Any, Any]:
        """C++ groups by the device it knows: put the claimed device into the key."""
        groups = {}
        for (device, dtype), members in group_by_device(lists, with_indices).items():
            first = next((tensor for tensor in members[0][0] if tensor is not None), None)
            groups[(DEVICE if is_shadow(first) else device, dtype)] = members
        return groups

    yield torch._C, "_group_tensors_by_device_and_dtype", group


def _autocast() -> Iterator[Replacement]:
    init = autocast.__init__

    @functools.wraps(init)
    def on_cpu(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            dtype = args[0] if args else kwargs.pop("dtype", None)
            init(self, "cpu", dtype or torch.float16, *args[1:], **kwargs)
        else:
            init(self, device_type, *args, **kwargs)

    yield autocast, "__init__", on_cpu


def _host_calls(recorder: Recorder) -> Iterator[Replacement]:
    def noted(function: Callable[..., Any], code: str, name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not any(isinstance(value, torch.Tensor) for value in args):  # printing one is a host read
                recorder.note_host_call(code, name)
            return function(*args, **kwargs)

        return call

    for module, names, code in (
        (random, _RANDOM, "host-random"),
        (np.random, _NUMPY_RANDOM, "host-random"),
        (time, _CLOCK, "host-clock"),
        (builtins, ("print",), "side-effect"),
    ):
        for name in names:
            yield module, name, noted(getattr(module, name), code, f"{module.__name__}.{name}()")


@contextlib.contextmanager
def _foreach_types() -> Iterator[None]:
    """Let torch's optimizers take their multi-tensor path for shadow tensors."""
    shadow_types: list[type] = [ShadowTensor, ShadowParameter]
    lists: list[list[Any]] = [torch_optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types]
    before = [list(types) for types in lists]  # the two may be one list
    for types, original in zip(lists, before, strict=True):
        types[:] = [*original, *shadow_types]
    try:
        yield
    finally:
        for types, original in zip(lists, before, strict=True):
            types[:] = original


@contextlib.contextmanager
def patched(recorder: Recorder) -> Iterator[None]:
    """Make torch believe in the shadow device."""
    replacements = (*_devices(), *_tensors(recorder), *_optimizers(), *_autocast(), *_host_calls(recorder))
    with contextlib.ExitStack() as stack:
        for owner, name, value in replacements:
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(_foreach_types())
        yield
