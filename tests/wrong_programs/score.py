"""Runs the programs under each tool, and prints how often each of them is right.

`--record` writes the table into README.md, and what each tool said of each program into
verdicts.csv.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

import psutil
import torch
from report import SILENT, Judgement, Report, judge
from suite import PROGRAMS, Program, programs_for

HERE = Path(__file__).parent
README = HERE / "README.md"
VERDICTS = HERE / "verdicts.csv"
TOOLS = {
    "ddp_kit": "ddp_kit",
    "gloo": "gloo, {timeout:g} s timeout",
    "detail": "`TORCH_DISTRIBUTED_DEBUG=DETAIL`, {timeout:g} s timeout",
    "monitored_barrier": "`monitored_barrier` before every collective, {timeout:g} s",
    "flight_recorder": "flight recorder, dumped after {timeout:g} s",
}
MARK = "DDP_KIT_VERDICTS"  # every process of a tool has it in its environment
JOBS = 24  # programs at once, under PyTorch's tools
PATIENCE = 90.0  # seconds beyond the program's own after which a tool has no answer
Results = dict[str, Report]  # by the program's name


class Tool:
    """A process that runs programs under one tool; it is started again if it gives no answer."""

    def __init__(self, name: str, timeout: float, backend: str) -> None:
        self._command = [sys.executable, str(HERE / "with_torch.py"), name, str(timeout)]
        if name == "ddp_kit":
            self._command = [sys.executable, str(HERE / "with_kit.py"), backend]
        self._environment = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            **{
                "detail": {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
                "flight_recorder": {"TORCH_FR_BUFFER_SIZE": "20000"},
            }.get(name, {}),
        }
        self._process: subprocess.Popen | None = None
        self.left: list[str] = []  # processes and files that were there when it had ended

    def ask(self, program: Program, file: Path) -> Report:
        """Return what the tool says of a program."""
        if self._process is None:
            self._folder = Path(tempfile.mkdtemp(prefix="verdicts-"))
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**self._environment, MARK: self._folder.name, "TMPDIR": str(self._folder)},
                start_new_session=True,
                text=True,
            )
        job = {"file": str(file), "world_size": program.world_size, "seconds": program.seconds}
        impatience = threading.Timer(PATIENCE + program.seconds, self._kill)
        impatience.start()
        try:
            print(json.dumps(job), file=self._process.stdin, flush=True)
            return Report(**json.loads(self._process.stdout.readline()))
        except (BrokenPipeError, ValueError):
            self.close()
            return Report(SILENT, text="the tool itself gave no answer")
        finally:
            impatience.cancel()

    def close(self) -> None:
        """End the process; note what it has left, and remove that."""
        if self._process is None:
            return
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self._process.communicate(timeout=15)
        self.left += [f"process {process.name()}" for process in self._owned()]
        files = [path.name for path in self._folder.iterdir()]
        # PyTorch keeps its cache of compiled functions, which belongs to no tool.
        self.left += [f"file {name}" for name in files if not name.startswith("torchinductor_")]
        self._kill()
        self._process.communicate()
        self._process = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def _kill(self) -> None:
        owned = self._owned()
        for process in owned:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(owned, 5)

    def _owned(self) -> list[psutil.Process]:
        owned = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == self._folder.name:
                    owned.append(process)
        return owned


def score(
    tool: str,
    programs: Sequence[Program],
    timeout: float,
    show: Callable[[str, Program, Report], None] | None = None,
    backend: str = "gloo",
) -> tuple[Results, list[str]]:
    """Return what a tool says of each program, and the processes and files that it has left.

    show: is called with each report as it comes. backend: of the kit's ranks.
    """
    results: Results = {}
    left: list[str] = []
    todo = iter(list(programs))
    lock = threading.Lock()

    def work(folder: str) -> None:
        process = Tool(tool, timeout, backend)
        with contextlib.closing(process):
            for program in todo:
                report = process.ask(program, program.write(Path(folder)))
                with lock:
                    results[program.name] = report
                    say(f"{tool}: {len(results)} of {len(programs)}, {program.name}")
                    if show is not None:
                        show(tool, program, report)
        left.extend(process.left)

    count = 1 if tool == "ddp_kit" else JOBS
    with tempfile.TemporaryDirectory(prefix="wrong-") as folder, ThreadPoolExecutor(count) as pool:
        try:
            for task in [pool.submit(work, folder) for _ in range(count)]:
                task.result()
        finally:
            list(todo)  # after an interrupt, each ends with the program that it runs
    say("")
    return results, left


def say(text: str) -> None:
    """Show on a terminal what is being run."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text[:78]}")
        sys.stderr.flush()


def row(name: str, programs: Sequence[Program], results: Results) -> str:
    """Return a tool's line of the table."""
    wrong = [program for program in programs if not program.is_right]
    right = [program for program in programs if program.is_right]
    visible = [program for program in wrong if not program.unseen]
    judged = {program.name: judge(program, results[program.name]) for program in programs}

    def share(some: Sequence[Program], what: str, value: object = True) -> str:
        having = sum(getattr(judged[program.name], what) == value for program in some)
        return f"{having / len(some):.3f} ({having}/{len(some)})" if some else ""

    true_positives = [one for one in wrong if judged[one.name].outcome == "TP"]
    found = [results[program.name] for program in true_positives]
    cells = [
        name,
        share(visible, "outcome", "TP"),
        share(wrong, "outcome", "TP"),
        share(right, "outcome", "TN"),
        *(share(true_positives, what) for what in ("kind", "ranks", "lines")),
        f"{statistics.mean(one.noise for one in found):.2f}" if found else "",
        f"{statistics.median(one.seconds for one in found):.1f} s" if found else "",
        f"{max(one.seconds for one in found):.1f} s" if found else "",
    ]
    return f"| {' | '.join(cells)} |"


HEAD = """\
| tool | recall, visible | recall, all | specificity | right class | right ranks | right lines \
| noise | median | max |
|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|"""


def by_category(programs: Sequence[Program], results: dict[str, Results]) -> str:
    """Return a table of how many wrong programs of each category each tool finds."""
    lines = [f"| category | wrong | {' | '.join(results)} |", "|---|--:|" + "--:|" * len(results)]
    for category in dict.fromkeys(program.category for program in programs):
        wrong = [p for p in programs if p.category == category and not p.is_right]
        if wrong:
            found = (str(sum(one[p.name].complains for p in wrong)) for one in results.values())
            lines.append(f"| {category} | {len(wrong)} | {' | '.join(found)} |")
    return "\n".join(lines)


def print_failure(_tool: str, program: Program, report: Report) -> None:
    """Print a line if a tool did not say what is true of a program."""
    judged = judge(program, report)
    if judged in (Judgement("TN"), Judgement("TP", True, True, True)):
        return
    marks = {kind: ranks for kind, ranks in program.marks.items() if ranks}
    wrong = [what for what in ("kind", "ranks", "lines") if not getattr(judged, what)]
    detail = "" if judged.outcome != "TP" else f" wrong {', '.join(wrong)}"
    print(
        f"{judged.outcome}{detail} {program.name}: expected {program.expected} {marks}, "
        f"got {report.kind} {report.ranks} absent {report.absent}",
        flush=True,
    )


def print_report(tool: str, program: Program, report: Report) -> None:
    """Print all that a tool said of a program, and how that compares."""
    print(f"--- {tool}, {program.name}: {judge(program, report)}", flush=True)
    print(f"expected {program.expected} {program.marks}")
    print(f"said {report.kind} {report.ranks}, absent {report.absent}, noise {report.noise}")
    print(f"after {report.seconds:.1f} s: {report.text}", flush=True)


def machine() -> str:
    """Describe where and when this was run."""
    return (
        f"{date.today():%d %B %Y}; {platform.system()} on {platform.machine()}, "
        f"{len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}."
    )


def record_verdicts(programs: Sequence[Program], results: dict[str, Results]) -> None:
    """Write what each tool said of each program."""
    with VERDICTS.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["category", "program", "world_size", "expected", *results])
        for program in programs:
            said = [results[tool][program.name].kind for tool in results]
            row = [program.category, program.name, program.world_size, program.expected]
            table.writerow([*row, *said])


def main() -> None:
    """Run, print, and record if --record is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="write README.md and verdicts.csv")
    parser.add_argument("--tools", nargs="+", default=list(TOOLS), choices=TOOLS)
    parser.add_argument("--only", default="", help="programs with this in their name or category")
    parser.add_argument("--show", metavar="NAME", help="print a program and stop")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds, of PyTorch's tools")
    parser.add_argument("--backend", default="gloo", help="of ddp_kit's ranks, such as shm")
    parser.add_argument("--failures", action="store_true", help="print what ddp_kit gets wrong")
    parser.add_argument("--text", action="store_true", help="print what each tool said")
    options = parser.parse_args()
    if options.show:
        print(next(p.source for p in PROGRAMS if p.name == options.show), end="")
        return
    everything = not options.only and options.tools == list(TOOLS) and options.backend == "gloo"
    if options.record and not everything:
        parser.error("--record needs every program and every tool, on gloo")
    programs = programs_for(options.backend)
    programs = [p for p in programs if options.only in f"{p.category} {p.name}"]
    if not programs:
        parser.error(f"no program has {options.only!r} in its name or category")
    results: dict[str, Results] = {}
    left: dict[str, list[str]] = {}
    for tool in options.tools:
        show = print_failure if options.failures and tool == "ddp_kit" else None
        show = print_report if options.text else show
        results[tool], left[tool] = score(tool, programs, options.timeout, show, options.backend)
    rows = [
        row(TOOLS[tool].format(timeout=options.timeout), programs, said)
        for tool, said in results.items()
    ]
    wrong = sum(not program.is_right for program in programs)
    counted = f"{wrong} wrong programs and {len(programs) - wrong} right ones, {machine()}"
    if "ddp_kit" in left:
        counted += f"\nddp_kit has left {', '.join(left['ddp_kit']) or 'no process and no file'}."
    text = "\n".join([counted, "", HEAD, *rows, "", by_category(programs, results), ""])
    print(text)
    if options.record:
        record_verdicts(programs, results)
        readme = README.read_text("utf-8")
        block = re.compile(r"(?<=<!-- verdicts -->\n).*(?=<!-- /verdicts -->)", re.DOTALL)
        README.write_text(block.sub(lambda _: text, readme), "utf-8")


if __name__ == "__main__":
    main()
