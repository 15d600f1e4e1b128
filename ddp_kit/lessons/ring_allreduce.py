"""Ring all-reduce: the sum of all ranks' tensors, built from sends to the right neighbour.

Three rings; each sums a contiguous `tensor` in place on every rank, as `dist.all_reduce` does:

    whole_ring      the tutorial's: the whole tensor travels n-1 times
    chunked_ring    its homework: n chunks; reduce-scatter, then all-gather
    preposted_ring  the chunked ring with every receive posted before the first send

Sources: "Writing Distributed Applications with PyTorch", section Our Own Ring-Allreduce;
Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations"
(2009), for the chunked ring and its 2(n-1)/n.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
import torch.distributed as dist

from ddp_kit import device
from ddp_kit.launch import lesson_parser, open_ranks, prove, run_as_script
from ddp_kit.notebook.controls import Explorer

SIZES = (4_000, 40_000, 400_000, 4_000_000, 40_000_000)  # bytes
ROUNDS, LARGE, ROUNDS_IF_LARGE = 15, 10_000_000, 5  # LARGE: bytes; each round takes long
Sample = tuple[int, list[float]]  # bytes, and the seconds of each round


def neighbours() -> tuple[int, int]:
    """Return the ranks to the left and to the right of this one."""
    rank, n = dist.get_rank(), dist.get_world_size()
    return (rank - 1) % n, (rank + 1) % n


def whole_ring(tensor: torch.Tensor) -> None:
    """Sum a contiguous `tensor` over all ranks in place; every message is the whole tensor."""
    left, right = neighbours()
    passing, arriving = tensor.clone(), torch.empty_like(tensor)
    for _ in range(dist.get_world_size() - 1):
        sending = dist.isend(passing, right)
        dist.recv(arriving, left)
        tensor += arriving
        sending.wait()
        passing, arriving = arriving, passing


def chunked_ring(tensor: torch.Tensor, after_step: Callable[[], None] = lambda: None) -> None:
    """Sum a contiguous `tensor` over all ranks in place; every message is one chunk of n.

    after_step: called after each of the 2(n-1) steps, to watch the chunks.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    left, right = neighbours()
    chunks = tensor.view(-1).tensor_split(n)
    arriving = torch.empty_like(chunks[0])  # the first chunk is never smaller than another
    for step in range(2 * (n - 1)):
        going, coming = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        into = arriving[: len(coming)] if step < n - 1 else coming  # first reduce, then gather
        exchange(going, right, into, left)
        if step < n - 1:
            coming += into
        after_step()


def exchange(going: torch.Tensor, right: int, coming: torch.Tensor, left: int) -> None:
    """Send one chunk and receive another at the same time. An empty chunk is not sent."""
    sending = dist.isend(going, right) if len(going) else None
    if len(coming):
        dist.recv(coming, left)
    if sending:
        sending.wait()


def preposted_ring(tensor: torch.Tensor, scratch: torch.Tensor | None = None) -> None:
    """Sum a contiguous `tensor` in place, with every receive posted before the first send.

    scratch: a tensor of the same shape and dtype to receive into; allocated if None. A training
        loop would keep one between steps.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    left, right = neighbours()
    scratch = torch.empty_like(tensor) if scratch is None else scratch
    chunks, partial = tensor.view(-1).tensor_split(n), scratch.view(-1).tensor_split(n)
    steps = range(2 * (n - 1))
    sources = [(rank - step - 1) % n for step in steps]
    landing = [(partial if step < n - 1 else chunks)[sources[step]] for step in steps]
    receives = [dist.irecv(landing[s], left, tag=s) if len(landing[s]) else None for s in steps]
    sends, going = [], chunks[rank]
    for step in steps:
        if len(going):
            sends.append(dist.isend(going, right, tag=step))
        receiving, going = receives[step], chunks[sources[step]]
        if receiving:
            receiving.wait()
        if step < n - 1:
            going += landing[step]
    for sending in sends:
        sending.wait()


RINGS = (whole_ring, chunked_ring, preposted_ring)


def example(rank: int, world_size: int, shape: tuple[int, ...], dtype: torch.dtype):
    """Return a tensor of small whole numbers, so that sums are exact in every dtype."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count, device=device()) + rank) % 5).to(dtype).reshape(shape)


def compare(rank: int, world_size: int, ring: Callable, shape: tuple[int, ...], dtype: torch.dtype):
    """Return whether `ring` gives exactly what `dist.all_reduce` gives for a shape and dtype."""
    tensor = example(rank, world_size, shape, dtype)
    expected = tensor.clone()
    dist.all_reduce(expected)
    ring(tensor)
    return torch.equal(tensor, expected)


def count(rank: int, world_size: int, ring: Callable, numel: int) -> None:
    """Run `ring` once on `numel` float32; the run's trace then contains its messages."""
    ring(torch.zeros(numel, device=device()))


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


def expected_cost(ring: Callable, world_size: int, nbytes: int) -> tuple[int, float]:
    """Return how many messages and bytes one rank sends, by the formula."""
    if ring is whole_ring:
        return world_size - 1, (world_size - 1) * nbytes
    return 2 * (world_size - 1), 2 * (world_size - 1) / world_size * nbytes


def measure(
    rank: int, world_size: int, sizes: Sequence[int], rounds: int
) -> dict[str, dict[int, list[float]]]:
    """Time `dist.all_reduce` and each ring; return this rank's seconds by name, size and round.

    A round times every size and every contestant once, so that whatever else the machine does
    slows all of them down alike. Every other round goes from the largest size to the smallest,
    because a small call right after a much larger one takes longer. Each call starts at a barrier,
    which is not timed. The first round is left out, because it opens connections; there is one
    more than `rounds`.
    """
    tensors = [torch.zeros(nbytes // 4, device=device()) for nbytes in sizes]
    kept = torch.empty_like(tensors[-1])
    contestants: dict[str, Callable] = {
        "built-in all_reduce": dist.all_reduce,
        "whole ring": whole_ring,
        "chunked ring": chunked_ring,
        "preposted ring": lambda tensor: preposted_ring(tensor, kept[: len(tensor)]),
    }
    seconds: dict[str, dict[int, list[float]]] = {
        name: {nbytes: [] for nbytes in sizes} for name in contestants
    }
    pairs = list(zip(sizes, tensors, strict=True))
    for round_ in range(1 + rounds):
        for nbytes, tensor in pairs[:: 1 if round_ % 2 else -1]:
            for name, contestant in contestants.items():
                dist.barrier()
                start = time.perf_counter()
                contestant(tensor)
                if tensor.is_cuda:
                    torch.cuda.synchronize()
                if round_:
                    seconds[name][nbytes].append(time.perf_counter() - start)
    return seconds


def samples(
    run: Callable, sizes: Sequence[int] = SIZES, rounds: int | None = None
) -> dict[str, list[Sample]]:
    """Time each contestant at each size: the slowest rank's seconds of every round.

    run: calls a worker on all ranks, such as `kit.run`. sizes: bytes of the tensor, ascending.
    rounds: by default 15, and 5 from 10 MB on.
    """
    small = [nbytes for nbytes in sizes if nbytes < LARGE]
    large = [nbytes for nbytes in sizes if nbytes >= LARGE]
    series: dict[str, list[Sample]] = {}
    for some, many in (small, ROUNDS), (large, ROUNDS_IF_LARGE):
        per_rank = list(run(measure, some, rounds or many)) if some else [{}]
        for name in per_rank[0]:
            for nbytes in some:
                by_round = zip(*(seconds[name][nbytes] for seconds in per_rank), strict=True)
                series.setdefault(name, []).append((nbytes, [max(times) for times in by_round]))
    return series


def bandwidth(
    run: Callable, sizes: Sequence[int] = SIZES, rounds: int | None = None
) -> dict[str, list[tuple[int, float]]]:
    """Return the medians of `samples`: for each contestant, pairs of bytes and seconds."""
    found = samples(run, sizes, rounds)
    return {
        name: [(nbytes, median(seconds)) for nbytes, seconds in points]
        for name, points in found.items()
    }


def main(argv: list[str] | None = None) -> None:
    """Compare each ring with `dist.all_reduce`, count its messages, and print one line."""
    parser = lesson_parser("ring_allreduce", __doc__)
    parser.add_argument("--measure", action="store_true", help="also time 4 kB to 40 MB")
    options = parser.parse_args(argv or [])
    with open_ranks(options.world_size, options.backend, options.trace) as ranks:
        n = ranks.world_size
        for ring in RINGS:
            for shape in ((), (1,), (7,), (3, 5), (1000,)):
                for dtype in (torch.float32, torch.float64, torch.float16, torch.int64):
                    same = all(ranks(compare, ring, shape, dtype))
                    prove(f"{ring.__name__} is exact for {shape} {dtype}", same)
            trace = ranks(count, ring, 1000 * n).trace
            messages, nbytes = expected_cost(ring, n, 4 * 1000 * n)
            for rank in range(n):
                sent = len(trace.messages(src=rank)), trace.bytes_sent(rank)
                prove("each rank sends what the formula says", sent == (messages, round(nbytes)))
        complete = all((steps[-1] == int("1" * n)).all() for steps in ranks(watch))
        prove("after the last step every chunk includes every rank", complete)
        ranks.say(f"ring_allreduce: {ranks}, {len(RINGS)} rings agree with dist.all_reduce")
        series = bandwidth(ranks) if options.measure else {}
        for name, points in series.items():
            for nbytes, seconds in points:
                ratio = seconds / dict(series["built-in all_reduce"])[nbytes]
                ranks.say(f"{name:20} {nbytes:>11,} B {1000 * seconds:8.2f} ms  x{ratio:.2f}")


if __name__ == "__main__":
    run_as_script(main)
