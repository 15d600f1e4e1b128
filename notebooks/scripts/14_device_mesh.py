"""A product of two matrices on a mesh of 2 x 2 processes, in plain PyTorch."""

import gc
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


def worker(rank, world_size):
    torch.set_num_threads(1)  # a core for each rank, as under torchrun
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    X, W = torch.randn(6, 8), torch.randn(8, 4)
    x = distribute_tensor(X, mesh, [Shard(0), Replicate()])  # rows along dp
    w = distribute_tensor(W, mesh, [Replicate(), Shard(1)])  # columns along tp
    y = x @ w
    difference = (y.full_tensor() - X @ W).abs().max().item()  # all processes gather
    if rank == 0:
        print(f"rank 0 has {tuple(y.to_local().shape)} of {tuple(y.shape)}: {y.placements}")
        print(f"differs from one process by {difference:.6f} at most")
    gc.collect()  # cycles keep the group alive, and gloo may then abort at exit
    dist.destroy_process_group()


if __name__ == "__main__":
    world_size = 4
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # the new processes inherit both
    os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 10000))
    mp.spawn(worker, args=(world_size,), nprocs=world_size)
