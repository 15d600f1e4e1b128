"""Collectives: every rank of a group takes part in one operation.

Each worker returns {"before": ..., "after": ...}: the tensors that this rank held.
Source: "Writing Distributed Applications with PyTorch", section Collective Communication;
`reduce_scatter`, `all_to_all` and AVG go beyond it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from ddp_kit import device
from ddp_kit.error_text import count
from ddp_kit.launch import lesson_parser, open_ranks, prove, run_as_script
from ddp_kit.notebook.controls import Explorer

OPS = ("SUM", "PRODUCT", "MAX", "MIN", "AVG")


def own_tensor(rank: int, world_size: int) -> torch.Tensor:
    """Return the tensor a rank starts with: for rank 2 of 4 it is 20, 21, 22, 23."""
    return 10.0 * rank + torch.arange(world_size, device=device())


def broadcast(rank: int, world_size: int, src: int = 0) -> dict:
    """Copy one rank's tensor to every rank."""
    tensor = own_tensor(rank, world_size)
    before = tensor.clone()
    dist.broadcast(tensor, src=src)
    return {"before": before, "after": tensor}


def scatter(rank: int, world_size: int, src: int = 0) -> dict:
    """Send tensor i of one rank's list to rank i."""
    pieces = list(own_tensor(rank, world_size).split(1)) if rank == src else None
    tensor = torch.empty(1, device=device())
    dist.scatter(tensor, pieces, src=src)
    return {"before": pieces, "after": tensor}


def gather(rank: int, world_size: int, dst: int = 0) -> dict:
    """Collect one tensor from every rank in a list on one rank."""
    tensor = torch.tensor([10.0 * rank], device=device())
    pieces = [torch.empty_like(tensor) for _ in range(world_size)] if rank == dst else None
    dist.gather(tensor, pieces, dst=dst)
    return {"before": tensor, "after": pieces}


def reduce(rank: int, world_size: int, op: str = "SUM", dst: int = 0) -> dict:
    """Combine all tensors on one rank. What the others hold afterwards is undefined."""
    tensor = own_tensor(rank, world_size)
    before = tensor.clone()
    dist.reduce(tensor, dst=dst, op=getattr(dist.ReduceOp, op))
    return {"before": before, "after": tensor}


def all_reduce(rank: int, world_size: int, op: str = "SUM") -> dict:
    """Combine all tensors; every rank gets the whole result."""
    tensor = own_tensor(rank, world_size)
    before = tensor.clone()
    dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
    return {"before": before, "after": tensor}


def all_gather(rank: int, world_size: int) -> dict:
    """Collect one tensor from every rank, on every rank."""
    tensor = torch.tensor([10.0 * rank], device=device())
    pieces = [torch.empty_like(tensor) for _ in range(world_size)]
    dist.all_gather(pieces, tensor)
    return {"before": tensor, "after": pieces}


def reduce_scatter(rank: int, world_size: int, op: str = "SUM") -> dict:
    """Combine all lists and give rank i only entry i of the result."""
    pieces = list(own_tensor(rank, world_size).split(1))
    before = [piece.clone() for piece in pieces]
    tensor = torch.empty(1, device=device())
    dist.reduce_scatter(tensor, pieces, op=getattr(dist.ReduceOp, op))
    return {"before": before, "after": tensor}


def all_to_all(rank: int, world_size: int) -> dict:
    """Send entry i of the list to rank i, on every rank: the lists are transposed."""
    pieces = list(own_tensor(rank, world_size).split(1))
    received = [torch.empty_like(piece) for piece in pieces]
    dist.all_to_all(received, pieces)
    return {"before": pieces, "after": received}


def all_reduce_in_a_group(rank: int, world_size: int) -> dict:
    """Sum over the even ranks only. Every rank must call `new_group`, the odd ones too."""
    even = dist.new_group(list(range(0, world_size, 2)))
    tensor = own_tensor(rank, world_size)
    before = tensor.clone()
    if rank % 2 == 0:
        dist.all_reduce(tensor, group=even)
    return {"before": before, "after": tensor}


def barrier(rank: int, world_size: int) -> dict[str, int]:
    """Wait until the last rank has arrived; higher ranks come later.

    Returns when this rank arrived and left, in nanoseconds of one clock for all ranks.
    """
    time.sleep(0.02 * rank)
    arrived = time.monotonic_ns()
    dist.barrier()
    return {"arrived": arrived, "left": time.monotonic_ns()}


def reference(name: str, held: list[torch.Tensor], op: str = "SUM", root: int = 0) -> list:
    """Return what each rank should hold after a collective, computed in this one process.

    held: the `own_tensor` of each rank. root: the `src` or `dst` of those that have one.
    None means that what the rank holds is undefined.
    """
    n = len(held)
    stacked = torch.stack(held)  # row: rank, column: entry
    if name == "broadcast":
        return [held[root]] * n
    if name == "scatter":
        return list(held[root].split(1))
    if name in ("gather", "all_gather"):
        firsts = list(stacked[:, :1])
        return [firsts if name == "all_gather" or rank == root else None for rank in range(n)]
    if name == "all_to_all":
        return [list(column.split(1)) for column in stacked.T]
    if name == "all_reduce_in_a_group":
        total = stacked[::2].sum(0)
        return [held[rank] if rank % 2 else total for rank in range(n)]
    combined = {
        "SUM": stacked.sum(0),
        "PRODUCT": stacked.prod(0),
        "MAX": stacked.amax(0),
        "MIN": stacked.amin(0),
        "AVG": stacked.mean(0),
    }[op]
    if name == "reduce":
        return [combined if rank == root else None for rank in range(n)]
    if name == "reduce_scatter":
        return list(combined.split(1))
    return [combined] * n


COLLECTIVES: tuple[Callable, ...] = (
    broadcast,
    scatter,
    gather,
    reduce,
    all_reduce,
    all_gather,
    reduce_scatter,
    all_to_all,
    all_reduce_in_a_group,
)
WITH_OP: tuple[Callable, ...] = (reduce, all_reduce, reduce_scatter)
WITH_ROOT: dict[Callable, str] = {broadcast: "src", scatter: "src", gather: "dst", reduce: "dst"}


def agrees(result, expected: list) -> bool:
    """Return whether each rank's "after" is what `reference` expects."""
    return all(
        want is None or _flat(value["after"]) == _flat(want)
        for value, want in zip(result, expected, strict=True)
    )


def _flat(value: torch.Tensor | list[torch.Tensor]) -> list[float]:
    return (torch.cat(value) if isinstance(value, list) else value).tolist()


def explore(
    collective: str = "all_reduce", op: str = "SUM", world_size: int = 4, root: int = 0
) -> Explorer:
    """Run one collective and draw what each rank held before and after.

    root: the `src` or `dst` of those that have one. The drawing's `interact()` adds controls.
    Raises PoolError for an invalid choice.
    """
    from ddp_kit import plot  # ranks do not need it

    def choices(settings: dict) -> dict:
        n = settings["world_size"]
        names = tuple(worker.__name__ for worker in COLLECTIVES)
        sizes = range(1, max(8, n) + 1)
        return {"collective": names, "op": OPS, "world_size": sizes, "root": range(n)}

    settings = {"collective": collective, "op": op, "world_size": world_size, "root": root}
    return Explorer(
        "collectives",
        settings,
        choices,
        ask=_call,
        draw=lambda result, settings: plot.tensors(result, title=_title(settings)),
        idle=_without_effect,
    )


def _call(settings: dict) -> tuple:
    """Return the chosen worker and its arguments."""
    worker = globals()[settings["collective"]]
    arguments = [settings["op"]] if worker in WITH_OP else []
    return worker, *arguments, *([settings["root"]] if worker in WITH_ROOT else [])


def _without_effect(settings: dict) -> set[str]:
    worker, *_ = _call(settings)
    used = {"op": worker in WITH_OP, "root": worker in WITH_ROOT}
    return {name for name, useful in used.items() if not useful}


def _title(settings: dict) -> str:
    """Return what the ranks call: "reduce(op=SUM, dst=0) on 4 ranks"."""
    worker, *_ = _call(settings)
    arguments = [f"op={settings['op']}"] if worker in WITH_OP else []
    arguments += [f"{WITH_ROOT[worker]}={settings['root']}"] if worker in WITH_ROOT else []
    return f"{worker.__name__}({', '.join(arguments)}) on {count(settings['world_size'], 'rank')}"


def main(argv: list[str] | None = None) -> None:
    """Run every collective with every op, compare with one process, and print one line."""
    options = lesson_parser("collectives", __doc__).parse_args(argv or [])
    with open_ranks(options.world_size, options.backend, options.trace) as ranks:
        held = [own_tensor(rank, ranks.world_size).cpu() for rank in range(ranks.world_size)]
        for worker in COLLECTIVES:
            for op in OPS if worker in WITH_OP else ("SUM",):
                name = worker.__name__
                result = ranks(worker, *([op] if worker in WITH_OP else []))
                prove(f"{name} with {op} is right", agrees(result, reference(name, held, op)))
        moments = list(ranks(barrier))
        last = max(moment["arrived"] for moment in moments)
        prove("nobody left the barrier early", all(m["left"] >= last for m in moments))
        ranks.say(f"collectives: {ranks}, {len(COLLECTIVES)} collectives and the barrier are right")


if __name__ == "__main__":
    run_as_script(main)
