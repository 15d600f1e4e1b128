"""Graders of lesson 02: what collectives are good for, how messages make them, and a sort."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from ddp_kit.check.compared import IN_MESSAGES, MANY, Used, by_rank, compared, hunt, in_messages
from ddp_kit.check.grader import (
    SENT,
    SIZES,
    UNCHANGED,
    Grader,
    brought,
    by_size,
    drawn,
    exercise,
    in_place,
    unknown,
)
from ddp_kit.check.record import Score, Span, record, rounds
from ddp_kit.error_text import count, name_ranks
from ddp_kit.trace import Trace
from ddp_kit.trace.schedule import START, WAIT, schedule

ROUNDS = "no more rounds than needed"
BALANCED = "no rank gets more than twice its share"
SORTED, LENGTH = 64, 1000  # numbers of a rank to sort, and of a piece
LATENCY, BYTES = 10.0, 4000  # microseconds of a message, and how many bytes take one more


@compared("2.a", "global_mean(numbers)", spare=MANY)
def _global_mean(rank: int, world_size: int, global_mean: Callable) -> float:
    return global_mean(torch.arange(_lengths(world_size)[rank]) + 10 * rank + 0.375)


def _lengths(world_size: int) -> list[int]:
    return [3, 1] if world_size == 2 else [2, 0, 4]


@compared("2.b", "all_gather_uneven(tensor)")
def _all_gather_uneven(rank: int, world_size: int, all_gather: Callable) -> list[torch.Tensor]:
    numbers = brought(world_size, 4)[rank] - 11  # rank 0 has -1, 0 and 1
    return all_gather(numbers[: _lengths(world_size)[rank]])


def _without_all_reduce(trace: Trace, n: int) -> list[Used]:
    calls = sum(event.op.startswith("all_reduce") for event in trace if event.rank == 0)
    return [*by_rank(trace), Used("rank 0 called all_reduce {}", calls, "time")]


@compared("2.c", "two_steps(tensor)", used=_without_all_reduce, spare=1.25)
def _two_steps(rank: int, world_size: int, two_steps: Callable) -> torch.Tensor:
    return in_place(rank, world_size, two_steps, brought(world_size, 2 * world_size))


@compared("2.d", "sum_by_parity(tensor)", sizes=(3, 4))
def _sum_by_parity(rank: int, world_size: int, sum_by_parity: Callable) -> torch.Tensor:
    return sum_by_parity(torch.tensor([10.0**rank, rank + 1]))


@compared(
    "2.1",
    "broadcast(tensor, src)",
    "from every src",
    cases=[(n, src) for n in SIZES for src in range(n)],
    part=lambda pair: "every other src" if pair[1] else "src=0",
    call=lambda n, src: f"broadcast(tensor, src={src})",
    **IN_MESSAGES,
)
def _broadcast(rank: int, n: int, broadcast: Callable, src: int) -> torch.Tensor:
    return in_place(rank, n, broadcast, brought(n, 5), src)


def _messages_and_rounds(trace: Trace, n: int) -> list[Used]:
    return [*in_messages(trace), Used("it takes {}", rounds(trace).value, "round", ROUNDS)]


@compared(
    "2.2",
    "tree_reduce(tensor)",
    "in 0, 1, 2, 2 and 3 rounds",
    together=lambda result: list(result)[:1],
    **IN_MESSAGES | {"others": (SENT, ROUNDS), "used": _messages_and_rounds},
)
def _tree_reduce(rank: int, n: int, tree_reduce: Callable) -> torch.Tensor:
    return in_place(rank, n, tree_reduce, brought(n, 5))


@compared(
    "2.3",
    "all_gather(pieces, tensor)",
    "each piece came to each rank once",
    **IN_MESSAGES,
)
def _all_gather(rank: int, n: int, all_gather: Callable) -> list[torch.Tensor]:
    held = brought(n, 3)
    pieces = [torch.full_like(tensor, -1) for tensor in held]
    all_gather(pieces, held[rank])
    return pieces


@compared(
    "2.4",
    "gather(tensor, dst)",
    "to every dst, also for an empty tensor",
    cases=[(n, dst) for n in SIZES for dst in range(n)],
    part=lambda pair: "every other dst" if pair[1] else "dst=0",
    call=lambda n, dst: f"gather(tensor, dst={dst})",
    **IN_MESSAGES,
)
def _gather(rank: int, n: int, gather: Callable, dst: int) -> list[torch.Tensor] | None:
    length = (2, 0, 3, 1, 5)[rank]  # an empty tensor is among them
    return gather(brought(n, 5)[rank][:length], dst)


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
    sent = len(grader.result.trace.messages())
    grader.check_at_most("", sent, most, "message", "too many messages")


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


hunt("2.6", "2.7", "2.8")


@record("2.9", "broadcast_in_rounds(tensor)", "rounds", (6, 4, 3), along="round")
def _broadcast_in_rounds(grader: Grader) -> Score:
    held = drawn(8, 5)
    result = grader.run(in_place, held, world_size=8)
    mistakes = {UNCHANGED: held, "other tensor": True}
    grader.compare([held[0]] * 8, result, mistakes)
    return rounds(result.trace)


@exercise(
    "2.10",
    "sample_sort(numbers)",
    "no rank has more than twice its share",
    kind="function",
    cases=[(n, how) for n in (2, 3, 1, 4) for how in ("shuffled", "in blocks", "in turns")],
    part=lambda case: by_size((2, 3, 1, 4))(case[0]),
    others=(SENT, BALANCED),
    where="on 1, 2, 3 and 4 ranks",
)
def _sample_sort(grader: Grader, world_size: int, how: str) -> None:
    size = SORTED * world_size
    whole = torch.arange(float(size)) ** 3  # small numbers are closer to each other
    held = {
        "shuffled": whole[torch.randperm(size, generator=torch.Generator().manual_seed(1))],
        "in blocks": whole.flip(0),  # rank 0 has the largest ones
        "in turns": whole.view(SORTED, world_size).T.reshape(-1),
    }[how]
    given = [(numbers.clone(),) for numbers in held.split(SORTED)]
    parts = grader.call(given, f"sample_sort(numbers), {how}")
    for rank, part in enumerate(parts):
        if not isinstance(part, torch.Tensor) or part.dim() != 1:
            grader.fail(f"rank {rank} should return a tensor of one dimension, got {part!r}")
    together = torch.cat(parts)
    if not torch.equal(together.sort().values, whole):
        fact = f"the ranks return {count(len(together), 'number')}"
        if len(together) == size:
            fact += ", but not those that they brought"
        grader.fail(f"{fact} where there are {size}", hint="numbers lost")
    for rank, part in enumerate(parts):
        if not torch.equal(part, part.sort().values):
            grader.fail(f"the numbers of rank {rank} are not in order", hint="not sorted")
    if not torch.equal(together, whole):
        ends = [f"rank {r} has {p.min():g} to {p.max():g}" for r, p in enumerate(parts) if len(p)]
        grader.fail("each rank is in order, but not one after the other", *ends, hint="overlap")
    most = max(map(len, parts))
    if most > 2 * SORTED:
        fact = f"right, but a rank has {most} of {size} numbers, more than twice {SORTED}"
        grader.fail(fact, hint="unbalanced", part=BALANCED)
    grader.check_sent(8 * SORTED, "all to all ranks")


@record("2.11", "all_to_all_fast(pieces)", "µs", (55, 46, 37), along="µs")
def _all_to_all_fast(grader: Grader) -> Score:
    table = torch.rand(6, 6, LENGTH, generator=unknown())
    result = grader.run(_exchange, table, world_size=6)
    wanted = [[10 * src + dst for src in range(6)] for dst in range(6)]
    own = [[10 * src + dst for dst in range(6)] for src in range(6)]
    found = list(result)
    mistakes = {
        "own pieces": own,
        "other order": [set(one or ()) for one in found] == [set(one) for one in wanted],
        "other pieces": True,
    }
    grader.compare(wanted, found, mistakes, verb="return")
    return _timed(result.trace)


def _exchange(rank: int, world_size: int, all_to_all: Callable, table: torch.Tensor) -> Any:
    """Call an answer with a row of the table; return which pieces it returns, `10 * src + dst`."""
    names = {
        tuple(piece.tolist()): 10 * src + dst
        for src, row in enumerate(table)
        for dst, piece in enumerate(row)
    }
    returned = all_to_all([piece.clone() for piece in table[rank]])
    if not isinstance(returned, list | tuple):
        return None
    pieces = (piece if isinstance(piece, torch.Tensor) else torch.zeros(1) for piece in returned)
    return [names.get(tuple(piece.flatten().tolist())) for piece in pieces]


def _timed(trace: Trace) -> Score:
    """Score a run by the time that its messages take, in steps that begin on all ranks at once.

    In a step are the messages of which none must wait for another one. A rank sends its messages
    of a step one after the other, and meanwhile receives its own in the same way.
    """
    at = schedule(trace).at
    steps = defaultdict(list)
    for message in trace.messages():
        if message.recv is not None:
            steps[at[message.recv.rank, message.recv.index]].append(message)
    now, spans = 0.0, []
    for _, together in sorted(steps.items()):
        sends, receives = [0.0] * trace.world_size, [0.0] * trace.world_size
        for message in sorted(together, key=lambda m: (m.src, m.dst)):
            begin, takes = now + sends[message.src], LATENCY + message.nbytes / BYTES
            spans.append(Span(message.src, begin, begin + takes, f"to {message.dst}"))
            sends[message.src] += takes
            receives[message.dst] += takes
        now += max(*sends, *receives)
    return Score(now, spans)
