"""Which module a value that is not finite comes from: one step, run again with hooks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zdtrain.monitor.guard import changing_places, held
from zdtrain.monitor.masking import Copies


def locate_nonfinite(module: nn.Module, batch: Any, step: Callable[[], Any]) -> str:
    """Run a step again and say where the first value that is not finite comes from.

    Weights, gradients, buffers and the random generators of the host are left as they are. Reads the device, so it
    belongs behind the end of training.

    Args:
        module: The module, with the weights that the step began with.
        batch: The step's batch.
        step: Runs forward on the batch and returns the loss.

    Returns:
        One sentence.
    """
    if not is_finite(batch):
        return "the batch itself holds values that are not finite"
    names = {part: path or type(part).__name__ for path, part in module.named_modules()}
    found: list[str] = []

    def look(part: nn.Module, args: Any, output: Any) -> None:
        if not found and not is_finite(output):
            given = "finite" if is_finite(args) else "not finite either"
            found.append(f"the output of {names[part]} ({type(part).__name__}) is not finite; its inputs are {given}")

    handles = [part.register_forward_hook(look) for part in names if part is not module]
    try:
        with _left_alone(module), torch.enable_grad():
            loss = step()
            if found:
                return found[0]
            if not isinstance(loss, Tensor) or not is_finite(loss):
                return "every module's output is finite, the loss made of them is not"
            return _gradient(module, loss)
    finally:
        for handle in handles:
            handle.remove()


def _gradient(module: nn.Module, loss: Tensor) -> str:
    named = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    bad = [name for name, gradient in zip(named.keys(), gradients, strict=True) if not is_finite(gradient)]
    if bad:  # backward runs from the last module to the first
        return f"the loss is finite, the gradient of {bad[-1]} is not ({len(bad)} of {len(named)} parameters)"
    return "every value was finite when the step was run again"


def is_finite(value: Any) -> bool:
    """Return whether all floating-point tensors in `value` are finite."""
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


@contextmanager
def _left_alone(module: nn.Module) -> Iterator[None]:
    """Put back what a forward pass changes, and let nothing be logged."""
    places, copies = list(changing_places(module)), Copies()
    copies.save(held(places))
    random, log = torch.get_rng_state(), module.__dict__.get("log")
    module.__dict__["log"] = lambda *_, **__: None
    try:
        yield
    finally:
        module.__dict__.pop("log")
        if log is not None:
            module.__dict__["log"] = log
        torch.set_rng_state(random)
        live = held(places)
        if live:
            copies.put_back(live, torch.ones((), dtype=torch.bool, device=next(iter(live.values())).device))
