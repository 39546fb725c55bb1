"""Saved state: to try a program and take it back, and to compare what it did with what an eager step does."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zdtrain.device.base import Runtime

# For programs that reorder arithmetic; eager and recorded steps are compared bit for bit.
TOLERANCES: dict[torch.dtype, tuple[float, float]] = {  # relative, absolute
    torch.float64: (1e-7, 1e-9),
    torch.float32: (1e-3, 1e-5),
    torch.bfloat16: (3e-2, 1e-3),
    torch.float16: (1e-2, 1e-3),
}

Named = Mapping[str, Tensor | None]


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """The first thing in which a program and an eager step differ."""

    name: str
    """What differs, e.g. ``"gradient of layer.weight"``."""
    how: str
    """By how much."""

    def __str__(self) -> str:
        return f"{self.name} {self.how}"


class Saved:
    """A copy of tensors and of the random generators.

    Args:
        tensors: What a step may write to, by name; None where there is nothing.
        runtime: Knows the generators.
    """

    @torch.no_grad()
    def __init__(self, tensors: Named, runtime: Runtime) -> None:
        self._runtime = runtime
        self._live = tensors
        self.copies: dict[str, Tensor | None] = {
            name: None if tensor is None else tensor.detach().clone() for name, tensor in tensors.items()
        }
        self.rng = runtime.rng_state()

    @torch.no_grad()
    def restore(self) -> None:
        """Write the copies back in place."""
        for name, copy in self.copies.items():
            live = self._live[name]
            if live is not None and copy is not None and not _repeats(live):
                live.copy_(copy)
        self._runtime.restore_rng(self.rng)

    def forget(self) -> None:
        """Let go of the copies: memory is short."""
        self.copies.clear()


def _repeats(tensor: Tensor) -> bool:
    """Return whether elements share memory, as those of an expanded tensor do: no operation writes to such a one."""
    if tensor.layout is not torch.strided:
        return False
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def compared(*comparisons: Callable[[], Mismatch | None]) -> Mismatch | None:
    """Return the first mismatch that a comparison finds; one that fails, for want of memory, counts as one."""
    try:
        return next((found for compare in comparisons if (found := compare()) is not None), None)
    except Exception as error:
        return Mismatch(name="comparing them", how=f"failed with {type(error).__name__}: {error}")


def first_mismatch(expected: Named, got: Named, *, exact: bool) -> Mismatch | None:
    """Return the first entry in which `got` differs from `expected`, None if there is none.

    Args:
        expected: What the eager step left.
        got: What the program left, under the same names.
        exact: Compare bit for bit (NaN equals NaN); otherwise within `TOLERANCES`, where a float64 value counts as
            float32 if most of the step's numbers are that or narrower: it was widened, not computed.
    """
    narrow = _is_narrow(expected)
    for name, want in expected.items():
        have = got.get(name)
        if want is None and have is None:
            continue
        if want is None or have is None:
            return Mismatch(name=name, how=f"is {'missing' if have is None else 'extra'} in the program")
        if want.shape != have.shape or want.dtype != have.dtype:
            return Mismatch(
                name=name,
                how=f"is {tuple(have.shape)} {have.dtype} in the program and {tuple(want.shape)} {want.dtype} eagerly",
            )
        tolerance = None if exact else _tolerance(want.dtype, narrow)
        if not _agree(want.detach(), have.detach(), tolerance):
            return Mismatch(name=name, how=_distance(want.detach(), have.detach()))
    return None


def rng_mismatch(expected: Sequence[Tensor], got: Sequence[Tensor]) -> Mismatch | None:
    """Return whether two steps drew different amounts of randomness."""
    if all(torch.equal(a, b) for a, b in zip(expected, got, strict=True)):
        return None
    return Mismatch(name="the random generator", how="is in another state")


def _is_narrow(tensors: Named) -> bool:
    floats = [tensor for tensor in tensors.values() if tensor is not None and tensor.is_floating_point()]
    wide = sum(tensor.numel() for tensor in floats if tensor.dtype == torch.float64)
    return 2 * wide < sum(tensor.numel() for tensor in floats)


def _tolerance(dtype: torch.dtype, narrow: bool) -> tuple[float, float]:
    return TOLERANCES.get(torch.float32 if narrow and dtype == torch.float64 else dtype, (0.0, 0.0))


def _agree(want: Tensor, have: Tensor, tolerance: tuple[float, float] | None) -> bool:
    if torch.equal(want, have):
        return True
    if not want.is_floating_point():
        return False
    if tolerance is None:
        return bool(((want == have) | (want.isnan() & have.isnan())).all())
    relative, absolute = tolerance
    return torch.allclose(have, want, rtol=relative, atol=absolute, equal_nan=True)


def _distance(want: Tensor, have: Tensor) -> str:
    if want.dtype == torch.bool:
        return f"differs in {int((want != have).sum())} of {want.numel()} elements"
    apart = (want.double() - have.double()).abs()
    gap: Any = apart[~(want.isnan() & have.isnan())].max().item()
    return f"differs by up to {gap:.3g}"
