"""Device meshes: one tensor that is split, replicated or partial over ranks.

The collective that turns each placement into another one, by hand, beside PyTorch's DTensor, which
chooses it; meshes of two dimensions, and a product of sharded matrices. Sources: PyTorch's tutorial
"Getting Started with DeviceMesh" and its documentation of DTensor; Xu et al., "GSPMD: General and
Scalable Parallelization for ML Computation Graphs" (2021), arXiv 2105.04663.
"""

from __future__ import annotations

import itertools
import math

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from ddp_kit import compare, device
from ddp_kit.launch import lesson_parser, open_ranks, prove, run_as_script
from ddp_kit.lessons._explore_placements import explore  # noqa: F401
from ddp_kit.lessons._placements import (  # noqa: F401 - the notebook uses them
    PLACEMENTS,
    by_dtensor,
    bytes_sent,
    change,
    collectives,
    counted,
    groups_by_hand,
    lengths,
    mesh_groups,
    numbered,
    own_part,
    pad,
    partial_to_replicate,
    partial_to_shard,
    pieces,
    redistribute_on_mesh,
    reference,
    replicate_to_shard,
    sent_by_tcp,
    shard_to_replicate,
    shard_to_shard,
    stands_for,
)

# Every change that `redistribute` makes: nothing becomes partial.
CHANGES = [
    (before, after)
    for before, after in itertools.product(PLACEMENTS.values(), repeat=2)
    if before != after and after != Partial()
]


def by_hand(
    rank: int,
    world_size: int,
    before: Placement,
    after: Placement,
    rows: int = 4,
    columns: int = 4,
) -> dict[str, torch.Tensor]:
    """Change the placement of a matrix with `change`; return this rank's part before and after."""
    local = own_part(rank, world_size, before, rows, columns)
    return {"before": local, "after": change(local, before, after, (rows, columns))}


def collective(before: Placement, after: Placement) -> str:
    """Return the name in a trace of what `redistribute` calls on the CPU; "" for nothing."""
    if before == after or isinstance(before, Replicate):
        return ""
    if isinstance(before, Shard):
        return "all_gather_into_tensor"
    return "reduce_scatter_tensor" if isinstance(after, Shard) else "all_reduce"


def groups_of_mesh(rank: int, world_size: int, rows: int) -> dict[str, list[int]]:
    """Return what `groups_by_hand` does, of a mesh that PyTorch has made."""
    shape = (rows, world_size // rows)
    mesh = init_device_mesh(device().type, shape, mesh_dim_names=("dp", "tp"))
    names = ("dp", "tp")
    return {name: dist.get_process_group_ranks(mesh.get_group(name)) for name in names}


def on_mesh(
    rank: int,
    world_size: int,
    mesh_shape: tuple[int, int],
    placements: list[Placement],
    rows: int = 4,
    columns: int = 4,
) -> dict[str, torch.Tensor]:
    """Distribute a matrix over a mesh of two dimensions, by hand and with `distribute_tensor`.

    Returns what this rank holds: "by hand" and "DTensor".
    """
    mesh = init_device_mesh(device().type, mesh_shape, mesh_dim_names=("dp", "tp"))
    local = numbered(rows, columns)
    for name, placement in zip(("dp", "tp"), placements, strict=True):
        if isinstance(placement, Shard):
            local = replicate_to_shard(local, placement.dim, mesh.get_group(name))
    tensor = distribute_tensor(numbered(rows, columns), mesh, placements)
    return {"by hand": local, "DTensor": tensor.to_local()}


def product(
    rank: int, world_size: int, left: Placement, right: Placement, size: int = 4
) -> tuple[str, torch.Tensor, torch.Tensor]:
    """Multiply two sharded matrices of `size` rows and columns, at least one for each rank.

    DTensor gathers a factor that has fewer, and then the product is replicated.

    Returns the placement of the product, this rank's part of it, and the whole.
    """
    mesh = init_device_mesh(device().type, (world_size,))
    x = distribute_tensor(numbered(size, size), mesh, [left])
    w = distribute_tensor(numbered(size, size), mesh, [right])
    y = x @ w
    return repr(y.placements[0]), y.to_local(), y.full_tensor()


def forward(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return what two layers make of x, without biases."""
    return torch.relu(x @ first) @ second


def mlp(
    rank: int, world_size: int, x: torch.Tensor, first: torch.Tensor, second: torch.Tensor
) -> tuple[list[tuple[int, ...]], list[torch.Tensor]]:
    """Run two layers, their weights cut into columns and rows, forward and backward.

    The loss is the sum of the squares of the output. Returns the shapes of this rank's pieces of
    both weights, and the whole output and the whole gradients of the weights.
    """
    mesh = init_device_mesh(device().type, (world_size,))
    x = distribute_tensor(x, mesh, [Replicate()])
    first = distribute_tensor(first, mesh, [Shard(1)]).requires_grad_()
    second = distribute_tensor(second, mesh, [Shard(0)]).requires_grad_()
    y = forward(x, first, second).redistribute(placements=[Replicate()])
    y.square().sum().backward()
    shapes = [tuple(weight.to_local().shape) for weight in (first, second)]
    gradients = [weight.grad.full_tensor() for weight in (first, second)]
    return shapes, [y.to_local(), *gradients]


def in_one_process(
    x: torch.Tensor, first: torch.Tensor, second: torch.Tensor
) -> list[torch.Tensor]:
    """Return the output and the gradients of both weights, as `mlp` does, without ranks."""
    first, second = (weight.clone().requires_grad_() for weight in (first, second))
    y = forward(x, first, second)
    y.square().sum().backward()
    return [y.detach(), first.grad, second.grad]


def main(argv: list[str] | None = None) -> None:
    """Compare both ways with each other and with one process, and print one line."""
    options = lesson_parser("device_mesh", __doc__).parse_args(argv or [])
    with open_ranks(options.world_size, options.backend, options.trace) as ranks:
        n = ranks.world_size
        for shape in ((4, 4), (5, 3), (n, 2 * n)):
            for before, after in CHANGES:
                prove_change(ranks, before, after, shape)
        prove_mesh(ranks)
        prove_product(ranks)
        prove_mlp(ranks)
        ranks.say(
            f"device_mesh: {ranks}, {len(CHANGES)} changes of placement by hand equal DTensor's, "
            "and so do meshes"
        )


def prove_change(ranks, before: Placement, after: Placement, shape: tuple[int, int]) -> None:
    """Prove that both ways of a change hold the reference, and send what the formula says."""
    n, on_gpu = ranks.world_size, False
    expected = reference(stands_for(before, n, *shape), after, n)
    for worker in (by_hand, by_dtensor):
        claim = f"{before!r} to {after!r} {worker.__name__} of {shape}"
        result = ranks(worker, before, after, *shape)
        prove(claim, compare([held["after"] for held in result], expected))
        on_gpu |= any(event.device != "cpu" for event in result.trace)
        called = [f"redistribute {name}" for name in [collective(before, after)] if name]
        if worker is by_dtensor:
            if n == 1 or on_gpu:  # nothing to call, or other collectives
                continue
            prove(f"{claim} calls {called}", collectives(result.trace) == called)
        elif any(length % n for length in shape):
            continue  # by all_to_all, the ranks send more or less than each other
        for rank in range(n):
            nbytes = sum(row.sent for row in result.trace.summary(rank=rank).rows)
            formula = round(bytes_sent(before, after, shape, n, all_to_all=worker is by_hand))
            prove(f"{claim} sends {formula} bytes", nbytes == formula)


def prove_mesh(ranks) -> None:
    """Prove that meshes have the groups made by hand, and that tensors are cut along both."""
    n = ranks.world_size
    whole = numbered(5, 6)
    kinds = [Shard(0), Shard(1), Replicate()]
    for rows in {1, math.gcd(n, 2)}:
        groups = list(ranks(groups_by_hand, rows))
        prove("a mesh has the groups made by hand", groups == list(ranks(groups_of_mesh, rows)))
        for first, second in itertools.product(kinds, repeat=2):
            columns = n // rows
            expected = [
                part
                for line in reference(whole, first, rows)
                for part in reference(line, second, columns)
            ]
            result = ranks(on_mesh, (rows, columns), [first, second], 5, 6)
            for way in ("by hand", "DTensor"):
                prove(
                    f"{first!r} and {second!r} are cut {way} as in one process",
                    compare([held[way] for held in result], expected),
                )


def prove_product(ranks) -> None:
    """Prove that DTensor's products are those of one process, and what their placements are."""
    n = ranks.world_size
    size = 2 * n
    expected = numbered(size, size) @ numbered(size, size)
    cases = {
        (Shard(1), Shard(0)): ("Partial(sum)", None),
        (Shard(0), Replicate()): ("Shard(dim=0)", Shard(0)),
        (Replicate(), Shard(1)): ("Shard(dim=1)", Shard(1)),
    }
    for (left, right), (name, placement) in cases.items():
        result = ranks(product, left, right, size)
        names, parts, wholes = zip(*result, strict=True)
        prove(f"{left!r} times {right!r} is {name}", set(names) == {name} or n == 1)
        prove("the product is right", compare(list(wholes), expected))
        if placement is None:
            prove("the parts add up to it", compare(sum(parts), expected))
        else:
            prove("the parts are its parts", compare(parts, reference(expected, placement, n)))


def prove_mlp(ranks) -> None:
    """Prove that two sharded layers have the output and gradients of one process."""
    n = ranks.world_size
    torch.manual_seed(0)
    given = [torch.randn(shape) for shape in ((3, 4), (4, 2 * n), (2 * n, 3))]
    expected = in_one_process(*given)
    result = ranks(mlp, *given)
    for name, whole, *parts in zip(
        ("output", "first gradient", "second gradient"),
        expected,
        *(tensors for _, tensors in result),
        strict=True,
    ):
        prove(f"the {name} of two layers is right", compare([p.cpu() for p in parts], whole))


if __name__ == "__main__":
    run_as_script(main)
