"""What ranks hold of a tensor, and the collective that turns a placement into another one, by hand.

A part of lesson 14, and what lessons on sharded training build on. In all functions, `dim` is the
dimension along which a tensor is cut, and `group` a process group, by default that of all ranks.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import stat
import struct
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ddp_kit import device
from ddp_kit.trace import Trace

# Once in each process, PyTorch warns that it gathers on the CPU where it could call all_to_all, and
# that it gathers along two dimensions of a mesh one after the other.
for name in ("_collective_utils", "_redistribute"):
    logging.getLogger(f"torch.distributed.tensor.{name}").setLevel(logging.ERROR)

PLACEMENTS: dict[str, Placement] = {
    "Shard(0)": Shard(0),
    "Shard(1)": Shard(1),
    "Replicate()": Replicate(),
    "Partial()": Partial(),
}


def numbered(rows: int, columns: int) -> torch.Tensor:
    """Return a matrix with the entries 1, 2, 3, ..., row by row."""
    count = torch.arange(1.0, rows * columns + 1, device=device())
    return count.view(rows, columns)


def lengths(length: int, n: int) -> list[int]:
    """Return how many of `length` rows each of n ranks holds, as `torch.chunk` deals them out.

    The first ranks hold as many as would be needed by all; the last ones may hold fewer, or none.
    """
    most = -(-length // n)  # rounded up
    return [max(0, min(most, length - most * rank)) for rank in range(n)]


def pieces(tensor: torch.Tensor, dim: int, n: int) -> tuple[torch.Tensor, ...]:
    """Return the parts of n ranks, cut along a dimension."""
    return tensor.split(lengths(tensor.shape[dim], n), dim)


def own_part(rank: int, n: int, placement: Placement, rows: int, columns: int) -> torch.Tensor:
    """Return what a rank holds of a matrix with this placement.

    If it is partial, rank r holds 10**r times the numbered matrix, so that the digits of a sum
    name the ranks in it; the matrix itself is that sum.
    """
    whole = numbered(rows, columns)
    if isinstance(placement, Partial):
        return 10.0**rank * whole
    if isinstance(placement, Shard):
        return pieces(whole, placement.dim, n)[rank].clone()
    return whole


def stands_for(placement: Placement, n: int, rows: int, columns: int) -> torch.Tensor:
    """Return the whole matrix that the parts of `own_part` make up."""
    summands = n if isinstance(placement, Partial) else 1
    return sum(10.0**rank for rank in range(summands)) * numbered(rows, columns)


def by_dtensor(
    rank: int,
    world_size: int,
    before: Placement,
    after: Placement,
    rows: int = 4,
    columns: int = 4,
) -> dict[str, torch.Tensor]:
    """Change the placement of a matrix with `redistribute`; return as `by_hand` does."""
    mesh = init_device_mesh(device().type, (world_size,))
    local = own_part(rank, world_size, before, rows, columns)
    whole = {"shape": torch.Size([rows, columns]), "stride": (columns, 1)}
    tensor = DTensor.from_local(local, mesh, [before], **whole)
    return {"before": local, "after": tensor.redistribute(placements=[after]).to_local()}


def own_part_on_mesh(
    at: tuple[int, ...], mesh: tuple[int, ...], kinds: list[Placement], rows: int, columns: int
) -> torch.Tensor:
    """Return what a rank holds of a matrix that has a placement for each dimension of a mesh.

    at: the rank's place in the mesh. If the matrix is partial, a rank holds a power of ten times
    its part of the numbered matrix.
    """
    part, summand = numbered(rows, columns), 0
    for place, n, placement in zip(at, mesh, kinds, strict=True):
        if isinstance(placement, Shard):
            part = pieces(part, placement.dim, n)[place].clone()
        elif isinstance(placement, Partial):
            summand = summand * n + place
    return 10.0**summand * part


def whole_on_mesh(
    mesh: tuple[int, ...], kinds: list[Placement], rows: int, columns: int
) -> torch.Tensor:
    """Return the whole matrix that the parts of `own_part_on_mesh` make up."""
    summands = [n for n, kind in zip(mesh, kinds, strict=True) if isinstance(kind, Partial)]
    return stands_for(Partial(), math.prod(summands), rows, columns)


def redistribute_on_mesh(
    rank: int,
    world_size: int,
    mesh_shape: tuple[int, int],
    before: list[Placement],
    after: list[Placement],
    rows: int = 4,
    columns: int = 4,
) -> dict[str, torch.Tensor]:
    """Change the placements of a matrix on a mesh; return this rank's part before and after."""
    mesh = init_device_mesh(device().type, mesh_shape, mesh_dim_names=("dp", "tp"))
    local = own_part_on_mesh(mesh.get_coordinate(), mesh_shape, before, rows, columns)
    whole = {"shape": torch.Size([rows, columns]), "stride": (columns, 1)}
    tensor = DTensor.from_local(local, mesh, before, **whole)
    return {"before": local, "after": tensor.redistribute(placements=after).to_local()}


def reference(whole: torch.Tensor, placement: Placement, n: int) -> list[torch.Tensor]:
    """Return what each rank should hold of a tensor that is not partial, in this one process."""
    if isinstance(placement, Shard):
        return list(pieces(whole, placement.dim, n))
    return [whole] * n


def pad(piece: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """Fill a tensor up with zeros along a dimension."""
    shape = list(piece.shape)
    shape[dim] = length - shape[dim]
    return torch.cat([piece, piece.new_zeros(shape)], dim)


def replicate_to_shard(whole: torch.Tensor, dim: int, group=None) -> torch.Tensor:
    """Keep the own part; nothing is sent."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    return pieces(whole, dim, n)[rank].clone()


def shard_to_replicate(piece: torch.Tensor, dim: int, length: int, group=None) -> torch.Tensor:
    """Gather all parts. length: of the whole tensor, along `dim`."""
    n = dist.get_world_size(group)
    padded = pad(piece, dim, -(-length // n))  # all_gather needs equal shapes
    parts = [torch.empty_like(padded) for _ in range(n)]
    dist.all_gather(parts, padded, group=group)
    return torch.cat(parts, dim).narrow(dim, 0, length)


def partial_to_replicate(summand: torch.Tensor, group=None) -> torch.Tensor:
    """Add up the summands of all ranks."""
    total = summand.clone()
    dist.all_reduce(total, group=group)
    return total


def partial_to_shard(summand: torch.Tensor, dim: int, group=None) -> torch.Tensor:
    """Add up the summands of all ranks, and keep the own part of the sum."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    parts = pieces(summand, dim, n)
    padded = [pad(part, dim, parts[0].shape[dim]) for part in parts]
    mine = torch.empty_like(padded[rank])
    dist.reduce_scatter(mine, padded, group=group)
    return mine.narrow(dim, 0, parts[rank].shape[dim])


def shard_to_shard(
    piece: torch.Tensor, old: int, new: int, length: int, group=None
) -> torch.Tensor:
    """Cut the tensor along another dimension. length: of the whole tensor, along `old`."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    given = pieces(piece, new, n)
    shapes = [list(given[rank].shape) for _ in range(n)]
    for shape, rows in zip(shapes, lengths(length, n), strict=True):
        shape[old] = rows
    sizes = [math.prod(shape) for shape in shapes]
    received = piece.new_empty(sum(sizes))
    flat = torch.cat([part.reshape(-1) for part in given])
    dist.all_to_all_single(received, flat, sizes, [part.numel() for part in given], group=group)
    parts = [part.view(shape) for part, shape in zip(received.split(sizes), shapes, strict=True)]
    return torch.cat(parts, old)


def change(
    local: torch.Tensor, before: Placement, after: Placement, shape: tuple[int, ...], group=None
) -> torch.Tensor:
    """Do by hand what `redistribute` does on a mesh of one dimension. shape: of the whole."""
    if before == after:
        return local
    if isinstance(before, Replicate):
        return replicate_to_shard(local, after.dim, group)
    if isinstance(before, Partial) and isinstance(after, Shard):
        return partial_to_shard(local, after.dim, group)
    if isinstance(before, Partial):
        return partial_to_replicate(local, group)
    if isinstance(after, Shard):
        return shard_to_shard(local, before.dim, after.dim, shape[before.dim], group)
    return shard_to_replicate(local, before.dim, shape[before.dim], group)


def mesh_groups(rank: int, world_size: int, rows: int) -> dict[str, dist.ProcessGroup]:
    """Make the groups of a mesh by hand; return the two that this rank is in, by dimension.

    Raises ValueError if the ranks do not fill all rows of the mesh.
    """
    if world_size % rows:
        raise ValueError(f"{world_size} ranks cannot fill a mesh of {rows} rows evenly")
    ranks = torch.arange(world_size).view(rows, -1)
    groups = {}
    for name, lines in {"dp": ranks.T, "tp": ranks}.items():
        for line in lines.tolist():
            group = dist.new_group(line)  # all ranks call it, members or not
            if rank in line:
                groups[name] = group
    return groups


def groups_by_hand(rank: int, world_size: int, rows: int) -> dict[str, list[int]]:
    """Return the ranks of both groups that this rank is in."""
    groups = mesh_groups(rank, world_size, rows)
    return {name: dist.get_process_group_ranks(group) for name, group in groups.items()}


def sent_by_tcp() -> Counter[int]:
    """Return how many bytes this process has sent so far, by connection.

    A difference of two counts has what was sent in between, without connections that were closed
    meanwhile, such as those of an earlier group. Only Linux counts; elsewhere the result is empty.
    """
    sent: Counter[int] = Counter()
    for number in os.listdir("/proc/self/fd") if sys.platform == "linux" else ():
        with suppress(OSError):  # it was closed, or is no connection
            status = os.stat(int(number))
            if stat.S_ISSOCK(status.st_mode):
                with socket.socket(fileno=os.dup(int(number))) as connection:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                if len(info) >= 216:  # a kernel before 4.19 says less
                    # A busy machine sends some bytes again, which says nothing about the program.
                    sent_in_all, sent_again = struct.unpack_from("QQ", info, 200)
                    sent[status.st_ino] = sent_in_all - sent_again
    return sent


def counted(
    rank: int,
    world_size: int,
    worker: Callable,
    before: Placement,
    after: Placement,
    size: int = 1024,
) -> int:
    """Return how many bytes this rank sends while a worker changes the placement of a matrix.

    worker: takes what `by_hand` takes. The bytes are those of `sent_by_tcp`: with all headers, and
    with what a new mesh takes, which the default size makes negligible.
    """
    dist.barrier()
    start = sent_by_tcp()
    worker(rank, world_size, before, after, size, size)
    dist.barrier()
    return (sent_by_tcp() - start).total()


def bytes_sent(
    before: Placement,
    after: Placement,
    shape: tuple[int, ...],
    n: int,
    all_to_all: bool = False,
    itemsize: int = 4,
) -> float:
    """Return how many bytes each of n ranks sends when a tensor is redistributed.

    shape: of the whole tensor. all_to_all: a tensor is cut along another dimension with all_to_all,
    as on GPUs and by hand; on the CPU, DTensor gathers it and cuts it again. itemsize: bytes of
    one number, 4 for float32.
    """
    if before == after or isinstance(before, Replicate):
        return 0
    cut = {placement.dim for placement in (before, after) if isinstance(placement, Shard)}
    padded = [n * -(-size // n) if dim in cut else size for dim, size in enumerate(shape)]
    once = (n - 1) / n * itemsize * math.prod(padded)
    if not cut:
        return 2 * once  # an all_reduce: a reduce_scatter and an all_gather
    return once / n if all_to_all and len(cut) == 2 else once


def collectives(trace: Trace) -> list[str]:
    """Return what rank 0 called, in order, but not the new_group of a mesh."""
    return [event.op for event in trace if event.rank == 0 and event.op != "new_group"]
