"""Graders of lesson 04: all_reduce as a ring of chunks, and as a pipeline of their pieces."""

from __future__ import annotations

from itertools import product

from ddp_kit.check.grader import SENT, SIZES, UNCHANGED, Grader, brought, exercise, in_place
from ddp_kit.error_text import count
from ddp_kit.errors import DeadlockError, MismatchError
from ddp_kit.trace import Trace

SHAPES = ((60,), (7,), (3, 5), (2,))  # 60 divides by every world size; 2 is less than most
AT_ONCE = "each piece is passed on at once"


def _divides(case: tuple) -> str:
    return "60 numbers" if case[1] == (60,) else "sizes that do not divide by the ranks"


@exercise(
    "4.1",
    "chunked_ring(tensor)",
    "each rank sends 2(n-1)/n of the bytes",
    on_failure={MismatchError: "lengths"},
    collectives=False,
    cases=product(SIZES, SHAPES),
    others=(SENT,),
    part=_divides,
)
def _chunked_ring(grader: Grader, world_size: int, shape: tuple[int, ...]) -> None:
    _sum(grader, shape, world_size, f"chunked_ring(tensor of shape {shape})")


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
    for rank in range(world_size):
        sent = result.trace.bytes_sent(rank)
        grader.check_at_most(f" by rank {rank}", sent, needed, "byte", "too many bytes")
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
