"""Ranks that start when a notebook imports the kit, so that its first run finds them warm."""

from __future__ import annotations

import os

from ddp_kit.pool import ipython
from ddp_kit.pool.memory import available_memory
from ddp_kit.pool.pool import start_shared_pool

MEMORY = 2 << 30  # bytes that must be available


def start_after_cell() -> None:
    """Start the shared pool when the cell that runs now has ended.

    Do nothing if DDP_KIT_WARM is 0, if too little memory is available, or if the cell has already
    started ranks, as a lesson under `%run` may.
    """

    def start() -> None:
        if available_memory() >= MEMORY:
            start_shared_pool()

    if os.environ.get("DDP_KIT_WARM") != "0":
        ipython.after_cell(start)
