"""What an expression holds, as far as the source tells: a small set of bits, and what torch returns.

A kind is an ``int`` of the flags below; 0 means that nothing is known. A tuple of kinds is a tuple whose items are
known, each a kind or again a tuple.
"""

from typing import Union

UNKNOWN = 0
TENSOR = 1  # a torch.Tensor, on the training device unless ON_HOST is set
ON_HOST = 2  # ... that lives in host memory: reading it costs nothing
SCALAR = 4  # ... with no dimension
MASK = 8  # ... of booleans
GRAPH = 16  # ... that an autograd graph hangs on
TENSORS = 32  # a list, tuple, dict or batch that holds tensors
VALUE = 64  # plain Python, NumPy or configuration: never on the device
MODULE = 128  # an nn.Module: calling it gives tensors
OPTIMIZER = 256
SCHEDULER = 512
LOADER = 1024  # iterating it gives batches that are still in host memory
GATE = 2048  # a Python boolean that is true once in an interval
ARRAY = 4096  # a VALUE that is a NumPy array
UNREDUCED = 8192  # a loss asked for with reduction="none"
PINNED = 16384  # a host tensor in pinned memory
SCALER = 32768  # a GradScaler
MAPPING = 131072  # a dict: iterating it gives keys
OUTPUT = 65536  # what a module returned: a tensor or a container of them

Kind = int
Kinds = Union[int, tuple["Kinds", ...]]  # noqa: UP007 -- refers to itself


def is_device_tensor(kind: Kind) -> bool:
    """True for a tensor that is not known to live in host memory."""
    return bool(kind & TENSOR) and not kind & (ON_HOST | VALUE)


def is_device_value(kind: Kind) -> bool:
    """True for a single tensor on the device; False for what may be a container."""
    return is_device_tensor(kind) and not kind & (TENSORS | OUTPUT)


def join(first: Kind, second: Kind) -> Kind:
    """The kind of a name that two branches gave two kinds."""
    if first == second:
        return first
    if first & TENSOR and second & TENSOR:
        return (first & second) | TENSOR | ((first | second) & GRAPH)
    if first & TENSOR and second & VALUE:
        return first
    if first & VALUE and second & TENSOR:
        return second
    return UNKNOWN


# Attributes of a tensor that the host knows without asking the device.
METADATA = frozenset(
    [
        "shape",
        "ndim",
        "dtype",
        "device",
        "requires_grad",
        "is_cuda",
        "layout",
        "is_leaf",
        "grad_fn",
        "itemsize",
        "nbytes",
        "names",
        "is_sparse",
        "is_quantized",
        "is_nested",
        "is_meta",
        "output_nr",
        "_version",
        "retains_grad",
        "__class__",
    ]
)
# Attributes of a tensor that are tensors.
VIEWS = frozenset(["T", "mT", "H", "mH", "data", "real", "imag", "grad"])
# Methods of a tensor that return host values without a host read.
HOST_METHODS = frozenset(
    [
        "size",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "element_size",
        "data_ptr",
        "stride",
        "storage",
        "untyped_storage",
        "storage_offset",
        "get_device",
        "is_contiguous",
        "is_complex",
        "is_floating_point",
        "is_shared",
        "is_pinned",
        "is_signed",
        "is_conj",
        "is_inference",
        "backward",
        "register_hook",
        "retain_grad",
        "register_post_accumulate_grad_hook",
        "has_names",
        "__len__",
    ]
)
# Methods that give a Python or NumPy value by waiting for the device.
READING_METHODS = frozenset(
    [
        "item",
        "tolist",
        "numpy",
        "__array__",
        "__float__",
        "__int__",
        "__bool__",
        "__index__",
        "is_nonzero",
        "equal",
        "allclose",
    ]
)
# Reductions: 0-D when called without a dimension.
REDUCTIONS = frozenset(
    [
        "mean",
        "sum",
        "prod",
        "max",
        "min",
        "norm",
        "std",
        "var",
        "median",
        "mode",
        "argmax",
        "argmin",
        "logsumexp",
        "all",
        "any",
        "amax",
        "amin",
        "nanmean",
        "nansum",
        "count_nonzero",
        "dist",
        "nanmedian",
        "dot",
    ]
)
# Methods that return several tensors, in a tuple.
MULTIPLE = frozenset(
    ["chunk", "split", "unbind", "topk", "sort", "tensor_split", "aminmax", "unique_consecutive", "split_with_sizes"]
)
MASK_METHODS = frozenset(
    [
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "isnan",
        "isinf",
        "isfinite",
        "logical_and",
        "logical_or",
        "logical_not",
        "logical_xor",
        "bool",
        "isclose",
        "isneginf",
        "isposinf",
    ]
)
# torch.<name> that return host values.
HOST_FUNCTIONS = frozenset(
    [
        "is_tensor",
        "is_storage",
        "is_floating_point",
        "is_complex",
        "numel",
        "get_default_dtype",
        "set_default_dtype",
        "is_grad_enabled",
        "device",
        "dtype",
        "finfo",
        "iinfo",
        "manual_seed",
        "seed",
        "initial_seed",
        "get_rng_state",
        "set_rng_state",
        "save",
        "load",
        "compile",
        "no_grad",
        "enable_grad",
        "set_grad_enabled",
        "inference_mode",
        "is_inference_mode_enabled",
        "use_deterministic_algorithms",
        "get_num_threads",
        "Generator",
        "set_num_threads",
        "set_float32_matmul_precision",
        "Size",
        "is_autocast_enabled",
        "autocast",
        "result_type",
        "promote_types",
        "can_cast",
        "set_default_device",
        "get_default_device",
        "is_deterministic_algorithms_enabled",
        "typename",
        "is_nonzero",
        "equal",
        "allclose",
    ]
)
# torch.<module>.* that never give tensors of the step.
HOST_MODULES = (
    "torch.cuda.",
    "torch.backends.",
    "torch.distributed.",
    "torch.accelerator.",
    "torch.utils.",
    "torch.multiprocessing.",
    "torch.version.",
    "torch.hub.",
    "torch.profiler.",
    "torch.jit.",
    "torch.onnx.",
    "torch.autograd.profiler.",
    "torch.mps.",
    "torch.xpu.",
    "torch.npu.",
    "torch.random.",
    "torch.overrides.",
    "torch.compiler.",
    "torch.serialization.",
)
# torch.<name> that make a tensor out of nothing: in host memory unless `device` is given.
COMMON_FACTORIES = frozenset(
    [
        "tensor",
        "zeros",
        "ones",
        "full",
        "rand",
        "randn",
        "randint",
        "randperm",
        "arange",
        "linspace",
        "eye",
        "empty",
    ]
)
FACTORIES = COMMON_FACTORIES | frozenset(
    [
        "logspace",
        "as_tensor",
        "scalar_tensor",
        "normal",
        "hann_window",
        "hamming_window",
        "tril_indices",
        "triu_indices",
    ]
)
LEGACY_FACTORIES = frozenset(
    ["Tensor", "FloatTensor", "LongTensor", "DoubleTensor", "HalfTensor", "IntTensor", "BoolTensor", "ByteTensor"]
)
# Losses are 0-D unless reduction says otherwise.
LOSSES = frozenset(
    [
        "cross_entropy",
        "nll_loss",
        "mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "binary_cross_entropy",
        "kl_div",
        "poisson_nll_loss",
        "binary_cross_entropy_with_logits",
        "cosine_embedding_loss",
        "ctc_loss",
        "gaussian_nll_loss",
        "hinge_embedding_loss",
        "soft_margin_loss",
        "margin_ranking_loss",
        "multi_margin_loss",
        "multilabel_margin_loss",
        "triplet_margin_loss",
    ]
)
