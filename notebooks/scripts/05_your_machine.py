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


if __name__ == "__main__":
    rank = int(os.environ.get("RANK", 0))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if "RANK" in os.environ:  # torchrun has started this process
        dist.init_process_group(dist.get_default_backend_for_device(device))
    total = torch.tensor([rank], device=device)
    if dist.is_initialized():
        dist.all_reduce(total)
    line = f"rank {rank} of {world_size}, local rank {local_rank}, sum of all ranks {total.item()}"
    for turn in range(world_size):  # print one after the other
        if turn == rank:
            print(line, flush=True)
        synchronize()
    if dist.is_initialized():
        dist.destroy_process_group()
