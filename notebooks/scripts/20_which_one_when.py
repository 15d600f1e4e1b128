"""FSDP x tensor parallelism on a mesh of 2 x 2 processes, beside one process, in plain PyTorch."""

import gc
import logging
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

# It warns that a weight which is cut twice is gathered in two steps.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.LayerNorm(16))


def train(model, place, places):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-5, foreach=False)
    torch.manual_seed(1)
    for batch in torch.randn(5, 8, 16):  # the same on all ranks
        optimizer.zero_grad()
        mine = batch.chunk(places)[place]
        (model(mine) - mine).square().mean().backward()
        optimizer.step()


def worker(rank, world_size):
    torch.set_num_threads(1)  # a core for each rank, as under torchrun
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = fully_shard(parallelize_module(make_model(), mesh["tp"], plan), mesh=mesh["dp"])
    train(model, mesh.get_local_rank("dp"), 2)
    held = sum(p.to_local().numel() for p in model.parameters())
    whole = [p.full_tensor().detach() for p in model.parameters()]  # all processes gather

    alone = make_model()
    train(alone, 0, 1)
    worst = max((a - b).abs().max().item() for a, b in zip(whole, alone.parameters()))
    if rank == 0:
        print(f"rank 0 holds {held} of {sum(p.numel() for p in whole)} parameters")
        print(f"differs from one process by {worst:.6f} at most")
    gc.collect()  # cycles keep the group alive, and gloo may then abort at exit
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # the new processes inherit both
    os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 10000))
    mp.spawn(worker, args=(4,), nprocs=4)
