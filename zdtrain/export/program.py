"""From a module to a program: a copy on the CPU in eval mode, traced by `torch.export`."""

import copy
import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from zdtrain.export.examples import Examples, on_cpu
from zdtrain.export.refusals import hushed, refusal_of, summary_of
from zdtrain.export.types import ExportError


def copy_of(module: nn.Module, signature: inspect.Signature) -> nn.Module:
    """Return a copy on the CPU in eval mode, without a trainer, whose forward has this signature."""
    name = type(module).__name__
    memo: dict[int, Any] = {}  # what deepcopy refuses, or would copy within the device's memory first
    for owner in module.modules():
        for leaf in pytree.tree_leaves(vars(owner)):
            if isinstance(leaf, Tensor) and (is_lazy(leaf) or leaf.is_meta):
                raise ExportError(
                    f"{name}: {type(owner).__name__} has weights without values; load them, or run a batch"
                )
            if isinstance(leaf, Tensor) and id(leaf) not in memo and not (leaf.is_cpu and leaf.is_leaf):
                memo[id(leaf)] = on_cpu(leaf)
    try:
        copied = copy.deepcopy(module, memo)
    except (TypeError, RuntimeError) as error:
        raise ExportError(
            f"{name} cannot be copied: {summary_of(error)}; export a module that holds no such thing"
        ) from error
    for part in copied.modules():
        vars(part).pop("_compiled_call_impl", None)  # of module.compile(); it calls the original
    if inspect.signature(copied.forward) != signature:
        original = copied.forward

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs)

        forward.__signature__ = signature  # type: ignore[attr-defined]
        copied.forward = forward
    return copied.cpu().eval()


def traced(module: nn.Module, examples: Examples, dynamic_batch: bool) -> torch.export.ExportedProgram:
    """Return the program, with zeros in place of the examples that it keeps: they may be somebody's data."""
    shapes = torch.export.ShapesCollection()
    batch = torch.export.Dim("batch")
    for tensor in examples.batched.values() if dynamic_batch else ():
        shapes[tensor] = {0: batch}
    try:
        with hushed():
            dynamic = shapes.dynamic_shapes(module, examples.args, examples.kwargs)
            program = torch.export.export(module, examples.args, examples.kwargs, dynamic_shapes=dynamic, strict=False)
    except Exception as error:  # whatever torch, or the user's code on torch's stand-ins for tensors, raises
        raise ExportError(refusal_of(module, examples, error)) from error
    program.example_inputs = pytree.tree_map_only(Tensor, torch.zeros_like, program.example_inputs)
    return program


def refuse_tensors_of(module: nn.Module, program: torch.export.ExportedProgram) -> None:
    """Raise if a program holds tensors of the module itself, which then ran in its place, perhaps in training mode."""
    constants = [constant for constant in program.constants.values() if isinstance(constant, Tensor)]
    held = {constant.untyped_storage().data_ptr() for constant in constants if constant.numel()}
    own = (*module.parameters(), *module.buffers())
    if held and any(tensor.untyped_storage().data_ptr() in held for tensor in own):
        raise ExportError(
            f"{type(module).__name__} holds a function that knows the module by itself, such as "
            f"`lambda x: self.net(x)`, and runs that in place of the copy in eval mode; make it a method"
        )
