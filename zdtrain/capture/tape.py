"""The op tape: a step's ATen operations, recorded while the step runs, replayed without its Python."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import is_
from typing import Any, TypeVar

import torch
import torch._inductor
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._inductor.output_code import CompiledFxGraph
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import increment_version
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

Inputs = Sequence[Tensor | None] | Mapping[int, Tensor]
Outputs = list[Any]
Function = Callable[[], Outputs]

INDUCTOR_OPTIONS: dict[str, Any] = {
    "size_asserts": False,
    "alignment_asserts": False,
    "fallback_random": True,  # draw dropout from torch's generator, as the eager step does
}


class Tape:
    """A recorded function of tensors. It writes in place to the tensors that the recorded Python wrote to.

    Args:
        graph: The recorded operations.
        positions: Where the graph's inputs are among those of `run`.
        written: Indices of inputs that it writes to.
    """

    overwrites = False
    memory_bytes = None  # a run allocates and frees like the step itself

    def __init__(self, graph: fx.GraphModule, positions: Sequence[int], written: Collection[int] = ()) -> None:
        self.used = _drop_unused(graph, positions)
        self._default_dtype = _default_dtype_of(graph)
        self.written = frozenset(written)
        self.constants = _lift_constants(graph)  # parameters, buffers, optimizer state: by reference, not copies
        self._graph = graph
        self._with_grad = torch.is_grad_enabled()  # some kernels ask: oneDNN's LSTM keeps what its backward needs
        self._replay: Callable[..., Outputs] = graph.forward

    def __len__(self) -> int:
        """Return the number of operations."""
        return sum(node.op == "call_function" for node in self._graph.graph.nodes)

    def run(self, inputs: Inputs) -> Outputs:
        """Run the operations on `inputs`, which must have the layout that was recorded."""
        below_autograd = torch._C._AutoDispatchBelowAutograd()
        with torch.set_grad_enabled(self._with_grad), below_autograd, _default_dtype(self._default_dtype):
            return self._replay(*self.arguments(inputs))

    def spare_kept(self) -> None:
        """Do nothing: every run has outputs of its own."""

    def body(self, inputs: Inputs) -> Outputs:
        """Run the operations; see `Program.body`."""
        return self.run(inputs)

    def arguments(self, inputs: Inputs) -> list[Any]:
        """Return what the operations work on: the inputs that they read, then all else."""
        return [*[inputs[index] for index in self.used], *self.constants]


class LoweredTape(Tape):
    """A tape compiled by Inductor. Results agree with the tape up to rounding, not bit for bit."""

    def __init__(self, graph: fx.GraphModule, positions: Sequence[int], written: Collection[int] = ()) -> None:
        super().__init__(graph, positions, written)
        self.constants = _merge_views(graph, self.constants)
        for node in graph.graph.nodes:
            node.meta.clear()  # the tracer's stand-ins for tensors are of no use to the compiler
        self._replay = self._lower_and_run

    def run(self, inputs: Inputs) -> Outputs:
        """Run the kernels on `inputs`, which must have the layout that was recorded."""
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # `torch.no_grad` takes a microsecond
        try:
            return self._replay(*self.arguments(inputs))
        finally:
            torch._C._set_grad_enabled(before)

    def _lower_and_run(self, *arguments: Tensor) -> Outputs:
        with _default_dtype(self._default_dtype):
            lowered = lower(self._graph, arguments)
        outputs, self._replay = run_and_shorten(lowered, arguments)
        return outputs

    def lower(self, inputs: Inputs) -> Callable[..., Outputs]:
        """Compile it for inputs of this layout; nothing is run. Returns a function of `arguments`."""
        with _default_dtype(self._default_dtype):
            return lower(self._graph, self.arguments(inputs))


Kind = TypeVar("Kind", bound=Tape)


def lower(graph: fx.GraphModule, arguments: Sequence[Any]) -> Callable[..., Outputs]:
    """Compile the operations for arguments of this layout."""
    # Inductor itself, not torch.compile: there is no Python left to guard, and Dynamo's frame costs as much as a
    # third of a small program.
    on_host = all(argument.device.type == "cpu" for argument in arguments)
    options = {
        **INDUCTOR_OPTIONS,
        "cpp_wrapper": on_host,
    }  # a device graph leaves no launches for a wrapper to speed up
    shapes = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)  # without one Inductor's cache is passed by
    with tracing(TracingContext(shapes)), torch.no_grad():
        described: Any = [shapes.from_tensor(argument, static_shapes=True) for argument in arguments]
        compiled: Any = torch._inductor.compile(graph, described, options=options)
    return compiled  # type: ignore[no-any-return]


def run_and_shorten(
    lowered: Callable[..., Outputs], arguments: Sequence[Any]
) -> tuple[Outputs, Callable[..., Outputs]]:
    """Run a lowered function; return its outputs, and one that does the same with less Python around the kernels.

    The layers around them serve subclasses, views and autograd. Where this run shows that they passed everything on as
    it was, later ones go past them, which saves a tenth of a small program.

    Args:
        lowered: What `lower` returned.
        arguments: What it runs on; later runs have arguments of the same layout.
    """
    calls: list[tuple[CompiledFxGraph, list[Any], list[Any]]] = []
    call = CompiledFxGraph.__call__

    def noted(kernels: CompiledFxGraph, inputs: Any) -> Any:
        taken = list(inputs)
        outputs = call(kernels, inputs)
        calls.append((kernels, taken, list(outputs)))
        return outputs

    versions = [version_of(argument) for argument in arguments]
    CompiledFxGraph.__call__ = noted  # type: ignore[method-assign,assignment]
    try:
        outputs = lowered(*arguments)
    finally:
        CompiledFxGraph.__call__ = call  # type: ignore[method-assign]
    if len(calls) != 1 or torch._C._is_any_autocast_enabled():  # which one of the layers turns off
        return outputs, lowered
    kernels, taken, made = calls[0]
    if not (_are_same(taken, arguments) and _are_same(made, outputs)):
        return outputs, lowered
    run: Any = kernels
    written = [i for i, argument in enumerate(arguments) if version_of(argument) != versions[i]]

    def shortened(*arguments: Any) -> Outputs:
        increment_version([arguments[index] for index in written])
        return run.current_callable(list(arguments))  # type: ignore[no-any-return]

    return outputs, shortened


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def record(function: Function, inputs: Sequence[Tensor | None], kind: type[Kind]) -> Kind:
    """Run `function` once and return its operations.

    The function runs for real: everything it does to tensors and to Python objects is done.

    Args:
        function: Takes nothing; returns tensors and None.
        inputs: The tensors it works on that a replay will have others for; None where there is none.
        kind: `Tape`, or `LoweredTape` to have the operations compiled.
    """
    positions = [index for index, tensor in enumerate(inputs) if tensor is not None]
    versions = {index: version_of(tensor) for index, tensor in enumerate(inputs) if tensor is not None}
    shapes = FakeTensorMode()  # without one the tracer makes a mode for each value it describes: over half of its time
    with tracing(TracingContext(shapes)):
        graph: fx.GraphModule = make_fx(lambda *_: function())(*[inputs[index] for index in positions])
    for node in reversed(list(graph.graph.nodes)):
        if "profiler" in str(node.target):
            graph.graph.erase_node(node)
    written = [i for i, version in versions.items() if version is None or version_of(inputs[i]) != version]  # type: ignore[arg-type]
    return kind(graph, positions, written)


def _default_dtype_of(graph: fx.GraphModule) -> torch.dtype | None:
    """Return the default dtype under which operations ran whose results took it; None where none did.

    Those are operations that make floating point of nothing or of integers, and are not told the dtype: ``rand(3)``,
    ``t / 100``. Precisions such as ``"64-true"`` set another default while the module's code runs.
    """
    found = {
        node.meta["val"].dtype
        for node in graph.graph.nodes
        if node.op == "call_function" and _is_floating(node.meta.get("val")) and not _has_dtype(node)
    }
    return found.pop() if len(found) == 1 else None  # several: the comparison with an eager step decides


def _has_dtype(node: fx.Node) -> bool:
    """Return whether the arguments of an operation determine the dtype of its result."""
    arguments, keywords = node.args, node.kwargs
    tensors = [argument.meta.get("val") for argument in node.all_input_nodes]
    told = any(isinstance(argument, torch.dtype) for argument in (*arguments, *keywords.values()))
    return told or any(_is_floating(tensor) for tensor in tensors)


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _default_dtype(dtype: torch.dtype | None) -> AbstractContextManager[None]:
    """Return a context in which `dtype` is the default, if it is given."""
    return nullcontext() if dtype in (None, torch.get_default_dtype()) else _another_default(dtype)


@contextmanager
def _another_default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def version_of(tensor: Tensor) -> int | None:
    """Return how often `tensor` was written to; None for one made in inference mode, which does not count."""
    return None if tensor.is_inference() else tensor._version


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
    for name in {str(node.target) for node in nodes if node.op == "get_attr"}:
        delattr(graph, name)  # the compiler would take it for one more input
    graph.recompile()
    return [tensor for tensor, _ in constants.values()]


def _merge_views(graph: fx.GraphModule, constants: Sequence[Tensor]) -> list[Tensor]:
    """Make constants that share memory views of one input; Inductor takes every input for memory of its own."""
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"][-len(constants) :]
    body = next(node for node in graph.graph.nodes if node.op != "placeholder")
    sharing: dict[tuple[int, torch.dtype], list[tuple[fx.Node, Tensor]]] = {}
    for node, tensor in zip(placeholders, constants, strict=True):
        sharing.setdefault((tensor.untyped_storage().data_ptr(), tensor.dtype), []).append((node, tensor))
    bases: list[Tensor] = []
    merged: set[int] = set()
    for members in sharing.values():
        if len(members) < 2:
            continue
        storage = members[0][1].untyped_storage()
        base = members[0][1].detach().new_empty(0)
        base.set_(storage, 0, (storage.nbytes() // base.element_size(),), (1,))
        with graph.graph.inserting_before(body):
            whole = graph.graph.placeholder(f"memory_{len(bases)}")
        for node, tensor in members:
            with graph.graph.inserting_before(body):
                where = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
                view = graph.graph.call_function(torch.ops.aten.as_strided.default, (whole, *where))
            node.replace_all_uses_with(view)
            graph.graph.erase_node(node)
            merged.add(id(tensor))
        bases.append(base)
    graph.recompile()
    return [*(tensor for tensor in constants if id(tensor) not in merged), *bases]
