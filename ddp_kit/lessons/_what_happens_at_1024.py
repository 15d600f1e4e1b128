"""What the counts of messages need besides what the lesson shows, and their proof."""

from __future__ import annotations

from functools import cache, partial

import torch
import torch.distributed as dist

from ddp_kit import model
from ddp_kit.lessons._launch import Ranks, lesson_main, prove
from ddp_kit.lessons.backends import samples
from ddp_kit.lessons.ring_allreduce import compare, count, exchange


def halving_doubling(tensor):
    """Sum a contiguous tensor in place.

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
    lesson.swap_halves(tensor.view(-1), rank, core)
    if rank + core < n:
        dist.send(tensor, rank + core)


def reduce_scatter(chunks, ring):
    """Sum n chunks over the n ranks of a ring, in n-1 steps; return the one complete here."""
    me, n = ring.index(dist.get_rank()), len(ring)
    arriving = torch.empty_like(chunks[0])  # the first chunk is never smaller than another
    for step in range(n - 1):
        going, coming = chunks[(me - step) % n], chunks[(me - step - 1) % n]
        exchange(going, ring[(me + 1) % n], arriving[: len(coming)], ring[(me - 1) % n])
        coming += arriving[: len(coming)]
    return chunks[(me + 1) % n]


def all_gather(chunks, ring):
    """Pass the complete chunks round the ring, in n-1 steps."""
    me, n = ring.index(dist.get_rank()), len(ring)
    for step in range(n - 1):
        going, coming = chunks[(me - step + 1) % n], chunks[(me - step) % n]
        exchange(going, ring[(me + 1) % n], coming, ring[(me - 1) % n])


def replay(trace, alpha: float, beta: float) -> float:
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
        return max(map(finish, before), default=0.0) + alpha + beta * messages[number].nbytes

    return max(map(finish, range(len(messages))), default=0.0)


def measure(run, world_sizes, sizes):
    """Return ranks, bytes and seconds of each all_reduce: the slowest rank's, of each round.

    run: calls a worker on all ranks of a `world_size=`, such as `kit.run`.
    """
    return {
        name: [
            (n, nbytes, seconds)
            for n in world_sizes
            for nbytes, seconds in samples(partial(run, world_size=n), all_reduce, sizes)
        ]
        for name, (all_reduce, _) in lesson.ALL_REDUCES.items()
    }


@lesson_main("what_happens_at_1024")
def main(ranks: Ranks) -> str:
    """Compare the traces of real ranks with the model, and print one line."""
    n, nbytes = ranks.world_size, 480 * ranks.world_size
    for name, (all_reduce, cost) in lesson.SENT.items():
        prove(f"{name} is exact", all(ranks(compare, all_reduce, (1001,), torch.float32)))
        trace = ranks(count, all_reduce, nbytes // 4).trace
        for alpha, beta in ((1, 0), (0, 1)):
            taken, predicted = replay(trace, alpha, beta), cost(n, nbytes, alpha, beta)
            prove(f"{name} takes as long as predicted", round(taken) == round(predicted))
        predicted = sum(many * size for many, size in model.rounds(cost, n, nbytes))
        sent = sum(message.nbytes for message in trace.messages())
        prove(f"{name} sends as many bytes", sent == round(predicted))
    per_host = 2 if n % 2 == 0 else n
    two_level = partial(lesson.two_level, per_host=per_host)
    prove("two levels are exact", all(ranks(compare, two_level, (1001,), torch.float32)))
    trace = ranks(count, two_level, nbytes // 4).trace
    leaving = sum(m.nbytes for m in trace.messages() if m.src < per_host <= m.dst)
    predicted = model.two_level(n, nbytes, per_host, model.Link(0, 0), model.Link(0, 1))
    prove("a host's link carries as many bytes", leaving == round(predicted))
    return "5 all_reduces send what the model says"


from ddp_kit.lessons import what_happens_at_1024 as lesson
