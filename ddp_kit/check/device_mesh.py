"""Graders of lesson 14: a norm and a whole tensor from shards on a mesh, and a sharded product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ddp_kit.check.grader import SENT, SIZES, Credit, Grader, same

MESHES = ((2, 2), (2, 1), (1, 2), (1, 1), (3, 2))  # most mistakes show on the first
KEPT = "the tensor that it gets stays as it is"
NAMES = ("dp", "tp")
ROWS = 60  # of a product: divisible by all world sizes
INNER, COLUMNS = 2, 2  # of a product: a rank's part of what is summed over, and the columns
_UNCHANGED = "Leave the tensor that it gets as it is: `a * a` makes a new one, `a *= a` does not."


def exercise_14_1(norm: Callable[[torch.Tensor, DeviceMesh], Any]) -> Credit:
    """Grade `norm(local, mesh)` on meshes of 1 to 6 ranks, with [Shard(0), Replicate()].

    Raises ExerciseError if it is not right yet, NotImplementedError for the stub.
    """
    grader = Grader("14.1", "norm(local, mesh)", norm, collectives=True)
    for shape in grader.each(MESHES, KEPT, SENT, part=mesh_name):
        rows, columns = shape
        held = [_matrix(rows)[r // columns * 2 :][:2] for r in range(rows * columns)]
        result = _run(grader, "norm", _call, shape, held)
        found = [value for value, _ in result]
        wanted = [_matrix(rows).norm()] * len(held)
        grader.compare(wanted, found, _hint_for_norm(held, found, columns), verb="return")
        grader.compare(held, [local for _, local in result], _UNCHANGED, "hold", " in local", KEPT)
        hint = "Add up the squares on each rank first: only one number has to travel."
        nbytes = sum(event.nbytes for event in grader.collectives() if event.op != "new_group")
        grader.check_at_most(" in collectives by rank 0", nbytes, 8, "byte", hint)
    return grader.passed("right on meshes of 2 x 2, 2 x 1, 1 x 2, 1 x 1 and 3 x 2 ranks")


def exercise_14_2(gather_whole: Callable[[torch.Tensor, DeviceMesh], Any]) -> Credit:
    """Grade `gather_whole(local, mesh)` on meshes of 1 to 6 ranks, with [Shard(0), Shard(1)].

    Raises ExerciseError if it is not right yet, NotImplementedError for the stub.
    """
    grader = Grader("14.2", "gather_whole(local, mesh)", gather_whole, collectives=True)
    for shape in grader.each(MESHES, part=mesh_name):
        rows, columns = shape
        whole = torch.arange(1.0, 6 * rows * columns + 1).view(2 * rows, 3 * columns)
        held = [
            part.contiguous() for line in whole.chunk(rows) for part in line.chunk(columns, dim=1)
        ]
        result = _run(grader, "gather_whole", _call, shape, held)
        found = [value for value, _ in result]
        grader.compare([whole] * len(held), found, _hint_for_whole(whole, found), verb="return")
    return grader.passed("right on meshes of 2 x 2, 2 x 1, 1 x 2, 1 x 1 and 3 x 2 ranks")


def exercise_14_3(own_rows: Callable[[torch.Tensor, torch.Tensor], Any]) -> Credit:
    """Grade `own_rows(x, w)` on 1 to 5 ranks.

    Raises ExerciseError if it is not right yet, NotImplementedError for the stub.
    """
    grader = Grader("14.3", "own_rows(x, w)", own_rows, collectives=True)
    for n in grader.each(SIZES, SENT):
        result = grader.run(_multiply, world_size=n)
        factors = [_factors(rank) for rank in range(n)]
        summands = [x @ w for x, w in factors]
        wanted = list(sum(summands).chunk(n))
        found = list(result)
        grader.compare(wanted, found, _hint_for_rows(summands, wanted, found), verb="return")
        sent = sum(row.sent for row in result.trace.summary(rank=0).rows)
        enough = 4 * ROWS * COLUMNS * (n - 1) // n
        hint = (
            "Every rank needs only its own rows of the sum: reduce_scatter adds up and deals out "
            "in one call. An all_reduce sends twice as much, and so does gathering the factors."
        )
        grader.check_at_most(" by rank 0", sent, enough, "byte", hint)
    return grader.passed(
        "right on 1, 2, 3, 4 and 5 ranks, each row is sent where it is needed only"
    )


def mesh_name(shape: tuple[int, int]) -> str:
    """Return the name of the part to which a mesh belongs; most mistakes show on 2 x 2 ranks."""
    return "on 2 x 2 ranks" if shape == (2, 2) else "on other meshes"


def _run(grader: Grader, name: str, worker: Callable, shape: tuple[int, int], held: list) -> Any:
    rows, columns = shape
    case = f"{name}(local, mesh of {rows} x {columns})"
    return grader.run(worker, shape, held, world_size=rows * columns, case=case)


def _call(
    rank: int,
    world_size: int,
    answer: Callable,
    shape: tuple[int, int],
    held: list[torch.Tensor],
) -> tuple[Any, torch.Tensor]:
    """Return what the answer returns, and this rank's tensor afterwards."""
    local = held[rank].clone()
    value = answer(local, init_device_mesh("cpu", shape, mesh_dim_names=NAMES))
    return value, local


def _matrix(rows: int) -> torch.Tensor:
    """Return two rows of three numbers for each row of the mesh."""
    return torch.arange(1.0, 6 * rows + 1).view(2 * rows, 3)


def _factors(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a rank's columns of the left factor and rows of the right one; sums are exact."""
    x = torch.arange(ROWS * INNER).view(ROWS, INNER) % 7 + 10 * (rank + 1)
    w = torch.arange(INNER * COLUMNS).view(INNER, COLUMNS) + rank + 1
    return x.float(), w.float()


def _multiply(rank: int, world_size: int, own_rows: Callable) -> Any:
    return own_rows(*_factors(rank))


def _hint_for_norm(held: list[torch.Tensor], found: list, columns: int) -> str:
    norms = torch.stack([local.norm() for local in held])
    total = (norms**2).sum() / columns  # every row is on that many ranks
    hints = [
        (norms, "That is the norm of this rank's rows. Add up the squares over a group's ranks."),
        (
            (total * columns).sqrt(),
            "Every row is counted once for each of its replicas. Add up over the ranks that hold "
            'different rows only: mesh.get_group("dp").',
        ),
        (
            norms.sum() / columns,
            "Norms do not add up. Add up the squares, and take the root of the sum.",
        ),
        (total, "That is the square of the norm: take the root."),
    ]
    for value, hint in hints:
        if all(map(same, value.expand(len(held)), found)):
            return hint
    return (
        "The norm is the root of the sum of all squares. Ranks with the same rows count once: add "
        'up over mesh.get_group("dp"), and return a tensor without dimensions.'
    )


def _hint_for_whole(whole: torch.Tensor, found: list) -> str:
    tensors = [have for have in found if isinstance(have, torch.Tensor)]
    shapes = {tuple(have.shape) for have in tensors if have.ndim == 2}
    if tuple(whole.shape) in shapes:
        return (
            "The shape is right, but parts are in the wrong place. The ranks of a row of the mesh "
            "hold the same rows: concatenate their parts along dimension 1."
        )
    if any(shape[0] == len(whole) for shape in shapes):
        return 'The columns are not complete: gather along "tp" as well, and concatenate along 1.'
    if any(shape[-1] == whole.shape[1] for shape in shapes):
        return 'The rows are not complete: gather along "dp" as well, and concatenate along 0.'
    return (
        'Gather along "tp", and concatenate the parts along dimension 1. Then gather the result '
        'along "dp", and concatenate along dimension 0.'
    )


def _hint_for_rows(summands: list, wanted: list, found: list) -> str:
    n = len(summands)
    if all(map(same, summands, found)):
        return "That is this rank's summand, for all rows. Add up over the ranks, and cut."
    if all(same(list(own.chunk(n))[r], found[r]) for r, own in enumerate(summands)):
        return "Those are this rank's rows of its own summand: add up over the ranks, too."
    if all(same(sum(summands), have) for have in found):
        return "That is the whole product on every rank. Each should return its own rows."
    return (
        "x @ w is a summand of the whole product. Cut it into as many parts as there are ranks, "
        "along dimension 0, and pass these to reduce_scatter."
    )
