"""Two ranks meet in four ways, and then without a process group, in plain PyTorch."""

import os
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def meet(rank, world_size, name, **where):
    dist.init_process_group("gloo", rank=rank, world_size=world_size, **where)
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    if rank == 0:
        print(f"{name:8} met, the sum of 1 and 2 is {total.item()}")
    dist.destroy_process_group()


def worker(rank, world_size, folder):
    limit = timedelta(seconds=60)  # instead of half an hour
    port = int(os.environ["MASTER_PORT"]) + 1  # another one for each store
    meet(rank, world_size, "env://", init_method="env://", timeout=limit)
    meet(rank, world_size, "tcp://", init_method=f"tcp://127.0.0.1:{port}", timeout=limit)
    meet(rank, world_size, "file://", init_method=f"file://{folder}/met", timeout=limit)
    store = dist.TCPStore("127.0.0.1", port + 1, world_size, is_master=rank == 0, timeout=limit)
    meet(rank, world_size, "store=", store=store, timeout=limit)

    store.set(f"greeting/{rank}", f"hello from rank {rank}")  # no group is needed for this
    other = store.get(f"greeting/{1 - rank}").decode()  # waits until the key is there
    if store.add("done", 1) == world_size:
        store.set("all done", "")
    if rank == 0:  # it keeps the store, and so must not leave before the other has read
        store.wait(["all done"])
        print("by hand  rank 0 read:", other)


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # the new processes inherit both
    os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 10000))
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(2, folder), nprocs=2)
