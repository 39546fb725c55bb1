"""Example inputs of a `forward`, and others like them."""

import inspect
from collections.abc import Container, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zdtrain.errors import ConfigError


class Examples:
    """Arguments of a `forward` on the CPU, and the tensors among them that have one row per sample.

    Attributes:
        batched: Those tensors by name, e.g. ``"batch['tokens']"``.
        batch_size: How many rows they have; 0 if there are none.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        signature: inspect.Signature,
        batched: Container[str] | None = None,
    ) -> None:
        self.args, self.kwargs, self.signature = args, kwargs, signature
        tensors = {
            f"{name}{pytree.keystr(path)}": leaf
            for name, value in signature.bind(*args, **kwargs).arguments.items()
            for path, leaf in pytree.tree_flatten_with_path(value)[0]
            if isinstance(leaf, Tensor) and leaf.dim()
        }
        if batched is None:  # those that are as long as the first
            batched = [name for name in tensors if 0 < len(tensors[name]) == len(next(iter(tensors.values())))]
        self.batched = {name: tensor for name, tensor in tensors.items() if name in batched}
        self.batch_size: int = next((len(tensor) for tensor in self.batched.values()), 0)

    def rows(self, n: int) -> "Examples":
        """Return examples with `n` rows: these from the last to the first, again and again."""
        index = torch.arange(n - 1, -1, -1) % self.batch_size
        batched = {id(tensor) for tensor in self.batched.values()}
        args, kwargs = pytree.tree_map(
            lambda leaf: leaf[index] if id(leaf) in batched else leaf, (self.args, self.kwargs)
        )
        return Examples(args, kwargs, self.signature, self.batched)

    def run(self, module: nn.Module) -> Any:
        """Return what a module makes of them; it may write into its arguments and draw random numbers."""
        torch.default_generator.manual_seed(0)
        args, kwargs = pytree.tree_map_only(Tensor, torch.clone, (self.args, self.kwargs))
        return module(*args, **kwargs)


def examples_of(module: nn.Module, inputs: Any, kwargs: Mapping[str, Any] | None) -> Examples:
    """Return what a module's `forward` is to be called with.

    Raises:
        ConfigError: There is no `forward`, there are no examples, or they do not fit it.
    """
    name = type(module).__name__
    if getattr(module.forward, "__func__", None) in (nn.Module.forward, LightningModule.forward):
        raise ConfigError(f"{name} has no forward: define what the exported program is to compute")
    if inputs is None and kwargs is None:
        inputs = getattr(module, "example_input_array", None)
        if inputs is None:
            raise ConfigError(f"example_inputs: give arguments of {name}.forward, or set its example_input_array")
    args: tuple[Any, ...] = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    if inputs is None or isinstance(inputs, Mapping):
        args, kwargs = (), {**(inputs or {}), **(kwargs or {})}
    args, keywords = pytree.tree_map_only(Tensor, on_cpu, (args, dict(kwargs or {})))
    signature = _named(inspect.signature(module.forward), keywords)
    try:
        return Examples(args, keywords, signature)
    except TypeError as error:
        raise ConfigError(f"example_inputs do not fit {name}.forward{signature}: {error}") from error


def _named(signature: inspect.Signature, kwargs: Mapping[str, Any]) -> inspect.Signature:
    """Return `signature` with the names of `kwargs` in place of ``**kwargs``, for which torch has no dynamic sizes."""
    kept = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    if len(kept) == len(signature.parameters):
        return signature
    names = [name for name in kwargs if name not in {each.name for each in kept}]
    keywords = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    return signature.replace(parameters=[*kept, *keywords])


def on_cpu(tensor: Tensor) -> Tensor:
    """Return a copy that is a leaf: of a parameter, a parameter."""
    copied = tensor.detach().to("cpu", copy=True)
    return nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied
