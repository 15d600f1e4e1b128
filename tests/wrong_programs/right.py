"""Programs in which nothing is wrong."""

from __future__ import annotations

from calls import ALL
from program import NONE, each

PROGRAMS = [
    *each(
        ALL,
        "${name}",
        "call matching",
        "All ranks call $name.",
        NONE,
        3,
        """
        $setup
        $call
        """,
    ),
]
