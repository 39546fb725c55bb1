"""What torch returns: kinds of method calls on tensors and of ``torch.…`` functions."""

import ast
import re

from zdtrain.lint import kinds as k
from zdtrain.lint.infer import KEPT, keyword, names_cpu, names_device
from zdtrain.lint.kinds import Kind, Kinds

_HOST_NAME = re.compile(r"^_?(?:is|has|get|set|can)_|_(?:enabled|available|supported|initialized)$")


def place(kind: Kind, node: ast.Call) -> Kind:
    """Where ``.to(…)`` leaves a tensor."""
    arguments = [*node.args, *([device] if (device := keyword(node, "device")) else [])]
    if any(names_cpu(argument) for argument in arguments):
        return kind | k.ON_HOST
    if any(
        names_device(argument) or (isinstance(argument, ast.Attribute) and argument.attr == "device")
        for argument in arguments
    ):
        return kind & ~(k.ON_HOST | k.PINNED)
    return kind


def tensor_method(kind: Kind, name: str, node: ast.Call) -> Kinds:
    """The kind of ``tensor.name(…)``."""
    if name in k.READING_METHODS:
        return k.VALUE | (k.ARRAY if name == "numpy" else 0)
    if name in k.HOST_METHODS or (name == "type" and not node.args and not node.keywords):
        return k.VALUE
    if name == "cpu":
        return kind & ~k.GRAPH | k.ON_HOST
    if name == "to":
        return place(kind, node)
    if name == "cuda" or (name == "type" and node.args and isinstance(node.args[0], ast.Name)):
        return kind & ~(k.ON_HOST | k.PINNED)
    if name == "pin_memory":
        return kind | k.PINNED
    if name in ("detach", "detach_"):
        return kind & ~k.GRAPH
    if name in k.MULTIPLE:
        return k.TENSORS | (kind & KEPT)
    if name in k.REDUCTIONS:
        return reduction(kind, name, node.args, node.keywords)
    if name in k.MASK_METHODS:
        return k.TENSOR | k.MASK | (kind & (k.ON_HOST | k.SCALAR))
    if name in ("view", "reshape", "flatten", "squeeze", "unsqueeze", "expand", "repeat"):
        return k.TENSOR | (kind & (KEPT | k.MASK))
    if name in ("values", "items", "keys") and kind & (k.OUTPUT | k.TENSORS):
        return k.TENSORS | (kind & KEPT)
    return kind & ~k.MASK if kind & k.TENSOR else k.TENSOR | (kind & KEPT)


def reduction(kind: Kind, name: str, args: list[ast.expr], keywords: list[ast.keyword]) -> Kinds:
    """The kind of a reduction: 0-D without a dimension, a pair for ``max(dim)`` and its like."""
    has_dim = bool(args) or any(item.arg in ("dim", "axis") for item in keywords)
    if not has_dim:
        return k.TENSOR | k.SCALAR | (kind & KEPT) | (k.MASK if name in ("all", "any") else 0)
    if name in ("max", "min", "median", "mode", "nanmedian"):
        one = k.TENSOR | (kind & KEPT)
        return (one, one)
    return k.TENSOR | (kind & KEPT) | (k.MASK if name in ("all", "any") else 0)


def torch_function(name: str, node: ast.Call, arguments: list[Kind]) -> Kinds:
    """The kind of ``torch.…(…)`` by its dotted name."""
    last = name.rpartition(".")[2]
    if last in k.LEGACY_FACTORIES:
        return k.TENSOR if name.startswith("torch.cuda.") else k.TENSOR | k.ON_HOST
    if name.startswith("torch.utils.data.") and last.endswith("DataLoader"):
        return k.LOADER
    if last == "GradScaler":
        return k.SCALER
    if name.startswith("torch.optim."):
        return k.SCHEDULER if "lr_scheduler" in name else k.OPTIMIZER
    if name.startswith(k.HOST_MODULES):
        return k.TENSOR | k.GRAPH if "checkpoint" in name else k.VALUE
    first = arguments[0] if arguments else k.UNKNOWN
    if name.startswith("torch.nn.functional."):
        return _functional(last, node, first)
    if name.startswith("torch.nn."):
        return _nn(name, last)
    if name == "torch.autograd.grad":
        return k.TENSORS
    if last in k.HOST_FUNCTIONS or _HOST_NAME.search(last):
        return k.VALUE
    if name.startswith("torch._") and not name.startswith("torch._foreach_"):
        return k.UNKNOWN  # private: anything
    if last in k.FACTORIES:
        return _factory(last, node, first)
    if last == "from_numpy":
        return k.TENSOR | k.ON_HOST
    if arguments and all(argument & k.VALUE for argument in arguments):
        return k.TENSOR | k.ON_HOST  # arithmetic on numbers stays in host memory
    merged = k.TENSOR | (first & (KEPT | k.SCALAR)) if first & k.TENSOR else k.TENSOR
    if last in ("stack", "cat", "concat", "einsum", "vstack", "hstack"):
        return k.TENSOR | (first & KEPT)
    if last in k.REDUCTIONS and node.args:
        if len(arguments) > 1 and arguments[1] & k.TENSOR:
            return k.TENSOR | (first & KEPT)
        return reduction(first, last, node.args[1:], node.keywords)
    if last in k.MULTIPLE:
        return k.TENSORS | (first & KEPT)
    if last in k.MASK_METHODS:
        return k.TENSOR | k.MASK | (first & (k.ON_HOST | k.SCALAR))
    if last in ("meshgrid", "broadcast_tensors", "nonzero_static", "svd", "eigh"):
        return k.TENSORS
    return merged


def _functional(last: str, node: ast.Call, first: Kind) -> Kind:
    graph = first & KEPT
    if last in k.LOSSES:
        way = keyword(node, "reduction")
        if isinstance(way, ast.Constant) and way.value == "none":
            return k.TENSOR | k.UNREDUCED | graph
        return k.TENSOR | k.SCALAR | graph
    return k.TENSOR | graph


def _nn(name: str, last: str) -> Kind:
    if last in ("Parameter", "Buffer"):
        return k.TENSOR | k.GRAPH if last == "Parameter" else k.TENSOR
    if name.startswith("torch.nn.init."):
        return k.VALUE
    if last.startswith(("clip_grad", "get_total_norm")):
        return k.TENSOR | k.SCALAR
    if name.startswith("torch.nn.utils."):
        return k.UNKNOWN
    return k.MODULE if last[:1].isupper() else k.UNKNOWN


def _factory(last: str, node: ast.Call, first: Kind) -> Kind:
    device = keyword(node, "device")
    place = 0 if device is not None and not names_cpu(device) else k.ON_HOST
    scalar = 0
    if last in ("tensor", "as_tensor", "scalar_tensor") and node.args:
        if last == "as_tensor" and first & k.TENSOR:
            return first & ~k.ON_HOST if place == 0 else first
        scalar = k.SCALAR if is_number(node.args[0]) else 0
    elif last in ("zeros", "ones", "full", "empty") and node.args:
        shape = node.args[0]
        scalar = k.SCALAR if isinstance(shape, ast.Tuple | ast.List) and not shape.elts else 0
    return k.TENSOR | place | scalar


def is_number(node: ast.expr) -> bool:
    """Whether an expression is a number as written: ``1``, ``-0.5``, ``True``, ``float("inf")``, ``1 / 3``."""
    if isinstance(node, ast.UnaryOp):
        return is_number(node.operand)
    if isinstance(node, ast.BinOp):
        return is_number(node.left) and is_number(node.right)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in ("float", "int")
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)
