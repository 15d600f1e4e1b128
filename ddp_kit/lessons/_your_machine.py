"""The proof of the lesson on one's machine, and programs that run side by side."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
import time
import uuid
from contextlib import suppress

import torch
import torch.distributed as dist

from ddp_kit.lessons._launch import lesson_parser, open_ranks, prove
from ddp_kit.pool.ranks import kill_marked
from ddp_kit.pool.wire.messages import RANK_MARK


def side_by_side(
    *commands: str, errors: bool = False, in_order: bool = False, seconds: float = 120
) -> list[str]:
    """Run programs at the same time; return the lines that they print, sorted.

    errors: also return the lines on stderr. in_order: return the lines of each program as they
    came, one program after the other.

    No program outlives this call, nor does any process it has started. At an interrupt, and at the
    time limit, which raises TimeoutError, programs get SIGTERM, and after 10 seconds SIGKILL.
    """
    started: list[subprocess.Popen] = []
    mark = uuid.uuid4().hex  # the processes that they start inherit it
    streams = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT if errors else subprocess.DEVNULL,
    }
    with tempfile.TemporaryDirectory() as folder:
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


def _ask_to_end(programs: list[subprocess.Popen]) -> None:
    for program in programs:
        program.terminate()
    deadline = time.monotonic() + 10
    with suppress(subprocess.TimeoutExpired):
        for program in programs:
            program.wait(deadline - time.monotonic())


def in_a_world_of_one() -> str:
    """Call `synchronize` in a process group with this process as its only rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return lesson.synchronize()
    finally:
        dist.destroy_process_group()


def come_and_leave(rank: int, world_size: int, late: int) -> dict[str, float]:
    """Return when this rank came to `synchronize` and when it left, by the machine's own clock.

    Rank `late` computes for a while before it comes.
    """
    lesson.synchronize()
    enough = time.monotonic() + (0.3 if rank == late else 0)
    while time.monotonic() < enough:
        torch.matmul(torch.rand(100, 100), torch.rand(100, 100))
    came = time.monotonic()
    lesson.synchronize()
    return {"came": came, "left": time.monotonic()}


def main(argv: list[str] | None = None) -> None:
    """Call `synchronize` with and without a group, check each rank's numbers, print one line."""
    options = lesson_parser("your_machine", lesson.__doc__).parse_args(argv or [])
    alone = "the world is one rank"
    prove("it returns without a group", lesson.synchronize() == "there is no process group")
    prove("it returns in a world of one", in_a_world_of_one() == alone)
    with open_ranks(options.world_size, options.backend, options.trace) as ranks:
        n = ranks.world_size
        for rank, answers in enumerate(ranks(lesson.who_am_i)):
            group = answers["get_rank()"], answers["get_world_size()"]
            prove("the group numbers ranks as the kit does", group == (rank, n))
            environment = answers["RANK"], answers["WORLD_SIZE"]
            prove("the environment agrees", environment == (rank, n))
        last = alone if n == 1 else "all ranks are here"
        prove("all ranks leave together", list(ranks(lesson.everywhere)) == [last] * n)
        times = list(ranks(come_and_leave, 0))
        if os.environ.get("LOCAL_WORLD_SIZE", str(n)) == str(n):  # one machine, one clock
            came, left = (max(t["came"] for t in times), min(t["left"] for t in times))
            prove("nobody leaves before the last has come", came <= left)
        ranks.say(f"your_machine: {ranks}, each knows its rank, synchronize returns as it should")


from ddp_kit.lessons import your_machine as lesson
