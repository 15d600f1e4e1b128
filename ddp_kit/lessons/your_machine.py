"""Your machine: what PyTorch finds here, and how a process learns which rank it is.

`is_available`, `is_initialized`, a `synchronize()` that is safe to call anywhere, and a worker that
reads its rank from the environment, however it was started. Source: PyTorch's documentation of
`torch.distributed`, sections Initialization and Launch utility, and of torchrun.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
import time
import uuid
from contextlib import suppress
from unittest.mock import patch

import torch
import torch.distributed as dist

from ddp_kit.backends import device
from ddp_kit.launch import lesson_parser, open_ranks, prove, run_as_script
from ddp_kit.pool.rank_handle import kill_marked
from ddp_kit.pool.wire.messages import RANK_MARK
from ddp_kit.renamed import renamed

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")  # what torchrun sets for each process
EXITS = (
    "torch has no distributed package",
    "there is no process group",
    "the world is one rank",
    "all ranks are here",
)

__getattr__ = renamed(__name__, told="who_am_i")


def synchronize() -> str:
    """Wait for the other ranks, if there are any; return why it returned, one of EXITS."""
    if not dist.is_available():
        return "torch has no distributed package"
    if not dist.is_initialized():
        return "there is no process group"
    if dist.get_world_size() == 1:
        return "the world is one rank"
    dist.barrier()
    return "all ranks are here"


def without_a_package() -> str:
    """Call `synchronize` as on a PyTorch that was built without its distributed package.

    Such builds are rare, so this is the one exit that we fake: `dist.is_available` is replaced.
    """
    with patch.object(dist, "is_available", return_value=False):
        return synchronize()


def in_a_world_of_one() -> str:
    """Call `synchronize` in a process group with this process as its only rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return synchronize()
    finally:
        dist.destroy_process_group()


def everywhere(rank: int, world_size: int) -> str:
    """Call `synchronize` on each rank."""
    return synchronize()


def introduce() -> str:
    """Return a line that says who this process is, using only its environment variables."""
    rank, local_rank, world_size = (
        int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    )
    total = torch.tensor([rank], device=device())
    dist.all_reduce(total)
    return f"rank {rank} of {world_size}, local rank {local_rank}, sum of all ranks {total.item()}"


def side_by_side(
    *commands: str, errors: bool = False, in_order: bool = False, seconds: float = 120
) -> list[str]:
    """Run programs at the same time; return the lines that they print, sorted.

    No program outlives this call, nor does any process it has started. At an interrupt, and at the
    time limit, which raises TimeoutError, programs get SIGTERM, and after 10 seconds SIGKILL.
    Their temporary files are removed. errors: also return the lines on stderr. in_order: return the
    lines of each program as they came, one program after the other.
    """
    started: list[subprocess.Popen] = []
    with tempfile.TemporaryDirectory() as folder:
        streams = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT if errors else subprocess.DEVNULL,
        }
        mark = uuid.uuid4().hex  # the processes that they start inherit it
        around = os.environ | {"TMPDIR": folder, RANK_MARK: mark}
        try:
            for command in commands:
                program = shlex.split(command)
                started.append(subprocess.Popen(program, text=True, env=around, **streams))
            deadline = time.monotonic() + seconds
            printed = [p.communicate(timeout=deadline - time.monotonic())[0] for p in started]
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the programs did not end within {seconds:g} s") from None
        finally:
            try:
                _ask_to_end(started)
            finally:
                for process in started:
                    process.kill()
                    process.wait()
                kill_marked(mark)
    lines = "".join(printed).splitlines()
    return lines if in_order else sorted(lines)


def _ask_to_end(programs: list[subprocess.Popen], seconds: float = 10) -> None:
    """Send SIGTERM, so that programs can clean up, and wait for so many seconds at most."""
    for program in programs:
        program.terminate()
    deadline = time.monotonic() + seconds
    with suppress(subprocess.TimeoutExpired):
        for program in programs:
            program.wait(deadline - time.monotonic())


def who_am_i(rank: int, world_size: int) -> dict[str, int]:
    """Return this rank's numbers, according to its environment and to the process group."""
    numbers = {name: int(os.environ[name]) for name in NAMES}
    numbers["get_rank()"] = dist.get_rank()
    numbers["get_world_size()"] = dist.get_world_size()
    return numbers


def come_and_leave(rank: int, world_size: int, late: int, seconds: float = 0.3) -> dict[str, float]:
    """Call `synchronize` on all ranks, with rank `late` computing for `seconds` before it comes.

    Returns when this rank came and when it left, in seconds on the machine's own clock.
    """
    synchronize()
    enough = time.monotonic() + (seconds if rank == late else 0)
    while time.monotonic() < enough:
        torch.matmul(torch.rand(100, 100), torch.rand(100, 100))
    came = time.monotonic()
    synchronize()
    return {"came": came, "left": time.monotonic()}


def main(argv: list[str] | None = None) -> None:
    """Leave `synchronize` by each exit, check each rank's numbers, and print one line."""
    options = lesson_parser("your_machine", __doc__).parse_args(argv or [])
    prove("it returns without a package", without_a_package() == EXITS[0])
    prove("it returns without a group", synchronize() == EXITS[1])
    prove("it returns in a world of one", in_a_world_of_one() == EXITS[2])
    with open_ranks(options.world_size, options.backend, options.trace) as ranks:
        n = ranks.world_size
        for rank, answers in enumerate(ranks(who_am_i)):
            group = answers["get_rank()"], answers["get_world_size()"]
            prove("the group numbers ranks as the kit does", group == (rank, n))
            environment = answers["RANK"], answers["WORLD_SIZE"]
            prove("the environment agrees", environment == (rank, n))
        last = EXITS[2] if n == 1 else EXITS[3]
        prove("all ranks leave together", list(ranks(everywhere)) == [last] * n)
        times = list(ranks(come_and_leave, 0))
        if os.environ.get("LOCAL_WORLD_SIZE", str(n)) == str(n):  # one machine, one clock
            came, left = (max(t["came"] for t in times), min(t["left"] for t in times))
            prove("nobody leaves before the last has come", came <= left)
        ranks.say(f"your_machine: {ranks}, each knows its rank, synchronize returns as it should")


if __name__ == "__main__":
    run_as_script(main)
