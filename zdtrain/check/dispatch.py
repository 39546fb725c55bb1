"""Sees every operation below autograd while the shadow device is on, and decides where its results live."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from zdtrain.check import kernels
from zdtrain.check.functions import FunctionMode
from zdtrain.check.kernels import aten
from zdtrain.check.recorder import Recorder
from zdtrain.check.tensor import HOST, is_shadow, to_shadow
from zdtrain.check.trace import Arguments, Context, Operation, record, sort_arguments
from zdtrain.source.location import Location


class Born:
    """A tensor made by an operation of a step."""

    __slots__ = ("location", "name", "reference", "step")

    def __init__(self, tensor: torch.Tensor, location: Location, name: str, step: int) -> None:
        self.reference = weakref.ref(tensor)
        self.location = location
        self.name = name
        self.step = step


class DispatchMode(TorchDispatchMode):
    """Runs operations on the CPU and keeps the pretence up.

    Args:
        recorder: takes the notes.
        functions: knows which API call is running.
    """

    def __init__(self, recorder: Recorder, functions: FunctionMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder
        self.functions = functions
        self.operations: list[Operation] = []
        """The operations since `start_step`."""
        self.born: list[Born] = []
        """Device tensors made while the recorder was listening."""
        self.made_bytes = 0
        self.ordinal = 0
        """Number of the step among all steps, whatever their stage."""
        self.module_path: Callable[[], str] = lambda: ""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: nothing is compiled here, and torch's guard against it costs as much as a small kernel."""
        return False

    def start_step(self) -> None:
        """Begin a new list of operations."""
        self.ordinal += 1
        self.operations = []
        self.made_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        info = kernels.kernel_info(func)
        if info.is_bookkeeping:
            return func(*args, **kwargs)
        given = sort_arguments((*args, *kwargs.values()) if kwargs else args)
        in_backward = torch._C._current_autograd_node() is not None
        on_device, kwargs = self._place(func, args, kwargs, bool(given.shadows), in_backward)
        if self.recorder.is_listening:
            self._inspect(func, args, kwargs, given, on_device, in_backward)
        result = self._run(func, args, kwargs)
        results = [result] if isinstance(result, torch.Tensor) else sort_arguments((result,)).tensors
        made = self._claim(func, results, given, on_device)
        if self.recorder.is_listening:
            self._remember(info.name, given, results, made, in_backward)
        return result

    # ---- where the result lives
    def _place(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], has_shadows: bool, in_backward: bool
    ) -> tuple[bool, dict[str, Any]]:
        """Whether the result is on the shadow device, and the keyword arguments for the CPU kernel."""
        if func is aten.copy_.default:
            return is_shadow(args[0]), kwargs
        device = kwargs.get("device")
        if device is None:
            return has_shadows, kwargs
        functions = self.functions
        if device.type == "cuda":
            on_device = True
        elif device.type == "meta":
            return False, kwargs
        elif functions.wanted is not None:
            on_device = functions.wanted == "cuda"
        elif func is aten._to_copy.default:
            # `.to(options)` inside C++ names the C++ device, which is the CPU: no move, unless we are on the way out
            on_device = has_shadows and not self.recorder.leaving_depth
        elif getattr(functions.function, "__name__", "").startswith("new_"):
            on_device = False
        else:
            on_device = in_backward or has_shadows or functions.touches_device
        return on_device, {**kwargs, "device": HOST}

    # ---- what there is to say about it
    def _inspect(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: Arguments,
        on_device: bool,
        in_backward: bool,
    ) -> None:
        note = self.recorder.note
        if func is aten._to_copy.default or func is aten.copy_.default:
            self._inspect_copy(func, args, kwargs, on_device, in_backward)
        elif func is aten._local_scalar_dense.default:
            if given.shadows:
                note("host-read", "reads a device tensor")
        elif given.shadows:
            self._inspect_device_work(func, args, kwargs, given, in_backward)
        elif not on_device and kernels.kernel_info(func).draws_random:
            note("host-random", f"{func} draws on the CPU", user_only=True)

    def _inspect_copy(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], on_device: bool, in_backward: bool
    ) -> None:
        if in_backward:
            return
        in_place = func is aten.copy_.default
        source = args[1] if in_place else args[0]
        if on_device and not is_shadow(source):
            if self._is_scalar_fill(source):
                return
            non_blocking = (args[2] if len(args) > 2 else False) if in_place else kwargs.get("non_blocking")
            pinned = getattr(source, "_zd_pinned", False)
            code = "async-copy-to-device" if pinned and non_blocking else "copy-to-device"
            memory = "pinned" if pinned else "pageable"
            how = "non_blocking" if non_blocking else "blocking"
            self.recorder.note(code, f"{how} copy of {memory} host memory {tuple(source.shape)} to the device")
        elif is_shadow(source) and not on_device:
            self.recorder.note("copy-to-host", f"copy of a device tensor {tuple(source.shape)} to the CPU")

    def _is_scalar_fill(self, source: torch.Tensor) -> bool:
        """``x[i] = 0.0`` reaches the dispatcher as a copy of a 0-D tensor but is a fill on the device."""
        functions = self.functions
        is_setitem = functions.function is torch.Tensor.__setitem__
        return source.dim() == 0 and is_setitem and not isinstance(functions.args[-1], torch.Tensor)

    def _inspect_device_work(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: Arguments, in_backward: bool
    ) -> None:
        note = self.recorder.note
        host = given.host
        if func in kernels.READ_INDEX or func in kernels.WRITE_INDEX:
            index = list(args[1])
            if kernels.uses_mask(index) and not kernels.is_scalar_put(func, args):
                note("data-dependent-shape", "indexing by a boolean mask counts the mask on the host")
            host_index = [part for part in index if part is not None and not is_shadow(part)]
            if host_index and not in_backward:
                note("copy-to-device", "an index on the CPU is copied to the device")
            host = [tensor for tensor in host if not any(tensor is part for part in host_index)]
        elif kernels.sizes_on_host(func, kwargs):
            code = "data-dependent-shape" if kernels.kernel_info(func).has_dynamic_shape else "host-read"
            note(code, f"{func} sizes or makes its result on the host", is_explicit=True)
        elif (why := kernels.WAITS_INSIDE.get(kernels.kernel_info(func).name)) is not None:
            note("kernel-host-read", f"{func} {why}")
        if not in_backward and func not in kernels.TAKES_HOST_TENSORS:
            for tensor in host:
                self._inspect_host_tensor(func, tensor)

    def _inspect_host_tensor(self, func: Any, tensor: torch.Tensor) -> None:
        if tensor.dim() > 0:
            self.recorder.note("cpu-tensor", f"{func} gets a CPU tensor {tuple(tensor.shape)} beside device tensors")
        elif not self._is_scalar_fill(tensor):
            self.recorder.note("cpu-scalar", f"{func} gets a 0-D CPU tensor", user_only=True)

    # ---- running it
    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.recorder.kernel_depth += 1
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:  # NotImplementedError is one
            if "not implemented for" not in str(error) or func._schema.is_mutable:
                raise
            return self._run_in_float32(func, args, kwargs)
        finally:
            self.recorder.kernel_depth -= 1

    def _run_in_float32(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """CUDA has half-precision kernels that the CPU lacks: compute in float32 and round."""
        low = (torch.float16, torch.bfloat16)
        tensors = sort_arguments((*args, *kwargs.values())).tensors
        dtype = next((tensor.dtype for tensor in tensors if tensor.dtype in low), None)
        if dtype is None:
            return func(*args, **kwargs)
        up_args, up_kwargs = pytree.tree_map_only(
            torch.Tensor, lambda t: t.float() if t.dtype in low else t, (args, kwargs)
        )
        result = func(*up_args, **up_kwargs)
        return pytree.tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, result)

    # ---- afterwards
    def _claim(self, func: Any, results: list[torch.Tensor], given: Arguments, on_device: bool) -> list[torch.Tensor]:
        """Put the new tensors among the results on the shadow device, if that is where they live."""
        if not on_device:
            return []
        if func is aten._pack_padded_sequence.default:
            results = results[:1]  # batch_sizes lives on the host by design
        plain = [tensor for tensor in results if type(tensor) is torch.Tensor]
        if plain and given.host:
            taken = set(map(id, given.host))
            plain = [tensor for tensor in plain if id(tensor) not in taken]
        return [to_shadow(tensor) for tensor in plain]

    def _remember(
        self,
        name: str,
        given: Arguments,
        results: list[torch.Tensor],
        made: list[torch.Tensor],
        in_backward: bool,
    ) -> None:
        location = self.recorder.locate()
        context = Context(location, self.recorder.hook(), self.module_path(), in_backward)
        self.operations.append(record(name, given, results, context))
        for tensor in made:
            self.made_bytes += tensor.numel() * tensor.element_size()
            self.born.append(Born(tensor, location, name, self.ordinal))
