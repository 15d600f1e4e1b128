"""What the lesson on rings has besides its cells: the homework, solved, and what watches it."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

from ddp_kit import device, model
from ddp_kit.lessons._launch import Ranks, lesson_main, prove
from ddp_kit.notebook.controls import Explorer, positive


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


def explore_formula(ranks: int = 8, alpha_us: float = 50, beta_ns: float = 0.1) -> Explorer:
    """Draw the time of both rings by their formulas, and say at which size they are equal.

    alpha_us: microseconds for each message. beta_ns: nanoseconds for each byte. In JupyterLab,
    controls follow. No rank runs. Raises PoolError for an invalid choice.
    """
    from ddp_kit import plot  # ranks do not need it

    def draw(_, settings):
        n, alpha, beta = settings["ranks"], settings["alpha_us"] / 1e6, settings["beta_ns"] / 1e9
        equal = lesson.break_even(n, alpha, beta)
        sizes = {k * 10**power for power in range(3, 9) for k in (1, 2, 5)} | {10**9}
        sizes |= {round(equal)} if 1e3 < equal < 1e9 else set()
        costs = {"whole ring": model.naive_ring, "chunked ring": model.chunked_ring}
        lines = {
            name: [(nbytes, cost(n, nbytes, alpha, beta)) for nbytes in sorted(sizes)]
            for name, cost in costs.items()
        }
        wire = f"{settings['alpha_us']:g} µs and {settings['beta_ns']:g} ns per byte"
        meet = "the whole ring is never slower" if n == 2 else f"equal at {equal / 1e6:,.3g} MB"
        return plot.bandwidth(lines, title=f"{n} ranks, {wire}: {meet}")

    return Explorer(
        "ring_allreduce",
        {"ranks": ranks, "alpha_us": alpha_us, "beta_ns": beta_ns},
        choices=lambda settings: {
            "ranks": range(2, 65),
            "alpha_us": positive("alpha_us", alpha_us, (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)),
            "beta_ns": positive("beta_ns", beta_ns, (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)),
        },
        ask=None,
        draw=draw,
    )


def compare(rank: int, world_size: int, ring: Callable, shape: tuple[int, ...], dtype: torch.dtype):
    """Return whether `ring` gives exactly what `dist.all_reduce` gives for a shape and dtype."""
    numel = torch.Size(shape).numel()  # small whole numbers have an exact sum in every dtype
    tensor = ((torch.arange(numel, device=device()) + rank) % 5).to(dtype).reshape(shape)
    expected = tensor.clone()
    dist.all_reduce(expected)
    ring(tensor)
    return torch.equal(tensor, expected)


@lesson_main("ring_allreduce", measure={"action": "store_true", "help": "also time 2 kB to 20 MB"})
def main(ranks: Ranks, measure: bool) -> str:
    """Compare each ring with `dist.all_reduce`, count its messages, and print one line."""
    costs = {
        lesson.whole_ring: model.naive_ring,
        lesson.chunked_ring: model.chunked_ring,
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
