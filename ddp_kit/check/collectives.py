"""Graders of lesson 02: collectives built from messages."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ddp_kit.check.compared import hunt
from ddp_kit.check.grader import SENT, SIZES, UNCHANGED, Grader, brought, exercise, in_place, same
from ddp_kit.check.record import Score, record, rounds
from ddp_kit.error_text import count, name_ranks
from ddp_kit.trace import Trace
from ddp_kit.trace.schedule import START, WAIT, schedule

ROUNDS = "no more rounds than needed"


@exercise(
    "2.1",
    "broadcast(tensor, src)",
    "from every src",
    collectives=False,
    cases=[(n, src) for n in SIZES for src in range(n)],
    others=(SENT,),
    part=lambda pair: "every other src" if pair[1] else "src=0",
)
def _broadcast(grader: Grader, world_size: int, src: int) -> None:
    held = brought(world_size, 5)
    case = f"broadcast(tensor, src={src})"
    result = grader.run(in_place, held, src, world_size=world_size, case=case)
    mistakes = {UNCHANGED: held, "always rank 0": True}
    grader.compare([held[src]] * world_size, result, mistakes)
    others = world_size - 1
    grader.check_total_sent(others, 20 * others, "received twice")


@exercise(
    "2.2",
    "tree_reduce(tensor)",
    "in 0, 1, 2, 2 and 3 rounds",
    collectives=False,
    others=(SENT, ROUNDS),
)
def _tree_reduce(grader: Grader, world_size: int) -> None:
    held = brought(world_size, 5)
    result = grader.run(in_place, held, world_size=world_size)
    mistakes = {
        UNCHANGED: same(held, list(result)),
        "upwards": held[:1],
        "own numbers lost": tuple([other] for other in held[1:]),
        "not once": world_size == 2,
        "no partner": True,
    }
    grader.compare([sum(held[1:], held[0])], result.values[:1], mistakes)
    others = world_size - 1
    grader.check_total_sent(others, 20 * others, "sent twice")
    needed, most = rounds(result.trace).value, math.ceil(math.log2(world_size))
    if needed > most:
        grader.fail(
            f"right, but it takes {count(needed, 'round')} where {most} would be enough",
            hint="too many rounds",
            part=ROUNDS,
        )


@exercise(
    "2.3",
    "all_gather(pieces, tensor)",
    "each piece came to each rank once",
    collectives=False,
    others=(SENT,),
)
def _all_gather(grader: Grader, world_size: int) -> None:
    held = brought(world_size, 3)
    result = grader.run(_gather_all, held, world_size=world_size)
    grader.compare([held] * world_size, result, "wrong piece")
    messages = world_size * (world_size - 1)
    grader.check_total_sent(messages, 12 * messages, "too many bytes")


def _gather_all(rank: int, world_size: int, all_gather: Callable, held: list) -> list:
    pieces = [torch.full_like(tensor, -1) for tensor in held]
    all_gather(pieces, held[rank])
    return pieces


@exercise(
    "2.4",
    "gather(tensor, dst)",
    "to every dst, also for an empty tensor",
    collectives=False,
    cases=[(n, dst) for n in SIZES for dst in range(n)],
    others=(SENT,),
    part=lambda pair: "every other dst" if pair[1] else "dst=0",
)
def _gather(grader: Grader, world_size: int, dst: int) -> None:
    lengths = (2, 0, 3, 1, 5)  # an empty tensor is among them
    held = [t[:n] for t, n in zip(brought(world_size, 5), lengths, strict=False)]
    found = grader.call([(tensor, dst) for tensor in held], f"gather(tensor, dst={dst})")
    wanted = [held if rank == dst else None for rank in range(world_size)]
    grader.compare(wanted, found, "wrong list", verb="return")
    others = world_size - 1
    numbers = sum(len(tensor) for rank, tensor in enumerate(held) if rank != dst)
    grader.check_total_sent(2 * others, 8 * others + 4 * numbers, "too many messages")


@exercise(
    "2.5", "barrier()", "nobody leaves before all have come", collectives=False, others=(SENT,)
)
def _barrier(grader: Grader, world_size: int) -> None:
    grader.call([()] * world_size)
    early = [
        f"rank {rank} leaves without having heard of {name_ranks(unknown)}"
        for rank, known in enumerate(known_at_the_end(grader.result.trace))
        if (unknown := set(range(world_size)) - known)
    ]
    if early:
        grader.fail("a rank may leave too early", *early, hint="leaves early")
    # All ranks send to all others, or a token goes round twice.
    most = max(2 * world_size, world_size * (world_size - 1)) if world_size > 1 else 0
    grader.check_total_sent(most, 64 * most, "too many messages")


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


for _number in ("2.6", "2.7", "2.8"):
    hunt(_number)


@record("2.9", "broadcast_in_rounds(tensor)", "rounds", (6, 4, 3), along="round")
def _broadcast_in_rounds(grader: Grader) -> Score:
    held = brought(8, 5)
    result = grader.run(in_place, held, world_size=8)
    mistakes = {UNCHANGED: held, "other tensor": True}
    grader.compare([held[0]] * 8, result, mistakes)
    return rounds(result.trace)
