"""Sees every call of torch's Python API while the shadow device is on: factories, moves, and who called them."""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _device as torch_device_module
from torch.utils._device import _device_constructors

from zdtrain.capture.counters import counters_in
from zdtrain.check.kernels import READS_ON_CPU_ONLY
from zdtrain.check.recorder import Recorder
from zdtrain.check.tensor import DEVICE, HOST, alias_on_host, is_shadow, move, target_of, to_plain, to_shadow
from zdtrain.check.trace import flatten
from zdtrain.source.location import Location

Function = Callable[..., Any]

_FROM_DATA = (torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor)
_DTYPE_FOLLOWS_DEFAULT = (*_FROM_DATA, torch.zeros, torch.ones, torch.empty, torch.full)
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]  # how Module.to moves parameters
_CREATION_LIMIT = 16
"""More tensors than this made by one line in one step are churn."""


def _asked_device(kwargs: dict[str, Any]) -> torch.device | None:
    device = kwargs.get("device")
    if device is None:
        device = torch_device_module.CURRENT_DEVICE  # `with torch.device("cuda")`
    return torch.device(device) if isinstance(device, str | int) else device


def metadata(node: Any) -> dict[str, Any]:
    """The dictionary that travels with an autograd node."""
    held: dict[str, Any] = node.metadata
    return held


def _backward(
    tensor: torch.Tensor,
    gradient: torch.Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)


class FunctionMode(TorchFunctionMode):
    """Interprets API calls for the shadow device.

    Args:
        recorder: takes the notes.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        self.wanted: str | None = None
        """``"cuda"`` or ``"cpu"`` while a factory runs that was asked for this device."""
        self.function: Function | None = None
        """The API function that is running."""
        self.args: tuple[Any, ...] = ()
        self._constructors = frozenset(_device_constructors())
        self._special: dict[Function, Callable[..., Any]] = {
            torch.Tensor.to: self._move,
            torch.Tensor.cuda: self._move,
            torch.Tensor.type: self._type,
            torch.Tensor.backward: self._backward,
            _SET_DATA: self._set_data,
        }
        self._created: dict[Location, int] = {}

    def start_step(self) -> None:
        """Count created tensors from zero."""
        self._created.clear()

    @property
    def touches_device(self) -> bool:
        """Whether the running API call has a device tensor among its arguments."""
        return self.function is None or any(is_shadow(leaf) for leaf in flatten(self.args))

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for counter in counters_in((args, kwargs)):
            counter.counters.refuse(counter.number)
        special = self._special.get(func)
        if special is not None:
            return special(func, args, kwargs)
        before = self.function, self.args
        self.function, self.args = func, args
        try:
            result = self._call(func, args, kwargs)
        finally:
            self.function, self.args = before
        if self.recorder.is_listening:
            self._tag_forward(result)
        return result

    def _tag_forward(self, result: Any) -> None:
        """Leave the user's line on the new autograd nodes, for what their backward may do."""
        pending = [leaf.grad_fn for leaf in flatten((result,)) if isinstance(leaf, torch.Tensor)]
        location: Location | None = None
        while pending:
            node = pending.pop()
            if node is None or node.name() == "torch::autograd::AccumulateGrad" or "zd_location" in metadata(node):
                continue
            location = location or self.recorder.locate()
            metadata(node)["zd_location"] = location
            pending += [parent for parent, _ in node.next_functions]

    def _set_data(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        func(*args, **kwargs)
        (to_shadow if is_shadow(args[1]) else to_plain)(args[0])

    def _type(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) > 1 or kwargs or not is_shadow(args[0]):
            return func(*args, **kwargs)
        return alias_on_host(args[0]).type().replace("torch.", "torch.cuda.")

    def _backward(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with self:  # the Python part of `Tensor.backward` would run without this mode
            _backward(*args, **kwargs)

    def _move(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor, rest = args[0], args[1:]
        if func is torch.Tensor.cuda:
            non_blocking = kwargs.get("non_blocking", rest[1] if len(rest) > 1 else False)
            return move(tensor, (DEVICE,), {"non_blocking": non_blocking})
        device = target_of(rest, kwargs)[0]
        if is_shadow(tensor) or (device is not None and device.type == "cuda"):
            return move(tensor, rest, kwargs)
        return func(*args, **kwargs)

    def _call(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        reads_on_cpu_only = READS_ON_CPU_ONLY.get(func)
        if reads_on_cpu_only is not None and reads_on_cpu_only(args, kwargs):
            with self.recorder.muted():
                return func(*args, **kwargs)
        if func in self._constructors:
            return self._create(func, args, kwargs)
        return func(*args, **kwargs)

    def _create(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = _asked_device(kwargs)
        if device is not None and device.type == "meta":
            return func(*args, **kwargs)
        on_device = device is not None and device.type == "cuda"
        if self.recorder.is_listening:
            self._note_creation(func, args, kwargs, on_device=on_device, has_device=device is not None)
        if on_device and func in _FROM_DATA:
            return self._create_from_data(func, args, kwargs)
        if on_device:
            kwargs = {**kwargs, "device": DEVICE}
        self.wanted = "cuda" if on_device else "cpu"
        try:
            return func(*args, **kwargs)
        finally:
            self.wanted = None

    def _create_from_data(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
        kwargs = {**kwargs, "device": HOST}  # explicit: a surrounding `with torch.device("cuda")` must not add it again
        if is_shadow(data):
            self.wanted = "cuda"
            try:
                return func(*args, **kwargs)
            finally:
                self.wanted = None
        if func is not torch.scalar_tensor:
            self.recorder.note("copy-to-device", f"torch.{func.__name__}(..., device='cuda') copies host data")
        requires_grad = kwargs.pop("requires_grad", False)
        result: torch.Tensor = func(*args, **kwargs)
        if isinstance(data, torch.Tensor):
            result = result.clone()
        return to_shadow(result).requires_grad_(requires_grad)

    def _note_creation(
        self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], *, on_device: bool, has_device: bool
    ) -> None:
        recorder = self.recorder
        name = f"torch.{func.__name__}"
        data = args[0] if args else kwargs.get("data")
        if func in _FROM_DATA and isinstance(data, torch.Tensor):
            return
        if not on_device and not has_device:
            recorder.note("device-less-tensor", f"{name} without device=", user_only=True)
        if func in _DTYPE_FOLLOWS_DEFAULT and kwargs.get("dtype") is None:
            recorder.note("dtype-less-tensor", f"{name} without dtype=", user_only=True)
        location = recorder.locate()
        if location.is_user and not location.library:
            made = self._created[location] = self._created.get(location, 0) + 1
            if made == _CREATION_LIMIT + 1:
                recorder.add("churn", location, f"more than {_CREATION_LIMIT} calls of {name} in one step")
