"""Add up the ranks:  torchrun --standalone --nproc-per-node 4 00_torchrun.py"""

import torch
import torch.distributed as dist

if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tensor = torch.tensor([rank])
    dist.all_reduce(tensor)
    if rank == 0:
        print(f"{world_size} ranks, and their sum is {tensor.item()}")
    dist.destroy_process_group()
