"""Random collectives on two backends: a worker that compares each result with gloo's, exactly."""

from __future__ import annotations

import random

import torch
import torch.distributed as dist

OPS = ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG")
INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)
FLOATS = (torch.float32, torch.float64)
NAMES = (
    *("broadcast", "reduce", "all_reduce", "scatter", "gather", "all_gather", "all_gather_single"),
    *("reduce_scatter", "reduce_scatter_single", "all_to_all", "all_to_all_single", "send"),
)


def numbers(chance, seed, shape, dtype):
    """Return small whole numbers, whose sums and products are exact in any order."""
    made = torch.Generator().manual_seed(seed)
    return torch.randint(0, 3, shape, generator=made).to(dtype)


def call(name, group, chance, seed):
    """Call a collective with arguments drawn from `chance`, alike on all ranks; return results."""
    size, rank = group.size(), group.rank()
    dtype = chance.choice((*FLOATS, *INTEGERS))
    ops = OPS[:4] if dtype.is_floating_point else OPS[:7]
    op = getattr(dist.ReduceOp, chance.choice((*ops, "AVG") if dtype in FLOATS else ops))
    length = chance.choice((1, 2, 7, 100, 1000, chance.randrange(1, 20_000), 2_000_000 // size))
    root = chance.randrange(size)
    here, seed = rank == root, seed * 64 + rank
    source = numbers(chance, seed, (length,), dtype)
    several = [numbers(chance, seed + 8 * i, (length,), dtype) for i in range(size)]
    outputs = [torch.zeros(length, dtype=dtype) for _ in range(size)]
    whole = torch.zeros(length * size, dtype=dtype)
    if name == "broadcast":
        dist.broadcast(source, group_src=root, group=group)
        return [source]
    if name == "reduce":
        dist.reduce(source, group_dst=root, op=op, group=group)
        return [source] if here else []
    if name == "all_reduce":
        dist.all_reduce(source, op, group=group)
        return [source]
    if name == "scatter":
        dist.scatter(source, several if here else None, group_src=root, group=group)
        return [source]
    if name == "gather":
        dist.gather(source, outputs if here else None, group_dst=root, group=group)
        return outputs
    if name == "all_gather":
        dist.all_gather(outputs, source, group=group)
        return outputs
    if name == "all_gather_single":
        dist.all_gather_into_tensor(whole, source, group=group)
        return [whole]
    if name == "reduce_scatter":
        dist.reduce_scatter(source, several, op, group=group)
        return [source]
    if name == "reduce_scatter_single":
        dist.reduce_scatter_tensor(source, torch.cat(several), op, group=group)
        return [source]
    if name == "all_to_all":
        dist.all_to_all(outputs, several, group=group)
        return outputs
    if name == "all_to_all_single":
        table = [[chance.randrange(length) for _ in range(size)] for _ in range(size)]
        to, of = table[rank], [row[rank] for row in table]
        output = torch.zeros(sum(of), dtype=dtype)
        dist.all_to_all_single(output, numbers(chance, seed, (sum(to),), dtype), of, to, group)
        return [output]
    works = [
        dist.isend(several[0], group_dst=(rank + 1) % size, group=group, tag=length),
        dist.irecv(outputs[0], group_src=(rank - 1) % size, group=group, tag=length),
    ]
    for work in works:
        work.wait()
    return [outputs[0]]


def compare(rank, world_size, repeats):
    """Call each collective `repeats` times on shm and on gloo; return how many were equal."""
    subsets = [None, [0, 1], [1, 2], [0, 2], [2, 1, 0]]
    pairs = [
        [dist.new_group(ranks, backend=name, sort_ranks=False) for name in ("shm", "gloo")]
        for ranks in subsets
    ]
    chance = random.Random(5)
    equal = dict.fromkeys(NAMES, 0)
    for turn in range(repeats * len(NAMES)):
        name = NAMES[turn % len(NAMES)]
        number, seed = chance.randrange(len(subsets)), chance.randrange(1 << 30)
        if rank not in (subsets[number] or range(world_size)):
            continue
        ours, gloos = [call(name, group, random.Random(seed), seed) for group in pairs[number]]
        assert len(ours) == len(gloos)
        for one, other in zip(ours, gloos, strict=True):
            assert torch.equal(one, other), (name, turn, subsets[number], one.dtype, one.shape)
        equal[name] += 1
    return equal
