"""What a program holds by value of its modules: Python attributes, modes, hooks, what is trained."""

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from zdtrain.capture.frozen import frozen
from zdtrain.capture.guards import Guards
from zdtrain.capture.reads import ALL
from zdtrain.capture.roots import class_reader

# Written by Lightning around every hook, or caches of torchmetrics that are accounted for elsewhere.
LIGHTNING_ATTRIBUTES = frozenset({"_current_fx_name", "_metric_attributes", "_trainer", "_fabric", "log"})
METRIC_ATTRIBUTES = frozenset({"_update_count", "_computed", "_forward_cache", "_update_called", "_cache"})
MODULE_ATTRIBUTES = frozenset(nn.Module().__dict__) - {"training"}
_MACHINERY = (frozenset(vars(nn.Module)) - {"forward", "training"}) | MODULE_ATTRIBUTES | LIGHTNING_ATTRIBUTES
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
HOOKS_EVERYWHERE: tuple[Mapping[int, Any], ...] = tuple(
    vars(torch_module)[f"_global{kind}"] for kind in ("_forward_hooks", "_forward_pre_hooks", *_HOOKS[2:])
)
"""Functions that torch calls around every module's forward and backward."""


def python_state(root: nn.Module, only: Collection[tuple[str, str]] | None = None) -> dict[tuple[str, str], Hashable]:
    """Return the Python values that modules keep as attributes, by module path and attribute name.

    Tensors that are attributes are left out: a program holds or carries those.

    Args:
        root: The module.
        only: Paths and names to look at, see `AttributeReads.names`; None for all.
    """
    return {
        (path, name): frozen(value)
        for path, module, name, value in attributes(root)
        if not isinstance(value, Tensor | nn.Module) and (only is None or (path, name) in only or (path, ALL) in only)
    }


def attributes(root: nn.Module) -> Iterator[tuple[str, nn.Module, str, Any]]:
    """Yield path, module, name and value of every attribute of `root` and its submodules that users may have set."""
    for path, module in root.named_modules():
        ignored = METRIC_ATTRIBUTES if is_metric(module) else frozenset()
        for name, value in list(module.__dict__.items()):
            if name not in MODULE_ATTRIBUTES and name not in LIGHTNING_ATTRIBUTES and name not in ignored:
                yield path, module, name, value


def is_metric(module: nn.Module) -> bool:
    """Return whether `module` is a torchmetrics metric, without importing torchmetrics."""
    return hasattr(module, "_update_count") and hasattr(module, "_defaults")


def fingerprint(root: nn.Module, only: Collection[tuple[str, str]] | None = None) -> tuple[Hashable, ...]:
    """Return everything about `root` that a program holds by value: modes, Python attributes, what is trained.

    Args:
        root: The module.
        only: The attributes that steps read; None for all.
    """
    trained = tuple([(id(p), p.requires_grad, *map(bool, hooks_on(p))) for p in root.parameters()])
    kinds = tuple([(type(module), module.training, *map(len, hooks_of(module))) for module in root.modules()])
    forwards = tuple([class_reader(kind, "forward")() for kind in dict.fromkeys(map(type, root.modules()))])
    shapes = tuple([buffer.shape for buffer in root.buffers() if not is_lazy(buffer)])
    layouts = tuple(
        [
            (path, name, _layout(value))
            for path, _, name, value in attributes(root)
            if isinstance(value, Tensor) and (only is None or (path, name) in only)
        ]
    )
    hooks = tuple(map(len, HOOKS_EVERYWHERE))
    return (tuple(python_state(root, only).items()), trained, kinds, forwards, shapes, layouts, hooks)


def changed_part(before: Any, after: Any) -> str:
    """Return in words what is different between two fingerprints; empty where it is nothing that has a name."""
    old, new = dict(before[0]), dict(after[0])
    for (path, name), value in new.items():
        if old.get((path, name), value) != value:
            return f"the attribute {f'{path}.{name}' if path else name!r}"
    words = ("what is trained", "modes or hooks of modules", "methods", "buffers", "attributes", "hooks of all modules")
    parts = zip(words, before[1:], after[1:], strict=True)
    return next((what for what, part, other in parts if part != other), "")


def guard_modules(guards: Guards, root: nn.Module, only: Collection[tuple[str, str]]) -> None:
    """Let `guards` look at what `fingerprint` tells, as far as steps depend on it.

    Args:
        guards: The guards.
        root: The module.
        only: The attributes that steps read.
    """
    names: defaultdict[str, set[str]] = defaultdict(set)
    for path, name in only:
        names[path].add(name)
    modules = dict(root.named_modules())
    for path, module in modules.items():
        for name in module._parameters:
            guards.hold(module._parameters, name, meaning=id)
        _guard_attributes(guards, module, names[path])
    all_modules, parameters = list(modules.values()), list(root.parameters())
    guards.hold_all(part._modules for path, part in modules.items() if part._modules or "_modules" in names[path])
    counted: list[Any] = [module._parameters for path, module in modules.items() if "_parameters" in names[path]]
    counted += [hooks for module in all_modules for hooks in hooks_of(module) if hooks]
    buffers = [module._buffers for module in all_modules if module._buffers]
    guards.read(lambda: RemovableHandle.next_id)  # counts every hook that is registered, on whatever
    guards.read(lambda: [type(module) for module in all_modules])
    guards.read(lambda: [p.requires_grad for p in parameters])
    if counted:
        guards.read(lambda: [len(held) for held in counted])
    if buffers:
        guards.read(lambda: [b.shape for held in buffers for b in held.values() if b is not None and not is_lazy(b)])
    for kind in dict.fromkeys(map(type, all_modules)):
        for base in kind.__mro__:
            guards.keep(vars(base), "forward", class_reader(kind, "forward"))
            if "forward" in vars(base):
                break


def _guard_attributes(guards: Guards, module: nn.Module, names: set[str]) -> None:
    held = module.__dict__
    ignored = METRIC_ATTRIBUTES if is_metric(module) else frozenset()
    if ALL in names:
        names = {*names, *held} - {ALL}
        guards.read(lambda: len(held))
    for name in names - _MACHINERY - ignored:
        if name.startswith("__"):
            continue
        if isinstance(held.get(name), Tensor):
            guards.read(partial(_read_layout, held, name))
        elif not any(name in module.__dict__[kind] for kind in ("_parameters", "_buffers", "_modules")):
            guards.keep(held, name, partial(_read_frozen, held, name))


def _read_layout(held: Mapping[str, Any], name: str) -> Hashable:
    value = held.get(name)
    return _layout(value) if isinstance(value, Tensor) else None


def _read_frozen(held: Mapping[str, Any], name: str) -> Hashable:
    return frozen(held.get(name))


def _layout(tensor: Tensor) -> tuple[Hashable, ...]:
    """Return what a program depends on of a tensor that it gets anew in every run."""
    stride = tensor.stride() if tensor.layout is torch.strided else ()
    return (tensor.shape, stride, tensor.dtype, tensor.requires_grad)


def hooks_on(parameter: Tensor) -> tuple[Any, Any]:
    """Return the functions that torch calls with a parameter's gradient, before and after adding it."""
    return parameter._backward_hooks, parameter._post_accumulate_grad_hooks


def hooks_of(module: nn.Module) -> Iterator[Mapping[int, Any]]:
    """Yield the functions that torch calls around a module's forward and backward, by kind."""
    held = module.__dict__
    return (held[kind] for kind in _HOOKS)
