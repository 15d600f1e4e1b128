"""Graders: each runs an answer to an exercise on real ranks and explains what is wrong with it.

`kit.check.exercise_4_1(chunked_ring)` prints one line if the answer is right. Otherwise it raises
NotImplementedError for a stub, or ExerciseError for an answer that is not right yet. It returns
which parts of the exercise hold, as a float from 0 to 1, which is 1 if it does not raise.
`kit.check.credit(kit.check.exercise_4_1, chunked_ring)` tries all parts, and does not raise.
"""

from ddp_kit.check.backends import exercise_10_1, exercise_10_2, exercise_10_3
from ddp_kit.check.collectives import (
    exercise_2_1,
    exercise_2_2,
    exercise_2_3,
    exercise_2_4,
    exercise_2_5,
)
from ddp_kit.check.context_parallel import (
    exercise_18_1,
    exercise_18_2,
    exercise_18_3,
    exercise_18_4,
)
from ddp_kit.check.data_parallel import exercise_7_1, exercise_7_2
from ddp_kit.check.ddp import exercise_8_1, exercise_8_3, exercise_8_6
from ddp_kit.check.ddp_mistakes import exercise_8_2, exercise_8_4, exercise_8_5
from ddp_kit.check.device_mesh import exercise_14_1, exercise_14_2, exercise_14_3
from ddp_kit.check.fully_sharded import exercise_15_3
from ddp_kit.check.init_methods import exercise_6_1, exercise_6_2, exercise_6_3
from ddp_kit.check.partial_credit import credit
from ddp_kit.check.partitioned_sgd import exercise_3_1, exercise_3_2
from ddp_kit.check.pipeline_parallel import (
    exercise_17_1,
    exercise_17_2,
    exercise_17_3,
    exercise_17_4,
)
from ddp_kit.check.point_to_point import exercise_1_1, exercise_1_2, exercise_1_3, exercise_1_4
from ddp_kit.check.ring_allreduce import exercise_4_1, exercise_4_2
from ddp_kit.check.tensor_parallel import exercise_16_1, exercise_16_2, exercise_16_3, exercise_16_4
from ddp_kit.check.torchrun import exercise_11_1, exercise_11_2, exercise_11_3
from ddp_kit.check.what_happens_at_1024 import (
    exercise_12_1,
    exercise_12_2,
    exercise_12_3,
    exercise_12_4,
)
from ddp_kit.check.which_one_when import exercise_20_1, exercise_20_2, exercise_20_3, exercise_20_4
from ddp_kit.check.your_machine import exercise_5_1, exercise_5_2
from ddp_kit.check.your_own_backend import (
    exercise_21_1,
    exercise_21_2,
    exercise_21_3,
    exercise_21_4,
)
from ddp_kit.check.zero import exercise_15_1, exercise_15_2, exercise_15_4
from ddp_kit.progress_file import recorded

__all__ = [
    "credit",
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
    "exercise_5_1",
    "exercise_5_2",
    "exercise_6_1",
    "exercise_6_2",
    "exercise_6_3",
    "exercise_7_1",
    "exercise_7_2",
    "exercise_8_1",
    "exercise_8_2",
    "exercise_8_3",
    "exercise_8_4",
    "exercise_8_5",
    "exercise_8_6",
    "exercise_10_1",
    "exercise_10_2",
    "exercise_10_3",
    "exercise_11_1",
    "exercise_11_2",
    "exercise_11_3",
    "exercise_12_1",
    "exercise_12_2",
    "exercise_12_3",
    "exercise_12_4",
    "exercise_14_1",
    "exercise_14_2",
    "exercise_14_3",
    "exercise_15_1",
    "exercise_15_2",
    "exercise_15_3",
    "exercise_15_4",
    "exercise_16_1",
    "exercise_16_2",
    "exercise_16_3",
    "exercise_16_4",
    "exercise_17_1",
    "exercise_17_2",
    "exercise_17_3",
    "exercise_17_4",
    "exercise_18_1",
    "exercise_18_2",
    "exercise_18_3",
    "exercise_18_4",
    "exercise_20_1",
    "exercise_20_2",
    "exercise_20_3",
    "exercise_20_4",
    "exercise_21_1",
    "exercise_21_2",
    "exercise_21_3",
    "exercise_21_4",
]

# With DDP_KIT_PROGRESS, each check adds a line to that file; see ddp_kit/progress_file.py.
globals().update({name: recorded(globals()[name]) for name in __all__})


def __dir__() -> list[str]:
    return __all__  # without the modules that define them
