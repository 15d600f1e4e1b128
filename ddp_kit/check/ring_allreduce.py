"""Graders of lesson 04: rings of chunks and of their pieces, and all_reduces that are fast."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import torch

from ddp_kit.check.compared import compared
from ddp_kit.check.grader import SENT, SIZES, UNCHANGED, Grader, brought, drawn, exercise, in_place
from ddp_kit.check.record import ROUNDING, Score, on_a_wire, record
from ddp_kit.error_text import count
from ddp_kit.errors import DeadlockError, MismatchError
from ddp_kit.trace import Trace

LENGTHS = (2, 0, 3, 1, 5)  # of pieces; an empty one is among them
AT_ONCE = "each piece is passed on at once"
SMALL, LARGE = "a small tensor takes few messages in a row", "a large tensor moves few bytes"
ALPHA = 50e-6  # seconds for a message
FAST, SLOW = 1e-9, 1e-6  # seconds for a byte: 1 GB/s and 1 MB/s
RANKS = 6  # of the record


@compared("4.a", "whole_ring(tensor)")
def _whole_ring(rank: int, world_size: int, ring: Callable) -> torch.Tensor:
    held = brought(world_size, 5)
    # A tensor that is overwritten while it is sent may arrive right: often enough, it does not.
    sums = [in_place(rank, world_size, ring, held) for _ in range(8)]
    return next((each for each in sums if not each.equal(sum(held))), sums[0])


@compared("4.b", "reduce_chunks(chunks)")
def _reduce_chunks(rank: int, world_size: int, reduce_chunks: Callable) -> dict:
    chunks = brought(world_size, 9)[rank].tensor_split(world_size)
    reduce_chunks(chunks)
    return {"its complete chunk": chunks[(rank + 1) % world_size]}


@compared("4.c", "gather_chunks(chunks)")
def _gather_chunks(rank: int, world_size: int, gather_chunks: Callable) -> torch.Tensor:
    tensor = brought(1, 7)[0]
    chunks = tensor.tensor_split(world_size)
    for number, chunk in enumerate(chunks):
        if number != (rank + 1) % world_size:
            chunk.fill_(torch.nan)
    gather_chunks(chunks)
    return tensor


@compared("4.d", "break_even(n, alpha, beta)", sizes=(1,))
def _break_even(rank: int, world_size: int, break_even: Callable) -> dict[str, float]:
    asked = ((4, 50e-6, 1e-10), (3, 2e-6, 1e-10), (100, 50e-6, 1e-8), (2, 50e-6, 1e-10))
    return {f"break_even{numbers}": float(break_even(*numbers)) for numbers in asked}


def _divides(case: tuple) -> str:
    return "60 numbers" if case[1] == (60,) else "sizes that do not divide by the ranks"


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
    output = torch.empty_like(pieces[rank])
    reduce_scatter(output, pieces)
    return {"output": output, "pieces": pieces}


@exercise(
    "4.2",
    "pipelined_ring(tensor, pieces)",
    "each piece is passed on as soon as it is there",
    on_failure={DeadlockError: "unmatched"},
    collectives=False,
    cases=[(n, *each) for n in SIZES for each in (((60,), 3), ((7,), 2), ((60,), 1))],
    others=(SENT, AT_ONCE),
    part=_divides,
)
def _pipelined_ring(grader: Grader, world_size: int, shape: tuple[int, ...], pieces: int) -> None:
    case = f"pipelined_ring(tensor of shape {shape}, pieces={pieces})"
    trace = _sum(grader, shape, world_size, case, pieces)
    if shape != (60,) or world_size == 1:
        return  # some pieces are empty and need not be sent
    messages = 2 * (world_size - 1) * pieces
    for rank in range(world_size):
        _as_a_pipeline(grader, trace, rank, messages, pieces)


def _sum(grader: Grader, shape: tuple, world_size: int, case: str, *pieces: int) -> Trace:
    """Run one case, check the sum and the bytes, and return the trace."""
    held = brought(world_size, *shape)
    result = grader.run(in_place, held, *pieces, world_size=world_size, case=case)
    mistakes = {UNCHANGED: held, "wrong chunk": True}
    grader.compare([sum(held[1:], held[0])] * world_size, result, mistakes)
    longest = -(-held[0].numel() // world_size)
    needed = 2 * (world_size - 1) * longest * 4
    grader.check_sent(needed, "too many bytes")
    return result.trace


def _as_a_pipeline(grader: Grader, trace: Trace, rank: int, messages: int, pieces: int) -> None:
    """Fail unless `rank` sent piece by piece, and each before it waited for the one after it."""
    mine = [event for event in trace if event.rank == rank]
    sends = sorted(event.start for event in mine if event.kind == "send")
    if len(sends) < messages:
        fact = f"right, but rank {rank} sent {count(len(sends), 'message')} instead of {messages}"
        grader.fail(fact, hint="sent whole", part=AT_ONCE)
        return
    # The first sends are the rank's own chunk. The next one passes on what it received.
    passed_on = sends[pieces]
    before = sum(event.kind == "recv" and (event.waited or 0) < passed_on for event in mine)
    if before > 1:
        grader.fail(
            f"right, but rank {rank} waited for {before} pieces before it passed on the first",
            hint="waits for all",
            part=AT_ONCE,
        )


@exercise(
    "4.3",
    "all_reduce(tensor, alpha, beta)",
    "as fast as doubling or the ring",
    kind="function",
    collectives=False,
    cases=product((4, 2, 6, 3, 1), ((1000, FAST), (1000, SLOW), (10_000, SLOW))),
    others=(SMALL, LARGE),
    part=lambda case: "on 1, 2 and 4 ranks" if case[0] in (1, 2, 4) else "on 3 and 6 ranks",
    where="on 1, 2, 3, 4 and 6 ranks",
)
def _all_reduce(grader: Grader, world_size: int, case: tuple[int, float]) -> None:
    numel, beta = case
    held, power = brought(world_size, numel), world_size & (world_size - 1) == 0
    called = f"all_reduce(tensor of {4 * numel:,} bytes, alpha={ALPHA:g}, beta={beta:g})"
    args = (in_place, held, ALPHA, beta)
    partner = "" if power else "no partner"
    result = grader.run(*args, world_size=world_size, case=called, failed=lambda error: partner)
    mistakes = {UNCHANGED: held, "no partner": not power, "other sum": True}
    grader.compare([sum(held[1:], held[0])] * world_size, result, mistakes)
    taken, doubling = on_a_wire(result.trace, ALPHA, beta).value, _doubling(world_size, numel, beta)
    enough = min(doubling, _ring(world_size, numel, beta))
    if taken > ROUNDING * enough:
        fact = f"right, but that takes {1e3 * taken:.3g} ms on this wire"
        small = doubling == enough
        hint, part = ("slow if small", SMALL) if small else ("slow if large", LARGE)
        grader.fail(f"{fact} where {1e3 * enough:.3g} ms would be enough", hint=hint, part=part)


def _doubling(n: int, numel: int, beta: float) -> float:
    """Return the seconds of recursive doubling; ranks above a power of two have a partner."""
    rounds = n.bit_length() - 1 + 2 * (n & (n - 1) > 0)
    return rounds * (ALPHA + 4 * numel * beta)


def _ring(n: int, numel: int, beta: float) -> float:
    """Return the seconds of the chunked ring, whose steps last as long as the longest chunk."""
    return 2 * (n - 1) * (ALPHA + 4 * math.ceil(numel / n) * beta)


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
