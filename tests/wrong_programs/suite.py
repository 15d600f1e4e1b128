"""All programs of the suite."""

from __future__ import annotations

import collectives
import right
from program import Program

MODULES = (collectives, right)
PROGRAMS: list[Program] = [program for module in MODULES for program in module.PROGRAMS]


def tenth() -> list[Program]:
    """Return every tenth program of each category, right and wrong apart; at least one of each."""
    groups: dict[tuple[str, bool], list[Program]] = {}
    for program in PROGRAMS:
        groups.setdefault((program.category, program.is_right), []).append(program)
    return [program for group in groups.values() for program in group[::10]]
