"""A solution of project 3, for teachers and tests. Learners do not get it."""

import torch
import torch.distributed as dist

SMALL = 64_000  # bytes, up to which every rank sends its tensor to every other one


def exchange(outgoing, incoming):
    """Send to each rank one tensor and receive one, all at once; dicts by rank."""
    works = [dist.irecv(tensor, rank) for rank, tensor in incoming.items()]
    works += [dist.isend(tensor, rank) for rank, tensor in outgoing.items()]
    for work in works:
        work.wait()


def all_reduce(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    others = [(rank + step) % world_size for step in range(1, world_size)]
    flat = tensor.view(-1)
    if tensor.nbytes <= SMALL:
        arriving = {other: torch.empty_like(flat) for other in others}
        exchange(dict.fromkeys(others, flat.clone()), arriving)
        arriving[rank] = flat.clone()
        flat.zero_()
        for other in range(world_size):  # in the same order on all ranks, so the bits are the same
            flat += arriving[other]
        return
    chunks = flat.tensor_split(world_size)
    arriving = {other: torch.empty_like(chunks[rank]) for other in others}
    exchange({other: chunks[other] for other in others}, arriving)
    for other in others:
        chunks[rank].add_(arriving[other])
    exchange(dict.fromkeys(others, chunks[rank]), {other: chunks[other] for other in others})
