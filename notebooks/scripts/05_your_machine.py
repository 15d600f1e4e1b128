"""Which rank is this process?  The same file runs in two ways:

python 05_your_machine.py                                      one process, no group
torchrun --standalone --nproc-per-node 3 05_your_machine.py    three ranks
"""

import os

import torch
import torch.distributed as dist


def synchronize():
    if not dist.is_available():
        return "torch has no distributed package"
    if not dist.is_initialized():
        return "there is no process group"
    if dist.get_world_size() == 1:
        return "the world is one rank"
    dist.barrier()
    return "all ranks are here"


def number(name, alone):
    return int(os.environ[name]) if launched else alone


if __name__ == "__main__":
    # torchrun sets all four variables. A cluster may set RANK without LOCAL_RANK.
    launched = "LOCAL_RANK" in os.environ
    rank, world_size = number("RANK", 0), number("WORLD_SIZE", 1)
    local_rank, ranks_here = number("LOCAL_RANK", 0), number("LOCAL_WORLD_SIZE", 1)
    device = torch.device("cpu")
    if torch.cuda.device_count() >= ranks_here:  # a GPU for each rank of this machine
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    total = torch.tensor([rank], device=device)
    if launched:
        dist.init_process_group(dist.get_default_backend_for_device(device))
        dist.all_reduce(total)
    line = f"rank {rank} of {world_size}, local rank {local_rank}, sum of all ranks {total.item()}"
    for turn in range(world_size):  # print one after the other
        if turn == rank:
            print(line, flush=True)
        synchronize()
    if launched:
        dist.destroy_process_group()
