"""What happens at 1024: five all_reduces and DDP send what `ddp_kit.model` says.

The model counts messages and bytes and gives each a cost. Here real ranks send them, and the
trace of the run is compared with the model. Besides the rings of lesson 04 there are three more
all_reduces made of sends: a tree, halving and doubling, and two levels of rings. The times are
for the notebook.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_kit import device, model
from ddp_kit.launch import lesson_parser, open_ranks, prove, run_as_script
from ddp_kit.lessons.ddp import Stack
from ddp_kit.lessons.ring_allreduce import chunked_ring, compare, count, exchange, whole_ring
from ddp_kit.model import Link
from ddp_kit.trace import Trace


def tree(tensor: torch.Tensor) -> None:
    """Sum a contiguous `tensor` in place: up a binomial tree to rank 0, and down again."""
    rank, n = dist.get_rank(), dist.get_world_size()
    arriving = torch.empty_like(tensor)
    distances = [2**level for level in range((n - 1).bit_length())]
    for distance in distances:
        if rank % (2 * distance) == distance:
            dist.send(tensor, rank - distance)
        elif rank % (2 * distance) == 0 and rank + distance < n:
            dist.recv(arriving, rank + distance)
            tensor += arriving
    for distance in reversed(distances):
        if rank % (2 * distance) == distance:
            dist.recv(tensor, rank - distance)
        elif rank % (2 * distance) == 0 and rank + distance < n:
            dist.send(tensor, rank + distance)


def halving_doubling(tensor: torch.Tensor) -> None:
    """Sum a contiguous `tensor` in place: swap halves, quarters, eighths, and all the way back.

    Ranks above the largest power of two first send their tensor to a partner, and receive the
    sum from it at the end.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    core = 2 ** (n.bit_length() - 1)  # the largest power of two that is not above n
    if rank >= core:
        dist.send(tensor, rank - core)
        dist.recv(tensor, rank - core)
        return
    if rank + core < n:
        arriving = torch.empty_like(tensor)
        dist.recv(arriving, rank + core)
        tensor += arriving
    swap_halves(tensor.view(-1), rank, core)
    if rank + core < n:
        dist.send(tensor, rank + core)


def swap_halves(piece: torch.Tensor, rank: int, core: int) -> None:
    """Sum a flat tensor over the first `core` ranks, a power of two, in place."""
    arriving, swaps, distance = torch.empty_like(piece), [], core // 2
    while distance:
        low, high = piece.tensor_split(2)
        kept, given = (high, low) if rank & distance else (low, high)
        exchange(given, rank ^ distance, arriving[: len(kept)], rank ^ distance)
        kept += arriving[: len(kept)]
        swaps.append((rank ^ distance, kept, given))
        piece, distance = kept, distance // 2
    for partner, kept, given in reversed(swaps):
        exchange(kept, partner, given, partner)


def two_level(tensor: torch.Tensor, per_host: int) -> None:
    """Sum a contiguous `tensor` in place: rings inside hosts of `per_host` ranks, then between.

    Consecutive ranks share a host; the world size must be a multiple of `per_host`.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    host = rank - rank % per_host
    inside, between = range(host, host + per_host), range(rank % per_host, n, per_host)
    chunks = tensor.view(-1).tensor_split(per_host)
    mine = reduce_scatter(chunks, inside)
    pieces = mine.tensor_split(len(between))
    reduce_scatter(pieces, between)
    all_gather(pieces, between)
    all_gather(chunks, inside)


def reduce_scatter(chunks: Sequence[torch.Tensor], ring: Sequence[int]) -> torch.Tensor:
    """Sum n chunks over the n ranks of a ring, in n-1 steps; return the one complete here."""
    me, n = ring.index(dist.get_rank()), len(ring)
    arriving = torch.empty_like(chunks[0])  # the first chunk is never smaller than another
    for step in range(n - 1):
        going, coming = chunks[(me - step) % n], chunks[(me - step - 1) % n]
        exchange(going, ring[(me + 1) % n], arriving[: len(coming)], ring[(me - 1) % n])
        coming += arriving[: len(coming)]
    return chunks[(me + 1) % n]


def all_gather(chunks: Sequence[torch.Tensor], ring: Sequence[int]) -> None:
    """Pass the complete chunks round the ring, in n-1 steps."""
    me, n = ring.index(dist.get_rank()), len(ring)
    for step in range(n - 1):
        going, coming = chunks[(me - step + 1) % n], chunks[(me - step) % n]
        exchange(going, ring[(me + 1) % n], coming, ring[(me - 1) % n])


# What sums a tensor on real ranks, and its formula in the model.
SENT: dict[str, tuple[Callable, Callable]] = {
    "naive ring": (whole_ring, model.naive_ring),
    "chunked ring": (chunked_ring, model.chunked_ring),
    "tree": (tree, model.tree),
    "halving-doubling": (halving_doubling, model.halving_doubling),
}
# gloo's own all_reduce is a chunked ring too.
ALL_REDUCES = SENT | {"built-in": (dist.all_reduce, model.chunked_ring)}


def replay(trace: Trace, alpha: float, beta: float) -> float:
    """Return the seconds that the messages of a run would take on links of alpha and beta.

    A message starts when its sender and its receiver have finished all that they waited for
    before they posted it.
    """
    messages = trace.messages()
    ends = [(e, i) for i, m in enumerate(messages) for e in (m.send, m.recv)]

    @cache
    def finish(number: int) -> float:
        posted = {e.rank: e.start for e in (messages[number].send, messages[number].recv)}
        before = {i for e, i in ends if e.rank in posted and e.end <= posted[e.rank]}
        start = max(map(finish, before), default=0.0)
        return start + alpha + beta * messages[number].nbytes

    return max(map(finish, range(len(messages))), default=0.0)


def backwards_by_ring(rank: int, world_size: int) -> list[int]:
    """Run two backwards of DDP that reduces buckets by the chunked ring; return their bytes.

    The first has one bucket, because DDP does not know yet in which order gradients are ready.
    """
    sizes: list[int] = []

    def reduce_by_ring(_, bucket):
        gradients = bucket.buffer().div_(world_size)
        sizes.append(gradients.nbytes)
        chunked_ring(gradients)
        done: torch.futures.Future = torch.futures.Future()
        done.set_result(gradients)
        return done

    layers = nn.Sequential(*(nn.Linear(48, 48) for _ in range(4))).to(device())
    ddp = DistributedDataParallel(layers, bucket_cap_mb=0.01)
    ddp.register_comm_hook(None, reduce_by_ring)
    for _ in range(2):
        ddp(torch.ones(1, 48, device=device())).sum().backward()
    return sizes


def time_all_reduces(
    rank: int, world_size: int, sizes: Iterable[int], rounds: int | None = None
) -> dict[tuple[str, int], list[float]]:
    """Time each of ALL_REDUCES, by name and bytes: the seconds of each round, after a warm-up.

    All are timed in each round, so that a busy moment does not affect only one of them. rounds:
    by default 15, and 5 for tensors of a megabyte and more.
    """
    seconds: dict[tuple[str, int], list[float]] = {}
    for nbytes in sizes:
        tensor = torch.zeros(nbytes // 4, device=device())
        for turn in range(1 + (rounds or (15 if nbytes < 1_000_000 else 5))):
            for name, (all_reduce, _) in ALL_REDUCES.items():
                dist.barrier()
                start = time.perf_counter()
                all_reduce(tensor)
                if tensor.is_cuda:
                    torch.cuda.synchronize()
                if turn:
                    seconds.setdefault((name, nbytes), []).append(time.perf_counter() - start)
    return seconds


def measure(
    run: Callable, world_sizes: Iterable[int], sizes: Iterable[int], rounds: int | None = None
) -> dict[str, list[tuple[int, int, list[float]]]]:
    """Return ranks, bytes and seconds of each all_reduce: the slowest rank's, of each round.

    run: calls a worker on all ranks of a `world_size=`, such as `kit.run`. rounds: as in
    `time_all_reduces`.
    """
    found: dict[str, list[tuple[int, int, list[float]]]] = {name: [] for name in ALL_REDUCES}
    for n in world_sizes:
        of_ranks = list(run(time_all_reduces, tuple(sizes), rounds, world_size=n))
        for name, nbytes in of_ranks[0]:
            each_round = zip(*(seconds[name, nbytes] for seconds in of_ranks), strict=True)
            found[name].append((n, nbytes, [max(seconds) for seconds in each_round]))
    return found


def compute_seconds(rank: int, world_size: int, steps: int = 20) -> tuple[float, float]:
    """Return the median seconds of forward and backward of a Stack, without communication."""
    stack, x = Stack().to(device()), torch.ones(128, 512, device=device())
    seconds = []
    for _ in range(steps + 3):
        dist.barrier()
        start = time.perf_counter()
        loss = stack(x).sum()
        middle = time.perf_counter()
        loss.backward()
        seconds.append((middle - start, time.perf_counter() - middle))
    forward, backward = zip(*seconds[3:], strict=True)
    return median(forward), median(backward)


def main(argv: list[str] | None = None) -> None:
    """Compare the traces of real ranks with the model, and print one line."""
    options = lesson_parser("what_happens_at_1024", __doc__).parse_args(argv or [])
    with open_ranks(options.world_size, options.backend, options.trace) as ranks:
        n = ranks.world_size
        for name, (all_reduce, cost) in SENT.items():
            prove_counts(ranks, name, all_reduce, cost)
        prove_two_levels(ranks, 2 if n % 2 == 0 else n)
        result = ranks(backwards_by_ring)
        for rank, buckets in enumerate(result):
            sent = [message.nbytes for message in result.trace.messages(src=rank)]
            for counted, alpha, beta in ((len(sent), 1, 0), (sum(sent), 0, 1)):
                ring = partial(model.chunked_ring, alpha=alpha, beta=beta)
                predicted = model.ddp_step(n, buckets, 0, 0, ring)
                prove("DDP sends what the model says", counted == round(predicted))
        ranks.say(f"what_happens_at_1024: {ranks}, 5 all_reduces and DDP send what the model says")


def prove_counts(ranks, name: str, all_reduce: Callable, cost: Callable) -> None:
    """Prove that an all_reduce is exact and sends the model's messages, in a row and in all."""
    n, nbytes = ranks.world_size, 480 * ranks.world_size
    prove(f"{name} is exact", all(ranks(compare, all_reduce, (1001,), torch.float32)))
    trace = ranks(count, all_reduce, nbytes // 4).trace
    for alpha, beta in ((1, 0), (0, 1)):
        predicted = round(cost(n, nbytes, alpha, beta))
        prove(f"{name} takes as long as predicted", round(replay(trace, alpha, beta)) == predicted)
    rounds = model.rounds(cost, n, nbytes)
    messages = trace.messages()
    prove(f"{name} sends as many messages", len(messages) == sum(many for many, _ in rounds))
    nbytes = round(sum(many * size for many, size in rounds))
    prove(f"{name} sends as many bytes", sum(message.nbytes for message in messages) == nbytes)


def prove_two_levels(ranks, per_host: int) -> None:
    """Prove the same for two levels, on imaginary hosts."""
    n, nbytes, free, one = ranks.world_size, 480 * ranks.world_size, Link(0, 0), Link(1, 0)
    all_reduce = partial(two_level, per_host=per_host)
    prove("two levels are exact", all(ranks(compare, all_reduce, (1001,), torch.float32)))
    trace = ranks(count, all_reduce, nbytes // 4).trace
    predicted = model.two_level(n, nbytes, per_host, one, one)
    prove("two levels take as long as predicted", replay(trace, 1, 0) == predicted)
    leaving = [m.nbytes for m in trace.messages() if m.src < per_host <= m.dst]
    predicted = model.two_level(n, nbytes, per_host, free, Link(0, 1))
    prove("a host's link carries as many bytes", sum(leaving) == round(predicted))
    staying = [m.nbytes for m in trace.messages(src=0) if m.dst < per_host]
    predicted = model.two_level(n, nbytes, per_host, Link(0, 1), free)
    prove("a link inside a host carries as many bytes", sum(staying) == round(predicted))


if __name__ == "__main__":
    run_as_script(main)
