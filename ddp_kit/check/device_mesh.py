"""Graders of lesson 14: a norm and a whole tensor from shards on a mesh, and a sharded product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from ddp_kit.check.compared import hunt
from ddp_kit.check.grader import SENT, Grader, exercise

MESHES = ((2, 2), (2, 1), (1, 2), (1, 1), (3, 2))  # most mistakes show on the first
KEPT = "the tensor that it gets stays as it is"
ROWS = 60  # of a product: divisible by all world sizes
INNER, COLUMNS = 2, 2  # of a product: a rank's part of what is summed over, and the columns


def mesh_name(shape: tuple[int, int]) -> str:
    """Return the name of the part to which a mesh belongs; most mistakes show on 2 x 2 ranks."""
    return "on 2 x 2 ranks" if shape == (2, 2) else "on other meshes"


@exercise(
    "14.1",
    "norm(local, mesh)",
    where="on meshes of 2 x 2, 2 x 1, 1 x 2, 1 x 1 and 3 x 2 ranks",
    cases=MESHES,
    others=(KEPT, SENT),
    part=mesh_name,
)
def _norm(grader: Grader, rows: int, columns: int) -> None:
    shape = (rows, columns)
    held = [_matrix(rows)[r // columns * 2 :][:2] for r in range(rows * columns)]
    result = _run(grader, shape, held)
    norms = torch.stack([local.norm() for local in held])
    total = (norms**2).sum() / columns  # every row is on that many ranks
    n = len(held)
    mistakes = {
        "nothing added up": list(norms),
        "replicas counted": (total * columns).sqrt(),
        "norms added up": norms.sum() / columns,
        "no root": total,
        "wrong group": True,
    }
    found = [value for value, _ in result]
    grader.compare([_matrix(rows).norm()] * n, found, mistakes, verb="return")
    kept = [local for _, local in result]
    grader.compare(held, kept, "changed in place", place=" in local", part=KEPT)
    grader.check_collectives(8, "rows gathered")


@exercise(
    "14.2",
    "gather_whole(local, mesh)",
    where="on meshes of 2 x 2, 2 x 1, 1 x 2, 1 x 1 and 3 x 2 ranks",
    cases=MESHES,
    part=mesh_name,
)
def _gather_whole(grader: Grader, rows: int, columns: int) -> None:
    shape = (rows, columns)
    whole = torch.arange(1.0, 6 * rows * columns + 1).view(2 * rows, 3 * columns)
    held = [part.contiguous() for line in whole.chunk(rows) for part in line.chunk(columns, dim=1)]
    found = [value for value, _ in _run(grader, shape, held)]
    grader.compare([whole] * len(held), found, _mistake_in(whole, found), verb="return")


@exercise("14.3", "own_rows(x, w)", "each row is sent where it is needed only", others=(SENT,))
def _own_rows(grader: Grader, n: int) -> None:
    factors = [_factors(rank) for rank in range(n)]
    found = grader.call(factors)
    summands = [x @ w for x, w in factors]
    whole = sum(summands)
    mistakes = {
        "own summand": summands,
        "rows of own summand": [own.chunk(n)[rank] for rank, own in enumerate(summands)],
        "whole product": [whole] * n,
        "wrong rows": True,
    }
    grader.compare(list(whole.chunk(n)), found, mistakes, verb="return")
    grader.check_sent(4 * ROWS * COLUMNS * (n - 1) // n, "too many bytes")


def _run(grader: Grader, shape: tuple[int, int], held: list) -> Any:
    name, (rows, columns) = grader.form.partition("(")[0], shape
    case = f"{name}(local, mesh of {rows} x {columns})"
    return grader.run(_call, shape, held, world_size=rows * columns, case=case)


def _call(
    rank: int, world_size: int, answer: Callable, shape: tuple[int, int], held: list[torch.Tensor]
) -> tuple[Any, torch.Tensor]:
    """Return what the answer returns, and this rank's tensor afterwards."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    return answer(held[rank], mesh), held[rank]


def _matrix(rows: int) -> torch.Tensor:
    """Return two rows of three numbers for each row of the mesh."""
    return torch.arange(1.0, 6 * rows + 1).view(2 * rows, 3)


def _factors(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a rank's columns of the left factor and rows of the right one; sums are exact."""
    x = torch.arange(ROWS * INNER).view(ROWS, INNER) % 7 + 10 * (rank + 1)
    w = torch.arange(INNER * COLUMNS).view(INNER, COLUMNS) + rank + 1
    return x.float(), w.float()


def _mistake_in(whole: torch.Tensor, found: list) -> str:
    tensors = [have for have in found if isinstance(have, torch.Tensor)]
    shapes = {tuple(have.shape) for have in tensors if have.ndim == 2}
    if tuple(whole.shape) in shapes:
        return "wrong place"
    if any(shape[0] == len(whole) for shape in shapes):
        return "columns left out"
    if any(shape[-1] == whole.shape[1] for shape in shapes):
        return "rows left out"
    return "wrong shape"


hunt("14.9")
