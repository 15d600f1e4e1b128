"""Graders of lesson 02: collectives built from messages."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ddp_kit.check.grader import (
    SENT,
    SIZES,
    Credit,
    Grader,
    brought,
    hint_if_unchanged,
    in_place,
    same,
)
from ddp_kit.error_text import count, name_ranks
from ddp_kit.trace import Trace
from ddp_kit.trace.schedule import START, WAIT, schedule

ROUNDS = "no more rounds than needed"


def exercise_2_1(broadcast: Callable[[torch.Tensor, int], Any]) -> Credit:
    """Grade `broadcast(tensor, src)` on 1 to 5 ranks, from each of them.

    Raises ExerciseError if it is not right yet, NotImplementedError for the stub.
    """
    grader = Grader("2.1", "broadcast(tensor, src)", broadcast)
    pairs = [(n, src) for n in SIZES for src in range(n)]
    for world_size, src in grader.each(
        pairs, SENT, part=lambda pair: "every other src" if pair[1] else "src=0"
    ):
        held = brought(world_size, 5)
        case = f"broadcast(tensor, src={src})"
        result = grader.run(in_place, held, src, world_size=world_size, case=case)
        grader.compare(
            [held[src]] * world_size,
            result,
            hint_if_unchanged(held, result.values)
            or "Rank `src` sends, and that need not be rank 0. All others receive into "
            "their own `tensor`.",
        )
        others = world_size - 1
        grader.check_total_sent(
            others, 20 * others, "Each rank except `src` needs to receive only once."
        )
    return grader.passed("right on 1, 2, 3, 4 and 5 ranks, from every src")


def exercise_2_2(tree_reduce: Callable[[torch.Tensor], Any]) -> Credit:
    """Grade `tree_reduce(tensor)` on 1 to 5 ranks: the sum on rank 0, in log2 rounds.

    Raises ExerciseError if it is not right yet, NotImplementedError for the stub.
    """
    grader = Grader("2.2", "tree_reduce(tensor)", tree_reduce)
    for world_size in grader.each(SIZES, SENT, ROUNDS):
        held = brought(world_size, 5)
        result = grader.run(in_place, held, world_size=world_size)
        grader.compare(
            [sum(held[1:], held[0])],
            result.values[:1],
            hint_if_unchanged(held, result.values) or _hint_for_sum(held, result[0]),
        )
        others = world_size - 1
        grader.check_total_sent(
            others, 20 * others, "Each rank except rank 0 sends once and is then done."
        )
        needed, most = rounds(result.trace), math.ceil(math.log2(world_size))
        if needed > most:
            grader.fail(
                f"right, but it takes {count(needed, 'round')} where {most} would be enough",
                part=ROUNDS,
                hint="In each round a rank can take part in one message. Let pairs of ranks work "
                "at the same time, so that half of the ranks with a partial sum send it.",
            )
    return grader.passed("right on 1, 2, 3, 4 and 5 ranks, in 0, 1, 2, 2 and 3 rounds")


def _hint_for_sum(held: list[torch.Tensor], found: torch.Tensor) -> str:
    """Return a hint on why rank 0 does not hold the sum."""
    if same(held[0], found):
        return "Nothing reached rank 0. In each pair the higher rank sends and the lower one adds."
    if any(same(other, found) for other in held[1:]):
        return "Rank 0 lost its own numbers. Receive into `arriving`, and add that to `tensor`."
    whole = "Each rank's numbers must reach rank 0 exactly once."
    if len(held) == 2:
        return whole
    return (
        f"{whole} A rank without a partner in a round still takes part in the next one: 3 and 5 "
        "are not powers of two."
    )


def exercise_2_3(all_gather: Callable[[list[torch.Tensor], torch.Tensor], Any]) -> Credit:
    """Grade `all_gather(pieces, tensor)` on 1 to 5 ranks, including the bytes sent.

    Raises ExerciseError if it is not right yet, NotImplementedError for the stub.
    """
    grader = Grader("2.3", "all_gather(pieces, tensor)", all_gather)
    for world_size in grader.each(SIZES, SENT):
        held = brought(world_size, 3)
        result = grader.run(_all_gather, held, world_size=world_size)
        grader.compare(
            [held] * world_size,
            result,
            "On every rank, `pieces[r]` must hold rank r's tensor. In each step a rank passes on "
            "the piece that it received in the step before.",
        )
        messages = world_size * (world_size - 1)
        grader.check_total_sent(
            messages, 12 * messages, "Each rank needs the piece of every other rank once."
        )
    return grader.passed("right on 1, 2, 3, 4 and 5 ranks, each piece came to each rank once")


def exercise_2_4(gather: Callable[[torch.Tensor, int], Any]) -> Credit:
    """Grade `gather(tensor, dst)` on 1 to 5 ranks whose tensors have unequal lengths.

    Raises ExerciseError if it is not right yet, NotImplementedError for the stub.
    """
    grader = Grader("2.4", "gather(tensor, dst)", gather)
    pairs = [(n, dst) for n in SIZES for dst in range(n)]
    for world_size, dst in grader.each(
        pairs, SENT, part=lambda pair: "every other dst" if pair[1] else "dst=0"
    ):
        lengths = (2, 0, 3, 1, 5)  # an empty tensor is among them
        held = [t[:n] for t, n in zip(brought(world_size, 5), lengths, strict=False)]
        case = f"gather(tensor, dst={dst})"
        result = grader.run(_gather, held, dst, world_size=world_size, case=case)
        grader.compare(
            [held if rank == dst else None for rank in range(world_size)],
            result,
            "Rank `dst` returns the tensors of all ranks, in rank order; all others return "
            "None. `dst` must allocate room for as many numbers as it will receive.",
            verb="return",
        )
        others = world_size - 1
        numbers = sum(len(tensor) for rank, tensor in enumerate(held) if rank != dst)
        grader.check_total_sent(
            2 * others,
            8 * others + 4 * numbers,
            "Each rank except `dst` sends it two messages: a length, and then as many numbers.",
        )
    return grader.passed("right on 1, 2, 3, 4 and 5 ranks, to every dst, also for an empty tensor")


def exercise_2_5(barrier: Callable[[], Any]) -> Credit:
    """Grade `barrier()` on 1 to 5 ranks, by what each rank could know when it left.

    Raises ExerciseError if it is not right yet, NotImplementedError for the stub.
    """
    grader = Grader("2.5", "barrier()", barrier)
    for world_size in grader.each(SIZES, SENT):
        result = grader.run(_barrier, world_size=world_size)
        early = [
            f"rank {rank} leaves without having heard of {name_ranks(unknown)}"
            for rank, known in enumerate(known_at_the_end(result.trace))
            if (unknown := set(range(world_size)) - known)
        ]
        if early:
            grader.fail(
                "a rank may leave too early",
                *early,
                hint="A rank learns that another one has come by a message from it, or from a rank "
                "that knew it already. A send that ends proves nothing: a backend may buffer it.",
            )
        # All ranks send to all others, or a token goes round twice.
        most = max(2 * world_size, world_size * (world_size - 1)) if world_size > 1 else 0
        grader.check_total_sent(most, 64 * most, "A token passed round the ring twice is enough.")
    return grader.passed("right on 1, 2, 3, 4 and 5 ranks, nobody leaves before all have come")


def rounds(trace: Trace) -> int:
    """Return how many rounds a run needs if a rank takes part in one message per round."""
    at = schedule(trace).at
    taken = [message for message in trace.messages() if message.recv is not None]
    taken.sort(key=lambda m: (at[m.recv.rank, m.recv.index], m.dst))
    busy = [0] * trace.world_size  # rounds that a rank has finished
    for message in taken:
        busy[message.src] = busy[message.dst] = max(busy[message.src], busy[message.dst]) + 1
    return max(busy)


def known_at_the_end(trace: Trace) -> list[set[int]]:
    """Return, for each rank, the ranks that it knew at the end to have begun.

    A message carries what its sender knew when it sent. Nothing else counts: not the time, and
    not that a send has ended, because a backend may buffer a small message.
    """
    known = [{rank} for rank in range(trace.world_size)]
    carried: dict[tuple[int, int], set[int]] = {}  # what a receive will bring, by (rank, index)
    receives = {(m.send.rank, m.send.index): m.recv for m in trace.messages()}
    found = schedule(trace)
    moments = []  # when each message was sent, and when it had been received
    for rank, actions in enumerate(found.actions):
        for place, action in enumerate(actions):
            event = action.event
            if event.kind == "send" and action.what != WAIT:
                moments.append((action.begin, rank, place, event))
            elif event.kind == "recv" and (action.what != START or event.waited is None):
                over = found.at.get((rank, event.index), -1) + 1
                moments.append((max(action.end, over), rank, place, event))
    for *_, event in sorted(moments, key=lambda moment: moment[:3]):
        if event.kind == "recv":
            known[event.rank] |= carried.pop((event.rank, event.index), set())
        elif event.kind == "send" and (recv := receives[event.rank, event.index]) is not None:
            carried[recv.rank, recv.index] = set(known[event.rank])
    return known


def _all_gather(rank: int, world_size: int, all_gather: Callable, held: list) -> list:
    pieces = [torch.full_like(tensor, -1) for tensor in held]
    all_gather(pieces, held[rank])
    return pieces


def _gather(rank: int, world_size: int, gather: Callable, held: list, dst: int) -> Any:
    return gather(held[rank], dst)


def _barrier(rank: int, world_size: int, barrier: Callable) -> None:
    barrier()
