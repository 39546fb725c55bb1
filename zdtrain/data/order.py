"""The order of an epoch as one tensor, made where the data is."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler, RandomSampler, Sampler, SequentialSampler


def is_vectorised(sampler: object) -> bool:
    """Return whether `epoch_order` knows the order of `sampler` without iterating over it."""
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    return type(sampler) in (SequentialSampler, DistributedSampler)


def epoch_order(sampler: Sampler[int], device: torch.device) -> Iterator[Tensor]:
    r"""Yield the indices that iterating over `sampler` gives, as one int64 tensor of shape (N,) on `device`.

    On the CPU the indices, and the draws from the generators, are the sampler's own. On another device the permutation
    comes from that device's generator, seeded with what the sampler would seed its own with: the same seed gives the
    same order on the same kind of device.

    Args:
        sampler: One that `is_vectorised`.
        device: Where the indices are made.
    """
    if isinstance(sampler, RandomSampler):
        yield from _random(sampler, device)
    elif isinstance(sampler, DistributedSampler):
        yield _distributed(sampler, device)
    elif isinstance(sampler, SequentialSampler):
        yield torch.arange(len(sampler), device=device)


def _random(sampler: RandomSampler, device: torch.device) -> Iterator[Tensor]:
    num_samples = len(sampler.data_source)
    generator = sampler.generator
    if generator is not None and generator.device == device:
        yield torch.randperm(num_samples, generator=generator, device=device)
        # RandomSampler draws once more when it runs out, for a remainder that is empty here; the next epoch's order
        # depends on it.
        torch.randperm(num_samples, generator=generator, device=device)
    else:
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
        yield _permutation(num_samples, seed, device)


def _distributed(sampler: DistributedSampler[int], device: torch.device) -> Tensor:
    num_samples = len(sampler.dataset)  # type: ignore[arg-type] # a DistributedSampler needs a sized dataset
    share = torch.arange(sampler.total_size, device=device)[sampler.rank :: sampler.num_replicas]
    share = share % num_samples  # past the end it starts again, so that each rank has as many
    if not sampler.shuffle:
        return share
    return _permutation(num_samples, sampler.seed + sampler.epoch, device).index_select(0, share)


def _permutation(num_samples: int, seed: int, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randperm(num_samples, generator=generator, device=device)
