"""What can be said about a module and its parameters: registration, devices, gradients, optimizers."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zdtrain.check.findings import Finding, make_finding
from zdtrain.check.state import is_library_class, user_attributes
from zdtrain.check.tensor import alias_on_host, is_shadow
from zdtrain.source.definitions import attribute_location, class_location
from zdtrain.source.location import Location

_MAX_NAMED = 3


def _finding(code: str, message: str, location: Location, *, in_step: bool = True) -> Finding:
    return make_finding(
        code,
        message,
        file=location.file or None,
        line=location.line or None,
        function=location.function or None,
        stage="module",
        in_step=in_step,
    )


def _contents(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple | set):
        yield from value
    elif isinstance(value, dict):
        yield from value.values()


def audit_registration(root: nn.Module, ignored: frozenset[str]) -> list[Finding]:
    """Tensors, parameters and modules that the user's modules hold without registering them.

    Args:
        root: a module that has been moved to the device.
        ignored: attributes that the check itself has set.
    """
    registered = {id(module) for module in root.modules()} | {id(parameter) for parameter in root.parameters()}
    registered |= {id(buffer) for buffer in root.buffers()}
    findings = []
    for path, module in root.named_modules():
        for name, value in user_attributes(module, ignored):
            held = list(_contents(value))
            loose = [item for item in held if isinstance(item, torch.Tensor) and id(item) not in registered]
            is_loose = isinstance(value, torch.Tensor) and id(value) not in registered
            if any(isinstance(item, nn.Module) and id(item) not in registered for item in held):
                code, what = "hidden-submodule", f"holds modules in a {_kind(value)}"
            elif any(isinstance(item, nn.Parameter) for item in loose):
                code, what = "hidden-parameter", f"holds parameters in a {_kind(value)}"
            elif any(not is_shadow(item) for item in loose):
                code, what = "plain-tensor", f"holds CPU tensors in a {_kind(value)}"
            elif is_loose and not is_shadow(value):
                code = "plain-tensor"
                what = f"is a plain tensor; make it {'nn.Parameter' if value.requires_grad else 'a buffer'}"
            else:
                continue
            full = f"{path}.{name}".lstrip(".")
            location = attribute_location(type(module), name)
            in_step = code != "hidden-submodule" or any(map(_is_trainable, held))
            findings.append(_finding(code, f"`{full}` {what}", location, in_step=in_step))
    return findings


def _is_trainable(value: Any) -> bool:
    """Whether backward adds to gradients in `value`; nobody zeroes those of a hidden module."""
    return isinstance(value, nn.Module) and any(parameter.requires_grad for parameter in value.parameters())


def _kind(value: Any) -> str:
    return type(value).__name__


def audit_devices(root: nn.Module) -> list[Finding]:
    """Registered tensors that did not come along to the device."""
    findings = []
    for path, module in root.named_modules():
        for kind, members in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, tensor in members.items():
                if tensor is not None and not is_shadow(tensor):
                    full = f"{path}.{name}".lstrip(".")
                    location = attribute_location(type(module), name)
                    findings.append(_finding("wrong-device", f"{kind} `{full}` is on {tensor.device}", location))
    return findings


@dataclasses.dataclass
class GradientLog:
    """What became of one parameter's gradients over the steps."""

    seen: bool = False
    nonzero: bool = False
    finite: bool = True


class GradientWatch:
    """Looks at every gradient as it is accumulated.

    Args:
        root: the module whose trainable parameters are watched.
    """

    def __init__(self, root: nn.Module) -> None:
        self.logs: dict[str, GradientLog] = {}
        self._root = root
        self._handles = []
        for name, parameter in root.named_parameters():
            if parameter.requires_grad and parameter.is_leaf:
                log = self.logs[name] = GradientLog()
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._hook(log)))

    @staticmethod
    def _hook(log: GradientLog) -> Any:
        def look(parameter: torch.Tensor) -> None:
            log.seen = True
            gradient = parameter.grad
            if gradient is None or gradient.layout != torch.strided or (log.nonzero and not log.finite):
                log.nonzero = True
                return
            with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
                total = float(torch.linalg.vector_norm(alias_on_host(gradient), ord=1))
            log.nonzero = log.nonzero or total != 0
            log.finite = log.finite and total - total == 0

        return look

    def look_at_grad_fields(self) -> None:
        """Count gradients that were assigned rather than accumulated (`torch.autograd.grad`)."""
        for name, parameter in self._root.named_parameters():
            log = self.logs.get(name)
            if log is not None and not log.seen and parameter.grad is not None:
                log.seen = log.nonzero = True

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def audit(self, optimizers: list[Optimizer], *, scaled: bool) -> list[Finding]:
        """Report on gradients and optimizers.

        Args:
            optimizers: all optimizers of the run.
            scaled: whether a loss scaler is on, so that overflows are expected and skipped.
        """
        optimized = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        groups: dict[str, list[str]] = {}
        for name, parameter in self._root.named_parameters():
            log = self.logs.get(name)
            if log is None or not parameter.requires_grad:
                continue
            if not log.seen:
                groups.setdefault("unused-parameter", []).append(name)
            elif id(parameter) not in optimized:
                groups.setdefault("not-in-optimizer", []).append(name)
            elif not log.finite and not scaled:
                groups.setdefault("nonfinite-gradient", []).append(name)
            elif not log.nonzero:
                groups.setdefault("zero-gradient", []).append(name)
        return [finding for code, names in groups.items() for finding in self._report(code, names)]

    def _report(self, code: str, names: list[str]) -> Iterator[Finding]:
        """One finding for each attribute of the user that holds such parameters."""
        by_location: dict[Location, list[str]] = {}
        for name in names:
            by_location.setdefault(self._location(name), []).append(name)
        for location, members in by_location.items():
            shown = ", ".join(f"`{name}`" for name in members[:_MAX_NAMED])
            more = f" and {len(members) - _MAX_NAMED} more" if len(members) > _MAX_NAMED else ""
            yield _finding(code, shown + more, location)

    def _location(self, name: str) -> Location:
        """Where the innermost module of the user's own class binds what leads to the parameter."""
        parts = name.split(".")
        for depth in range(len(parts) - 1, -1, -1):
            owner = self._root.get_submodule(".".join(parts[:depth]))
            if not is_library_class(type(owner)):
                return attribute_location(type(owner), parts[depth])
        return class_location(type(self._root))
