"""Four ranks in plain PyTorch: start one process for each, in a loop."""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def total(rank, world_size):
    tensor = torch.tensor([rank])
    dist.all_reduce(tensor)
    return tensor.item()


def init_process(rank, world_size, fn, results, backend="gloo"):
    dist.init_process_group(backend, rank=rank, world_size=world_size)
    results.put((rank, fn(rank, world_size)))
    dist.destroy_process_group()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:  # 0: any port that is free
        return server.getsockname()[1]


if __name__ == "__main__":
    world_size = 4
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # the new processes inherit both
    os.environ.setdefault("MASTER_PORT", str(free_port()))
    mp.set_start_method("spawn")
    results, processes = mp.SimpleQueue(), []
    for rank in range(world_size):
        process = mp.Process(target=init_process, args=(rank, world_size, total, results))
        process.start()
        processes.append(process)
    for process in processes:
        process.join()
        assert process.exitcode == 0, "a rank has failed"
    for rank, value in sorted(results.get() for process in processes):
        print(f"rank {rank}: {value}")
