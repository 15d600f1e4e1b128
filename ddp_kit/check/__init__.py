"""Graders: each runs an answer to an exercise on real ranks and explains what is wrong with it.

`kit.check.exercise_4_1(chunked_ring)` prints one line if the answer is right. Otherwise it raises
NotImplementedError for a stub, or ExerciseError for an answer that is not right yet.
"""

from ddp_kit.check.collectives import (
    exercise_2_1,
    exercise_2_2,
    exercise_2_3,
    exercise_2_4,
    exercise_2_5,
)
from ddp_kit.check.ddp import exercise_8_1, exercise_8_2
from ddp_kit.check.partitioned_sgd import exercise_3_1, exercise_3_2
from ddp_kit.check.point_to_point import exercise_1_1, exercise_1_2, exercise_1_3, exercise_1_4
from ddp_kit.check.ring_allreduce import exercise_4_1, exercise_4_2

__all__ = [
    "exercise_1_1",
    "exercise_1_2",
    "exercise_1_3",
    "exercise_1_4",
    "exercise_2_1",
    "exercise_2_2",
    "exercise_2_3",
    "exercise_2_4",
    "exercise_2_5",
    "exercise_3_1",
    "exercise_3_2",
    "exercise_4_1",
    "exercise_4_2",
    "exercise_8_1",
    "exercise_8_2",
]


def __dir__() -> list[str]:
    return __all__  # without the modules that define them
