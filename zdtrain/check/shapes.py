"""The table of every intermediate tensor of a step."""

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from zdtrain.check.trace import Operation

_HEADER = ("operation", "shape", "dtype", "device", "module", "pass", "line")


class ModulePath:
    """Knows which submodule's forward is running; a context manager, and a function that returns the dotted path."""

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._names: dict[int, str] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> "ModulePath":
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        return self

    def __exit__(self, *exc_info: object) -> None:
        for handle in self._handles:
            handle.remove()

    def __call__(self) -> str:
        """The dotted path of the innermost module whose forward runs."""
        return self._stack[-1] if self._stack else ""

    def name_modules(self, root: nn.Module) -> None:
        """Learn the dotted names of the submodules of `root`."""
        self._names = {id(module): name for name, module in root.named_modules()}

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        self._stack.append(self._names.get(id(module), type(module).__name__))

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._stack.pop()


def _rows(operations: tuple[Operation, ...]) -> Iterator[tuple[str, ...]]:
    for operation in operations:
        context = operation.context
        place = context.location
        line = f"{place.file.rpartition('/')[2]}:{place.line}" if place.is_user else ""
        direction = "backward" if context.in_backward else context.hook
        for info in operation.results:
            shape = "×".join(map(str, info.shape)) or "scalar"
            name = operation.name.removeprefix("aten.").removesuffix(".default")
            yield name, shape, info.dtype_name, info.device, context.module, direction, line


def shapes_table(operations: tuple[Operation, ...]) -> str:
    """A text table with one line for each tensor that an operation of the step returned."""
    rows = [_HEADER, *_rows(operations)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
