"""Memory that two processes share and that a killed one does not leave behind."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from typing import BinaryIO


def anonymous_file(purpose: str) -> BinaryIO:
    """Return an open file that has no name and is gone when its last descriptor is closed.

    Two processes can share it, and one that is killed leaves nothing behind.
    """
    if hasattr(os, "memfd_create"):
        with suppress(OSError):  # some sandboxes refuse it
            return open(os.memfd_create(f"ddp_kit {purpose}"), "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)
