"""PyTorch's flight recorder: the dumps of the ranks, read by PyTorch's own analyser.

On gloo it records collectives. Its list of groups has one entry, without a name, which each new
group overwrites, so the analyser raises a KeyError on every dump. The list is put right here.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pickle
import re
from pathlib import Path

import torch
import torch.distributed as dist
from report import Report
from suite import DEADLOCK, MISMATCH, NONE

_LINE = re.compile(r" at (.+):(\d+)$", re.MULTILINE)


def dump(folder: Path, rank: int) -> None:
    """Write what this rank's recorder holds; a second call does nothing."""
    with contextlib.suppress(FileExistsError):
        data = pickle.loads(torch._C._distributed_c10d._dump_fr_trace())
        data["pg_config"] = _groups() or data["pg_config"]
        with open(folder / f"part_{rank}.dump", "xb") as file:
            pickle.dump(data, file)
        os.rename(folder / f"part_{rank}.dump", folder / f"dump_{rank}")


def _groups() -> dict[str, dict[str, str]]:
    """Return the groups of this rank as the analyser expects them; {} if they are destroyed."""
    if not dist.is_initialized():
        return {}
    names = dist.distributed_c10d._world.pg_names
    return {
        name: {
            "name": name,
            "desc": "default_pg" if group is dist.group.WORLD else "undefined",
            "ranks": str(dist.get_process_group_ranks(group)),
        }
        for group, name in names.items()
    }


def analyse(folder: Path, program: str) -> Report:
    """Return what the analyser prints about the dumps of all ranks."""
    from torch.distributed.flight_recorder import fr_trace

    printed = io.StringIO()
    handler = logging.StreamHandler(printed)
    logger = logging.getLogger("Flight Recorder")
    logger.addHandler(handler)
    try:
        arguments = [str(folder), "-p", "dump_", "--allow-incomplete-ranks", "--print_stack_trace"]
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            fr_trace.main(arguments)
    except BaseException as error:
        return Report(NONE, text=f"the analyser failed: {type(error).__name__}: {error}")
    finally:
        logger.removeHandler(handler)
    return _read(printed.getvalue(), program)


def _read(text: str, program: str) -> Report:
    """Return what the analyser's first complaint says; every further one is noise."""
    blocks = re.split(r"^internal record id: .*$", text, flags=re.MULTILINE)[1:]
    found = [report for block in blocks if (report := _complaint(block, program)) is not None]
    if not found:
        return Report(NONE, text=text)
    found[0].noise, found[0].text = len(found) - 1, text
    return found[0]


def _complaint(block: str, program: str) -> Report | None:
    missing, culprits = _ranks("missing ranks", block), re.findall(r"Culprit rank (\d+)", block)
    if not missing and not culprits:
        return None
    # The stack is that of one rank; the others that joined are given the same line.
    lines = [int(line) for file, line in _LINE.findall(block) if file == program][:1]
    joined = _ranks("expected ranks", block) - missing
    kind = MISMATCH if culprits else DEADLOCK
    return Report(kind, dict.fromkeys(sorted(joined), lines), sorted(missing))


def _ranks(name: str, block: str) -> set[int]:
    found = re.search(rf"^{name}: \{{([\d, ]+)\}}", block, re.MULTILINE)
    return set(map(int, found[1].split(","))) if found else set()
