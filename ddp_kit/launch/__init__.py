"""How a lesson gets its ranks: spawned here, or started by torchrun or mpiexec."""

from ddp_kit.launch.command_line import lesson_parser, prove, run_as_script
from ddp_kit.launch.place import attempt
from ddp_kit.launch.ranks import Ranks, open_ranks
from ddp_kit.launch.torchrun import torchrun

__all__ = [
    "Ranks",
    "attempt",
    "lesson_parser",
    "open_ranks",
    "prove",
    "run_as_script",
    "torchrun",
]
