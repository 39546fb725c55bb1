"""What an expression holds: kinds of names, attributes, operators and calls."""

import ast
import re
from functools import lru_cache

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
KEPT = k.ON_HOST | k.GRAPH


@lru_cache(4096)
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


@lru_cache(4096)
def names_value(name: str) -> bool:
    """Whether a name is one that plain Python values have: ``batch_size``, ``num_steps``, ``args``."""
    return bool(_VALUE_NAMES.match(name))


@lru_cache(4096)
def names_module(name: str) -> bool:
    """Whether a name is one that modules and losses have: ``model``, ``criterion``, ``netG``."""
    return bool(_MODULE_NAMES.match(name))


@lru_cache(4096)
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
        return k.TENSOR | (kind & KEPT)
    if kind & (k.TENSORS | k.OUTPUT):
        return k.TENSOR | (kind & (KEPT | k.OUTPUT))
    if kind & k.TENSOR:
        return k.TENSOR | (kind & (KEPT | k.MASK))
    if kind & k.VALUE:
        return k.VALUE
    return k.UNKNOWN


def flat(kind: Kinds) -> Kind:
    """A tuple's kind as one: TENSORS if any item is one."""
    if not isinstance(kind, tuple):
        return kind
    return container([flat(item) for item in kind])


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
        return k.TENSORS | ((left | right) & KEPT)
    if left & k.VALUE and right & k.VALUE:
        return k.VALUE | ((left | right) & k.ARRAY)
    return k.UNKNOWN


def attribute_kind(owner: Kind, name: str) -> Kind:
    """The kind of ``owner.name``."""
    if name in k.METADATA and (owner & k.TENSOR or name in ("shape", "ndim", "dtype", "device", "requires_grad")):
        return k.VALUE
    if name in k.VIEWS and owner & k.TENSOR:
        return (
            k.TENSOR | (owner & (KEPT | k.SCALAR)) if name not in ("data", "grad") else k.TENSOR | (owner & k.ON_HOST)
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
