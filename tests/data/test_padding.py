"""Padding collate, bucket boundaries and the bucketing sampler."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler

from zdtrain.data import BucketBatchSampler, PadCollate, bucket_boundaries
from zdtrain.errors import ConfigError


def log_normal_lengths(num_samples=4000, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(num_samples).log_normal_(4.5, 0.6, generator=generator).long().clamp(1, 1024)


def test_padding_fills_each_field_with_its_own_value_and_adds_lengths():
    samples = [
        {"ids": torch.tensor([1, 2, 3]), "labels": [7], "y": 0},
        {"ids": torch.tensor([4]), "labels": [8, 9], "y": 1},
    ]
    batch = PadCollate(pad={"ids": 0, "labels": -100}, boundaries=(2, 4))(samples)
    assert batch["ids"].tolist() == [[1, 2, 3, 0], [4, 0, 0, 0]]
    assert batch["labels"].tolist() == [[7, -100], [8, 9]]
    assert batch["y"].tolist() == [0, 1]
    assert batch["ids_lengths"].tolist() == [3, 1]
    assert batch["labels_lengths"].tolist() == [1, 2]


def test_padding_keeps_dtype_and_trailing_dimensions():
    padded, lengths = PadCollate()([torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(5, 3, dtype=torch.bfloat16)])
    assert padded.shape == (2, 5, 3)
    assert padded.dtype == torch.bfloat16
    assert padded[0, 2:].eq(0).all()
    assert lengths.tolist() == [2, 5]


def test_padding_of_tuples_appends_lengths_or_leaves_them_out():
    samples = [(torch.tensor([1, 2]), 5), (torch.tensor([3]), 6)]
    tokens, label, lengths = PadCollate(pad={0: 9})(samples)
    assert tokens.tolist() == [[1, 2], [3, 9]]
    assert label.tolist() == [5, 6]
    assert lengths.tolist() == [2, 1]
    assert len(PadCollate(pad={0: 9}, add_lengths=False)(samples)) == 2


def test_a_batch_of_equal_lengths_is_padded_to_a_boundary_too():
    assert PadCollate(boundaries=(4,), add_lengths=False)([torch.ones(3), torch.ones(3)]).shape == (2, 4)


@pytest.mark.parametrize(
    ("options", "samples", "message"),
    [
        ({"boundaries": (4, 2)}, [], r"boundaries=\(4, 2\) must be positive and ascending"),
        ({"boundaries": (0, 2)}, [], r"boundaries=\(0, 2\) must be positive"),
        ({"pad": {}}, [], "names no field"),
        ({"boundaries": (2,)}, [torch.ones(3)], "length 3, but the last of boundaries is 2; truncate"),
        ({"pad": {"idx": 0}}, [{"ids": [1]}], r"pad names 'idx', but the samples have \['ids'\]"),
        ({"pad": 0}, [{"ids": [1]}], r"does not say which fields to pad.*\['ids'\]"),
        ({"pad": {0: 0}}, [torch.ones(3)], "the samples are tensors; give one number"),
        ({}, ["text"], "got str"),
    ],
)
def test_padding_that_cannot_be_done_says_why(options, samples, message):
    with pytest.raises(ConfigError, match=message):
        PadCollate(**options)(samples)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=20), st.integers(1, 4))
def test_boundaries_waste_least_among_all_choices(lengths, num_buckets):
    def padded(boundaries):
        return sum(min(b for b in boundaries if b >= n) for n in lengths)

    found = bucket_boundaries(lengths, num_buckets=num_buckets, multiple_of=1)
    sizes = sorted(set(lengths))
    choices = (
        (*chosen, sizes[-1])
        for count in range(min(num_buckets, len(sizes)))
        for chosen in itertools.combinations(sizes[:-1], count)
    )
    assert len(found) <= num_buckets
    assert padded(found) == min(padded(choice) for choice in choices)


@pytest.mark.parametrize("max_padding", [0.05, 0.1, 0.3])
def test_there_are_only_as_many_boundaries_as_the_padding_allowed_needs(max_padding):
    lengths = log_normal_lengths()

    def padding(boundaries):
        edges = torch.tensor(boundaries)
        return 1 - lengths.sum() / edges[torch.bucketize(lengths, edges)].sum()

    boundaries = bucket_boundaries(lengths, max_padding=max_padding)
    assert padding(boundaries) <= max_padding
    assert padding(bucket_boundaries(lengths, num_buckets=len(boundaries) - 1)) > max_padding


def test_boundaries_are_multiples():
    boundaries = bucket_boundaries(log_normal_lengths(), num_buckets=6, multiple_of=8)
    assert len(boundaries) == 6
    assert all(boundary % 8 == 0 for boundary in boundaries)


def test_bucketing_a_log_normal_mix_wastes_less_than_a_tenth_in_few_shapes():
    lengths = log_normal_lengths()
    sampler = BucketBatchSampler(lengths, 32)
    data = [torch.ones(n) for n in lengths.tolist()]
    collate = PadCollate(boundaries=sampler.boundaries)
    shapes, real, padded = set(), 0, 0
    for batch, true_lengths in DataLoader(data, batch_sampler=sampler, collate_fn=collate):
        shapes.add(tuple(batch.shape))
        padded += batch.numel()
        real += int(true_lengths.sum())
    assert real == int(lengths.sum())
    assert 1 - real / padded == pytest.approx(sampler.padding_fraction())
    assert sampler.padding_fraction() < 0.10
    assert len(shapes) <= len(sampler.boundaries) + 1


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=60),
    batch_size=st.integers(1, 5),
    num_replicas=st.integers(1, 4),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
)
def test_each_process_gets_as_many_batches_and_no_sample_is_lost(lengths, batch_size, num_replicas, drop_last, shuffle):
    shares = []
    for rank in range(num_replicas):
        source = DistributedSampler(lengths, num_replicas, rank, shuffle=shuffle, seed=1)
        sampler = BucketBatchSampler(lengths, batch_size, drop_last=drop_last, sampler=source)
        shares.append(list(sampler))
        assert len(sampler) == len(shares[-1])
    assert len({tuple(map(len, share)) for share in shares}) == 1
    served = sorted(index for share in shares for batch in share for index in batch)
    if drop_last:
        assert (
            len(served) == len(set(served)) == len(lengths) // (batch_size * num_replicas) * batch_size * num_replicas
        )
        assert all(len(batch) == batch_size for share in shares for batch in share)
    else:
        assert set(served) == set(range(len(lengths)))
        assert len(served) - len(lengths) < num_replicas


def test_drop_last_leaves_out_other_samples_each_epoch():
    sampler = BucketBatchSampler([1] * 9 + [50], 4, drop_last=True)
    seen = set()
    for epoch in range(10):
        sampler.set_epoch(epoch)
        seen.update(index for batch in sampler for index in batch)
    assert seen == set(range(10))


def test_the_order_depends_on_seed_and_epoch_only():
    lengths = log_normal_lengths(200)
    one, two = (BucketBatchSampler(lengths, 8, seed=3) for _ in range(2))
    torch.manual_seed(9)
    assert list(one) == list(two) == list(one)
    one.set_epoch(1)
    assert list(one) != list(two)
    two.set_epoch(1)
    assert list(one) == list(two)
    assert list(BucketBatchSampler(lengths, 8, seed=4)) != list(BucketBatchSampler(lengths, 8, seed=3))


def test_a_sequential_sampler_switches_shuffling_off():
    sampler = BucketBatchSampler([9, 1, 2, 8], 2, boundaries=(2, 9), sampler=SequentialSampler(range(4)))
    assert list(sampler) == [[1, 2], [0, 3]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BucketBatchSampler([3], 2, boundaries=(2,)), "length 3, but the last of boundaries is 2"),
        (lambda: BucketBatchSampler([], 2), "lengths must be a non-empty sequence of integers"),
        (lambda: BucketBatchSampler([1.5], 2), "lengths must be .* torch.float32"),
        (lambda: bucket_boundaries([1], num_buckets=0), "num_buckets=0 must be at least 1"),
        (lambda: bucket_boundaries([1], max_padding=1.5), "max_padding=1.5 must be between 0 and 1"),
        (lambda: bucket_boundaries([1], multiple_of=0), "multiple_of=0 must be at least 1"),
    ],
)
def test_bucketing_that_cannot_be_done_says_why(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
