"""What is known about single operations: which wait for the device inside, which read only on the CPU."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

aten = torch.ops.aten

WAITS_INSIDE: dict[str, str] = {
    "aten.multinomial.default": "checks the probabilities on the host",
    "aten.normal.Tensor_Tensor": "checks std >= 0 on the host",
    "aten.linalg_lstsq.default": "checks the solver's status on the host",
    "aten._linalg_eigh.default": "checks the solver's status on the host",
    "aten._linalg_svd.default": "checks the solver's status on the host",
    "aten.linalg_eig.default": "runs on the host",
    "aten._linalg_check_errors.default": "checks the solver's status on the host",
    "aten.embedding_renorm_.default": "finds the unique indices, whose number the host reads",
    "aten.unique_dim.default": "sizes its result on the host",
    "aten._ctc_loss.Tensor": "copies the lengths to the host",
}
"""CUDA kernels or their host wrappers that block although no read is visible above them."""

READ_INDEX = frozenset({aten.index.Tensor, aten._unsafe_index.Tensor})
WRITE_INDEX = frozenset(
    {
        aten.index_put_.default,
        aten.index_put.default,
        aten._index_put_impl_.default,
        aten._unsafe_index_put.default,
    }
)

TAKES_HOST_TENSORS = frozenset(
    {
        aten._pack_padded_sequence.default,
        aten._ctc_loss.Tensor,
        aten.tensor_split.tensor_indices_or_sections,
    }
)
"""Operations that want some of their arguments on the host, by design."""

BOOKKEEPING_NAMESPACES = frozenset({"profiler", "prim"})


def _has_num_classes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    given: int = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
    return given > 0


def _always(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return True


READS_ON_CPU_ONLY: dict[Callable[..., Any], Callable[[tuple[Any, ...], dict[str, Any]], bool]] = {
    torch.nn.functional.one_hot: _has_num_classes,
    torch.quantile: _always,
    torch.nanquantile: _always,
}
"""Functions whose CPU path reads values that the CUDA path does not, and when that is so."""


class KernelInfo(NamedTuple):
    """What the schema of an operation says; asking torch for tags costs more than most CPU kernels."""

    name: str
    is_bookkeeping: bool
    has_dynamic_shape: bool
    depends_on_data: bool
    draws_random: bool


@functools.cache
def kernel_info(func: Any) -> KernelInfo:
    """The facts about an operation."""
    tags = func.tags
    return KernelInfo(
        name=str(func),
        is_bookkeeping=func.namespace in BOOKKEEPING_NAMESPACES,
        has_dynamic_shape=torch.Tag.dynamic_output_shape in tags,
        depends_on_data=torch.Tag.data_dependent_output in tags,
        draws_random=torch.Tag.nondeterministic_seeded in tags,
    )


def uses_mask(index: list[torch.Tensor | None]) -> bool:
    """Whether an index contains a boolean mask, whose count the host has to know."""
    return any(part is not None and part.dtype in (torch.bool, torch.uint8) for part in index)


def is_scalar_put(func: Any, args: tuple[Any, ...]) -> bool:
    """``x[mask] = number``: CUDA fills in place without counting the mask."""
    accumulate = len(args) > 3 and bool(args[3])
    return func in WRITE_INDEX and args[2].numel() == 1 and not accumulate


def sizes_on_host(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operation reads values to size or to make its result."""
    if func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is not None:
        return False
    info = kernel_info(func)
    return info.has_dynamic_shape or info.depends_on_data
