"""Experts on several ranks beside one process. Needs PyTorch and nothing else."""

import gc
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed._functional_collectives import all_to_all_single_autograd

WIDTH, TOKENS, K = 16, 240, 2  # tokens of all ranks


def exchange(rows, going, coming):
    return all_to_all_single_autograd(rows, coming, going, dist.group.WORLD)


def moe(tokens, router, expert):
    n = dist.get_world_size()
    weights, choice = (tokens @ router).softmax(-1).topk(K)
    order = choice.flatten().argsort(stable=True)
    going = torch.bincount(choice.flatten(), minlength=n)
    coming = torch.empty_like(going)
    dist.all_to_all_single(coming, going)
    going, coming = going.tolist(), coming.tolist()  # on a GPU, the host waits here
    arrived = exchange(tokens[order // K], going, coming)
    back = exchange(torch.tanh(arrived @ expert), coming, going)[order.argsort()]
    return (weights.unsqueeze(-1) * back.view(-1, K, WIDTH)).sum(1), coming


def worker(rank, world_size):
    torch.set_num_threads(1)  # a core for each rank, as under torchrun
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    tokens, router = torch.randn(TOKENS, WIDTH), torch.randn(WIDTH, world_size)
    experts = torch.randn(world_size, WIDTH, WIDTH, requires_grad=True)
    weights, choice = (tokens @ router).softmax(-1).topk(K)  # one process with all experts
    results = torch.tanh(torch.einsum("th,tkhw->tkw", tokens, experts[choice]))
    expected = (weights.unsqueeze(-1) * results).sum(1)
    expected.square().sum().backward()
    own = experts[rank].detach().clone().requires_grad_()
    output, coming = moe(tokens.chunk(world_size)[rank], router, own)
    output.square().sum().backward()
    torch.testing.assert_close(output, expected.chunk(world_size)[rank])
    torch.testing.assert_close(own.grad, experts.grad[rank])
    dist.barrier()  # all are right
    if rank == 0:
        print(f"rank 0 got {coming} rows; outputs and gradients of all ranks equal one process")
    gc.collect()  # cycles keep the group alive, and gloo may then abort at exit
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # the new processes inherit both
    os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 10000))
    mp.spawn(worker, args=(4,), nprocs=4)
