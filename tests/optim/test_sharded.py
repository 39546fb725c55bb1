"""SimpleAdam steps sharded parameters as it steps whole ones."""

import os
import socket

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from zdtrain.optim import SimpleAdam


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def train_both(rank, world_size, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    for implementation in ("fused", "foreach"):
        compare(implementation, init_device_mesh("cpu", (world_size,)))
    dist.barrier()
    dist.destroy_process_group()


def compare(implementation, mesh):
    sharded, whole = build(), build()
    fully_shard(sharded, mesh=mesh)
    options = {"lr": 0.01, "weight_decay": 0.1, "max_norm": 0.1, "skip_nonfinite": True}
    optimizers = [SimpleAdam(m.parameters(), **options, implementation=implementation) for m in (sharded, whole)]
    for step in range(4):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        if step == 2:
            x = x * float("nan")
        for model, optimizer in zip((sharded, whole), optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    for part, full in zip(sharded.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(part.full_tensor(), full)
    assert optimizers[0].skipped_count.item() == optimizers[1].skipped_count.item() == 1
    torch.testing.assert_close(optimizers[0].grad_norm, optimizers[1].grad_norm)


@pytest.mark.slow
def test_fully_sharded_parameters_and_their_norm():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # processes of a fork server end without tearing libraries down, in which gloo's threads may abort them
    torch.multiprocessing.start_processes(train_both, (2, port), nprocs=2, start_method="forkserver")
