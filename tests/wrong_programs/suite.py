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

# Programs that do something else with backend="shm", by the reason.
OTHERWISE_ON_SHM = {
    "no rank relays what another one sends": [
        "relay_through_a_rank_that_waits",
        "broadcast_to_a_leaf_that_waits",
    ],
    "an operation whose Work was dropped goes on": [
        "only_the_last_isend_is_waited_for",
        "isend_thrown_away_before_a_barrier",
        "isend_thrown_away_before_a_receive_from_any_source",
        "first_irecv_thrown_away",
        "any_source_irecv_thrown_away_before_a_barrier",
        "batch_thrown_away_before_a_barrier",
    ],
    "a rank can send to itself": [
        "isend_irecv_to_oneself",
        "batch_isend_irecv_to_oneself",
        "pipeline_with_two_first_stages",
    ],
    "tensors need not be contiguous": ["send_of_a_tensor_that_is_not_contiguous"],
    "PyTorch has monitored_barrier for gloo alone": [
        "monitored_barrier_by_all",
        "monitored_barrier_skipped",
        "barrier_against_monitored_barrier",
    ],
}


def programs_for(backend: str) -> list[Program]:
    """Return the programs whose expected answer holds for a backend, "gloo" or "shm"."""
    others = {name for names in OTHERWISE_ON_SHM.values() for name in names}
    return [one for one in PROGRAMS if backend != "shm" or one.name not in others]


def tenth() -> list[Program]:
    """Return every tenth program, in the order of right and wrong and of the categories."""
    categories = list(dict.fromkeys(program.category for program in PROGRAMS))
    return sorted(PROGRAMS, key=lambda one: (one.is_right, categories.index(one.category)))[::10]
