"""The proof of the lesson on point-to-point messages."""

from __future__ import annotations

from ddp_kit.lessons._launch import Ranks, lesson_main, prove


@lesson_main("point_to_point")
def main(ranks: Ranks) -> str:
    """Run the workers, compare with what plain lists would hold, and print one line."""
    n = ranks.world_size
    held = [10 * rank for rank in range(n)]
    paired = [held[rank - 1] if rank % 2 else held[rank] for rank in range(n)]
    prove("odd ranks hold what the rank before them sent", _after(ranks, lesson.blocking) == paired)
    if n > 1:  # no rank can send to itself
        shifted = [held[rank - 1] for rank in range(n)]
        came = _after(ranks, lesson.immediate)
        prove("every rank holds what its left neighbour sent", came == shifted)
        both = [[held[rank - 1], held[(rank + 1) % n]] for rank in range(n)]
        prove("every rank holds what both neighbours sent", list(ranks(lesson.exchange)) == both)
        came = ranks(lesson.from_anyone)[0]
        prove("rank 0 received from every other rank", came == dict(list(enumerate(held))[1:]))
        signed = ranks(lesson.token)[0]
        prove("the token came round with every rank on it", signed == list(range(n)))
    return "every tensor arrived as it was sent"


def _after(ranks: Ranks, worker) -> list[int]:
    return [value["after"].item() for value in ranks(worker)]


from ddp_kit.lessons import point_to_point as lesson
