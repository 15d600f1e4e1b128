"""A wait with a limit, and the proof of the lesson on torchrun."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from ddp_kit.lessons._launch import Ranks, lesson_main, prove


def wait_for(happened: Callable[[], object], seconds: float = 120) -> None:
    """Wait until a call returns something true. Raise TimeoutError after so many seconds."""
    deadline = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > deadline:
            raise TimeoutError(f"what was waited for did not happen within {seconds:g} s")
        time.sleep(0.02)


@lesson_main(
    "torchrun",
    checkpoint={"metavar": "DIR", "help": "train, and save in this folder"},
    steps={"type": int, "default": 100, "help": "of that training (default 100)"},
    pause={"type": float, "default": 0.0, "help": "seconds that a lone rank waits after each step"},
)
def main(ranks: Ranks, checkpoint: str | None, steps: int, pause: float) -> str:
    """Check each rank's numbers, compare interrupted with uninterrupted training, print one line.

    With --checkpoint it trains in that folder instead, resuming at each start until all is done.
    """
    if checkpoint is not None:
        Path(checkpoint).mkdir(parents=True, exist_ok=True)
        begun, weights = ranks(lesson.train_tiny, checkpoint, steps, pause)[0]
        return f"steps {begun} to {steps}: {weights}"
    for rank, place in enumerate(ranks(lesson.my_place)):
        found = place["RANK"], place["WORLD_SIZE"]
        prove("each rank finds its number", found == (rank, ranks.world_size))
        if place["GROUP_RANK"] is not None:  # torchrun has started it
            first = place["GROUP_RANK"] * place["LOCAL_WORLD_SIZE"]
            prove("each host has consecutive ranks", rank == first + place["LOCAL_RANK"])
    with TemporaryDirectory() as whole, TemporaryDirectory() as halves:
        at_once = list(ranks(lesson.train_tiny, whole, 6))
        ranks(lesson.train_tiny, halves, 3)
        second_half = list(ranks(lesson.train_tiny, halves, 6))
    prove("training resumes where it stopped", {begun for begun, _ in second_half} == {3})
    weights = [weights for _, weights in [*at_once, *second_half]]
    prove("nothing is lost: all weights are bit-equal", all(w == weights[0] for w in weights))
    return "each knows its place, resumed training bit-equal"


from ddp_kit.lessons import torchrun as lesson
