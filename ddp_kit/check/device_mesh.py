"""Graders of lesson 14: a norm and a whole tensor from shards on a mesh, and a sharded product."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from ddp_kit.check.compared import compared, hunt
from ddp_kit.check.grader import SIZES, Grader
from ddp_kit.check.record import Score, Span, record
from ddp_kit.lessons import device_mesh as lesson

ROWS = 60  # of a product: divisible by all world sizes
INNER, COLUMNS = 2, 2  # of a product: a rank's part of what is summed over, and the columns
MESHES = ((2, 2), (2, 1), (1, 2), (1, 1), (3, 2))  # most mistakes show on the first
ON_MESHES: dict[str, Any] = {
    "where": "on meshes of 2 x 2, 2 x 1, 1 x 2, 1 x 1 and 3 x 2 ranks",
    "cases": [(rows * columns, rows, columns) for rows, columns in MESHES],
    "part": lambda case: "on 2 x 2 ranks" if case[1:] == (2, 2) else "on other meshes",
}


def _grid(rows: int, columns: int) -> DeviceMesh:
    return init_device_mesh("cpu", (rows, columns), mesh_dim_names=("dp", "tp"))


@compared(
    "14.1",
    "norm(local, mesh)",
    call=lambda n, rows, columns: f"norm(local, mesh of {rows} x {columns})",
    **ON_MESHES,
)
def _norm(rank: int, n: int, norm: Callable, rows: int, columns: int) -> dict:
    local = torch.arange(1.0, 6 * rows + 1).view(rows, 2, 3)[rank // columns].clone()
    return {"what is returned": norm(local, _grid(rows, columns)), "local": local}


@compared(
    "14.2",
    "gather_whole(local, mesh)",
    call=lambda n, rows, columns: f"gather_whole(local, mesh of {rows} x {columns})",
    **ON_MESHES,
)
def _gather_whole(rank: int, n: int, gather_whole: Callable, rows: int, columns: int) -> Any:
    whole, (row, column) = torch.arange(1.0, 6 * n + 1).view(-1, 3), divmod(rank, columns)
    local = whole.chunk(columns)[column].chunk(rows)[row].clone()
    return gather_whole(local, _grid(rows, columns))


@compared(
    "14.3", "own_rows(x, w)", "each row is sent where it is needed only", sizes=SIZES, spare=1
)
def _own_rows(rank: int, n: int, own_rows: Callable) -> torch.Tensor:
    x = torch.arange(ROWS * INNER).view(ROWS, INNER) % 7 + 10 * (rank + 1)
    w = torch.arange(INNER * COLUMNS).view(INNER, COLUMNS) + rank + 1
    return own_rows(x.float(), w.float())


hunt("14.9")


def in_groups(number: str, form: str) -> Callable[[Callable], Callable]:
    """Register a check on all ranks, and then in a group of rank 0 alone and one of the others."""
    return compared(
        number,
        form,
        where="on 2 and 3 ranks, and in groups",
        cases=[(2, False), (3, False), (3, True)],
        part=lambda case: "in groups" if case[1] else f"on {case[0]} ranks",
        call=lambda n, in_group: f"{form[:-1]}{', group' * in_group})",
    )


def _given(rank: int, n: int, in_group: bool) -> tuple[Callable, tuple]:
    """Return what cuts a tensor along a dimension to this rank's piece, and the group, if any."""
    group = dist.group.WORLD
    if in_group:
        group = [dist.new_group(members) for members in ([0], range(1, n))][min(rank, 1)]
    size, place = dist.get_world_size(group), dist.get_rank(group)

    def own(whole: torch.Tensor, dim: int) -> torch.Tensor:
        return lesson.pieces(whole, dim, size)[place].clone()

    return own, (group,) if in_group else ()


@in_groups("14.a", "shard_to_replicate(piece, dim, length)")
def _shard_to_replicate(rank: int, n: int, answer: Callable, in_group: bool) -> dict:
    own, group = _given(rank, n, in_group)
    whole, even = torch.arange(1.0, 36.0).view(5, 7), torch.arange(-6.0, 6.0).view(6, 2)
    even[3] = 0  # what looks like padding
    return {
        f"the whole from {name}": answer(own(one, dim), dim, one.shape[dim], *group)
        for name, one, dim in (("rows", whole, 0), ("columns", whole, 1), ("equal pieces", even, 0))
    }


@in_groups("14.b", "shard_to_shard(piece, old, new, length)")
def _shard_to_shard(rank: int, n: int, answer: Callable, in_group: bool) -> dict:
    own, group = _given(rank, n, in_group)
    whole, even = torch.arange(1.0, 36.0).view(5, 7), torch.arange(36.0).view(6, 6)
    cases = {
        "rows to columns": (whole, 0),
        "columns to rows": (whole, 1),
        "equal pieces": (even, 0),
    }
    return {
        f"the piece from {name}": answer(own(one, old), old, 1 - old, one.shape[old], *group)
        for name, (one, old) in cases.items()
    }


@compared("14.c", "mesh_groups(rank, world_size, rows)", sizes=(3, 6))
def _mesh_groups(rank: int, world_size: int, mesh_groups: Callable) -> dict | str:
    groups = mesh_groups(rank, world_size, 3 if world_size == 3 else 2)
    if not isinstance(groups, dict):
        return f"a value of type {type(groups).__name__}, and no dict"
    members = {name: dist.get_process_group_ranks(group) for name, group in groups.items()}
    return {f"the group along {name}": members.get(name) for name in ("dp", "tp")}


@compared("14.10", "jacobi(block, rows, columns, steps)", kind="function", sizes=(4, 6))
def _jacobi(rank: int, world_size: int, jacobi: Callable) -> dict:
    rows, columns = 2, world_size // 2
    row, column = divmod(rank, columns)
    plate = (torch.arange(4.0 * rows * 3 * columns) * 7 % 64).view(4 * rows, 3 * columns)
    block = plate[4 * row :, 3 * column :][:4, :3].clone()
    return {"the block": jacobi(block, rows, columns, 3)}


# Of x, of the weight as it is kept and as it is used, and of the product.
LAYOUTS: dict[str, tuple[Placement, Placement, Placement, Placement]] = {
    "rows": (Shard(0), Replicate(), Replicate(), Shard(0)),
    "gathered": (Shard(0), Shard(0), Replicate(), Shard(0)),
    "columns": (Replicate(), Shard(1), Shard(1), Shard(1)),
    "inner": (Shard(1), Shard(0), Shard(0), Partial()),
}
NETWORKS = (  # tokens, widths, ranks, bytes of weights that a rank may keep
    (512, (128, 512, 128, 128, 1024, 128, 256, 64, 512, 2048, 512, 128), 4, 3_500_000),
    (1024, (256, 1024, 1024, 256, 128, 512, 2048, 256, 512, 256, 1024, 256), 8, 3_500_000),
)


@record(
    "14.11", "choose_layouts(tokens, widths, n, most)", "MB", (22.1, 14.3, 12), "MB", ["each rank"]
)
def _choose_layouts(grader: Grader) -> Score:
    total, spans = 0.0, []
    for tokens, widths, n, most in NETWORKS:
        names = grader.ask(tokens, widths, n, most)
        if not isinstance(names, list | tuple) or len(names) != len(widths) - 1:
            fact = f"it returns {names!r}, and not a list of {len(widths) - 1} names"
            grader.fail(fact, hint="not a name for each layer")
        if unknown := [name for name in names if name not in LAYOUTS]:
            grader.fail(f"{unknown[0]!r} is not one of the layouts", hint="unknown layout")
        now, held = Shard(0), 0.0
        for number, (name, a, b) in enumerate(
            (name, a, b) for name, (a, b) in zip(names, pairwise(widths), strict=True)
        ):
            x, kept, used, y = LAYOUTS[name]
            sent = lesson.bytes_sent(now, x, (tokens, a), n, True)
            sent += lesson.bytes_sent(kept, used, (a, b), n, True)
            held += 4 * a * b / (1 if kept == Replicate() else n)
            now = y
            spans.append(Span(0, total, total + sent / 1e6, f"{number} {name}"))
            total += sent / 1e6
        if held > most:
            fact = f"a rank would keep {held:,.0f} bytes of weights where {most:,} are the most"
            grader.fail(fact, hint="too much kept")
        sent = lesson.bytes_sent(now, Shard(0), (tokens, widths[-1]), n, True)
        spans.append(Span(0, total, total + sent / 1e6, "end"))
        total += sent / 1e6
    return Score(total, [span for span in spans if span.end > span.start])
