"""The proof of the lesson on one's machine, and programs that run side by side."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
import time
import uuid
from contextlib import suppress

from ddp_kit.lessons._launch import Ranks, lesson_main, prove
from ddp_kit.pool.ranks import kill_marked
from ddp_kit.pool.wire.messages import RANK_MARK


def side_by_side(
    *commands: str, errors: bool = False, in_order: bool = False, seconds: float = 120
) -> list[str]:
    """Run programs at the same time; return the lines that they print, sorted.

    errors: also return the lines on stderr. in_order: return the lines of each program as they
    came, one program after the other.

    No program outlives this call, nor does any process it has started. Raises TimeoutError at the
    time limit. Programs that are still running get SIGTERM, and after 10 seconds SIGKILL.
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
            for process in started:
                process.terminate()  # a script may remove what it has made
            deadline = time.monotonic() + 10
            for process in started:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0, deadline - time.monotonic()))
                process.kill()
                process.wait()
            kill_marked(mark)
    lines = "".join(printed).splitlines()
    return lines if in_order else sorted(lines)


@lesson_main("your_machine")
def main(ranks: Ranks) -> str:
    """Check each rank's numbers, call `synchronize` on all, and print one line."""
    n = ranks.world_size
    for rank, answers in enumerate(ranks(lesson.who_am_i)):
        group = answers["get_rank()"], answers["get_world_size()"]
        prove("the group numbers ranks as the kit does", group == (rank, n))
        environment = answers["RANK"], answers["WORLD_SIZE"]
        prove("the environment agrees", environment == (rank, n))
    last = "the world is one rank" if n == 1 else "all ranks are here"
    prove("all ranks leave together", list(ranks(lesson.everywhere)) == [last] * n)
    return "each knows its rank, synchronize returns as it should"


from ddp_kit.lessons import your_machine as lesson
