"""Ranks that exchange messages forever: `torchrun talking.py FOLDER`.

Each creates a file in FOLDER, named after its rank, once all of them are communicating.
"""

import sys
from datetime import timedelta
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_kit.lessons._launch import open_ranks

PATIENCE = timedelta(seconds=10)  # a lesson's ranks wait five minutes for each other


def talk(rank: int, world_size: int, folder: str) -> None:
    tensor, group = torch.ones(250_000), dist.new_group(timeout=PATIENCE)
    for turn in count():
        dist.all_reduce(tensor, group=group)
        if turn == 10:
            Path(folder, str(rank)).touch()


with open_ranks() as ranks:
    ranks(talk, sys.argv[1])
