"""Ranks that torchrun or mpiexec starts, and the command line of the lessons."""

from ddp_kit.launch.lesson_command_line import (
    choose,
    lesson_parser,
    prove,
    run_as_script,
)
from ddp_kit.launch.lesson_ranks import Ranks, open_ranks
from ddp_kit.launch.rank.environment import attempt

__all__ = [
    "Ranks",
    "attempt",
    "choose",
    "lesson_parser",
    "open_ranks",
    "prove",
    "run_as_script",
]
