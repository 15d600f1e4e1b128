# Made from notebooks/14_device_mesh.ipynb by `make editions`: edit that, not this.
"""Device meshes: one tensor on many ranks."""

import math

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import ddp_kit as kit
from ddp_kit.lessons._device_mesh import CHANGES, collectives, main, sent_by_tcp
from ddp_kit.lessons._launch import run_as_script


def numbered(rows, columns):
    count = torch.arange(1.0, rows * columns + 1, device=kit.device())
    return count.view(rows, columns)


def lengths(length, n):
    most = -(-length // n)  # rounded up
    return [max(0, min(most, length - most * rank)) for rank in range(n)]


def pieces(tensor, dim, n):
    return tensor.split(lengths(tensor.shape[dim], n), dim)


def own_part(rank, n, placement, rows, columns):
    whole = numbered(rows, columns)
    if isinstance(placement, Partial):
        return 10.0**rank * whole
    if isinstance(placement, Shard):
        return pieces(whole, placement.dim, n)[rank].clone()
    return whole


def pad(piece, dim, length):
    shape = list(piece.shape)
    shape[dim] = length - shape[dim]
    return torch.cat([piece, piece.new_zeros(shape)], dim)


def replicate_to_shard(whole, dim, group=None):
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    return pieces(whole, dim, n)[rank].clone()


def shard_to_replicate(piece, dim, length, group=None):
    n = dist.get_world_size(group)
    padded = pad(piece, dim, -(-length // n))
    parts = [torch.empty_like(padded) for _ in range(n)]
    dist.all_gather(parts, padded, group=group)
    return torch.cat(parts, dim).narrow(dim, 0, length)


def partial_to_replicate(partial, group=None):
    total = partial.clone()
    dist.all_reduce(total, group=group)
    return total


def partial_to_shard(partial, dim, group=None):
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    parts = pieces(partial, dim, n)
    padded = [pad(part, dim, parts[0].shape[dim]) for part in parts]
    mine = torch.empty_like(padded[rank])
    dist.reduce_scatter(mine, padded, group=group)
    return mine.narrow(dim, 0, parts[rank].shape[dim])


def add_up(rank, world_size):
    local = own_part(rank, world_size, Partial(), 4, 2)
    return {"Partial()": local, "Shard(0)": partial_to_shard(local, 0)}


def shard_to_shard(piece, old, new, length, group=None):
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    given = pieces(piece, new, n)
    shapes = [list(given[rank].shape) for _ in range(n)]
    for shape, rows in zip(shapes, lengths(length, n), strict=True):
        shape[old] = rows
    sizes = [math.prod(shape) for shape in shapes]
    received = piece.new_empty(sum(sizes))
    flat = torch.cat([part.reshape(-1) for part in given])
    dist.all_to_all_single(received, flat, sizes, [len(g.reshape(-1)) for g in given], group=group)
    parts = received.split(sizes)
    return torch.cat([part.view(shape) for part, shape in zip(parts, shapes, strict=True)], old)


def change(local, before, after, shape, group=None):
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


def by_hand(rank, world_size, before, after, rows=4, columns=4):
    local = own_part(rank, world_size, before, rows, columns)
    return {"before": local, "after": change(local, before, after, (rows, columns))}


def bytes_sent(before, after, shape, n, all_to_all=False, itemsize=4):
    if before == after or isinstance(before, Replicate):
        return 0
    cut = {placement.dim for placement in (before, after) if isinstance(placement, Shard)}
    padded = [n * -(-size // n) if dim in cut else size for dim, size in enumerate(shape)]
    once = (n - 1) / n * itemsize * math.prod(padded)
    if not cut:
        return 2 * once  # an all_reduce: a reduce_scatter and an all_gather
    return once / n if all_to_all and len(cut) == 2 else once


def counted(rank, world_size, worker, before, after, size=1024):
    dist.barrier()
    start = sent_by_tcp()
    worker(rank, world_size, before, after, size, size)
    dist.barrier()
    return (sent_by_tcp() - start).total()


def count(worker, all_to_all):
    for before, after in CHANGES:
        result = kit.run(counted, worker, before, after, backend="gloo")
        called = ", ".join(collectives(result.trace)[1:-1])  # without the barriers
        formula = bytes_sent(before, after, (1024, 1024), 4, all_to_all)
        ratio = f"ratio {max(result) / formula:.1f}" if formula else ""
        print(f"{before!r:13} to {after!r:14} {called or 'nothing':36} {formula:9,.0f}  {ratio}")


def by_dtensor(rank, world_size, before, after, rows=4, columns=4):
    mesh = init_device_mesh(kit.device().type, (world_size,))
    local = own_part(rank, world_size, before, rows, columns)
    whole = {"shape": torch.Size([rows, columns]), "stride": (columns, 1)}
    tensor = DTensor.from_local(local, mesh, [before], **whole)
    return {"before": local, "after": tensor.redistribute(placements=[after]).to_local()}


def mesh_groups(rank, world_size, rows):
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


def who_am_i(rank, world_size, rows=2):
    shape = (rows, world_size // rows)
    mesh = init_device_mesh(kit.device().type, shape, mesh_dim_names=("dp", "tp"))
    by_hand = mesh_groups(rank, world_size, rows)
    members = {name: dist.get_process_group_ranks(mesh.get_group(name)) for name in by_hand}
    same = {name: dist.get_process_group_ranks(group) for name, group in by_hand.items()}
    return {name: mesh.get_local_rank(name) for name in by_hand}, members, same


def on_mesh(rank, world_size, mesh_shape, placements, rows=4, columns=4):
    mesh = init_device_mesh(kit.device().type, mesh_shape, mesh_dim_names=("dp", "tp"))
    return distribute_tensor(numbered(rows, columns), mesh, placements).to_local()


def product(rank, world_size, left, right, size=4):
    mesh = init_device_mesh(kit.device().type, (world_size,))
    x = distribute_tensor(numbered(size, size), mesh, [left])
    w = distribute_tensor(numbered(size, size), mesh, [right])
    y = x @ w
    return repr(y.placements[0]), y.to_local(), y.full_tensor()


def forward(x, first, second):
    return torch.relu(x @ first) @ second


def mlp(rank, world_size, x, first, second):
    mesh = init_device_mesh(kit.device().type, (world_size,))
    x = distribute_tensor(x, mesh, [Replicate()])
    first = distribute_tensor(first, mesh, [Shard(1)]).requires_grad_()
    second = distribute_tensor(second, mesh, [Shard(0)]).requires_grad_()
    y = forward(x, first, second).redistribute(placements=[Replicate()])
    y.square().sum().backward()
    shapes = [tuple(weight.to_local().shape) for weight in (first, second)]
    gradients = [weight.grad.full_tensor() for weight in (first, second)]
    return shapes, [y.to_local(), *gradients]


def in_one_process(x, first, second):
    first, second = (weight.clone().requires_grad_() for weight in (first, second))
    y = forward(x, first, second)
    y.square().sum().backward()
    return [y.detach(), first.grad, second.grad]


if __name__ == "__main__":
    run_as_script(main)
