"""Ranks that start when a notebook imports the kit, so that its first run finds them warm."""

from __future__ import annotations

import os
from typing import Any

from ddp_kit.pool.pool import start_shared_pool

MEMORY = 2 << 30  # bytes that must be available


def start_after_cell(shell: Any) -> None:
    """Start the shared pool when the cell that IPython's `shell` runs now has ended.

    Do nothing if DDP_KIT_WARM is 0, if too little memory is available, or if the cell has had ranks
    of its own, as a lesson has that runs under `%run`.
    """

    def start(_result: Any = None) -> None:
        import psutil

        shell.events.unregister("post_run_cell", start)
        if psutil.virtual_memory().available >= MEMORY:
            start_shared_pool()

    if os.environ.get("DDP_KIT_WARM") != "0":
        shell.events.register("post_run_cell", start)
