"""Batches of samples with similar lengths, so that little is padded and few padded shapes occur."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import BatchSampler, DistributedSampler, Sampler, SequentialSampler

from zdtrain.data.padding import check_boundaries, padded_length
from zdtrain.errors import ConfigError


def bucket_boundaries(
    lengths: Sequence[int] | Tensor,
    *,
    max_padding: float = 0.07,
    num_buckets: int | None = None,
    multiple_of: int = 8,
) -> tuple[int, ...]:
    r"""Return the padded lengths that waste least when each sample is padded to the next of them.

    Minimises :math:`\sum_i \min\{b \in B : b \ge n_i\}` over all sets :math:`B` of :math:`K` multiples of
    `multiple_of`, exactly, by dynamic programming over the rounded lengths. :math:`K` is `num_buckets`, or the smallest
    number that keeps the padding within `max_padding`; each boundary is one more shape to capture or compile.

    Args:
        lengths: Length of each sample, shape (N,).
        max_padding: Part of the padded samples that may be padding, in (0, 1). Batches that take the rest of one bucket
            and the start of the next add to it; `BucketBatchSampler.padding_fraction` counts those too.
        num_buckets: How many boundaries to return instead, whatever the padding; fewer where fewer lengths occur.
        multiple_of: Divides each padded length; 8 suits tensor cores. It sets how little padding is possible.

    Returns:
        The boundaries, ascending; the last is at least the longest sample.

    Raises:
        ConfigError: An option cannot be used.

    Example:
        >>> bucket_boundaries([3, 4, 4, 15, 16, 90], num_buckets=3, multiple_of=1)
        (4, 16, 90)
    """
    for name, value in (("num_buckets", num_buckets), ("multiple_of", multiple_of)):
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value} must be at least 1")
    if not 0 < max_padding < 1:
        raise ConfigError(f"max_padding={max_padding} must be between 0 and 1")
    lengths = _as_lengths(lengths)
    rounded = (lengths + multiple_of - 1) // multiple_of * multiple_of
    sizes, counts = rounded.clamp(min=multiple_of).unique(return_counts=True)
    below = torch.cat([counts.new_zeros(1), counts.cumsum(0)])  # below[i]: samples shorter than sizes[i]
    most_buckets = min(num_buckets or len(sizes), len(sizes))
    enough = 0.0 if num_buckets else int(lengths.sum()) / (1 - max_padding)
    totals = torch.cat([sizes.new_zeros(1), sizes * below[1:]])  # totals[j]: padded samples below j in one bucket
    starts = [[0] * len(totals)]  # starts[k][j]: where the last of k + 1 buckets over the sizes below j starts
    while len(starts) < most_buckets and int(totals[-1]) > enough:
        totals, last_starts = _with_one_more_bucket(totals, sizes, below)
        starts.append(last_starts)
    boundaries, end = [], len(sizes)
    for last_starts in reversed(starts):
        boundaries.append(int(sizes[end - 1]))
        end = last_starts[end]
    return tuple(reversed(boundaries))


def _with_one_more_bucket(totals: Tensor, sizes: Tensor, below: Tensor) -> tuple[Tensor, list[int]]:
    """Return the least padded total of the sizes below each j, and where the last bucket of that solution starts."""
    best = [totals[0]]
    starts = [0]
    for end in range(1, len(totals)):
        total, start = (totals[:end] + sizes[end - 1] * (below[end] - below[:end])).min(0)
        best.append(total)
        starts.append(int(start))
    return torch.stack(best), starts


class BucketBatchSampler(BatchSampler):
    """A batch sampler that puts samples of similar length together; pass it to a loader as ``batch_sampler``.

    Each epoch the samples are shuffled, ordered by bucket, cut into batches, and the batches are shuffled. What is left
    of a bucket joins the next longer one, so there is one short batch per epoch at most (none with `drop_last`). The
    order depends on the seed and the epoch only; Lightning sets the epoch, a plain loop calls `set_epoch`.

    Under DDP each process gets the same number of batches, cut from the same buckets: what remains is filled up with
    samples that occur twice, or dropped. Made inside a ``*_dataloader`` hook, the sampler gets its share from
    Lightning; made elsewhere, set ``Trainer(use_distributed_sampler=False)`` and it takes its share from
    ``torch.distributed``.

    Args:
        lengths: Length of each sample, shape (N,).
        batch_size: Samples per batch and process.
        boundaries: Padded lengths, ascending, the same as for `PadCollate`; `bucket_boundaries(lengths)` if not given.
        drop_last: Leave out as many samples, new ones each epoch, as do not fill a batch on each process.
        shuffle: A new order each epoch.
        seed: Of the order.
        sampler: Where rank, number of processes, seed, epoch and shuffling come from instead: Lightning's.

    Raises:
        ConfigError: A length is above the last boundary, or an option cannot be used.

    Example:
        >>> list(BucketBatchSampler([1, 9, 2, 8], batch_size=2, boundaries=(2, 9), shuffle=False))
        [[0, 2], [1, 3]]
    """

    def __init__(
        self,
        lengths: Sequence[int] | Tensor,
        batch_size: int,
        *,
        boundaries: Sequence[int] | None = None,
        drop_last: bool = False,
        shuffle: bool = True,
        seed: int = 0,
        sampler: Sampler[int] | None = None,
    ) -> None:
        self._lengths = _as_lengths(lengths)
        self.boundaries = bucket_boundaries(self._lengths) if boundaries is None else tuple(boundaries)
        """Padded lengths, ascending; give them to `PadCollate`."""
        check_boundaries(self.boundaries)
        padded_length(int(self._lengths.max()), self.boundaries)
        self._buckets = torch.bucketize(self._lengths, torch.tensor(self.boundaries))
        self._is_own_sampler = not isinstance(sampler, DistributedSampler)
        if not isinstance(sampler, DistributedSampler):
            shuffle = shuffle and not isinstance(sampler, SequentialSampler)
            sampler = DistributedSampler(self._buckets, num_replicas=1, rank=0, shuffle=shuffle, seed=seed)  # type: ignore[arg-type] # only its length counts
        super().__init__(sampler, batch_size, drop_last)
        self._source: DistributedSampler[int] = sampler

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of `epoch`."""
        self._source.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        rank, num_replicas = self._share()
        for batch in self._global_batches(num_replicas):
            yield batch[rank::num_replicas].tolist()

    def __len__(self) -> int:
        _, num_replicas = self._share()
        per_replica = self._num_served(num_replicas) // num_replicas
        return -(-per_replica // self.batch_size)

    def padding_fraction(self) -> float:
        """Return which part of this epoch's padded batches is padding, in [0, 1], over all processes."""
        _, num_replicas = self._share()
        edges = torch.tensor(self.boundaries)
        total = filled = 0
        for batch in self._global_batches(num_replicas):
            for rank in range(num_replicas):
                share = batch[rank::num_replicas]
                total += len(share) * int(edges[self._buckets[share].max()])
                filled += int(self._lengths[share].sum())
        return 1 - filled / total

    def _share(self) -> tuple[int, int]:
        if self._is_own_sampler and dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return self._source.rank, self._source.num_replicas

    def _num_served(self, num_replicas: int) -> int:
        unit = num_replicas * self.batch_size if self.drop_last else num_replicas
        rest = len(self._lengths) % unit
        if rest == 0:
            return len(self._lengths)
        return len(self._lengths) - rest + (0 if self.drop_last else unit)

    def _global_batches(self, num_replicas: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self._source.seed + self._source.epoch)
        num_samples = len(self._lengths)
        shuffle = self._source.shuffle
        order = torch.randperm(num_samples, generator=generator) if shuffle else torch.arange(num_samples)
        order = order[torch.arange(self._num_served(num_replicas)) % num_samples]
        order = order[torch.argsort(self._buckets[order], stable=True)]
        size = self.batch_size * num_replicas
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        if not shuffle:
            return batches
        shuffled: list[int] = torch.randperm(len(batches), generator=generator).tolist()
        return [batches[i] for i in shuffled]


def _as_lengths(lengths: Sequence[int] | Tensor) -> Tensor:
    tensor = torch.as_tensor(lengths)
    if tensor.ndim != 1 or len(tensor) == 0 or tensor.is_floating_point():
        raise ConfigError(
            f"lengths must be a non-empty sequence of integers, got shape {tuple(tensor.shape)} of {tensor.dtype}"
        )
    return tensor.to(torch.int64)
