"""Shared memory as a backend of PyTorch, for ranks on one host, on the stock PyTorch wheel.

    import torch.distributed as dist
    from ddp_kit.backends import shm

    shm.register()
    dist.init_process_group(shm.NAME)

Start it as a program for gloo, for example with torchrun. In `kit.run` and everywhere else in the
kit, `backend="shm"` is enough.

The ranks of a group share one segment of memory that has no name. What they give each other is
written into it in chunks, and read by the others; a rank that waits sleeps until another one wakes
it. Nothing is left of it when the processes have ended, in whatever way.
"""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist

from ddp_kit.backends.shm import process_group, segment
from ddp_kit.errors import BackendError

__all__ = ["NAME", "missing", "register"]

NAME = "shm"


def missing() -> str | None:
    """Return why this machine cannot run the backend; None if it can."""
    if segment.is_supported:
        return None
    system = "this system" if sys.platform == "linux" else f"{sys.platform!r}"
    return f'backend="shm" needs Linux on a 64-bit processor, and {system} is not; use "gloo"'


def register() -> None:
    """Register the backend "shm" with PyTorch; a second call does nothing.

    Raises BackendError if this is not Linux.
    """
    if problem := missing():
        raise BackendError(problem)
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, backend_options: Any) -> dist.ProcessGroup:
    return process_group.create_group(options)
