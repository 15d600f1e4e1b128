"""The proof of the lesson on point-to-point messages."""

from __future__ import annotations

from ddp_kit.lessons._launch import Ranks, lesson_main, prove


@lesson_main("point_to_point")
def main(ranks: Ranks) -> str:
    """Run the workers, compare with what plain lists would hold, and print one line."""
    n = ranks.world_size
    held = [10 * rank for rank in range(n)]
    paired = [held[rank - 1] if rank % 2 else held[rank] for rank in range(n)]
    result = ranks(lesson.blocking)
    prove("odd ranks hold what the rank before them sent", _after(result) == paired)
    if n > 1:  # no rank can send to itself
        _prove_on_rings(ranks, held)
    return "every tensor arrived as it was sent"


def _prove_on_rings(ranks: Ranks, held: list[int]) -> None:
    """Run the workers that need a second rank, and compare."""
    n = ranks.world_size
    shifted = [held[(rank - 1) % n] for rank in range(n)]
    both = [[held[rank - 1], held[(rank + 1) % n]] for rank in range(n)]
    signed = [[q if q <= rank else -1 for q in range(n)] for rank in range(n)]
    signed[0] = list(range(n))

    prove(
        "every rank holds what its left neighbour sent", _after(ranks(lesson.immediate)) == shifted
    )
    prove("every rank holds what both neighbours sent", list(ranks(lesson.exchange)) == both)
    came = ranks(lesson.from_anyone)[0]
    prove("rank 0 received from every other rank", came == dict(list(enumerate(held))[1:]))
    prove("the token came round with every rank on it", list(ranks(lesson.token)) == signed)


def _after(result) -> list[int]:
    return [value["after"].item() for value in result]


from ddp_kit.lessons import point_to_point as lesson
