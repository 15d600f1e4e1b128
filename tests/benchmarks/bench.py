"""Measures how fast the kit is, beside plain PyTorch and what a learner would use instead.

The sides of a comparison take turns, A B A B, in one run. What starts cold does so in a fresh
process every time. `--record` writes the tables into README.md; with `--only`, those tables alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
from comparisons import COMPARISONS, Comparison, Side

HERE = Path(__file__).parent
README = HERE / "README.md"
BLOCK = re.compile(r"(?<=<!-- bench -->\n).*(?=<!-- /bench -->)", re.DOTALL)
MARK = "DDP_KIT_BENCH"  # every process of a side has it in its environment, also what it starts
PATIENCE = 120.0  # seconds for one answer of a side
REST = 1.0  # seconds before a round, so that the threads of the other sides are asleep
FAREWELL = 15.0  # seconds for a side to leave
GROWTH = "growth with the number of ranks"
GROWTH_ROUNDS = 3
COLUMNS = {  # of its table
    "start": "start and first result",
    "bare_start": "the same with mp.spawn",
    "warm": "warm call",
    "floor": "a word, all_reduce, a word back",
    "memory": "memory of a rank",
    "deadlock": "a deadlock is found",
    "events": "100,000 traced events",
    "smaller": "call on half of them",
}
PACKAGES = ("torch", "cloudpickle", "accelerate", "ipyparallel", "nbdistributed")


class SideFailed(Exception):
    """A side gave no answer; the text says why, in a few words and without a path."""


class Running:
    """A side's process, and everything that it starts."""

    def __init__(self, side: Side, python: str = sys.executable) -> None:
        self._mark = uuid.uuid4().hex
        self._home = tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True)
        self._errors = Path(self._home.name, "errors")
        environment = {
            **{k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"},
            MARK: self._mark,
            "HOME": self._home.name,  # peers keep profiles, connections and logs there
            "TMPDIR": self._home.name,
            "PATH": f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        }
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [python, str(HERE / side.script), side.measure],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                cwd=self._home.name,
                start_new_session=True,
                text=True,
            )

    def __enter__(self) -> Running:
        try:
            self._answer()  # "ready"
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        """Let the side leave, then end what is left of it."""
        with suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self._process.communicate(timeout=FAREWELL)
        kill_marked(self._mark)
        self._process.communicate()
        self._home.cleanup()

    def round(self) -> Any:
        """Have the side measure once more."""
        with suppress(BrokenPipeError):  # the answer says why
            print("again", file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        impatience = threading.Timer(PATIENCE, kill_marked, [self._mark])
        impatience.start()
        line = self._process.stdout.readline()
        impatience.cancel()
        if not line:
            raise SideFailed(self._reason())
        return json.loads(line)

    def _reason(self) -> str:
        if self._process.wait() == -signal.SIGKILL:
            return f"no answer within {PATIENCE:g} s"
        lines = self._errors.read_text("utf-8", errors="replace").strip().splitlines()
        last = re.sub(r"\S*/\S*", "…", lines[-1]) if lines else "it ended without a word"
        return "not installed" if last.startswith("ModuleNotFoundError") else last[:120]


def kill_marked(mark: str) -> None:
    """Kill all processes that have this mark in their environment."""
    for _ in range(12):  # those that were being started as well; at most a minute
        left = [process for process in psutil.process_iter() if _has(process, mark)]
        for process in left:
            with suppress(psutil.NoSuchProcess):  # it left by itself
                process.kill()
        psutil.wait_procs(left, 5)
        if not left:
            return


def _has(process: psutil.Process, mark: str) -> bool:
    # Daemons leave the process group; the mark stays with them.
    try:
        alive = process.status() != psutil.STATUS_ZOMBIE
        return alive and process.environ().get(MARK) == mark
    except (psutil.Error, OSError):
        return False


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
                        with Running(side, python) as process:
                            times += process.round()
                        continue
                    if side not in warm:
                        warm[side] = stack.enter_context(Running(side, python))
                    time.sleep(REST)
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


def measure_growth() -> dict[int, dict[str, float] | str]:
    """Return the medians of some rounds for each number of ranks, or why there are none."""
    found: dict[int, dict[str, float] | str] = {}
    for ranks in (2, 4, 8, 16, 32, 64):
        rounds: list[dict[str, float]] = []
        try:
            for number in range(GROWTH_ROUNDS):
                say(f"{GROWTH}: round {number + 1}, {ranks} ranks")
                rounds.append({})
                for script in ("kit_side.py", "bare_side.py"):
                    with Running(Side(script, script, f"growth {ranks}")) as process:
                        rounds[-1] |= process.round()
            found[ranks] = {key: statistics.median(one[key] for one in rounds) for key in COLUMNS}
        except SideFailed as failed:
            found[ranks] = str(failed)
    say("")
    return found


def growth_table(found: dict[int, dict[str, float] | str]) -> str:
    """Return as a table what grows with the number of ranks."""
    lines = [
        f"**{GROWTH}** (goal: nothing grows faster than it; medians of {GROWTH_ROUNDS} pools)",
        "",
        f"| ranks | {' | '.join(COLUMNS.values())} |",
        f"|--:|{'--:|' * len(COLUMNS)}",
    ]
    for ranks, values in found.items():
        cells = (
            [values] + [""] * (len(COLUMNS) - 1)
            if isinstance(values, str)
            else [
                f"{value / 1e6:.0f} MB" if key == "memory" else shown(value)
                for key, value in values.items()
            ]
        )
        lines.append(f"| {ranks} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def heavy_modules() -> str:
    """Say what a rank has imported that its worker did not ask for."""
    with Running(Side("ddp_kit", "kit_side.py", "modules")) as side:
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="write the tables into README.md")
    parser.add_argument("--peers", default=sys.executable, help="the Python that has the peers")
    parser.add_argument("--only", default="", help="comparisons whose title begins with this")
    options = parser.parse_args()
    titles = [*(comparison.title for comparison in COMPARISONS), GROWTH]
    if not any(title.startswith(options.only) for title in titles):
        parser.error(f"no title begins with {options.only!r}: {titles}")
    options.peers = os.path.abspath(options.peers)  # sides run in a folder of their own
    here = machine(options.peers)
    print(here, flush=True)
    tables: dict[str, str] = {}
    for comparison in COMPARISONS:
        if comparison.title.startswith(options.only):
            tables[comparison.title] = table(comparison, compare(comparison, options.peers))
            print(tables[comparison.title], flush=True)
    if GROWTH.startswith(options.only):
        tables[GROWTH] = growth_table(measure_growth())
        print(tables[GROWTH], flush=True)
    heavy = heavy_modules()
    print(heavy)
    if options.record:
        text = README.read_text("utf-8")
        if options.only:
            block = BLOCK.search(text)
            assert block is not None
            recorded = with_tables(block.group(), tables, titles, here)
        else:
            recorded = "\n".join([here, *tables.values(), heavy])
        README.write_text(BLOCK.sub(lambda _: recorded, text), "utf-8")


def with_tables(block: str, tables: dict[str, str], titles: list[str], here: str) -> str:
    """Return what is recorded, with these tables in place of the old ones of the same titles."""
    first, *others = re.split(r"\n(?=\*\*|A rank has imported)", block)
    heavy = others.pop()
    kept = {text[2:].partition("**")[0]: text for text in others}
    tables = {title: f"{text}\nMeasured apart: {here}" for title, text in tables.items()}
    merged = kept | tables
    return "\n".join([first, *(merged[title] for title in titles if title in merged), heavy])


if __name__ == "__main__":
    main()
