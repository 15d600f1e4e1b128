"""Measure what an all_reduce costs here, and predict it for more ranks. Needs PyTorch alone."""

import os
import time
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SIZES = [2**p for p in range(8, 25, 4)]  # 256 bytes to 16 MiB


def time_of(nbytes, rounds=30):
    tensor, seconds = torch.zeros(nbytes // 4), torch.zeros(rounds)
    for i in range(-3, rounds):  # the first three warm up
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(tensor)
        if i >= 0:
            seconds[i] = time.perf_counter() - start
    dist.all_reduce(seconds, dist.ReduceOp.MAX)  # of each round, the slowest rank
    return median(seconds.tolist())


def worker(rank, n):
    torch.set_num_threads(1)  # a core for each rank, as under torchrun
    dist.init_process_group("gloo", rank=rank, world_size=n)
    times = [time_of(size) for size in SIZES]
    if rank == 0:  # a ring: 2(n-1) messages of N/n bytes follow one another
        messages = 2 * (n - 1)
        alpha = times[0] / messages  # nearly nothing to send
        beta = max(0, times[-1] / messages - alpha) / (SIZES[-1] / n)
        print(f"{n} ranks: alpha {1e6 * alpha:.0f} µs, beta {1e9 * beta:.2f} ns a byte")
        for N, t in zip(SIZES, times):
            model = messages * (alpha + beta * N / n)
            print(f"{N:12,} bytes: measured {1e3 * t:8.2f} ms, model {1e3 * model:8.2f} ms")
        model = 2 * 1023 * (alpha + beta * 25 * 2**20 / 1024)
        print(f"25 MiB in a ring of 1,024 such ranks, each with such a link: {1e3 * model:,.0f} ms")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # the new processes inherit both
    os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 10000))
    mp.spawn(worker, args=(2,), nprocs=2)
