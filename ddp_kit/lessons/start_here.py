# Made from notebooks/00_start_here.ipynb by `make editions`: edit that, not this.
"""Start here: your first four ranks."""

import os

import torch
import torch.distributed as dist

import ddp_kit as kit
from ddp_kit.lessons._launch import run_as_script
from ddp_kit.lessons._start_here import main


def after_me(rank, world_size):
    return world_size - 1 - rank


def process_id(rank, world_size):
    return os.getpid()


def total(rank, world_size):
    tensor = torch.tensor([rank], device=kit.device())
    before = tensor.clone()
    dist.all_reduce(tensor)
    return {"before": before, "after": tensor}


if __name__ == "__main__":
    run_as_script(main)
