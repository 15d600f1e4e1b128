"""What the lesson on rings has besides its cells: the homework, solved, and what watches it."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

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


def chunked_ring(tensor: torch.Tensor, after_step: Callable[[], None] = lambda: None) -> None:
    """Sum a contiguous `tensor` over all ranks in place; every message is one chunk of n.

    after_step: called after each of the 2(n-1) steps, to watch the chunks.
    """
    n, (left, right) = dist.get_world_size(), lesson.neighbours()
    chunks = tensor.view(-1).tensor_split(n)
    arriving = torch.empty_like(chunks[0])  # the first chunk is never smaller than another
    going = chunks[dist.get_rank()]
    for step, index in enumerate(arrivals(n)):
        chunk = chunks[index]
        into = arriving[: len(chunk)] if step < n - 1 else chunk  # first reduce, then gather
        lesson.exchange(going, right, into, left)
        if step < n - 1:
            chunk += into
        going = chunk
        after_step()


def watch(rank: int, world_size: int) -> torch.Tensor:
    """Run the chunked ring on powers of ten, and record each chunk after each step.

    Rank r starts with 10**r in every chunk, so the digits of a sum show which ranks are in it.
    Returns shape (2 * (world_size - 1) + 1, world_size): the start and each step, by chunk.
    """
    tensor = torch.full((world_size,), 10**rank, device=device())
    steps = [tensor.clone()]
    chunked_ring(tensor, after_step=lambda: steps.append(tensor.clone()))
    return torch.stack(steps)


def explore(world_size: int = 4) -> Explorer:
    """Watch the chunked ring and draw all its steps.

    In JupyterLab, controls follow that show them one by one. Raises PoolError for a world size
    that cannot be run or drawn.
    """
    from ddp_kit import plot  # ranks do not need it

    return Explorer(
        "ring_allreduce",
        {"world_size": world_size},
        choices=lambda settings: {"world_size": range(1, 9)},
        ask=lambda settings: (watch,),
        draw=lambda result, settings: plot.ring(result),
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


@lesson_main("ring_allreduce", measure={"action": "store_true", "help": "also time 4 kB to 40 MB"})
def main(ranks: Ranks, measure: bool) -> str:
    """Compare each ring with `dist.all_reduce`, count its messages, and print one line."""
    costs = {
        lesson.whole_ring: model.naive_ring,
        chunked_ring: model.chunked_ring,
        lesson.preposted_ring: model.chunked_ring,
    }
    n = ranks.world_size
    for ring, cost in costs.items():
        for shape in ((), (1,), (7,), (3, 5), (1000,)):
            for dtype in (torch.float32, torch.float64, torch.float16, torch.int64):
                same = all(ranks(compare, ring, shape, dtype))
                prove(f"{ring.__name__} is exact for {shape} {dtype}", same)
        trace = ranks(lesson.count, ring, 1000 * n).trace
        by_formula = cost(n, 4000 * n, 1, 0), round(cost(n, 4000 * n, 0, 1))
        for rank in range(n):
            sent = len(trace.messages(src=rank)), trace.bytes_sent(rank)
            prove("each rank sends what the formula says", sent == by_formula)
    complete = all((steps[-1] == int("1" * n)).all() for steps in ranks(watch))
    prove("after the last step every chunk includes every rank", complete)
    measured = [
        f"\n{name:20} {nbytes:>11,} B {1000 * median(seconds):8.2f} ms"
        for name, points in (lesson.samples(ranks) if measure else {}).items()
        for nbytes, seconds in points
    ]
    return f"{len(costs)} rings agree with dist.all_reduce{''.join(measured)}"


from ddp_kit.lessons import ring_allreduce as lesson
