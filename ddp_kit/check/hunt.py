"""Bug hunts: a program is repaired if it does what the solution does, on real ranks.

The exercises have the broken program in a cell that begins with `# Hunt 9.1`, the solutions the
repaired one. `make editions` writes both into solutions.json.
"""

from __future__ import annotations

import ast
import io
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from functools import cache
from typing import Any

from ddp_kit.check.grader import SENT, Grader, exercise, same
from ddp_kit.check.hints import solutions
from ddp_kit.error_text import count
from ddp_kit.errors import RunError
from ddp_kit.pool import Result, run

FORM = "train(rank, world_size)"
SPARE = 1.5  # times the bytes of the solution: there is more than one way to repair a program


def hunt(number: str, sizes: tuple[int, ...] = (2, 3)) -> None:
    """Register the check of a hunt. sizes: the numbers of ranks on which the program runs."""
    where = " and ".join(str(size) for size in sizes)

    @exercise(
        number,
        FORM,
        kind="hunt",
        cases=sizes,
        others=(SENT,),
        on_failure="fails",
        where=f"on {where} ranks",
    )
    def grade(grader: Grader, world_size: int) -> None:
        result = grader.run(_train, world_size=world_size)
        solved = ran(number, "solution", world_size)
        if not same(list(solved), list(result)):
            as_before = False
            with suppress(RunError):  # many broken programs do not end
                as_before = same(list(ran(number, "broken", world_size)), list(result))
            mistakes = {"as before": as_before, "otherwise": True}
            grader.compare(list(solved), result, mistakes, verb="return")
        for rank in range(world_size):
            most = round(SPARE * _sent(solved, rank))
            if _sent(result, rank) > most:
                sent = count(_sent(result, rank), "byte")
                fact = f"right, but rank {rank} sent {sent} where {most:,} would be enough"
                grader.fail(fact, hint="too many bytes", part=SENT)


def _train(rank: int, world_size: int, train: Callable[[int, int], Any]) -> Any:
    return train(rank, world_size)


@cache
def ran(number: str, which: str, world_size: int) -> Result:
    """Return the result of the broken program or of the solution."""
    train = defined(number, solutions()[number][which])
    with redirect_stdout(io.StringIO()):
        return run(train, world_size=world_size, backend="gloo")


def defined(number: str, program: str) -> Callable[[int, int], Any]:
    """Return `train` as a program of a hunt defines it, without running it."""
    names: dict[str, Any] = {"__name__": f"hunt_{number.replace('.', '_')}"}
    for source in (solutions()[number]["setup"], program):
        tree = ast.parse(source)
        tree.body = [node for node in tree.body if not isinstance(node, ast.Expr)]
        exec(compile(tree, f"hunt {number}", "exec"), names)
    return names["train"]


def _sent(result: Result, rank: int) -> int:
    """Return the bytes that a rank sent, by whatever calls."""
    return round(sum(row.sent for row in result.trace.summary(rank=rank).rows))
