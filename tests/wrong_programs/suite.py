"""All programs of the suite."""

from __future__ import annotations

import arguments
import collectives
import data_parallel
import groups
import meshes
import objects_and_stores
import peers_and_sources
import point_to_point
import right
import right_specials
import waits
import waits_and_batches
from program import Program

MODULES = (
    collectives,
    point_to_point,
    peers_and_sources,
    waits,
    waits_and_batches,
    groups,
    objects_and_stores,
    data_parallel,
    meshes,
    arguments,
    right,
    right_specials,
)
PROGRAMS: list[Program] = [program for module in MODULES for program in module.PROGRAMS]


def tenth() -> list[Program]:
    """Return every tenth program of each category, right and wrong apart; at least one of each."""
    groups_: dict[tuple[str, bool], list[Program]] = {}
    for program in PROGRAMS:
        groups_.setdefault((program.category, program.is_right), []).append(program)
    return [program for group in groups_.values() for program in group[::10]]
