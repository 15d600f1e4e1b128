"""Ring attention beside attention in one process. Needs PyTorch and nothing else."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

TOKENS = 2048


def ring_attention(query, key, value):
    rank, n = dist.get_rank(), dist.get_world_size()
    maximum = torch.full((*query.shape[:-1], 1), float("-inf"))
    total, weighted = torch.zeros_like(maximum), torch.zeros_like(query)
    block = torch.stack([key, value])
    for step in range(n):
        works, coming = [], torch.empty_like(block)
        if step < n - 1:
            sending = dist.P2POp(dist.isend, block, (rank + 1) % n)
            receiving = dist.P2POp(dist.irecv, coming, (rank - 1) % n)
            works = dist.batch_isend_irecv([sending, receiving])
        if step <= rank:  # later keys do not count
            scores = query @ block[0].mT / query.shape[-1] ** 0.5
            if step == 0:  # the own chunk
                scores += torch.full(scores.shape, float("-inf")).triu(1)
            larger = torch.maximum(maximum, scores.amax(-1, keepdim=True))
            rescale, weights = (maximum - larger).exp(), (scores - larger).exp()
            total = total * rescale + weights.sum(-1, keepdim=True)
            weighted = weighted * rescale + weights @ block[1]
            maximum = larger
        for work in works:
            work.wait()
        block = coming
    return weighted / total


def worker(rank, world_size):
    torch.set_num_threads(1)  # a core for each rank, as under torchrun
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    whole = torch.randn(3, 2, 4, TOKENS, 16)  # query, key, value: batch, heads, tokens, width
    output = ring_attention(*(x.chunk(world_size, dim=2)[rank].contiguous() for x in whole))
    expected = F.scaled_dot_product_attention(*whole, is_causal=True)
    torch.testing.assert_close(output, expected.chunk(world_size, dim=2)[rank])
    if rank == 0:
        print(f"{world_size} ranks, {TOKENS:,} tokens: attention equals one process")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # the new processes inherit both
    os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 10000))
    mp.spawn(worker, args=(4,), nprocs=4)  # a number that divides TOKENS
