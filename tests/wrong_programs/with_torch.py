"""Runs programs on plain gloo, with one of PyTorch's own tools: a process of its own.

It reads a line of JSON for each program from stdin, and answers with a Report as a line of JSON.
Every rank is a fork of this process, which has imported torch but has no thread yet. A rank that
does not end is killed, and so is every rank when this process ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import flight_recorder
import torch
import torch._dynamo  # DDP imports it when it is first used, which takes seconds in every fork
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor
from report import OTHER, SILENT, Report
from suite import DEADLOCK, MISMATCH, NONE, RAISED
from with_kit import load

GRACE = 1.0  # seconds after the first failure in which other ranks may fail too
SLACK = 10.0  # seconds beyond the timeout in which a rank must have reported
NO_TIMEOUT = 600.0  # where the tool is to speak, and not the group's timeout
GUARDED = """
    all_reduce all_gather all_gather_into_tensor reduce_scatter reduce_scatter_tensor all_to_all
    all_to_all_single barrier broadcast reduce gather scatter all_gather_object gather_object
    broadcast_object_list scatter_object_list
"""

# What a reader concludes from the text of an error, in this order.
KINDS = {
    MISMATCH: r"Detected mismatch between collectives|preamble\.length|op\.nbytes",
    DEADLOCK: r"monitoredBarrier|[Tt]imed out|timeout",
    OTHER: r"Connection (closed|reset)|pair closure|Broken pipe",
}
_MISSING = re.compile(r"[Rr]anks? ((?:\d+(?:, )?)+) (?:failed to pass|successfully)")


def guard(timeout: float) -> None:
    """Call monitored_barrier before every collective, as its documentation proposes."""

    def guarded(function):
        def call(*args, **kwargs):
            barrier(kwargs.get("group"), timeout)
            return function(*args, **kwargs)

        return call

    for name in GUARDED.split():
        setattr(dist, name, guarded(getattr(dist, name)))


def barrier(group: object, timeout: float) -> None:
    dist.monitored_barrier(group, timedelta(seconds=timeout), wait_all_ranks=True)


def be_rank(rank: int, folder: Path, tool: str, timeout: float, job: dict) -> NoReturn:
    """Run a program as one rank, and write what it raised; this process never returns."""
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        output = os.open(folder / f"output_{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        torch.set_num_threads(1)
        world_size = job["world_size"]
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(folder / "store"), world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout if tool in ("gloo", "detail") else NO_TIMEOUT),
        )
        dist.barrier()  # all ranks have joined; from here on the clock runs
        worker = load(job["file"])
        timer = threading.Timer(timeout, flight_recorder.dump, (folder, rank))
        timer.daemon = True
        if tool == "monitored_barrier":
            guard(timeout)
        elif tool == "flight_recorder":
            timer.start()
        said = {"began": time.monotonic()}
        try:
            worker(rank, world_size)
            if tool == "monitored_barrier":
                barrier(None, timeout)
        except BaseException as error:
            frames = traceback.extract_tb(error.__traceback__)
            lines = [frame.lineno for frame in frames if frame.filename == job["file"]]
            said |= {"text": f"{type(error).__name__}: {error}", "lines": lines[-1:]}
        said["ended"] = time.monotonic()
        if tool == "flight_recorder":
            timer.cancel()
            flight_recorder.dump(folder, rank)
        (folder / f"part_{rank}").write_text(json.dumps(said), "utf-8")
        os.rename(folder / f"part_{rank}", folder / f"said_{rank}")
        if "text" not in said and dist.is_initialized():
            dist.destroy_process_group()
    finally:
        os._exit(0)


def run(tool: str, timeout: float, job: dict) -> Report:
    """Run a program on all ranks, and return what the tool said."""
    with tempfile.TemporaryDirectory(prefix="wrong-") as name:
        folder = Path(name)
        began = time.monotonic()
        pids = {
            rank: os.fork() or be_rank(rank, folder, tool, timeout, job)
            for rank in range(job["world_size"])
        }
        ended = _wait(pids, folder, timeout + job["seconds"] + SLACK)
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        said = {}
        for rank in pids:
            with contextlib.suppress(FileNotFoundError):
                said[rank] = json.loads((folder / f"said_{rank}").read_text("utf-8"))
        printed = [(folder / f"output_{rank}").read_text("utf-8", "replace") for rank in pids]
        if tool == "flight_recorder":
            report = flight_recorder.analyse(folder, job["file"])
        else:
            report = _report(said)
        if report.kind == NONE and not ended:
            report.kind = SILENT
        report.noise += sum(line.startswith("[W") for text in printed for line in text.splitlines())
        if tool == "flight_recorder" and report.complains:
            report.seconds = time.monotonic() - began
        return report


def _wait(pids: dict[int, int], folder: Path, patience: float) -> bool:
    """Wait until all ranks have ended, one has failed, or all have dumped; return if all ended."""
    deadline = time.monotonic() + patience
    failed, left = False, set(pids)
    while left and time.monotonic() < deadline:
        for rank in sorted(left):
            file = folder / f"said_{rank}"
            gone = os.waitid(os.P_PID, pids[rank], os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if gone is not None:
                left.discard(rank)
                if not failed and (not file.exists() or "text" in file.read_text("utf-8")):
                    failed, deadline = True, min(deadline, time.monotonic() + GRACE)
        if all((folder / f"dump_{rank}").exists() for rank in pids):
            deadline = min(deadline, time.monotonic() + GRACE)
        time.sleep(0.01)
    return all((folder / f"said_{rank}").exists() for rank in pids)


def _report(said: dict[int, dict]) -> Report:
    """Return what the ranks' errors say: those of the most telling kind, and the rest as noise."""
    errors = {rank: one for rank, one in said.items() if "text" in one}
    if not errors:
        return Report(NONE)
    kinds = {
        rank: next((kind for kind, names in KINDS.items() if re.search(names, one["text"])), RAISED)
        for rank, one in errors.items()
    }
    telling = {rank for rank, kind in kinds.items() if kind != OTHER} or set(errors)
    first = min(telling, key=lambda rank: errors[rank]["ended"])
    kind = kinds[first]
    text = errors[first]["text"]
    absent = [int(n) for names in _MISSING.findall(text) for n in names.split(", ")]
    ranks = {rank: errors[rank]["lines"] for rank in errors if kinds[rank] == kind}
    seconds = errors[first]["ended"] - errors[first]["began"]
    return Report(kind, ranks, absent, len(errors) - 1, seconds, text)


def main() -> None:
    """Answer every line of stdin."""
    tool, timeout = sys.argv[1], float(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if tool == "flight_recorder":  # the first dump of a process takes a second of CPU time
        torch._C._distributed_c10d._dump_fr_trace()
    for line in sys.stdin:
        print(json.dumps(asdict(run(tool, timeout, json.loads(line)))), file=answers, flush=True)


if __name__ == "__main__":
    main()
