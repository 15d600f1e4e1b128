"""Collectives that some ranks skip, repeat, swap, or call differently."""

from __future__ import annotations

from calls import COLLECTIVES, OBJECT
from program import DEADLOCK, each

PROGRAMS = [
    *each(
        [*COLLECTIVES, *OBJECT],
        "${name}_skipped_by_rank_0",
        "call matching",
        "Rank 0 never calls $name, and rank 1 waits for it.",
        DEADLOCK,
        2,
        """
        $setup
        if rank == 1:
            $call  # fault: 1; absent: 0
        """,
    ),
]
