"""Memory that two processes share without a name that a killed one could leave behind."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from typing import BinaryIO


def anonymous_file(purpose: str) -> BinaryIO:
    """Return an open file that no folder lists and that ends with its last descriptor."""
    if hasattr(os, "memfd_create"):
        with suppress(OSError):  # some sandboxes refuse it
            return open(os.memfd_create(f"ddp_kit {purpose}"), "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)
