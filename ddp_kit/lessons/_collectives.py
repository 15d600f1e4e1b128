"""What the lesson on collectives needs besides its workers: their right answers, and controls."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch

from ddp_kit import compare
from ddp_kit.error_text import count
from ddp_kit.lessons._launch import Ranks, lesson_main, prove
from ddp_kit.notebook.controls import Explorer

COLLECTIVES = (
    *("broadcast", "scatter", "gather", "reduce", "all_reduce", "all_gather", "reduce_scatter"),
    *("all_to_all", "all_reduce_in_a_group"),
)
ONE_TENSOR = ("all_gather_one_tensor", "reduce_scatter_one_tensor", "all_to_all_one_tensor")


def reference(name: str, held: list[torch.Tensor], op: str = "SUM", root: int = 0) -> list:
    """Return the numbers that each rank should hold after a collective; None if undefined.

    held: the `own_tensor` of each rank. root: the `src` or `dst` of those that have one.
    """
    n, stacked = len(held), torch.stack(held)  # row: rank, column: entry
    combined = {
        "SUM": stacked.sum(0),
        "PRODUCT": stacked.prod(0),
        "MAX": stacked.amax(0),
        "MIN": stacked.amin(0),
        "AVG": stacked.mean(0),
    }[op]
    if name == "all_reduce_in_a_group":
        total = sum(10**rank for rank in range(0, n, 2))
        return [torch.tensor([10**rank if rank % 2 else total]) for rank in range(n)]
    return {
        "broadcast": [held[root]] * n,
        "scatter": [*held[root].split(1)],
        "gather": [stacked[:, 0] if rank == root else None for rank in range(n)],
        "reduce": [combined if rank == root else None for rank in range(n)],
        "all_reduce": [combined] * n,
        "all_gather": [stacked[:, 0]] * n,
        "reduce_scatter": [*combined.split(1)],
        "all_to_all": [*stacked.T],
    }[name.removesuffix("_one_tensor")]


def agrees(result, expected: list) -> bool:
    """Return whether each rank's "after" is what `reference` expects.

    Floats may differ by rounding: a product of many depends on the order of its factors.
    """
    rounding = len(expected) * torch.finfo(torch.float32).eps
    return all(
        compare(flat(value["after"]), want, rtol=rounding if want.is_floating_point() else 0)
        for value, want in zip(result, expected, strict=True)
        if want is not None
    )


def flat(after: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
    """Return a tensor, or those of a list as one."""
    return torch.cat(after) if isinstance(after, list) else after


def explore(
    collective: str = "all_reduce", op: str = "SUM", world_size: int = 4, root: int = 0
) -> Explorer:
    """Run one collective and draw what each rank held before and after.

    root: the `src` or `dst` of those that have one. In JupyterLab, controls follow.
    Raises PoolError for an invalid choice.
    """
    from ddp_kit import plot  # ranks do not need it

    def choices(settings: dict) -> dict:
        n = settings["world_size"]
        sizes = range(1, max(8, n) + 1)
        return {"collective": COLLECTIVES, "op": lesson.OPS, "world_size": sizes, "root": range(n)}

    def title(settings: dict) -> str:
        arguments = ", ".join(f"{name}={value}" for name, value in _arguments(settings).items())
        ranks = count(settings["world_size"], "rank")
        return f"{settings['collective']}({arguments}) on {ranks}"

    def idle(settings: dict) -> set[str]:
        used = {"root" if name in ("src", "dst") else name for name in _arguments(settings)}
        return {"op", "root"} - used

    return Explorer(
        "collectives",
        {"collective": collective, "op": op, "world_size": world_size, "root": root},
        choices,
        ask=lambda settings: (_worker(settings["collective"]), *_arguments(settings).values()),
        draw=lambda result, settings: plot.tensors(result, title=title(settings)),
        idle=idle,
    )


def _worker(name: str):
    return getattr(lesson, name)


def _arguments(settings: dict) -> dict[str, Any]:
    """Return the arguments of the chosen worker that follow its rank and world size, by name."""
    values = {"op": settings["op"], "src": settings["root"], "dst": settings["root"]}
    names = list(signature(_worker(settings["collective"])).parameters)[2:]
    return {name: values[name] for name in names}


@lesson_main("collectives")
def main(ranks: Ranks) -> str:
    """Run every collective with every op, compare with one process, and print one line."""
    n = ranks.world_size
    held = [lesson.own_tensor(rank, n).cpu() for rank in range(n)]
    names = COLLECTIVES + ONE_TENSOR
    for name in names:
        takes_op = "op" in signature(_worker(name)).parameters
        for op in lesson.OPS if takes_op else ["SUM"]:
            result = ranks(_worker(name), *([op] if takes_op else []))
            prove(f"{name} with {op} is right", agrees(result, reference(name, held, op)))
    moments = list(ranks(lesson.barrier))
    last = max(moment["arrived"] for moment in moments)
    prove("nobody left the barrier early", all(m["left"] >= last for m in moments))
    return f"{len(names)} collectives and the barrier are right"


from ddp_kit.lessons import collectives as lesson
