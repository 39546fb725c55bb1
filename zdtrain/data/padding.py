"""Collation of samples that differ in length."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from zdtrain.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PadCollate:
    """A ``collate_fn`` that pads sequences along their first dimension and collates the rest as usual.

    Samples are tensors, tuples or dicts. With `boundaries`, a batch takes one of ``len(boundaries)`` padded lengths, so
    that few shapes occur and each can be captured once.

    Raises:
        ConfigError: An option cannot be used, or a sequence is longer than the last boundary.

    Example:
        >>> samples = [{"ids": torch.tensor([1, 2, 3]), "y": 0}, {"ids": torch.tensor([4]), "y": 1}]
        >>> PadCollate(pad={"ids": 0}, boundaries=(4, 8))(samples)
        {'ids': tensor([[1, 2, 3, 0],
                [4, 0, 0, 0]]), 'y': tensor([0, 1]), 'ids_lengths': tensor([3, 1])}
    """

    pad: float | Mapping[Any, float] = 0
    """What to fill with: a number where samples are tensors, else ``{key or position: number}`` of the fields."""
    boundaries: Sequence[int] = ()
    """Padded lengths to choose from, ascending; empty pads to the longest sequence of the batch."""
    add_lengths: bool = True
    """Add the true lengths, int64 of shape (B,): as ``"<key>_lengths"`` in a dict, at the end of a tuple."""

    def __post_init__(self) -> None:
        check_boundaries(self.boundaries)
        if isinstance(self.pad, Mapping) and not self.pad:
            raise ConfigError("pad={} names no field to pad; use torch's default collation instead")

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Return the batch: padded fields have shape (B, L, ...)."""
        first = samples[0]
        if isinstance(first, Tensor):
            return self._tensors(samples)
        if isinstance(first, Mapping):
            return self._mappings(samples)
        if isinstance(first, tuple | list):
            return self._tuples(samples)
        raise ConfigError(f"PadCollate takes samples that are tensors, tuples or dicts, got {type(first).__name__}")

    def _tensors(self, samples: Sequence[Tensor]) -> Any:
        if isinstance(self.pad, Mapping):
            raise ConfigError(f"pad={self.pad!r} names fields, but the samples are tensors; give one number")
        padded, lengths = self._padded(samples, self.pad)
        return (padded, lengths) if self.add_lengths else padded

    def _mappings(self, samples: Sequence[Mapping[Any, Any]]) -> dict[Any, Any]:
        fields = self._fields_of(samples[0].keys())
        batch: dict[Any, Any] = {}
        added: dict[str, Tensor] = {}
        for key in samples[0]:
            column = [sample[key] for sample in samples]
            if key in fields:
                batch[key], added[f"{key}_lengths"] = self._padded(column, fields[key])
            else:
                batch[key] = default_collate(column)
        return batch | added if self.add_lengths else batch

    def _tuples(self, samples: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
        fields = self._fields_of(range(len(samples[0])))
        batch: list[Any] = []
        added: list[Tensor] = []
        for position in range(len(samples[0])):
            column = [sample[position] for sample in samples]
            if position in fields:
                padded, lengths = self._padded(column, fields[position])
                batch.append(padded)
                added.append(lengths)
            else:
                batch.append(default_collate(column))
        return (*batch, *added) if self.add_lengths else tuple(batch)

    def _fields_of(self, present: Any) -> Mapping[Any, float]:
        if not isinstance(self.pad, Mapping):
            raise ConfigError(
                f"pad={self.pad!r} does not say which fields to pad; "
                f"give pad={{field: {self.pad!r}}}, with fields of {list(present)}"
            )
        missing = [name for name in self.pad if name not in present]
        if missing:
            raise ConfigError(f"pad names {missing[0]!r}, but the samples have {list(present)}")
        return self.pad

    def _padded(self, column: Sequence[Any], value: float) -> tuple[Tensor, Tensor]:
        sequences = [torch.as_tensor(sequence) for sequence in column]
        lengths = [len(sequence) for sequence in sequences]
        length = padded_length(max(lengths), self.boundaries)
        batch = sequences[0].new_full((len(sequences), length, *sequences[0].shape[1:]), value)
        for row, sequence in zip(batch, sequences, strict=True):
            row[: len(sequence)] = sequence
        return batch, torch.tensor(lengths)


def padded_length(length: int, boundaries: Sequence[int]) -> int:
    """Return the smallest boundary that is at least `length`; `length` itself where there are no boundaries.

    Raises:
        ConfigError: `length` is above the last boundary.
    """
    if not boundaries:
        return length
    position = bisect_left(boundaries, length)
    if position == len(boundaries):
        raise ConfigError(
            f"a sequence has length {length}, but the last of boundaries is {boundaries[-1]}; "
            "truncate the sequence or add a boundary"
        )
    return boundaries[position]


def check_boundaries(boundaries: Sequence[int]) -> None:
    """Refuse boundaries that are not positive and ascending.

    Raises:
        ConfigError: They are not.
    """
    if any(low >= high for low, high in zip((0, *boundaries), boundaries, strict=False)):
        raise ConfigError(f"boundaries={tuple(boundaries)} must be positive and ascending, each once")
