"""What an all_reduce costs on this machine, from 4 bytes to 4 MB. Needs PyTorch alone."""

import math
import os
import time
from statistics import fmean, pstdev

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SIZES = [4 * 10**power for power in range(7)]  # bytes


def time_of(nbytes, device, rounds=31):
    tensor, seconds = torch.zeros(nbytes // 4, device=device), []
    for _ in range(1 + rounds):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(tensor)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    slowest = torch.tensor(seconds[1:], device=device)  # the first round warms up
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.median().item()


def fit(points):
    fits = []
    for k in [10 ** (i / 50) for i in range(451)]:  # bytes that cost as much as the latency
        logs = [math.log(seconds / (1 + nbytes / k)) for nbytes, seconds in points]
        fits.append((pstdev(logs), math.exp(fmean(logs)), k))
    _, alpha, k = min(fits)
    return alpha, alpha / k


def worker(rank, world_size):
    device = torch.device("cpu")
    if torch.cuda.device_count() >= world_size:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, rank=rank, world_size=world_size)
    points = [(nbytes, time_of(nbytes, device)) for nbytes in SIZES]
    alpha, beta = fit(points)
    if rank == 0:
        print(f"all_reduce by {backend} on {world_size} ranks")
        for nbytes, seconds in points:
            line = alpha + beta * nbytes
            print(f"{nbytes:10,} bytes {1e6 * seconds:9.0f} µs, {seconds / line:5.2f} of the line")
        print(f"the line: {1e6 * alpha:.0f} µs + {1e9 * beta:.3f} ns a byte")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # the new processes inherit both
    os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 10000))
    mp.spawn(worker, args=(2,), nprocs=2)
