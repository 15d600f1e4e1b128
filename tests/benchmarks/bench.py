"""Measures how fast the kit is, beside plain PyTorch and what a learner would use instead.

The sides of a comparison take turns, A B A B, in one run. What starts cold does so in a fresh
process every time. `--record` writes the table into README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import select
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).parent
README = HERE / "README.md"
BLOCK = re.compile(r"(?<=<!-- bench -->\n).*(?=<!-- /bench -->)", re.DOTALL)
MARK = "DDP_KIT_BENCH"  # every process of a side has it in its environment, also what it starts
PATIENCE = 120.0  # seconds for one answer of a side
FAREWELL = 15.0  # seconds for a side to leave
PACKAGES = ("torch", "cloudpickle", "accelerate", "ipyparallel", "nbdistributed")


@dataclass(frozen=True)
class Side:
    """One way to do the thing: a script beside this one, and the name of its measure."""

    name: str
    script: str
    measure: str
    most: int = 100  # rounds, however many the others have


@dataclass(frozen=True)
class Comparison:
    """The sides that do the same thing in turn. The first is the kit, or what it is held to."""

    title: str
    goal: str
    rounds: int
    fresh: bool  # each round in a new process
    sides: tuple[Side, ...]


COMPARISONS = (
    Comparison(
        "first result of a cold pool, 4 ranks",
        "at most 1.15 times mp.spawn",
        rounds=7,
        fresh=True,
        sides=(
            Side("ddp_kit", "kit_side.py", "cold"),
            Side("mp.spawn, init_process_group, all_reduce", "bare_side.py", "cold"),
            Side("mp.spawn, `import torch` and no more", "bare_side.py", "imports"),
            Side("torchrun file.py, the whole command", "peers.py", "torchrun"),
            Side("accelerate debug_launcher (forks)", "peers.py", "accelerate"),
            Side("ipyparallel, cluster and apply_sync", "peers.py", "ipyparallel_cold"),
            Side("nbdistributed, first cell not lost", "peers.py", "nbdistributed_cold", most=2),
        ),
    ),
    Comparison(
        "first kit.run of a notebook, 10 s after its import of the kit",
        "at most 50 ms",
        rounds=5,
        fresh=True,
        sides=(Side("ddp_kit", "kit_side.py", "first_run"),),
    ),
    Comparison(
        "a trivial cell of a notebook",
        "the page stays responsive while the ranks start",
        rounds=3,
        fresh=True,
        sides=(
            Side("in the 10 s after the import of the kit", "kit_side.py", "cells_while_starting"),
            Side("the same with DDP_KIT_WARM=0", "kit_side.py", "cells_without_ranks"),
        ),
    ),
    Comparison(
        "warm call with one scalar all_reduce, 4 ranks",
        "at most 1.8 times the second line",
        rounds=15,
        fresh=False,
        sides=(
            Side("ddp_kit", "kit_side.py", "warm"),
            Side("a word over a pipe, all_reduce, a word back", "bare_side.py", "warm"),
            Side("ipyparallel apply_sync", "peers.py", "ipyparallel_warm"),
            Side("accelerate debug_launcher (forks anew)", "peers.py", "accelerate"),
            Side("nbdistributed cell", "peers.py", "nbdistributed_warm"),
        ),
    ),
    Comparison(
        "call that changes the world size",
        "under 120 ms",
        rounds=25,
        fresh=False,
        sides=(
            Side("ddp_kit, from 4 ranks to 2", "kit_side.py", "smaller"),
            Side("ddp_kit, from 2 ranks to 4", "kit_side.py", "larger"),
        ),
    ),
    Comparison(
        "3,000 all_reduces of one number, 2 ranks, in one run",
        "at most 1.25 times untraced; 3,000 events of 10 µs are 30 ms",
        rounds=15,
        fresh=False,
        sides=(
            Side("ddp_kit, which records each", "kit_side.py", "traced"),
            Side("the same, not recorded", "kit_side.py", "untraced"),
        ),
    ),
    Comparison(
        "100 MB back from each of 2 ranks",
        "under 1 s",
        rounds=10,
        fresh=False,
        sides=(
            Side("ddp_kit", "kit_side.py", "values"),
            Side("ipyparallel apply_sync", "peers.py", "ipyparallel_values"),
        ),
    ),
    Comparison(
        "import",
        "ddp_kit beyond torch: under 100 ms",
        rounds=7,
        fresh=True,
        sides=(
            Side("ddp_kit, after torch", "kit_side.py", "kit_import"),
            Side("ddp_kit, after torch, in IPython", "kit_side.py", "notebook_import"),
            Side("torch", "kit_side.py", "torch_import"),
        ),
    ),
)


def all_reduce(ranks: int, nbytes: int, size: str, goal: str) -> Comparison:
    """Compare backends by an all_reduce of float32, with a copy of the tensor as the limit."""
    names = {
        "shm": "ddp_kit, shm",
        "gloo": "gloo",
        "mpi": "Open MPI, over mpi4py",
        "copy": "one copy of the tensor, in all ranks at once",
    }
    return Comparison(
        f"all_reduce of {size}, {ranks} ranks",
        goal,
        rounds=7,
        fresh=False,
        sides=tuple(
            Side(name, "kit_side.py", f"all_reduce {backend} {ranks} {nbytes}")
            for backend, name in names.items()
        ),
    )


COMPARISONS += (
    all_reduce(2, 4, "4 B", "at most 0.5 times gloo"),
    all_reduce(4, 4, "4 B", "no slower than gloo"),
    all_reduce(2, 10_000, "10 kB", "none"),
    all_reduce(4, 10_000, "10 kB", "none"),
    all_reduce(2, 2**20, "1 MB", "at most 0.5 times gloo"),
    all_reduce(4, 2**20, "1 MB", "at most 0.5 times gloo"),
    all_reduce(2, 40_000_000, "40 MB", "at most 0.5 times gloo"),
    all_reduce(4, 40_000_000, "40 MB", "at most 0.65 times gloo"),
    all_reduce(2, 100_000_000, "100 MB", "at most 0.5 times gloo"),
    all_reduce(4, 100_000_000, "100 MB", "at most 0.65 times gloo"),
)


class SideFailed(Exception):
    """A side gave no answer; the text says why, in a few words and without a path."""


class Running:
    """A side's process, and everything that it starts."""

    def __init__(self, side: Side, python: str) -> None:
        self._mark = uuid.uuid4().hex
        self._home = tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True)
        self._errors = Path(self._home.name, "errors").open("wb+")  # noqa: SIM115
        environment = {
            **{k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"},
            MARK: self._mark,
            "HOME": self._home.name,  # peers keep profiles, connections and logs there
            "TMPDIR": self._home.name,
            "PATH": f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        }
        self._process = subprocess.Popen(
            [python, str(HERE / side.script), side.measure],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            cwd=self._home.name,
            start_new_session=True,
        )
        try:
            self._answer()  # "ready"
        except BaseException:
            self.close()
            raise

    def round(self) -> Any:
        """Have the side measure once more."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"again\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise SideFailed(self._reason()) from None
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        deadline = time.monotonic() + PATIENCE
        line = b""
        while not line.endswith(b"\n"):
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self._process.stdout], [], [], left)[0]:
                raise SideFailed(f"no answer within {PATIENCE:g} s")
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                raise SideFailed(self._reason())
            line += data
        return json.loads(line)

    def _reason(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", errors="replace").strip().splitlines()
        last = re.sub(r"\S*/\S*", "…", lines[-1]) if lines else "it ended without a word"
        return "not installed" if last.startswith("ModuleNotFoundError") else last[:120]

    def close(self) -> None:
        """Let the side leave, then end what is left of it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(OSError, subprocess.TimeoutExpired):
            self._process.stdin.close()
            self._process.wait(FAREWELL)
        kill_marked(self._mark)
        self._process.wait()
        self._process.stdout.close()
        self._errors.close()
        self._home.cleanup()


def kill_marked(mark: str) -> None:
    """Kill all processes that have this mark in their environment."""
    for _ in range(12):  # those that were being started as well; at most a minute
        left = [process for process in psutil.process_iter() if _has(process, mark)]
        if not left:
            return
        for process in left:
            with suppress(psutil.NoSuchProcess):  # it left by itself
                process.kill()
        psutil.wait_procs(left, 5)


def _has(process: psutil.Process, mark: str) -> bool:
    # Daemons leave the process group; the mark stays with them.
    try:
        alive = process.status() != psutil.STATUS_ZOMBIE
        return alive and process.environ().get(MARK) == mark
    except (psutil.Error, OSError):
        return False


@contextmanager
def running(side: Side, python: str) -> Iterator[Running]:
    """Start a side, and end it with this block."""
    process = Running(side, python)
    try:
        yield process
    finally:
        process.close()


def compare(comparison: Comparison, peers_python: str) -> dict[Side, list[float] | str]:
    """Return each side's times in seconds, or why it has none."""
    results: dict[Side, list[float] | str] = {side: [] for side in comparison.sides}
    with ExitStack() as stack:
        warm: dict[Side, Running] = {}
        for number in range(comparison.rounds):
            for side, times in results.items():
                if isinstance(times, str) or number >= side.most:
                    continue
                python = peers_python if side.script == "peers.py" else sys.executable
                say(f"{comparison.title}: round {number + 1}, {side.name}")
                try:
                    if comparison.fresh:
                        with running(side, python) as process:
                            times += process.round()
                    else:
                        if side not in warm:
                            warm[side] = stack.enter_context(running(side, python))
                        times += warm[side].round()
                except SideFailed as failed:
                    results[side] = str(failed)
    say("")
    return results


def say(text: str) -> None:
    """Show on a terminal what is being measured."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text[:78]}")
        sys.stderr.flush()


def table(comparison: Comparison, results: dict[Side, list[float] | str]) -> str:
    """Return one comparison as a table in Markdown."""
    first = results[comparison.sides[0]]
    lines = [
        f"**{comparison.title}** ({comparison.goal})",
        "",
        "| | median | min | max | n | the first line is |",
        "|---|--:|--:|--:|--:|---|",
    ]
    for side, times in results.items():
        if isinstance(times, str):
            lines.append(f"| {side.name} | {times} | | | | |")
            continue
        ratio = ""
        if times is not first and not isinstance(first, str):
            ratio = f"{statistics.median(first) / statistics.median(times):.2f} times this"
        cells = [shown(statistics.median(times)), shown(min(times)), shown(max(times))]
        lines.append(f"| {side.name} | {' | '.join(cells)} | {len(times)} | {ratio} |")
    return "\n".join(lines) + "\n"


def shown(value: float) -> str:
    """Write a time in the unit in which it is easily read."""
    if value < 0.001:
        return f"{value * 1e6:.1f} µs"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.{1 if value >= 0.01 else 2}f} ms"


def heavy_modules() -> str:
    """Say what a rank has imported that its worker did not ask for."""
    with running(Side("ddp_kit", "kit_side.py", "modules"), sys.executable) as side:
        loaded = ", ".join(side.round()) or "none"
    return f"A rank has imported, of matplotlib, IPython, torchvision and ipywidgets: {loaded}.\n"


def machine(peers_python: str) -> str:
    """Describe where this runs, without a name or a path."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = psutil.virtual_memory().total / 2**30
    code = (
        "import importlib.metadata as m, sys\n"
        "have = {d.metadata['Name'].lower(): d.version for d in m.distributions()}\n"
        "print(', '.join(f'{n} {have[n]}' for n in sys.argv[1:] if n in have))"
    )
    packages = subprocess.run(
        [peers_python, "-c", code, *PACKAGES], capture_output=True, text=True, check=True
    ).stdout.strip()
    return (
        f"{platform.system()} on {platform.machine()}, {cores} cores, {memory:.0f} GiB of memory; "
        f"load {os.getloadavg()[0]:.1f} at the start; "
        f"Python {platform.python_version()}, {packages}.\n"
    )


def main() -> None:
    """Measure, print the tables, and record them if --record is given."""
    import growth  # it imports this module

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="write the tables into README.md")
    parser.add_argument("--peers", default=sys.executable, help="the Python that has the peers")
    parser.add_argument("--only", default="", help="comparisons with this word in their title")
    options = parser.parse_args()
    if options.record and options.only:
        parser.error("--record needs every comparison")
    titles = [*(comparison.title for comparison in COMPARISONS), growth.TITLE]
    if not any(options.only in title for title in titles):
        parser.error(f"no title has {options.only!r}: {titles}")
    options.peers = os.path.abspath(options.peers)  # sides run in a folder of their own
    parts = [machine(options.peers)]
    print(parts[0], flush=True)
    for comparison in COMPARISONS:
        if options.only in comparison.title:
            parts.append(table(comparison, compare(comparison, options.peers)))
            print(parts[-1], flush=True)
    if options.only in growth.TITLE:
        parts.append(growth.table(growth.measure()))
        print(parts[-1], flush=True)
    parts.append(heavy_modules())
    print(parts[-1])
    if options.record:
        text = README.read_text("utf-8")
        README.write_text(BLOCK.sub(lambda _: "\n".join(parts), text), "utf-8")


if __name__ == "__main__":
    main()
