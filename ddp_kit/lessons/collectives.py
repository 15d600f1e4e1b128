# Made from notebooks/02_collectives.ipynb by `make editions`: edit that, not this.
"""Collectives: every rank takes part."""

import time

import torch
import torch.distributed as dist

import ddp_kit as kit
from ddp_kit.lessons._collectives import (
    COLLECTIVES,
    ONE_TENSOR,
    agrees,
    explore,
    flat,
    main,
    reference,
)
from ddp_kit.lessons._launch import run_as_script

try:
    from torch.distributed import all_gather_single, reduce_scatter_single
except ImportError:  # before PyTorch 2.13 they had other names
    from torch.distributed import all_gather_into_tensor as all_gather_single
    from torch.distributed import reduce_scatter_tensor as reduce_scatter_single


def own_tensor(rank, world_size):
    return 10.0 * rank + torch.arange(world_size, device=kit.device())


def broadcast(rank, world_size, src=0):
    tensor = own_tensor(rank, world_size)
    before = tensor.clone()
    dist.broadcast(tensor, src=src)
    return {"before": before, "after": tensor}


def scatter(rank, world_size, src=0):
    pieces = list(own_tensor(rank, world_size).split(1)) if rank == src else None
    tensor = torch.empty(1, device=kit.device())
    dist.scatter(tensor, pieces, src=src)
    return {"before": pieces, "after": tensor}


def gather(rank, world_size, dst=0):
    tensor = torch.tensor([10.0 * rank], device=kit.device())
    pieces = [torch.empty_like(tensor) for _ in range(world_size)] if rank == dst else None
    dist.gather(tensor, pieces, dst=dst)
    return {"before": tensor, "after": pieces}


def reduce(rank, world_size, op="SUM", dst=0):
    tensor = own_tensor(rank, world_size)
    before = tensor.clone()
    dist.reduce(tensor, dst=dst, op=getattr(dist.ReduceOp, op))
    return {"before": before, "after": tensor}


OPS = ("SUM", "PRODUCT", "MAX", "MIN", "AVG")


def all_reduce(rank, world_size, op="SUM"):
    tensor = own_tensor(rank, world_size)
    before = tensor.clone()
    dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
    return {"before": before, "after": tensor}


def try_op(rank, world_size, op, dtype=torch.float32):
    tensor = torch.ones(2, dtype=dtype, device=kit.device())
    chosen = getattr(dist.ReduceOp, op)
    try:
        dist.all_reduce(tensor, op=chosen(2.0) if op == "PREMUL_SUM" else chosen)
    except (RuntimeError, TypeError, ValueError) as error:
        return str(error).splitlines()[0]
    return ""


def all_gather(rank, world_size):
    tensor = torch.tensor([10.0 * rank], device=kit.device())
    pieces = [torch.empty_like(tensor) for _ in range(world_size)]
    dist.all_gather(pieces, tensor)
    return {"before": tensor, "after": pieces}


def all_gather_one_tensor(rank, world_size):
    tensor = torch.tensor([10.0 * rank], device=kit.device())
    whole = torch.empty(world_size, device=kit.device())
    all_gather_single(whole, tensor)
    return {"before": tensor, "after": whole}


def reduce_scatter(rank, world_size, op="SUM"):
    pieces = list(own_tensor(rank, world_size).split(1))
    before = [piece.clone() for piece in pieces]
    tensor = torch.empty(1, device=kit.device())
    dist.reduce_scatter(tensor, pieces, op=getattr(dist.ReduceOp, op))
    return {"before": before, "after": tensor}


def reduce_scatter_one_tensor(rank, world_size, op="SUM"):
    whole = own_tensor(rank, world_size)
    before = whole.clone()
    tensor = torch.empty(1, device=kit.device())
    reduce_scatter_single(tensor, whole, op=getattr(dist.ReduceOp, op))
    return {"before": before, "after": tensor}


def all_to_all(rank, world_size):
    pieces = list(own_tensor(rank, world_size).split(1))
    received = [torch.empty_like(piece) for piece in pieces]
    dist.all_to_all(received, pieces)
    return {"before": pieces, "after": received}


def all_to_all_one_tensor(rank, world_size):
    whole = own_tensor(rank, world_size)
    received = torch.empty_like(whole)
    dist.all_to_all_single(received, whole)
    return {"before": whole, "after": received}


def barrier(rank, world_size):
    time.sleep(0.02 * rank)
    arrived = time.monotonic_ns()
    dist.barrier()
    return {"arrived": arrived, "left": time.monotonic_ns()}


def all_reduce_in_a_group(rank, world_size):
    even = dist.new_group(list(range(0, world_size, 2)))  # called by every rank
    tensor = torch.tensor([10**rank], device=kit.device())
    before = tensor.clone()
    if rank % 2 == 0:
        dist.all_reduce(tensor, group=even)
    return {"before": before, "after": tensor}


if __name__ == "__main__":
    run_as_script(main)
