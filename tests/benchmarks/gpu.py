"""Runs the kit and every lesson on the GPUs of this machine, and records what each printed.

Each check is a command in a process of its own with a time limit; the others still run if it
fails. What is timed runs first and alone, then several lessons at a time. The record is written
after every check, so that a run that is cut off leaves what it has found.
Needed: PyTorch, torchvision, matplotlib, cloudpickle, psutil and pytest; no network and no Jupyter.
Exit status: 0 if all checks have passed, 1 if one has failed, 2 if there is no GPU.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from bench import MARK, kill_marked

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RECORD = HERE / "GPU.md"
FEW = 4  # ranks that share the GPUs, because a lesson proves little on one or two
# What the kit says where a lesson needs what gloo cannot do with tensors on GPUs.
REFUSED = re.compile(r"gloo cannot .* on a GPU")
LAST = 12  # lines to record of what a check that failed has said
FAREWELL = 40.0  # seconds to leave after SIGTERM; torchrun gives its ranks 30


@dataclass(frozen=True)
class Check:
    """A command, and how its line of proof begins; "": the last line that it prints.

    limit: the seconds that it may take. alone: nothing else runs meanwhile.
    """

    title: str
    command: tuple[str, ...]
    proof: str = ""
    limit: float = 300.0
    alone: bool = False


@dataclass(frozen=True)
class Outcome:
    """What a check has printed.

    lines: its line of proof and what followed it; if it has failed, one line that says why.
    """

    title: str
    passed: bool
    seconds: float
    lines: tuple[str, ...]


def run(check: Check) -> Outcome:
    """Run a check within its limit, and end everything that it has started."""
    mark = uuid.uuid4().hex
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = os.environ | {MARK: mark, "PYTHONPATH": path}
    begin, status = time.monotonic(), None
    with tempfile.TemporaryDirectory(prefix="gpu-", ignore_cleanup_errors=True) as folder:
        printed, errors = Path(folder, "stdout"), Path(folder, "stderr")
        with printed.open("wb") as out, errors.open("wb") as err:  # a pipe could stay open
            process = subprocess.Popen(
                check.command, stdout=out, stderr=err, env=environment, cwd=folder
            )
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(check.limit)
            process.terminate()  # it does nothing to a process that has ended
            with suppress(subprocess.TimeoutExpired):
                process.wait(FAREWELL)
            kill_marked(mark)
            process.wait()
        seconds = time.monotonic() - begin
        passed, lines = _judge(check, status, _read(printed), _read(errors))
    return Outcome(check.title, passed, seconds, tuple(lines))


def _read(path: Path) -> list[str]:
    lines = path.read_text("utf-8", errors="replace").splitlines()
    return [line.rstrip() for line in lines if line.strip()]


def _judge(
    check: Check, status: int | None, printed: list[str], errors: list[str]
) -> tuple[bool, list[str]]:
    """Return whether a check has passed, and the lines to record."""
    if status is None:
        return False, [f"no result within {check.limit:g} s"]
    if status:
        said = [re.sub(r"\S*/\S*", "…", line)[:200] for line in errors or printed]
        if refused := REFUSED.search("\n".join(said)):
            return True, [f"refused: {refused[0]}"]
        last = said[-1] if said else "it printed nothing"
        return False, [f"exit status {status}: {last}", *said[-LAST:-1]]
    if not check.proof:
        return True, printed[-1:]
    for number, line in enumerate(printed):
        if line.startswith(check.proof):
            return True, printed[number:]
    return False, [f"it ended without a line that begins with {check.proof!r}"]


def lessons() -> list[str]:
    """Return the names of all lessons."""
    return sorted(path.stem for path in (ROOT / "ddp_kit" / "lessons").glob("[!_]*.py"))


def checks(gpus: int, nccl: bool) -> tuple[list[Check], list[str]]:
    """Return what is to be run on so many GPUs, and a line for what is not run, with the reason.

    gpus: 0 to try the checks on the CPU, with gloo.
    """
    has_nccl = nccl and gpus > 0
    choices = [("nccl", gpus)] if has_nccl else []
    if gpus < FEW or not nccl:
        choices.append(("cuda:gloo" if gpus else "gloo", FEW))
    shared = ["cuda:gloo:2", "cuda:gloo:4"] if gpus else ["gloo:2", "gloo:4"]
    own = [f"nccl:{count}" for count in sorted({1, gpus})] if has_nccl else []
    found = [
        _program("first_run", *own, *shared),
        _program("roofline", file="gpu_training"),
        _program("gpt", file="gpu_training"),
        _program("all_reduce", *own, *shared, *(["gloo:2", "gloo:4"] if gpus else [])),
        *(_program("probe", *place.split(":"), title=f"probe of {place}") for place in own),
    ]
    if gpus:
        # One dtype, because an operation that kills the ranks makes each dtype start new ones.
        options = "cuda:gloo", "2", "float32"
        found.append(_program("probe", *options, title="probe of cuda:gloo", alone=False))
    if gpus:
        found.append(_program("memory", str(min(gpus, 2))))
    script = str(ROOT / "notebooks" / "scripts" / "train.py")
    data = str(ROOT / "ddp_kit" / "lessons" / "data" / "text" / "pride_and_prejudice.txt")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus or 2)]
    for how, before in (" alone", []), (f", torchrun on {_ranks(gpus or 2)}", launch):
        batch = str(16 * (gpus or 2))
        command = sys.executable, *before, script, "--data", data, "--batch-size", batch
        found.append(Check(f"train.py{how}", command, "step 100: "))
    for backend, ranks in choices if gpus else ():
        port = ["cuda_port", backend.rpartition(":")[2], str(ranks)]
        title = f"lesson 03's script on GPUs, {backend} on {_ranks(ranks)}"
        found.append(_program(*port, title=title, alone=False))
    left_out = []
    for name in lessons():
        for backend, ranks in choices:
            options = ["--backend", backend, "--world-size", str(ranks)]
            command = sys.executable, "-m", f"ddp_kit.lessons.{name}", *options
            title = f"{name}, {backend} on {_ranks(ranks)}"
            found.append(Check(title, command, f"{name}: {_ranks(ranks)}, "))
    if gpus < 2:
        one = "it needs two GPUs, and there was " + ("one" if gpus else "none")
        left_out.append(f"nccl between two GPUs: {one}.")
    if not nccl:
        left_out.append("nccl: this PyTorch is built without it.")
    left_out.append("The cells of the notebooks: only the lessons' modules were run.")
    left_out.append("The tests that need a GPU: `make test` runs them where there is one.")
    return found, left_out


def _program(
    name: str, *arguments: str, file: str = "gpu_checks", title: str = "", **options: Any
) -> Check:
    command = (sys.executable, str(HERE / f"{file}.py"), name, *arguments)
    return Check(title or name, command, f"{name}: ", **{"alone": True, **options})


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def record(machine: str, done: Sequence[Outcome], left_out: Iterable[str]) -> str:
    """Return the text of GPU.md."""
    failed = [outcome for outcome in done if not outcome.passed]
    parts = [
        "# The lessons on a GPU",
        "Written by `make gpu`. Each check ran in a process of its own, and printed its line.",
        machine,
        f"{len(done) - len(failed)} of {len(done)} checks passed.",
    ]
    rows = ["| check | | s | its line |", "|---|---|--:|---|"]
    for outcome in done:
        verdict = "passed" if outcome.passed else "**failed**"
        line = outcome.lines[0].replace("|", "\\|")
        rows.append(f"| {outcome.title} | {verdict} | {outcome.seconds:.0f} | {line} |")
    parts.append("\n".join(rows))
    parts.append("## Not run")
    parts.append("\n".join(f"* {line}" for line in left_out))
    for outcome in done:
        if len(outcome.lines) > 1:
            parts += [f"## {outcome.title}", "\n".join(["```", *outcome.lines, "```"])]
    return "\n\n".join(parts) + "\n"


def machine() -> str:
    """Describe the GPUs and the versions, without a name or a path."""
    # In another process, because CUDA would keep memory of each GPU for as long as this one lives.
    code = (
        "import json, torch\n"
        "from torch.cuda import device_count, get_device_properties, nccl\n"
        "devices = [get_device_properties(index) for index in range(device_count())]\n"
        "gpus = [f'{d.name} with {d.total_memory / 2**30:.0f} GiB' for d in devices]\n"
        "has_nccl = torch.cuda.is_available() and torch.distributed.is_nccl_available()\n"
        "version = '.'.join(map(str, nccl.version())) if has_nccl else 'none'\n"
        "print(', '.join(gpus) or 'no GPU')\n"
        "print(f'PyTorch {torch.__version__}, CUDA {torch.version.cuda}, nccl {version}')\n"
    )
    gpus, versions = _ask(sys.executable, "-c", code).splitlines()[-2:]
    driver = _ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    commit = _ask("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")  # there may be no git
    return (
        f"{gpus}; {platform.system()} on {platform.machine()}, {os.cpu_count()} cores; {versions}, "
        f"driver {driver.partition(chr(10))[0] or 'unknown'}, Python {platform.python_version()}; "
        f"{f'commit {commit}, ' if commit else ''}{f'{date.today():%d %B %Y}'.lstrip('0')}."
    )


def _ask(*command: str) -> str:
    """Return what a command prints; "" if it fails."""
    with suppress(OSError, subprocess.SubprocessError):
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        return answer.stdout.strip()
    return ""


def run_all(
    machine: str, found: Sequence[Check], left_out: Sequence[str], target: Path, limit: float
) -> list[Outcome]:
    """Run the checks that begin within `limit` seconds; write the record after each of them."""
    end, done = time.monotonic() + limit, dict.fromkeys(found)

    def bounded(check: Check) -> Outcome | None:
        """Return what came of a check; None if the time for all checks did not suffice."""
        left = end - time.monotonic()
        if left <= 0:
            return None
        outcome = run(replace(check, limit=min(check.limit, left)))
        return outcome if outcome.passed or outcome.seconds < left else None

    def note(check: Check, outcome: Outcome | None) -> None:
        done[check] = outcome
        if outcome:
            state = "" if outcome.passed else "FAILED: "
            print(f"{outcome.seconds:4.0f} s, {check.title}: {state}{outcome.lines[0]}", flush=True)
        ended = [outcome for outcome in done.values() if outcome]
        missing = [
            f"{left.title}: the time for all checks was up before it had ended."
            for left in found
            if not done[left]
        ]
        target.write_text(record(machine, ended, [*left_out, *missing]), "utf-8")

    for check in found:
        if check.alone:
            note(check, bounded(check))
    at_once = max(1, (os.cpu_count() or 1) // 5)  # a lesson: 5 processes
    with ThreadPoolExecutor(at_once) as executor:
        waiting = {executor.submit(bounded, check): check for check in found if not check.alone}
        for future in as_completed(waiting):
            note(waiting[future], future.result())
    return [outcome for outcome in done.values() if outcome]


def main() -> int:
    """Run all checks and write the record, if there is a GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--record", type=Path, default=RECORD, help="the file to write")
    parser.add_argument("--limit", type=float, default=480.0, help="seconds for all checks")
    parser.add_argument("--only", default="", help="run checks whose title matches this pattern")
    parser.add_argument(
        "--on-cpu", action="store_true", help="try the checks without a GPU, with gloo; smaller"
    )
    options = parser.parse_args()
    import torch  # here, because this process needs it for nothing else
    import torch.distributed as dist

    gpus = 0 if options.on_cpu else torch.cuda.device_count()
    if not gpus and not options.on_cpu:
        print(
            f"make gpu needs a GPU, and PyTorch {torch.__version__} sees none here. "
            f"Nothing was run, and {options.record.name} is as it was.",
            file=sys.stderr,
        )
        return 2
    if options.on_cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        if options.record == RECORD:
            parser.error("--on-cpu needs a --record of its own: GPU.md is of runs on a GPU")
    found, left_out = checks(gpus, dist.is_nccl_available())
    found = [check for check in found if re.search(options.only, check.title)]
    done = run_all(machine(), found, left_out, options.record, options.limit)
    return 0 if all(outcome.passed for outcome in done) else 1


if __name__ == "__main__":
    sys.exit(main())
