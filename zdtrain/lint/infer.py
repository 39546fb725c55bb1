"""What an expression holds: kinds of names, attributes, operators and calls."""

import ast
import re

from zdtrain.lint import kinds as k
from zdtrain.lint.kinds import Kind, Kinds

_VALUE_NAMES = re.compile(
    r"^(?:args|opts?|cfg|config|conf|hparams|flags|settings|epochs?|(?:global_|train_|num_|max_)*steps?|batch_idx|batch_size|"
    r"idx|i|j|k|n|it|lr|device|dtype|name|path|mode|phase|split|key|rank|world_size|logger|writer|optimizer_idx|"
    r"\w*(?:_idx|_size|_name|_path|_dir|_freq|_interval|_ratio|_rate|_steps|_epochs?|_dim|_type|_mode)|num_\w+|n_\w+|use_\w+|(?:\w+_)?is_\w+|prob|sizes?|shapes?|[HWhw]|height|width)$",
    re.IGNORECASE,
)
_TENSOR_NAMES = re.compile(
    r"^(?:(?:\w+_)?(?:loss|logits?|probs|embeddings?|embeds?|preds?|hidden_states?)|"
    r"predictions?|outputs?|targets?|labels?|images?|imgs?|inputs?|x|y|y_hat|y_pred|y_true|x_hat|z|"
    r"features?|feats?|hidden|tensor|mask|mu|logvar|pred|gold|recon_x)$",
)
_MODULE_NAMES = re.compile(
    r"^(?:\w+_)?(?:model|net|network|criterion|loss_fn|loss_func|loss_function|encoder|decoder|generator|discriminator|"
    r"backbone|head|student|teacher|module|policy|actor|critic|classifier|layers?|proj|projection|embedding|vae|unet|agent|"
    r"compute_loss|task)(?:_\w|\d)?$|^(?:net|G|D|E)_?[A-Z]*$",
)
_LOADER_NAMES = re.compile(r"loader|(?:^|_)dl$", re.IGNORECASE)
TENSOR_ONLY = frozenset(
    [
        "detach",
        "unsqueeze",
        "contiguous",
        "permute",
        "view_as",
        "expand_as",
        "masked_fill",
        "masked_fill_",
        "masked_select",
        "softmax",
        "log_softmax",
        "requires_grad_",
        "clone",
        "index_select",
        "scatter",
        "scatter_",
        "bmm",
        "type_as",
        "cuda",
        "half",
        "new_tensor",
        "new_zeros",
        "new_ones",
        "repeat_interleave",
        "detach_",
        "expand",
        "mul_",
        "add_",
        "sub_",
        "div_",
        "zero_",
        "fill_",
        "clamp",
        "clamp_",
        "sigmoid",
        "relu",
    ]
)
_DEVICE_WORD = re.compile(r"device|cuda|gpu|rank|^dev$", re.IGNORECASE)
WRAPPERS = frozenset(
    [
        "tqdm",
        "trange",
        "track",
        "progress",
        "iter",
        "list",
        "tuple",
        "reversed",
        "sorted",
        "cycle",
        "islice",
        "chain",
        "tqdm_notebook",
    ]
)
HOST_BUILTINS = frozenset(
    [
        "len",
        "int",
        "float",
        "str",
        "bool",
        "isinstance",
        "issubclass",
        "hasattr",
        "range",
        "type",
        "round",
        "repr",
        "id",
        "open",
        "ord",
        "chr",
        "callable",
        "format",
        "hash",
        "input",
        "print",
        "any",
        "all",
        "vars",
        "dir",
        "complex",
        "bytes",
        "divmod",
        "pow",
    ]
)
TENSOR_LIBRARIES = ("torchvision.", "einops.", "kornia.", "torch_scatter.", "opt_einsum.")
_KEPT = k.ON_HOST | k.GRAPH


def parameter_kind(name: str, annotation: str, *, everything: bool) -> Kind:
    """The kind of a parameter by its annotation, else by its name.

    Args:
        name: the parameter.
        annotation: its annotation as written; empty if there is none.
        everything: True where whatever is not named like a value is a tensor, as in ``forward``.
    """
    if annotation:
        if re.search(r"(?:Dict|dict|Mapping)\[.*Tensor", annotation):
            return k.TENSORS | k.MAPPING
        if re.search(r"(?:List|Tuple|Sequence|Iterable|list|tuple)\[.*Tensor", annotation):
            return k.TENSORS
        if re.search(r"\bTensor\b", annotation):
            return k.TENSOR
        if re.search(r"\bModule\b", annotation):
            return k.MODULE
        if re.search(r"DataLoader\b", annotation):
            return k.LOADER
        if re.search(r"Optimizer\b", annotation):
            return k.OPTIMIZER
        if re.search(r"\b(?:int|float|str|bool|ndarray|Path|device|dtype|Namespace|Callable)\b", annotation):
            return k.VALUE
        if not re.search(r"\bAny\b", annotation):
            return k.UNKNOWN
    if name in ("batch", "batches", "losses", "metrics"):
        return k.TENSORS
    if _VALUE_NAMES.match(name):
        return k.VALUE
    if name in ("output", "outputs"):
        return k.TENSOR | k.OUTPUT
    if _TENSOR_NAMES.match(name):
        return k.TENSOR
    if _LOADER_NAMES.search(name):
        return k.LOADER
    if _MODULE_NAMES.match(name):
        return k.MODULE
    if re.search(r"optim(?:izer)?(?:_\w+)?$", name):
        return k.OPTIMIZER
    if re.search(r"sched", name):
        return k.SCHEDULER
    return k.TENSOR if everything else k.UNKNOWN


def names_value(name: str) -> bool:
    """Whether a name is one that plain Python values have: ``batch_size``, ``num_steps``, ``args``."""
    return bool(_VALUE_NAMES.match(name))


def names_module(name: str) -> bool:
    """Whether a name is one that modules and losses have: ``model``, ``criterion``, ``netG``."""
    return bool(_MODULE_NAMES.match(name))


def free_name_kind(name: str) -> Kind:
    """The kind of a name that nothing in sight defines."""
    if _LOADER_NAMES.search(name):
        return k.LOADER
    if _MODULE_NAMES.match(name):
        return k.MODULE
    if _VALUE_NAMES.match(name):
        return k.VALUE
    return k.UNKNOWN


def element(kind: Kinds) -> Kind:
    """The kind of an item of a container or of a tensor."""
    if isinstance(kind, tuple):
        return element(flat(kind))
    if kind & k.LOADER:
        return k.TENSORS | k.ON_HOST
    if kind & k.MAPPING and kind & k.TENSORS:
        return k.TENSOR | (kind & _KEPT)
    if kind & (k.TENSORS | k.OUTPUT):
        return k.TENSOR | (kind & (_KEPT | k.OUTPUT))
    if kind & k.TENSOR:
        return k.TENSOR | (kind & (_KEPT | k.MASK))
    if kind & k.VALUE:
        return k.VALUE
    return k.UNKNOWN


def flat(kind: Kinds) -> Kind:
    """A tuple's kind as one: TENSORS if any item is one."""
    if not isinstance(kind, tuple):
        return kind
    return container(kind)


def container(items: "tuple[Kind, ...] | list[Kind]") -> Kind:
    """The kind of a list, tuple or dict display."""
    tensors = [item for item in items if item & (k.TENSOR | k.TENSORS | k.OUTPUT)]
    if tensors:
        on_host = k.ON_HOST if all(item & k.ON_HOST for item in tensors) else 0
        graph = k.GRAPH if any(item & k.GRAPH for item in tensors) else 0
        scalar = k.SCALAR if len(tensors) == len(items) and all(item & k.SCALAR for item in tensors) else 0
        return k.TENSORS | on_host | graph | scalar
    if any(item & k.MODULE for item in items):
        return k.UNKNOWN
    return k.VALUE if all(item & k.VALUE for item in items) else k.UNKNOWN


def _stays_on_host(one: Kind, other: Kind) -> bool:
    """A host tensor meets a number, another one, or something unknown, which then can't be a device tensor."""
    return bool(one & k.ON_HOST and (other & (k.ON_HOST | k.VALUE) or not (one & k.SCALAR or other & k.TENSOR)))


def binary(left: Kind, right: Kind) -> Kind:
    """The kind of ``left + right``."""
    if (left | right) & k.TENSOR:
        both = left | right
        on_host = k.ON_HOST if _stays_on_host(left, right) or _stays_on_host(right, left) else 0
        scalar = k.SCALAR if all(side & (k.SCALAR | k.VALUE) and not side & k.ARRAY for side in (left, right)) else 0
        return k.TENSOR | (both & k.GRAPH) | on_host | scalar | (k.MASK if left & right & k.MASK else 0)
    if left & k.TENSORS or right & k.TENSORS:
        return k.TENSORS | ((left | right) & _KEPT)
    if left & k.VALUE and right & k.VALUE:
        return k.VALUE | ((left | right) & k.ARRAY)
    return k.UNKNOWN


def attribute_kind(owner: Kind, name: str) -> Kind:
    """The kind of ``owner.name``."""
    if name in k.METADATA and (owner & k.TENSOR or name in ("shape", "ndim", "dtype", "device", "requires_grad")):
        return k.VALUE
    if name in k.VIEWS and owner & k.TENSOR:
        return (
            k.TENSOR | (owner & (_KEPT | k.SCALAR)) if name not in ("data", "grad") else k.TENSOR | (owner & k.ON_HOST)
        )
    if owner & k.VALUE:
        return k.VALUE
    if owner & k.OPTIMIZER:
        return k.VALUE
    if owner & k.MODULE:
        if name in ("weight", "bias"):
            return k.TENSOR
        return k.MODULE if name == "module" else k.UNKNOWN
    if name == "hparams" or name == "param_groups":
        return k.VALUE
    if owner & (k.OUTPUT | k.TENSORS) and name in ("loss", "logits", "last_hidden_state"):
        return k.TENSOR | k.GRAPH
    if name == "grad":
        return k.TENSOR
    return k.UNKNOWN


def names_device(node: ast.expr) -> bool:
    """Whether an argument of ``.to(…)`` is a device: ``device``, ``"cuda:0"``, ``self.device``, ``rank``."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int) or (isinstance(node.value, str) and node.value != "cpu")
    if isinstance(node, ast.Attribute):
        return bool(_DEVICE_WORD.search(node.attr))
    if isinstance(node, ast.Name):
        return bool(_DEVICE_WORD.search(node.id))
    if isinstance(node, ast.Call):
        return names_device(node.func) and not names_cpu(node)
    return isinstance(node, ast.JoinedStr)


def names_cpu(node: ast.expr) -> bool:
    """Whether an argument is the host: ``"cpu"`` or ``torch.device("cpu")``."""
    if isinstance(node, ast.Call) and node.args:
        return names_cpu(node.args[0])
    return isinstance(node, ast.Constant) and node.value == "cpu"


def keyword(node: ast.Call, name: str) -> ast.expr | None:
    """The value of a keyword argument."""
    for item in node.keywords:
        if item.arg == name:
            return item.value
    return None


def is_constant(node: ast.expr | None, value: object) -> bool:
    """Whether an expression is the literal `value`."""
    return isinstance(node, ast.Constant) and node.value is value


def _place(kind: Kind, node: ast.Call) -> Kind:
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
        return _place(kind, node)
    if name == "cuda" or (name == "type" and node.args and isinstance(node.args[0], ast.Name)):
        return kind & ~(k.ON_HOST | k.PINNED)
    if name == "pin_memory":
        return kind | k.PINNED
    if name in ("detach", "detach_"):
        return kind & ~k.GRAPH
    if name in k.MULTIPLE:
        return k.TENSORS | (kind & _KEPT)
    if name in k.REDUCTIONS:
        return reduction(kind, name, node.args, node.keywords)
    if name in k.MASK_METHODS:
        return k.TENSOR | k.MASK | (kind & (k.ON_HOST | k.SCALAR))
    if name in ("view", "reshape", "flatten", "squeeze", "unsqueeze", "expand", "repeat"):
        return k.TENSOR | (kind & (_KEPT | k.MASK))
    if name in ("values", "items", "keys") and kind & (k.OUTPUT | k.TENSORS):
        return k.TENSORS | (kind & _KEPT)
    return kind & ~k.MASK if kind & k.TENSOR else k.TENSOR | (kind & _KEPT)


def reduction(kind: Kind, name: str, args: list[ast.expr], keywords: list[ast.keyword]) -> Kinds:
    """The kind of a reduction: 0-D without a dimension, a pair for ``max(dim)`` and its like."""
    has_dim = bool(args) or any(item.arg in ("dim", "axis") for item in keywords)
    if not has_dim:
        return k.TENSOR | k.SCALAR | (kind & _KEPT) | (k.MASK if name in ("all", "any") else 0)
    if name in ("max", "min", "median", "mode", "nanmedian"):
        one = k.TENSOR | (kind & _KEPT)
        return (one, one)
    return k.TENSOR | (kind & _KEPT) | (k.MASK if name in ("all", "any") else 0)


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
    if last in k.HOST_FUNCTIONS or last.startswith(("is_", "get_", "set_")):
        return k.VALUE
    if last in k.FACTORIES:
        return _factory(last, node, first)
    if last == "from_numpy":
        return k.TENSOR | k.ON_HOST
    if arguments and all(argument & k.VALUE for argument in arguments):
        return k.TENSOR | k.ON_HOST  # arithmetic on numbers stays in host memory
    merged = k.TENSOR | (first & (_KEPT | k.SCALAR)) if first & k.TENSOR else k.TENSOR
    if last in ("stack", "cat", "concat", "einsum", "vstack", "hstack"):
        return k.TENSOR | (first & _KEPT)
    if last in k.REDUCTIONS and node.args:
        if len(arguments) > 1 and arguments[1] & k.TENSOR:
            return k.TENSOR | (first & _KEPT)
        return reduction(first, last, node.args[1:], node.keywords)
    if last in k.MULTIPLE:
        return k.TENSORS | (first & _KEPT)
    if last in k.MASK_METHODS:
        return k.TENSOR | k.MASK | (first & (k.ON_HOST | k.SCALAR))
    if last in ("meshgrid", "broadcast_tensors", "nonzero_static", "svd", "eigh"):
        return k.TENSORS
    return merged


def _functional(last: str, node: ast.Call, first: Kind) -> Kind:
    graph = first & _KEPT
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
