"""Runs programs on a pool of ddp_kit, one after the other: a process of its own.

It reads a line of JSON for each program from stdin, and answers with a Report as a line of JSON.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict

from report import OTHER, SILENT, Report
from suite import DEADLOCK, MISMATCH, NONE, RAISED, UNAWAITED

import ddp_kit as kit

LIMIT = 20.0  # seconds after which a run is stopped, beyond what the program takes by itself
_UNAWAITED = re.compile(r"ranks? (.+) never waited for ")
_LINE = re.compile(r" +line (\d+) of ")


def load(file: str) -> Callable:
    """Return the worker of a program. It travels to the ranks by value, as from a cell."""
    namespace = {"__name__": "__main__"}
    with open(file, encoding="utf-8") as text:
        exec(compile(text.read(), file, "exec"), namespace)
    return namespace["worker"]


def ready(rank: int, world_size: int) -> None:
    """Do nothing: it returns when every rank is there, also those that were replaced."""


def run(call: Callable, file: str, world_size: int, seconds: float, limit: float = LIMIT) -> Report:
    """Return what the kit says about a program. call: `kit.run`, or the `run` of a pool."""
    call(ready, world_size=world_size)
    printed = io.StringIO()
    began = time.monotonic()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            result = call(load(file), world_size=world_size, timeout=seconds + limit)
    except kit.KitError as error:
        report = of_error(error, file)
        trace = error.trace if isinstance(error, kit.errors.RunError) else None
    else:
        trace = result.trace
        report = of_notices(printed.getvalue())
    report.seconds = time.monotonic() - max([began, *_last_movement(trace)])
    lines = printed.getvalue().splitlines()
    notices = [line for line in lines if not line.startswith(("[rank ", " "))]
    report.noise = max(0, len(notices) - (report.kind == UNAWAITED))
    return report


def _last_movement(trace: object) -> list[float]:
    times = [time for event in trace or () for time in (event.start, event.end) if time]
    return [max(times) / 1e9] if times else []


def of_error(error: kit.KitError, file: str) -> Report:
    """Return what an error of a run says."""
    text = "\n".join(error._lines())
    if isinstance(error, kit.DeadlockError):
        absent = sorted({peer for wait in error.waits for peer in wait.peers})
        return Report(DEADLOCK, _lines([*error.waits, *error.dropped], file), absent, text=text)
    if isinstance(error, kit.MismatchError):
        return Report(MISMATCH, _lines(error.calls, file), list(error.absent), text=text)
    if isinstance(error, kit.RankError):
        return Report(RAISED, _lines(error.failures.values(), file), text=text)
    return Report(SILENT if isinstance(error, kit.RunTimeoutError) else OTHER, text=text)


def _lines(shown: object, file: str) -> dict[int, list[int]]:
    ranks: dict[int, list[int]] = {}
    for one in shown:  # each has a rank, and the Frame of the program's line
        here = one.where is not None and one.where.file == file
        ranks.setdefault(one.rank, []).extend([one.where.line] if here else [])
    return ranks


def of_notices(printed: str) -> Report:
    """Return what the notes below a run that ended say."""
    report, open_ranks = Report(NONE, text=printed), []
    for line in printed.splitlines():
        if found := _UNAWAITED.match(line):
            report.kind = UNAWAITED
            open_ranks += [int(rank) for rank in re.findall(r"\d+", found[1])]
        elif open_ranks and (found := _LINE.match(line)):
            for rank in open_ranks:
                report.ranks.setdefault(rank, []).append(int(found[1]))
            open_ranks = []
    return report


def main() -> None:
    """Answer every line of stdin."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing else may write between the answers
    with kit.WorkerPool(2, backend=sys.argv[1]) as pool:
        for line in sys.stdin:
            report = run(pool.run, **json.loads(line))
            print(json.dumps(asdict(report)), file=answers, flush=True)


if __name__ == "__main__":
    main()
