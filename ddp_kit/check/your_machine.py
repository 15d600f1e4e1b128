"""Graders of lesson 05: the device, the backend and the threads of a rank, by its environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ddp_kit.check.grader import Credit, Grader
from ddp_kit.error_text import count
from ddp_kit.errors import RankError

# Hosts, ranks on each, and GPUs or cores of each.
ON_GPUS = ((1, 2, 2), (1, 3, 0), (2, 2, 2), (2, 2, 1), (2, 1, 1), (1, 2, 4))
ALONE = ((1, None, 2), (1, None, 0))
ON_CORES = ((1, 2, 8), (2, 2, 8), (1, 3, 8), (1, 5, 4), (1, 1, 6))


def exercise_5_1(place: Callable[[Mapping[str, str], int], Any]) -> Credit:
    """Grade `place(environ, gpus)` for ranks on one host and on two, and for a single process.

    Raises ExerciseError if it is not right yet, NotImplementedError for the stub.
    """
    hints = {RankError: "The values in environ are strings, and a process alone has none of them."}
    grader = Grader("5.1", "place(environ, gpus)", place, hints)
    for hosts, ranks, gpus in grader.each((*ON_GPUS, *ALONE), part=_where):
        if ranks is None:
            case = f"place({{}}, gpus={gpus})"
            found = grader.run(_place, None, gpus, world_size=1, case=case)
            hint = "A process that is alone has no variables: it is the only rank on its host."
            grader.compare([_wanted_place(0, 1, gpus)], found, hint, verb="return")
            continue
        found = grader.run(_place, ranks, gpus, world_size=hosts * ranks, case=_case(hosts, gpus))
        wanted = [_wanted_place(rank % ranks, ranks, gpus) for rank in range(hosts * ranks)]
        grader.compare(wanted, found, _hint_for_place(list(found), ranks, gpus), verb="return")
    return grader.passed("right on one host and on two, with and without GPUs, and alone")


def exercise_5_2(share_cores: Callable[[Mapping[str, str], int], Any]) -> Credit:
    """Grade `share_cores(environ, cores)` by the number of threads that PyTorch has afterwards.

    Raises ExerciseError if it is not right yet, NotImplementedError for the stub.
    """
    hints = {
        RankError: "torch.set_num_threads takes a whole number of at least 1: divide with //. "
        "A process alone has no variables in environ."
    }
    grader = Grader("5.2", "share_cores(environ, cores)", share_cores, hints)
    for hosts, ranks, cores in grader.each((*ON_CORES, (1, None, 6)), part=_where):
        environ = "{}" if ranks is None else "environ"
        on = "" if ranks is None else f", {count(hosts, 'host')}"
        case = f"share_cores({environ}, cores={cores}){on}"
        n = hosts * (ranks or 1)
        found = list(grader.run(_threads, ranks, cores, world_size=n, case=case))
        each = ranks or 1
        _check_threads(grader, max(1, cores // each), found, (hosts, each, cores))
    return grader.passed("right for 1 to 5 ranks on a host, on one host and on two, and alone")


def _where(case: tuple[int, int | None, int]) -> str:
    hosts, ranks, _ = case
    return "alone" if ranks is None else f"on {count(hosts, 'host')}"


def _case(hosts: int, gpus: int) -> str:
    return f"place(environ, gpus={gpus}), {count(hosts, 'host')}"


def _environ(rank: int, world_size: int, ranks: int | None) -> dict[str, str]:
    """Return what torchrun sets for a rank, with so many ranks on each host; None: it is alone."""
    if ranks is None:
        return {}
    numbers = {"RANK": rank, "LOCAL_RANK": rank % ranks}
    numbers |= {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": ranks}
    return {name: str(number) for name, number in numbers.items()}


def _place(rank: int, world_size: int, place: Callable, ranks: int | None, gpus: int) -> Any:
    returned = place(_environ(rank, world_size, ranks), gpus)
    if isinstance(returned, (tuple, list)) and len(returned) == 2:
        return tuple(str(each) for each in returned)  # a torch.device is as good as its name
    return returned


def _threads(rank: int, world_size: int, share_cores: Callable, ranks: int | None, cores: int):
    before = torch.get_num_threads()
    torch.set_num_threads(7)  # which is never right
    try:
        share_cores(_environ(rank, world_size, ranks), cores)
        return torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def _wanted_place(local_rank: int, ranks: int, gpus: int) -> tuple[str, str]:
    return (f"cuda:{local_rank}", "nccl") if gpus >= ranks else ("cpu", "gloo")


def _hint_for_place(found: list, ranks: int, gpus: int) -> str:
    if any(not isinstance(each, tuple) or len(each) != 2 for each in found):
        return 'Return two strings: the device, such as "cuda:1", and the backend.'
    if gpus >= ranks and found == [(f"cuda:{rank}", "nccl") for rank in range(len(found))]:
        return "RANK counts the ranks of all hosts. Choose the GPU by LOCAL_RANK."
    if 0 < gpus < ranks:
        return (
            "nccl needs a GPU for each rank: compare gpus with LOCAL_WORLD_SIZE. "
            "Without enough GPUs, use the CPU and gloo."
        )
    if gpus >= ranks and found[0][0] == "cpu":
        return "There is a GPU for each rank on this host: compare gpus with LOCAL_WORLD_SIZE."
    return 'With a GPU for each rank on the host: its own GPU and "nccl"; else "cpu" and "gloo".'


def _check_threads(grader: Grader, wanted: int, found: list[int], case: tuple[int, ...]) -> None:
    wrong = [
        f"rank {rank} should have {count(wanted, 'thread')} but has {threads}"
        for rank, threads in enumerate(found)
        if threads != wanted
    ]
    if wrong:
        grader.fail("wrong result", *wrong, hint=_hint_for_threads(set(found), *case))


def _hint_for_threads(found: set[int], hosts: int, ranks: int, cores: int) -> str:
    if found == {7}:
        return "The number of threads did not change: call torch.set_num_threads."
    if found == {cores} and ranks > 1:
        return f"All {ranks} ranks of a host take all of its cores, so it is oversubscribed."
    if hosts > 1 and found == {max(1, cores // (hosts * ranks))}:
        return "WORLD_SIZE counts the ranks of all hosts. LOCAL_WORLD_SIZE of them share cores."
    return "Divide the cores by the number of ranks on this host, LOCAL_WORLD_SIZE, and round down."
