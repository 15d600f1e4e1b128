"""Programs in which nothing is wrong."""

from __future__ import annotations

from calls import COLLECTIVES, OBJECT
from program import NONE, each

PROGRAMS = [
    *each(
        [*COLLECTIVES, *OBJECT],
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
