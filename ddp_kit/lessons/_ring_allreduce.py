"""What the lesson on rings has besides its cells: the homework, solved, and what watches it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from ddp_kit import device, model
from ddp_kit.lessons._launch import Ranks, lesson_main, prove
from ddp_kit.notebook.controls import Explorer


def arrivals(n: int) -> list[int]:
    """Return which of the n chunks reaches this rank in each of the 2(n-1) steps of a ring.

    In the next step the rank passes it on; its own chunk leaves in the first.
    """
    return [(dist.get_rank() - step - 1) % n for step in range(2 * (n - 1))]


def watch(rank: int, world_size: int) -> torch.Tensor:
    """Make the steps of the chunked ring on powers of ten, and record each chunk after each step.

    Rank r starts with 10**r in every chunk, so the digits of a sum show which ranks are in it.
    Returns shape (2 * (world_size - 1) + 1, world_size): the start and each step, by chunk.
    """
    chunks = torch.full((world_size, 1), 10**rank, device=device())
    left, right = lesson.neighbours()
    steps, going = [chunks[:, 0].clone()], rank
    for step, coming in enumerate(arrivals(world_size)):
        arriving = torch.empty_like(chunks[coming])
        lesson.exchange(chunks[going], right, arriving, left)
        chunks[coming] = arriving + (chunks[coming] if step < world_size - 1 else 0)
        steps.append(chunks[:, 0].clone())
        going = coming
    return torch.stack(steps)


def explore(world_size: int = 4) -> Explorer:
    """Watch the chunked ring and draw its first step.

    In JupyterLab, controls follow that show all steps, one by one. Raises PoolError for a world
    size that cannot be run or drawn.
    """
    from ddp_kit import plot  # ranks do not need it

    return Explorer(
        "ring_allreduce",
        {"world_size": world_size},
        choices=lambda settings: {"world_size": range(1, 9)},
        ask=lambda settings: (watch,),
        draw=lambda result, settings: plot.ring_step(result, min(1, len(result[0]) - 1)),
        frames=lambda result: len(result[0]),
        frame=plot.ring_step,
    )


def compare(rank: int, world_size: int, ring: Callable, shape: tuple[int, ...], dtype: torch.dtype):
    """Return whether `ring` gives exactly what `dist.all_reduce` gives for a shape and dtype."""
    numel = torch.Size(shape).numel()  # small whole numbers have an exact sum in every dtype
    tensor = ((torch.arange(numel, device=device()) + rank) % 5).to(dtype).reshape(shape)
    expected = tensor.clone()
    dist.all_reduce(expected)
    ring(tensor)
    return torch.equal(tensor, expected)


@lesson_main("ring_allreduce")
def main(ranks: Ranks) -> str:
    """Compare each ring with `dist.all_reduce`, count its messages, and print one line."""
    costs = {
        lesson.whole_ring: model.naive_ring,
        lesson.chunked_ring: model.chunked_ring,
        lesson.preposted_ring: model.chunked_ring,
    }
    n = ranks.world_size
    for ring, cost in costs.items():
        for shape, dtype in (((), torch.float64), ((3, 5), torch.float16), ((1000,), torch.int64)):
            same = all(ranks(compare, ring, shape, dtype))
            prove(f"{ring.__name__} is exact for {shape} {dtype}", same)
        trace = ranks(lesson.count, ring, 1000 * n).trace
        by_formula = cost(n, 4000 * n, 1, 0), round(cost(n, 4000 * n, 0, 1))
        for rank in range(n):
            sent = len(trace.messages(src=rank)), trace.bytes_sent(rank)
            prove("each rank sends what the formula says", sent == by_formula)
    complete = all((steps[-1] == int("1" * n)).all() for steps in ranks(watch))
    prove("after the last step every chunk includes every rank", complete)
    return f"{len(costs)} rings agree with dist.all_reduce"


from ddp_kit.lessons import ring_allreduce as lesson
