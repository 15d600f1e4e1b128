"""Operations to try on real ranks, with the answer that each of them must give.

An operation is called on every rank as `operation(rank, world_size, dtype)`. It communicates, and
returns two lists of tensors: what this rank got, and what it must have got. The second is None
where there is no right answer, such as the bitwise "and" of two floats.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import torch
import torch.distributed as dist

from ddp_kit import device

Answer = tuple[list[torch.Tensor], "list[torch.Tensor] | None"]
Operation = Callable[[int, int, torch.dtype], Answer]

BITWISE = {"BAND": operator.and_, "BOR": operator.or_, "BXOR": operator.xor}
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", *BITWISE)
DTYPES = (
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "int64",
    "int32",
    "uint8",
    "bool",
    "complex64",
)

# PyTorch 2.13 renamed two of them, and warns of the old names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def held(rank: int, world_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return what a rank brings along: 4 * world_size small numbers, exact in every dtype.

    Its pieces, one for each rank, differ, so that a piece in a wrong place is noticed.
    """
    places = torch.arange(4 * world_size) % 5
    values = (places >> rank) & 1 if dtype is torch.bool else places + 2 * rank
    return values.to(dtype).to(device())


def has_answer(op: str, dtype: torch.dtype) -> bool:
    """Tell whether every set of tensors has a right result: integers seldom have a whole mean."""
    integral = not dtype.is_floating_point and not dtype.is_complex
    if op == "AVG":
        return not integral
    return integral if op in BITWISE else op not in ("MIN", "MAX") or not dtype.is_complex


def combined(op: str, world_size: int, dtype: torch.dtype) -> torch.Tensor | None:
    """Combine what all ranks hold, in this one process; None: there is no right answer."""
    integral = not dtype.is_floating_point and not dtype.is_complex
    if not has_answer(op, dtype) and (op != "AVG" or dtype is torch.bool):
        return None
    wide = torch.int64 if integral else torch.complex128 if dtype.is_complex else torch.float64
    rows = torch.stack([held(rank, world_size, dtype).cpu().to(wide) for rank in range(world_size)])
    if op in ("SUM", "AVG"):
        total = rows.sum(0)
        total = total // world_size if op == "AVG" and integral else total
        total = total / world_size if op == "AVG" and not integral else total
    elif op == "PRODUCT":
        total = rows.prod(0)
    elif op in ("MIN", "MAX"):
        total = rows.amin(0) if op == "MIN" else rows.amax(0)
    else:
        total = functools.reduce(BITWISE[op], rows)
    return total.to(dtype)


def send_recv(rank: int, world_size: int, dtype: torch.dtype) -> Answer:
    """Pass a tensor to the right neighbour. Even ranks send first, so nobody waits for ever."""
    mine, left = held(rank, world_size, dtype), (rank - 1) % world_size
    into = torch.zeros_like(mine)
    steps = [lambda: dist.send(mine, (rank + 1) % world_size), lambda: dist.recv(into, left)]
    if world_size == 1:
        return [mine], [mine]
    for step in steps if rank % 2 == 0 else reversed(steps):
        step()
    return [into], [held(left, world_size, dtype)]


def broadcast(rank: int, world_size: int, dtype: torch.dtype) -> Answer:
    """Copy rank 0's tensor to every rank."""
    tensor = held(rank, world_size, dtype)
    dist.broadcast(tensor, src=0)
    return [tensor], [held(0, world_size, dtype)]


def all_reduce(op: str, rank: int, world_size: int, dtype: torch.dtype) -> Answer:
    """Combine all tensors on every rank."""
    tensor = held(rank, world_size, dtype)
    dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
    want = combined(op, world_size, dtype)
    return [tensor], None if want is None else [want]


def reduce(rank: int, world_size: int, dtype: torch.dtype) -> Answer:
    """Add up all tensors on rank 0. What the others then hold is of no use."""
    tensor = held(rank, world_size, dtype)
    dist.reduce(tensor, dst=0)
    return ([], []) if rank else ([tensor], [combined("SUM", world_size, dtype)])


def all_gather(rank: int, world_size: int, dtype: torch.dtype) -> Answer:
    """Collect the tensors of all ranks in a list, on every rank."""
    mine = held(rank, world_size, dtype)
    pieces = [torch.zeros_like(mine) for _ in range(world_size)]
    dist.all_gather(pieces, mine)
    return pieces, _everyone(world_size, dtype)


def all_gather_single(rank: int, world_size: int, dtype: torch.dtype) -> Answer:
    """Collect the tensors of all ranks in one tensor, on every rank."""
    mine = held(rank, world_size, dtype)
    whole = torch.cat([torch.zeros_like(mine)] * world_size)
    _all_gather_single(whole, mine)
    return list(whole.chunk(world_size)), _everyone(world_size, dtype)


def gather(rank: int, world_size: int, dtype: torch.dtype) -> Answer:
    """Collect the tensors of all ranks in a list on rank 0."""
    mine = held(rank, world_size, dtype)
    pieces = None if rank else [torch.zeros_like(mine) for _ in range(world_size)]
    dist.gather(mine, pieces, dst=0)
    return ([], []) if rank else (pieces, _everyone(world_size, dtype))


def scatter(rank: int, world_size: int, dtype: torch.dtype) -> Answer:
    """Deal out rank 0's list."""
    pieces = _pieces(0, world_size, dtype)
    into = torch.zeros_like(pieces[rank])
    dist.scatter(into, None if rank else pieces, src=0)
    return [into], [pieces[rank]]


def reduce_scatter(rank: int, world_size: int, dtype: torch.dtype) -> Answer:
    """Add up all lists, and give rank i entry i."""
    pieces = _pieces(rank, world_size, dtype)
    into = torch.zeros_like(pieces[rank])
    dist.reduce_scatter(into, pieces)
    return [into], [combined("SUM", world_size, dtype).chunk(world_size)[rank]]


def reduce_scatter_single(rank: int, world_size: int, dtype: torch.dtype) -> Answer:
    """Add up all tensors, and give rank i part i."""
    mine = held(rank, world_size, dtype)
    into = torch.zeros_like(mine[:4])
    _reduce_scatter_single(into, mine)
    return [into], [combined("SUM", world_size, dtype).chunk(world_size)[rank]]


def all_to_all(rank: int, world_size: int, dtype: torch.dtype) -> Answer:
    """Send entry i of a list to rank i, on every rank."""
    pieces = _pieces(rank, world_size, dtype)
    into = [torch.zeros_like(piece) for piece in pieces]
    dist.all_to_all(into, pieces)
    return into, [_pieces(other, world_size, dtype)[rank] for other in range(world_size)]


def all_to_all_single(rank: int, world_size: int, dtype: torch.dtype) -> Answer:
    """Send part i of a tensor to rank i, on every rank."""
    mine = held(rank, world_size, dtype)
    into = torch.zeros_like(mine)
    dist.all_to_all_single(into, mine)
    parts = [_pieces(other, world_size, dtype)[rank] for other in range(world_size)]
    return list(into.chunk(world_size)), parts


def barrier(rank: int, world_size: int, dtype: torch.dtype | None = None) -> Answer:
    """Wait until all ranks are here."""
    dist.barrier()
    return [], []


def objects(rank: int, world_size: int, dtype: torch.dtype | None = None) -> Answer:
    """Move Python objects: collected, broadcast and dealt out."""
    collected: list = [None] * world_size
    dist.all_gather_object(collected, {"rank": rank})
    told = ["a word"] if rank == 0 else [None]
    dist.broadcast_object_list(told, src=0)
    dealt: list = [None]
    dist.scatter_object_list(dealt, list(range(world_size)) if rank == 0 else None, src=0)
    expected = [{"rank": other} for other in range(world_size)], ["a word"], [rank]
    return [torch.tensor((collected, told, dealt) == expected)], [torch.tensor(True)]


OPERATIONS: dict[str, Operation] = {
    "send, recv": send_recv,
    "broadcast": broadcast,
    **{f"all_reduce {op}": functools.partial(all_reduce, op) for op in OPS},
    "reduce": reduce,
    "all_gather": all_gather,
    "all_gather_single": all_gather_single,
    "gather": gather,
    "scatter": scatter,
    "reduce_scatter": reduce_scatter,
    "reduce_scatter_single": reduce_scatter_single,
    "all_to_all": all_to_all,
    "all_to_all_single": all_to_all_single,
}
WITHOUT_DTYPE: dict[str, Operation] = {"barrier": barrier, "objects": objects}


def _pieces(rank: int, world_size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return list(held(rank, world_size, dtype).chunk(world_size))


def _everyone(world_size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [held(rank, world_size, dtype) for rank in range(world_size)]
