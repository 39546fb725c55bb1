"""Data that keeps up with the step: whole batches, padding, bucketing, measured loader defaults, prefetching."""

from zdtrain.data.buckets import BucketBatchSampler, bucket_boundaries
from zdtrain.data.datasets import BatchDataset, BatchSubset, InMemoryDataset, MemoryMappedDataset, as_batch_dataset
from zdtrain.data.loaders import BatchLoader, available_cores, default_num_workers, loader
from zdtrain.data.padding import PadCollate
from zdtrain.data.prefetch import DevicePrefetcher, prefetch

__all__ = [
    "BatchDataset",
    "BatchLoader",
    "BatchSubset",
    "BucketBatchSampler",
    "DevicePrefetcher",
    "InMemoryDataset",
    "MemoryMappedDataset",
    "PadCollate",
    "as_batch_dataset",
    "available_cores",
    "bucket_boundaries",
    "default_num_workers",
    "loader",
    "prefetch",
]
