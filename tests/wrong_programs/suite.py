"""All programs of the suite."""

from __future__ import annotations

import arguments
import collectives
import data_parallel
import fsdp_and_pipelines
import groups
import meshes
import objects
import peers_and_sources
import point_to_point
import right_collectives
import right_meshes
import right_messages
import right_others
import right_polls
import right_slow
import right_threads
import right_waits
import stores_and_barriers
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
    arguments,
    objects,
    stores_and_barriers,
    data_parallel,
    meshes,
    fsdp_and_pipelines,
    right_collectives,
    right_messages,
    right_meshes,
    right_slow,
    right_others,
    right_waits,
    right_polls,
    right_threads,
)
PROGRAMS: list[Program] = [program for module in MODULES for program in module.PROGRAMS]


def tenth() -> list[Program]:
    """Return every tenth program, in the order of right and wrong and of the categories."""
    categories = list(dict.fromkeys(program.category for program in PROGRAMS))
    return sorted(PROGRAMS, key=lambda one: (one.is_right, categories.index(one.category)))[::10]
