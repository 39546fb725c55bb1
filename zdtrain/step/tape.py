"""The op tape: a step's ATen operations, recorded while the step runs, replayed without its Python."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._inductor
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

Outputs = list[Any]
Function = Callable[[], Outputs]

INDUCTOR_OPTIONS: dict[str, Any] = {
    "cpp_wrapper": True,
    "size_asserts": False,
    "alignment_asserts": False,
    "fallback_random": True,  # draw dropout from torch's generator, as the eager step does
}


class Tape:
    """A recorded function of tensors. It writes in place to the tensors that the recorded Python wrote to.

    Args:
        graph: The recorded operations.
        positions: Where the graph's inputs are among those of `run`.
    """

    kind = "graph"
    overwrites = False

    def __init__(self, graph: fx.GraphModule, positions: Sequence[int]) -> None:
        self.used = _drop_unused(graph, positions)
        self.constants = _lift_constants(graph)  # parameters, buffers, optimizer state: by reference, not copies
        self._graph = graph
        self._replay: Callable[..., Outputs] = graph.forward

    def __len__(self) -> int:
        """Return the number of operations."""
        return sum(node.op == "call_function" for node in self._graph.graph.nodes)

    def run(self, inputs: Sequence[Tensor | None]) -> Outputs:
        """Run the operations on `inputs`, which must have the layout that was recorded."""
        with torch.no_grad():
            return self._replay(*[inputs[index] for index in self.used], *self.constants)


class LoweredTape(Tape):
    """A tape compiled by Inductor. Results agree with the tape up to rounding, not bit for bit."""

    kind = "compile"

    def __init__(self, graph: fx.GraphModule, positions: Sequence[int]) -> None:
        super().__init__(graph, positions)
        for node in graph.graph.nodes:
            node.meta.clear()  # the tracer's stand-ins for tensors are of no use to the compiler
        self._replay = self._compile

    def _compile(self, *arguments: Tensor) -> Outputs:
        # Inductor itself, not torch.compile: there is no Python left to guard, and Dynamo's frame costs as much as a
        # third of a small program.
        shapes = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)  # without one Inductor's cache is passed by
        with tracing(TracingContext(shapes)):
            compiled: Any = torch._inductor.compile(self._graph, list(arguments), options=INDUCTOR_OPTIONS)
        self._replay = compiled
        return self._replay(*arguments)


def record(function: Function, inputs: Sequence[Tensor | None], *, lowered: bool = False) -> Tape:
    """Run `function` once and return its operations.

    The function runs for real: everything it does to tensors and to Python objects is done.

    Args:
        function: Takes nothing; returns tensors and None.
        inputs: The tensors it works on that a replay will have others for; None where there is none.
        lowered: Compile the operations.
    """
    positions = [index for index, tensor in enumerate(inputs) if tensor is not None]
    graph: fx.GraphModule = make_fx(lambda *_: function())(*[inputs[index] for index in positions])
    for node in reversed(list(graph.graph.nodes)):
        if "profiler" in str(node.target):
            graph.graph.erase_node(node)
    return (LoweredTape if lowered else Tape)(graph, positions)


def _drop_unused(graph: fx.GraphModule, positions: Sequence[int]) -> list[int]:
    """Remove the inputs that nothing reads; return the positions of those that stay."""
    used = []
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for node, position in zip(placeholders, positions, strict=True):
        if node.users:
            used.append(position)
        else:
            graph.graph.erase_node(node)
    return used


def _lift_constants(graph: fx.GraphModule) -> list[Tensor]:
    """Turn the tensors that `graph` reads from its attributes into trailing inputs; return them."""
    nodes = list(graph.graph.nodes)
    body = next(node for node in nodes if node.op not in ("placeholder", "get_attr"))
    constants: dict[int, tuple[Tensor, fx.Node]] = {}  # by id: the tracer has several names for one tensor
    for node in nodes:
        if node.op != "get_attr":
            continue
        tensor = getattr(graph, node.target)
        if id(tensor) not in constants:
            with graph.graph.inserting_before(body):
                constants[id(tensor)] = (tensor, graph.graph.placeholder(f"constant_{len(constants)}"))
        node.replace_all_uses_with(constants[id(tensor)][1])
        graph.graph.erase_node(node)
    graph.recompile()
    return [tensor for tensor, _ in constants.values()]
