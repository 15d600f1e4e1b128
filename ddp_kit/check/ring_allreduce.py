"""Graders of lesson 04: rings of chunks and of their pieces, and all_reduces that are fast."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch

from ddp_kit.check.compared import Used, asked, by_rank, compared
from ddp_kit.check.grader import SENT, SIZES, UNCHANGED, Grader, brought, drawn, in_place
from ddp_kit.check.record import Score, on_a_wire, record
from ddp_kit.errors import DeadlockError, MismatchError
from ddp_kit.trace import Trace

LENGTHS = (2, 0, 3, 1, 5)  # of pieces; an empty one is among them
AT_ONCE = "each piece is passed on at once"
SMALL, LARGE = "a small tensor takes few messages in a row", "a large tensor moves few bytes"
ALPHA = 50e-6  # seconds for a message
FAST, SLOW = 1e-9, 1e-6  # seconds for a byte: 1 GB/s and 1 MB/s
FEW = 8  # numbers, for which the latency counts on the slow wire, too
RANKS = 6  # of the record


@compared("4.a", "whole_ring(tensor)", collectives=False)
def _whole_ring(rank: int, world_size: int, ring: Callable) -> torch.Tensor:
    held = brought(world_size, 5)
    # A tensor that is overwritten while it is sent may arrive right: often enough, it does not.
    sums = [in_place(rank, world_size, ring, held) for _ in range(8)]
    return next((each for each in sums if not each.equal(sum(held))), sums[0])


@compared("4.b", "reduce_chunks(chunks)", collectives=False)
def _reduce_chunks(rank: int, world_size: int, reduce_chunks: Callable) -> dict:
    chunks = brought(world_size, 9)[rank].tensor_split(world_size)
    reduce_chunks(chunks)
    return {"its complete chunk": chunks[(rank + 1) % world_size]}


@compared("4.c", "gather_chunks(chunks)", collectives=False)
def _gather_chunks(rank: int, world_size: int, gather_chunks: Callable) -> torch.Tensor:
    tensor = brought(1, 7)[0]
    chunks = tensor.tensor_split(world_size)
    for number, chunk in enumerate(chunks):
        if number != (rank + 1) % world_size:
            chunk.fill_(torch.nan)
    gather_chunks(chunks)
    return tensor


asked(
    "4.d",
    "break_even(n, alpha, beta)",
    [(4, 50e-6, 1e-10), (3, 2e-6, 1e-10), (100, 50e-6, 1e-8), (2, 50e-6, 1e-10)],
)


def _piece_lengths(n: int, alike: bool) -> list[int]:
    return [3] * n if alike else list(LENGTHS[:n])


@compared(
    "4.1",
    "reduce_scatter(output, pieces)",
    "each rank sends all pieces but one",
    on_failure={MismatchError: "lengths", DeadlockError: "lengths"},
    collectives=False,
    sizes=SIZES,
    spare=1,
    cases=product(SIZES, (True, False)),
    part=lambda case: "pieces of one length" if case[1] else "pieces of different lengths",
    call=lambda *case: f"reduce_scatter(output, pieces of lengths {_piece_lengths(*case)})",
)
def _reduce_scatter(rank: int, n: int, reduce_scatter: Callable, alike: bool) -> dict:
    lengths = _piece_lengths(n, alike)
    pieces = list(brought(n, sum(lengths))[rank].split(lengths))
    output = torch.full_like(pieces[rank], -1.0)
    reduce_scatter(output, pieces)
    return {"output": output, "pieces": pieces}


def _pipelined(trace: Trace, n: int, numbers: int, pieces: int) -> list[Used]:
    """Return what each rank sent, in messages of which size, and what it waited for before."""
    if numbers != 60 or n == 1:
        return []  # some pieces are empty and need not be sent
    found = by_rank(trace)
    for rank in range(n):
        mine = [event for event in trace if event.rank == rank]
        sent = [event for event in mine if event.kind == "send"]
        largest = max((event.nbytes for event in sent), default=0)
        found.append(Used(f"rank {rank} sent a message of {{}}", largest, part=AT_ONCE))
        # The first sends are the rank's own chunk. The next one passes on what it received.
        passed_on = sorted(event.start for event in sent)[pieces : pieces + 1]
        waits = [event.waited or 0 for event in mine if event.kind == "recv"]
        before = sum(wait < moment for moment in passed_on for wait in waits)
        words = f"rank {rank} waited for {{}} before it passed on the first"
        found.append(Used(words, max(1, before), "piece", AT_ONCE))
    return found


# The mistake of 4.2 by what the error says.
STUCK = {"never waited for isend": "sends not kept", " in send(": "blocking send", "": "unmatched"}


@compared(
    "4.2",
    "pipelined_ring(tensor, pieces)",
    "each piece is passed on as soon as it is there",
    on_failure={DeadlockError: STUCK},
    collectives=False,
    sizes=SIZES,
    spare=1,
    used=_pipelined,
    cases=[(n, *each) for n in SIZES for each in ((60, 3), (7, 2), (60, 1))],
    others=(SENT, AT_ONCE),
    part=lambda case: "60 numbers" if case[1] == 60 else "sizes that do not divide by the ranks",
    call=lambda n, numbers, pieces: f"pipelined_ring(tensor of {numbers}, pieces={pieces})",
)
def _pipelined_ring(rank: int, n: int, ring: Callable, numbers: int, pieces: int) -> torch.Tensor:
    return in_place(rank, n, ring, brought(n, numbers), pieces)


def _seconds(trace: Trace, n: int, numbers: int, beta: float) -> list[Used]:
    taken = 1e6 * on_a_wire(trace, ALPHA, beta).value
    part = SMALL if beta == FAST or numbers == FEW else LARGE
    return [Used("it takes {} on this wire", taken, "microsecond", part)]


@compared(
    "4.3",
    "all_reduce(tensor, alpha, beta)",
    "as fast as doubling or the ring",
    kind="function",
    collectives=False,
    sizes=(4, 2, 6, 3, 1),
    spare=1.05,  # chunks may be cut in another way
    used=_seconds,
    cases=[
        (n, *each)
        for n in (4, 2, 6, 3, 1)
        for each in ((1000, FAST), (FEW, SLOW), (200, SLOW), (1000, SLOW), (10_000, SLOW))
    ],
    others=(SMALL, LARGE),
    part=lambda case: "on 1, 2 and 4 ranks" if case[0] in (1, 2, 4) else "on 3 and 6 ranks",
    call=lambda n, numbers, beta: (
        f"all_reduce(tensor of {4 * numbers:,} bytes, alpha={ALPHA:g}, beta={beta:g})"
    ),
)
def _all_reduce(rank: int, n: int, all_reduce: Callable, numbers: int, beta: float) -> torch.Tensor:
    return in_place(rank, n, all_reduce, brought(n, numbers), ALPHA, beta)


@record("4.4", "sum_in_rounds(tensor)", "rounds", (6, 4, 3), along="round")
def _sum_in_rounds(grader: Grader) -> Score:
    held = drawn(RANKS, 5)
    result = grader.run(in_place, held, world_size=RANKS)
    total = sum(held[1:], held[0])
    mistakes = {
        UNCHANGED: held,
        "counted twice": all(bool((tensor >= total).all()) for tensor in result),
        "numbers missing": True,
    }
    grader.compare([total] * RANKS, result, mistakes)
    return on_a_wire(result.trace, 1, 0)
