"""A training over a backend of your own, in shared memory. Needs PyTorch and Linux alone."""

import mmap
import os
import time

import torch
import torch.distributed as dist


class Shared(dist.ProcessGroup):
    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        if rank == 0:
            os.ftruncate(memory := os.memfd_create("shared"), 4096 + 4 * 2**20)
            store.set("shared", f"/proc/{os.getpid()}/fd/{memory}")
        with open(store.get("shared"), "r+b", buffering=0) as file:
            memory = mmap.mmap(file.fileno(), 0)
        self.me, self.turn = rank, 0
        self.flags = memoryview(memory)[: 64 * size].cast("q")[::8]  # each in a cache line
        self.slots = torch.frombuffer(memory, dtype=torch.float32, offset=4096).view(size, -1)

    def meet(self):
        self.turn += 1
        self.flags[self.me], end = self.turn, time.monotonic() + 60
        while min(self.flags.tolist()) < self.turn:
            os.sched_yield()
            if time.monotonic() > end:
                raise RuntimeError(f"waited 60 s; the flags are {self.flags.tolist()}")

    def allreduce(self, tensors, opts=None):
        slots = self.slots[:, : tensors[0].numel()]
        slots[self.me].copy_(tensors[0].view(-1))
        self.meet()  # all have written
        tensors[0].copy_(slots.sum(0).view_as(tensors[0]))
        self.meet()  # all have read; no Work comes back, so nobody has to wait


if __name__ == "__main__":
    dist.Backend.register_backend("shared", Shared, devices=["cpu"])
    dist.init_process_group("shared")
    x = torch.randn(64, 9, generator=torch.Generator().manual_seed(0))
    weight, mine = torch.zeros(9), x[dist.get_rank() :: dist.get_world_size()]
    for _ in range(50):
        gradient = 2 * mine.T @ (mine @ weight - mine.sum(1)) / len(x)
        dist.all_reduce(gradient, async_op=True)
        weight -= 0.1 * gradient
    if dist.get_rank() == 0:
        right = torch.allclose(weight, torch.ones(9), atol=1e-2)
        print(f"{len(mine)} of {len(x)} rows on each rank; all weights are 1: {right}")
