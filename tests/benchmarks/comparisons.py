"""What is compared with what, and what the goals are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Side:
    """One way to do the thing: a script beside this one, and the name of its measure."""

    name: str
    script: str
    measure: str
    most: int = 100  # rounds, however many the others have


@dataclass(frozen=True)
class Comparison:
    """The sides that do the same thing in turn. The first is the kit, or what it is held to."""

    title: str
    goal: str
    rounds: int
    fresh: bool  # each round in a new process
    sides: tuple[Side, ...]


COMPARISONS = (
    Comparison(
        "first result of a cold pool, 4 ranks",
        "at most 1.15 times mp.spawn",
        rounds=7,
        fresh=True,
        sides=(
            Side("ddp_kit", "kit_side.py", "cold"),
            Side("mp.spawn, init_process_group, all_reduce", "bare_side.py", "cold"),
            Side("mp.spawn, `import torch` and no more", "bare_side.py", "imports"),
            Side("torchrun file.py, the whole command", "peers.py", "torchrun"),
            Side("accelerate debug_launcher (forks)", "peers.py", "accelerate"),
            Side("ipyparallel, cluster and apply_sync", "peers.py", "ipyparallel_cold"),
            Side("nbdistributed, first cell not lost", "peers.py", "nbdistributed_cold", most=2),
        ),
    ),
    Comparison(
        "first kit.run of a notebook, 10 s after its import of the kit",
        "at most 50 ms",
        rounds=5,
        fresh=True,
        sides=(Side("ddp_kit", "kit_side.py", "first_run"),),
    ),
    Comparison(
        "a trivial cell of a notebook",
        "the page stays responsive while the ranks start",
        rounds=3,
        fresh=True,
        sides=(
            Side("in the 10 s after the import of the kit", "kit_side.py", "cells_while_starting"),
            Side("the same with DDP_KIT_WARM=0", "kit_side.py", "cells_without_ranks"),
        ),
    ),
    Comparison(
        "warm call with one scalar all_reduce, 4 ranks",
        "under 15 ms",
        rounds=15,
        fresh=False,
        sides=(
            Side("ddp_kit", "kit_side.py", "warm"),
            Side("a word over a pipe, all_reduce, a word back", "bare_side.py", "warm"),
            Side("ipyparallel apply_sync", "peers.py", "ipyparallel_warm"),
            Side("accelerate debug_launcher (forks anew)", "peers.py", "accelerate"),
            Side("nbdistributed cell", "peers.py", "nbdistributed_warm"),
        ),
    ),
    Comparison(
        "call that changes the world size",
        "under 120 ms",
        rounds=25,
        fresh=False,
        sides=(
            Side("ddp_kit, from 4 ranks to 2", "kit_side.py", "smaller"),
            Side("ddp_kit, from 2 ranks to 4", "kit_side.py", "larger"),
        ),
    ),
    Comparison(
        "3,000 all_reduces of one number, 2 ranks, in one run",
        "at most 1.25 times untraced",
        rounds=15,
        fresh=False,
        sides=(
            Side("ddp_kit, which records each", "kit_side.py", "traced"),
            Side("the same, not recorded", "kit_side.py", "untraced"),
        ),
    ),
    Comparison(
        "processor time of the calling thread that recording adds to an all_reduce",
        "at most 20 µs",
        rounds=5,
        fresh=False,
        sides=(
            Side("ddp_kit, a world of one", "kit_side.py", "recording 1"),
            Side("ddp_kit, 2 ranks", "kit_side.py", "recording 2"),
        ),
    ),
    Comparison(
        "100 MB back from each of 2 ranks",
        "under 1 s",
        rounds=10,
        fresh=False,
        sides=(
            Side("ddp_kit", "kit_side.py", "values"),
            Side("ipyparallel apply_sync", "peers.py", "ipyparallel_values"),
        ),
    ),
    Comparison(
        "import",
        "ddp_kit beyond torch: under 100 ms",
        rounds=7,
        fresh=True,
        sides=(
            Side("ddp_kit, after torch", "kit_side.py", "kit_import"),
            Side("ddp_kit, after torch, in IPython", "kit_side.py", "notebook_import"),
            Side("torch", "kit_side.py", "torch_import"),
        ),
    ),
)


def all_reduce(ranks: int, nbytes: int, size: str, goal: str) -> Comparison:
    """Compare backends by an all_reduce of float32, with a copy of the tensor as the limit."""
    names = {
        "shm": "ddp_kit, shm",
        "gloo": "gloo",
        "mpi": "Open MPI, over mpi4py",
        "copy": "one copy of the tensor, in all ranks at once",
    }
    return Comparison(
        f"all_reduce of {size}, {ranks} ranks",
        goal,
        rounds=7,
        fresh=False,
        sides=tuple(
            Side(name, "kit_side.py", f"all_reduce {backend} {ranks} {nbytes}")
            for backend, name in names.items()
        ),
    )


def by_ring(ranks: int) -> Comparison:
    """Compare backends by the ring of lesson 04, whose messages a backend carries."""
    return Comparison(
        f"all_reduce of 1 MB by the ring of lesson 04, {ranks} ranks",
        "none",
        rounds=7,
        fresh=False,
        sides=tuple(
            Side(name, "kit_side.py", f"ring {backend} {ranks} {2**20}")
            for backend, name in {"shm": "ddp_kit, shm", "gloo": "gloo"}.items()
        ),
    )


def in_a_step(model: str, width: int) -> Comparison:
    """Compare backends by a forward and a backward of DDP on 2 ranks."""
    names = {"shm": "ddp_kit, shm", "gloo": "gloo", "alone": "no DDP, on both ranks at once"}
    return Comparison(
        f"all_reduce in a step of DDP, {model}, 2 ranks",
        "none",
        rounds=7,
        fresh=False,
        sides=tuple(
            Side(name, "kit_side.py", f"step {backend} {width}") for backend, name in names.items()
        ),
    )


COMPARISONS += (
    all_reduce(2, 4, "4 B", "at most 0.5 times gloo"),
    all_reduce(4, 4, "4 B", "no slower than gloo"),
    all_reduce(2, 10_000, "10 kB", "none"),
    all_reduce(4, 10_000, "10 kB", "none"),
    all_reduce(2, 2**20, "1 MB", "at most 0.5 times gloo"),
    all_reduce(4, 2**20, "1 MB", "at most 0.5 times gloo"),
    all_reduce(2, 40_000_000, "40 MB", "at most 0.5 times gloo"),
    all_reduce(4, 40_000_000, "40 MB", "at most 0.65 times gloo"),
    all_reduce(2, 100_000_000, "100 MB", "at most 0.5 times gloo"),
    all_reduce(4, 100_000_000, "100 MB", "at most 0.65 times gloo"),
    by_ring(2),
    by_ring(4),
    in_a_step("the network of lesson 03, 87 kB of gradients", 0),
    in_a_step("four layers of 1.05 MB each", 512),
)
