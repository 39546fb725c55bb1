"""A step captured in a device graph: fixed input buffers, one launch, outputs that the next launch overwrites."""

from collections.abc import Callable, Collection, Sequence
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor

from zdtrain.capture.tape import LoweredTape
from zdtrain.device.base import Graph, Runtime, UnsupportedError

Outputs = list[Any]


class GraphProgram:
    """A captured graph with its static inputs.

    Args:
        graph: The captured graph.
        static: Buffers that the graph reads, by index of the input.
        written: Indices of inputs that the step writes to in place.
        outputs: Tensors that the graph writes; every run overwrites them.
    """

    overwrites = True

    def __init__(self, graph: Graph, static: dict[int, Tensor], written: list[int], outputs: Outputs) -> None:
        self.used = list(static)
        self._graph = graph
        self._static = static
        self._written = written
        self._outputs = outputs
        buffers = [id(buffer) for buffer in static.values()]
        self._ours = [ONLY_HERE + buffers.count(id(output)) for output in outputs]

    def __len__(self) -> int:
        """Return 0: a device graph does not tell how many operations it holds."""
        return 0

    @property
    def memory_bytes(self) -> int:
        """Bytes of the input buffers, and by which the pool of graphs grew."""
        return self._graph.memory_bytes + sum(buffer.nbytes for buffer in self._static.values())

    @torch.no_grad()
    def run(self, inputs: Sequence[Tensor | None]) -> Outputs:
        """Copy the inputs into their buffers and launch the graph.

        Raises:
            ValueError: An input has another layout than its buffer; ``copy_`` would broadcast or convert it silently.
        """
        for index, buffer in self._static.items():
            tensor = inputs[index]
            if tensor is None or tensor.shape != buffer.shape or tensor.dtype != buffer.dtype:
                layout = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
                raise ValueError(f"input {index} is {layout}, captured as {(tuple(buffer.shape), buffer.dtype)}")
            if tensor is not buffer:
                buffer.copy_(tensor, non_blocking=True)
        self._graph.replay()
        for index in self._written:
            tensor = inputs[index]
            if tensor is not None and tensor is not self._static[index]:
                tensor.copy_(self._static[index], non_blocking=True)
        return self._outputs

    @torch.no_grad()
    def spare_kept(self) -> None:
        """Give outputs that somebody has kept, such as gradients, memory of their own: the next run overwrites them."""
        for index, (count, ours) in enumerate(zip(reference_counts(self._outputs), self._ours, strict=True)):
            kept = self._outputs[index]
            if count > ours and isinstance(kept, Tensor):
                here = self._outputs[index] = kept.detach()
                self._static = {i: here if buffer is kept else buffer for i, buffer in self._static.items()}
                kept.set_(kept.clone())  # type: ignore[call-overload]

    def body(self, inputs: Sequence[Tensor | None]) -> Outputs:  # noqa: ARG002
        """Refuse: a graph holds no other graph.

        Raises:
            UnsupportedError: Always. Steps that are to be part of a larger graph are recorded as tapes.
        """
        raise UnsupportedError("a captured graph can't be part of another one; record the step as a tape")


def reference_counts(values: list[Any]) -> list[int]:
    """Return how many references there are to each of `values`, those on the way here included."""
    return [getrefcount(value) for value in values]


ONLY_HERE = reference_counts([object()])[0]


class LoweredGraphProgram:
    """A lowered tape inside a device graph: compiled, tried on copies and captured when it runs for the first time.

    Args:
        tape: The recorded step.
        runtime: The device door.
    """

    overwrites = True

    def __init__(self, tape: LoweredTape, runtime: Runtime) -> None:
        self.used = tape.used
        self._tape = tape
        self._runtime = runtime
        self._program: GraphProgram | None = None
        self._lowered: Callable[..., Outputs] | None = None

    def __len__(self) -> int:
        """Return the number of recorded operations."""
        return len(self._tape)

    @property
    def memory_bytes(self) -> int | None:
        """See `GraphProgram.memory_bytes`; None until it is captured."""
        return None if self._program is None else self._program.memory_bytes

    def run(self, inputs: Sequence[Tensor | None]) -> Outputs:
        """Run it on inputs of the recorded layout."""
        if self._program is None:
            self._program = self._capture(inputs)
        return self._program.run(inputs)

    def spare_kept(self) -> None:
        """See `GraphProgram.spare_kept`."""
        if self._program is not None:
            self._program.spare_kept()

    def body(self, inputs: Sequence[Tensor | None]) -> Outputs:
        """Launch the kernels one by one; `run` was called before. See `Program.body`."""
        assert self._lowered is not None
        return self._lowered(*self._tape.arguments(inputs))

    @torch.no_grad()
    def _capture(self, inputs: Sequence[Tensor | None]) -> GraphProgram:
        tape, runtime = self._tape, self._runtime
        lowered = self._lowered = tape.lower(inputs)
        random = runtime.rng_state()
        lowered(*[static_copy(argument) for argument in tape.arguments(inputs)])  # kernels load when first launched
        runtime.restore_rng(random)
        static: dict[int, Tensor] = {}
        return capture_graph(
            lambda: lowered(*tape.arguments(static)), inputs, self.used, static.update, runtime, written=tape.written
        )


def capture_graph(
    function: Callable[[], Outputs],
    inputs: Sequence[Tensor | None],
    used: Sequence[int],
    put: Callable[[dict[int, Tensor]], None],
    runtime: Runtime,
    *,
    written: Collection[int] = (),
) -> GraphProgram:
    """Capture `function` without running it: its Python runs, the device's work is only recorded.

    Args:
        function: The step; returns tensors and None.
        inputs: The tensors it works on that a replay will have others for.
        used: Indices of those that it reads.
        put: Puts tensors in the places of those inputs.
        runtime: The device door.
        written: Indices of those that it is known to write to; tensors know what ATen's operations wrote to.
    """
    static = {index: static_copy(tensor) for index in used if (tensor := inputs[index]) is not None}
    versions = {index: tensor._version for index, tensor in static.items()}
    graph = runtime.graph()
    put(static)
    with graph.capture():
        outputs = function()
    changed = [index for index, tensor in static.items() if tensor._version != versions[index] or index in written]
    return GraphProgram(graph, static, changed, outputs)


@torch.no_grad()
def rehearse(runtime: Runtime) -> None:
    """Go once through all that captured steps ask of the device, with nothing at stake.

    Raises:
        Exception: Whatever the device, its driver or torch has against it.
    """
    random = runtime.rng_state()
    runtime.restore_rng(random)
    ones = torch.ones(4, device=runtime.device)
    graph = runtime.graph()
    try:
        with graph.capture():
            twos, noise = ones + 1, torch.rand_like(ones)
        graph.replay()
        if not torch.equal(twos, 2 * ones) or not noise.isfinite().all():
            raise RuntimeError("it left other numbers than the same operations run eagerly")
        _held, _growth = runtime.memory(), graph.memory_bytes
    finally:
        runtime.restore_rng(random)
        graph.reset()


@torch.no_grad()
def static_copy(tensor: Tensor) -> Tensor:
    """Return a copy at an address of its own, in the same layout."""
    with torch.inference_mode(False):  # tensors made in inference mode do not count what is written to them
        buffer = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        return buffer.copy_(tensor).requires_grad_(tensor.requires_grad)
