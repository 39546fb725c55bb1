"""The shadow device: `cuda:0` on a machine that has none."""

import contextlib
from collections.abc import Callable, Iterator
from types import CodeType

from zdtrain.check import recorder as recording
from zdtrain.check.dispatch import Born, DispatchMode
from zdtrain.check.findings import Finding
from zdtrain.check.functions import FunctionMode
from zdtrain.check.patches import patched
from zdtrain.check.recorder import Recorder
from zdtrain.check.tensor import to_plain
from zdtrain.check.trace import Operation
from zdtrain.errors import ZDTrainError


class ShadowDevice:
    """A context in which ``cuda:0`` exists and everything on it is computed on the CPU.

    Tensors keep real values, kernels, gradients and updates are the real ones; only `Tensor.device` and its relatives
    say ``cuda:0``. Code that branches on the device runs its CUDA branch. On exit every tensor tells the truth again.

    Args:
        boundary: code object of the function that drives the steps; frames around it are never blamed.

    Example::

        with ShadowDevice() as device:
            x = torch.ones(3, device="cuda")
            with device.recording():
                y = x.sum().item()
        device.findings()  # one host-read, with this file and line
    """

    def __init__(self, *, boundary: CodeType | None = None) -> None:
        self.recorder = Recorder(boundary)
        self._functions = FunctionMode(self.recorder)
        self._dispatch = DispatchMode(self.recorder, self._functions)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "ShadowDevice":
        if recording.active is not None:
            raise ZDTrainError("a shadow device is already on; one at a time")
        with contextlib.ExitStack() as stack:
            stack.enter_context(patched(self.recorder))
            recording.active = self.recorder
            stack.callback(self._switch_off)
            stack.enter_context(self._dispatch)
            stack.enter_context(self._functions)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def _switch_off(self) -> None:
        recording.active = None
        for tensor in self.recorder.adopted():
            to_plain(tensor)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Take notes inside."""
        before, self.recorder.is_armed = self.recorder.is_armed, True
        try:
            yield
        finally:
            self.recorder.is_armed = before

    def start_step(self, number: int) -> None:
        """Count what follows as step `number`."""
        self.recorder.step = number
        self._functions.start_step()
        self._dispatch.start_step()

    @property
    def operations(self) -> list[Operation]:
        """The operations of the current step."""
        return self._dispatch.operations

    def track_modules(self, path: Callable[[], str]) -> None:
        """Ask `path` for the running submodule at every operation."""
        self._dispatch.module_path = path

    @property
    def born(self) -> list[Born]:
        """Device tensors made while notes were taken."""
        return self._dispatch.born

    @property
    def made_bytes(self) -> int:
        """Bytes of device tensors made in the current step."""
        return self._dispatch.made_bytes

    def findings(self) -> list[Finding]:
        """What was found."""
        return self.recorder.findings()
