"""Collectives: every rank of a group takes part in one operation.

Each worker returns {"before": ..., "after": ...}: the tensors that this rank held.
Source: "Writing Distributed Applications with PyTorch", section Collective Communication;
`reduce_scatter`, `all_to_all`, AVG and the forms with one tensor instead of a list go beyond it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from ddp_kit import device
from ddp_kit.error_text import count
from ddp_kit.errors import PoolError
from ddp_kit.launch import lesson_parser, open_ranks, prove, run_as_script
from ddp_kit.notebook.controls import Explorer

try:
    from torch.distributed import all_gather_single, reduce_scatter_single
except ImportError:  # before PyTorch 2.13 they had other names
    from torch.distributed import all_gather_into_tensor as all_gather_single
    from torch.distributed import reduce_scatter_tensor as reduce_scatter_single

OPS = ("SUM", "PRODUCT", "MAX", "MIN", "AVG")
LARGEST_WORLD = 19  # for all_reduce_in_a_group: an int64 does not hold 10**19


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


def all_gather_one_tensor(rank: int, world_size: int) -> dict:
    """Collect one tensor from every rank in one tensor, on every rank."""
    tensor = torch.tensor([10.0 * rank], device=device())
    whole = torch.empty(world_size, device=device())
    all_gather_single(whole, tensor)
    return {"before": tensor, "after": whole}


def reduce_scatter(rank: int, world_size: int, op: str = "SUM") -> dict:
    """Combine all lists and give rank i only entry i of the result."""
    pieces = list(own_tensor(rank, world_size).split(1))
    before = [piece.clone() for piece in pieces]
    tensor = torch.empty(1, device=device())
    dist.reduce_scatter(tensor, pieces, op=getattr(dist.ReduceOp, op))
    return {"before": before, "after": tensor}


def reduce_scatter_one_tensor(rank: int, world_size: int, op: str = "SUM") -> dict:
    """Combine all tensors and give rank i only part i of the result."""
    whole = own_tensor(rank, world_size)
    before = whole.clone()
    tensor = torch.empty(1, device=device())
    reduce_scatter_single(tensor, whole, op=getattr(dist.ReduceOp, op))
    return {"before": before, "after": tensor}


def all_to_all(rank: int, world_size: int) -> dict:
    """Send entry i of the list to rank i, on every rank: the lists are transposed."""
    pieces = list(own_tensor(rank, world_size).split(1))
    received = [torch.empty_like(piece) for piece in pieces]
    dist.all_to_all(received, pieces)
    return {"before": pieces, "after": received}


def all_to_all_one_tensor(rank: int, world_size: int) -> dict:
    """Send part i of the tensor to rank i, on every rank."""
    whole = own_tensor(rank, world_size)
    received = torch.empty_like(whole)
    dist.all_to_all_single(received, whole)
    return {"before": whole, "after": received}


def all_reduce_in_a_group(rank: int, world_size: int) -> dict:
    """Sum over the even ranks only. Every rank must call `new_group`, the odd ones too.

    Rank r brings 10 to the power of r, so that the digits of a sum name the ranks that are in it.
    """
    even = dist.new_group(list(range(0, world_size, 2)))
    tensor = torch.tensor([10**rank], device=device())
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


def try_op(rank: int, world_size: int, op: str, dtype: torch.dtype = torch.float32) -> str:
    """Return how the backend refuses an all_reduce with this op and dtype, "" if it takes it."""
    tensor = torch.ones(2, dtype=dtype, device=device())
    chosen = getattr(dist.ReduceOp, op)
    try:
        dist.all_reduce(tensor, op=chosen(2.0) if op == "PREMUL_SUM" else chosen)
    except (RuntimeError, TypeError, ValueError) as error:
        return str(error).splitlines()[0]
    return ""


def reference(name: str, held: list[torch.Tensor], op: str = "SUM", root: int = 0) -> list:
    """Return what each rank should hold after a collective, computed in this one process.

    name: of the worker. A form with one tensor holds the same numbers as the one with a list.
    held: the `own_tensor` of each rank. root: the `src` or `dst` of those that have one.
    None means that what the rank holds is undefined.
    """
    name = name.removesuffix("_one_tensor")
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
        total = sum(10**rank for rank in range(0, n, 2))
        return [torch.tensor([10**rank if rank % 2 else total]) for rank in range(n)]
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
ONE_TENSOR: tuple[Callable, ...] = (
    all_gather_one_tensor,
    reduce_scatter_one_tensor,
    all_to_all_one_tensor,
)
WITH_OP: tuple[Callable, ...] = (reduce, all_reduce, reduce_scatter, reduce_scatter_one_tensor)
WITH_ROOT: dict[Callable, str] = {broadcast: "src", scatter: "src", gather: "dst", reduce: "dst"}


def agrees(result, expected: list) -> bool:
    """Return whether each rank's "after" is what `reference` expects.

    Floats may differ by rounding: a product of many depends on the order of its factors.
    """
    return all(
        want is None or _equal(value["after"], want, len(expected))
        for value, want in zip(result, expected, strict=True)
    )


def _equal(have: torch.Tensor | list, want: torch.Tensor | list, factors: int) -> bool:
    """Return whether numbers are equal; floats, up to the rounding of that many factors."""
    numbers, right = _flat(have), _flat(want)
    rounding = factors * torch.finfo(torch.float32).eps
    return len(numbers) == len(right) and all(
        a == b or (isinstance(b, float) and math.isclose(a, b, rel_tol=rounding))
        for a, b in zip(numbers, right, strict=True)
    )


def greatest_difference(result, expected: list) -> float:
    """Return how far any number of an "after" is from what `reference` expects.

    Raises ValueError if a rank holds more or fewer numbers than expected.
    """
    return max(
        float(abs(number - right))
        for value, want in zip(result, expected, strict=True)
        if want is not None
        for number, right in zip(_flat(value["after"]), _flat(want), strict=True)
    )


def _flat(value: torch.Tensor | list[torch.Tensor]) -> list[float]:
    return (torch.cat(value) if isinstance(value, list) else value).tolist()


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
        names = tuple(worker.__name__ for worker in COLLECTIVES)
        most = max(8, n)
        if settings["collective"] == all_reduce_in_a_group.__name__:
            most = min(most, LARGEST_WORLD)
        sizes = range(1, most + 1)
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
    """Run every collective with every op, compare with one process, and print one line.

    A backend may refuse AVG, as gloo does in PyTorch 2.6. It is then left out, and a second line
    says so. Raises ProofError if another op is refused, PoolError for more than 19 ranks.
    """
    options = lesson_parser("collectives", __doc__).parse_args(argv or [])
    with open_ranks(options.world_size, options.backend, options.trace) as ranks:
        if ranks.world_size > LARGEST_WORLD:
            raise PoolError(
                f"world_size must be at most {LARGEST_WORLD} in this lesson, whose rank r brings "
                f"10**r as an int64, got {ranks.world_size}"
            )
        held = [own_tensor(rank, ranks.world_size).cpu() for rank in range(ranks.world_size)]
        refused = [op for op in OPS if any(ranks(try_op, op))]
        prove("the backend accepts every op but AVG", set(refused) <= {"AVG"})
        taken = [op for op in OPS if op not in refused]
        workers = COLLECTIVES + ONE_TENSOR
        for worker in workers:
            for op in taken if worker in WITH_OP else ("SUM",):
                name = worker.__name__
                result = ranks(worker, *([op] if worker in WITH_OP else []))
                prove(f"{name} with {op} is right", agrees(result, reference(name, held, op)))
        moments = list(ranks(barrier))
        last = max(moment["arrived"] for moment in moments)
        prove("nobody left the barrier early", all(m["left"] >= last for m in moments))
        ranks.say(f"collectives: {ranks}, {len(workers)} collectives and the barrier are right")
        if refused:
            ranks.say(f"not tried, because the backend refuses it: {', '.join(refused)}")


if __name__ == "__main__":
    run_as_script(main)
