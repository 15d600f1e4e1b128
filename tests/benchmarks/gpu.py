"""Runs every lesson on the GPUs of this machine, and writes what each printed into GPU.md.

Each check is a command in a process of its own with a time limit; the others still run if it
fails. GPU.md is written after every check, so that a run that is cut off leaves what it has found.
Exit status: 0 if all checks have passed, 1 if one has failed, 2 if there is no GPU.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from bench import MARK, kill_marked

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RECORD = HERE / "GPU.md"
FEW = 4  # ranks that share the GPUs, because a lesson proves little on one or two
FAREWELL = 40.0  # seconds to leave after SIGTERM; torchrun gives its ranks 30
NEED_A_GPU = (
    "test_backends.py::test_two_ranks_share_a_gpu_with_gloo",
    "faults/test_values.py::test_tensors_on_a_real_gpu_come_back_on_the_cpu",
)
NEED_TWO = (
    "lessons/test_data_parallel.py::test_gpus_train_by_hand_as_virtual_devices_and_dataparallel_do",
)


@dataclass(frozen=True)
class Check:
    """A command, and how its line of proof begins; "": the last line that it prints.

    limit: the seconds that it may take.
    """

    title: str
    command: Sequence[str]
    proof: str = ""
    limit: float = 300.0


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
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-", ignore_cleanup_errors=True) as folder:
        printed, errors = Path(folder, "stdout"), Path(folder, "stderr")
        with printed.open("wb") as out, errors.open("wb") as err:  # a pipe could stay open
            process = subprocess.Popen(
                check.command, stdout=out, stderr=err, env=environment, cwd=folder
            )
            try:
                status: int | None = process.wait(check.limit)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                _end(process, mark)
        seconds = time.monotonic() - begin
        passed, lines = _judge(check, status, _read(printed), _read(errors))
    return Outcome(check.title, passed, seconds, tuple(lines))


def _end(process: subprocess.Popen, mark: str) -> None:
    process.terminate()  # it does nothing to a process that has ended
    with suppress(subprocess.TimeoutExpired):
        process.wait(FAREWELL)
    kill_marked(mark)
    process.wait()


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
        said = (errors or printed or ["it printed nothing"])[-1]  # pytest prints errors, too
        reason = re.sub(r"\S*/\S*", "…", said)[:200]
        return False, [f"exit status {status}: {reason}"]
    if not check.proof and printed:
        return True, printed[-1:]
    for number, line in enumerate(printed):
        if check.proof and line.startswith(check.proof):
            return True, printed[number:]
    return False, [f"it ended without a line that begins with {check.proof!r}"]


def lessons() -> list[str]:
    """Return the names of all lessons."""
    return sorted(path.stem for path in (ROOT / "ddp_kit" / "lessons").glob("[!_]*.py"))


def checks(gpus: int, nccl: bool) -> tuple[list[Check], list[str]]:
    """Return what is to be run on so many GPUs, and a line for what is not run, with the reason."""
    found, left_out = [], []
    choices = [("nccl", gpus)] if nccl else []
    choices += [("cuda:gloo", FEW)] if gpus < FEW or not nccl else []
    python, programs = sys.executable, str(HERE / "gpu_checks.py")
    for name in lessons():
        for backend, ranks in choices:
            module = ["-m", f"ddp_kit.lessons.{name}"]
            options = ["--backend", backend, "--world-size", str(ranks)]
            title = f"{name}, {backend} on {_ranks(ranks)}"
            found.append(Check(title, [python, *module, *options], f"{name}: {_ranks(ranks)}, "))
    for backend, ranks in choices:
        port = [python, programs, "cuda_port", backend.rpartition(":")[2], str(ranks)]
        title = f"lesson 03's script on GPUs, {backend} on {_ranks(ranks)}"
        found.append(Check(title, port, "cuda_port: "))
    script = str(ROOT / "notebooks" / "scripts" / "train.py")
    options = ["--data", str(ROOT / "ddp_kit" / "digits"), "--epochs", "3"]
    found.append(Check("train.py alone", [python, script, *options], "epoch 3: "))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
    title = f"train.py, torchrun on {_ranks(gpus)}"
    found.append(Check(title, [python, *launch, script, *options], "epoch 3: "))
    memory = [python, programs, "memory", str(min(gpus, 2))]
    found.append(Check("memory of the eight steps, and nvidia-smi's", memory, "memory: "))
    found.append(_pytest("tests that need a GPU", NEED_A_GPU))
    if gpus > 1:
        found.append(_pytest("nn.DataParallel equals the eight steps of lesson 07", NEED_TWO))
        devices = min(gpus, FEW)
        command = [python, programs, "dp_against_ddp", str(devices)]
        title = f"DataParallel against DistributedDataParallel, {devices} GPUs"
        found.append(Check(title, command, "dp_against_ddp: "))
    else:
        one = "it needs two GPUs, and there was one"
        left_out.append(f"`nn.DataParallel` beside the eight steps of lesson 07: {one}.")
        left_out.append(f"DataParallel against DistributedDataParallel: {one}.")
        left_out.append("nccl between two GPUs: there was one.")
    if not nccl:
        left_out.append("nccl: this PyTorch is built without it.")
    left_out.append("The cells of the notebooks: only the lessons' modules were run.")
    return found, left_out


def _pytest(title: str, names: Sequence[str]) -> Check:
    tests = [str(ROOT / "tests" / name) for name in names]
    return Check(title, [sys.executable, "-m", "pytest", "-q", *tests], f"{len(names)} passed")


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
        "has_nccl = torch.distributed.is_nccl_available()\n"
        "version = '.'.join(map(str, nccl.version())) if has_nccl else 'none'\n"
        "print(', '.join(gpus))\n"
        "print(f'PyTorch {torch.__version__}, CUDA {torch.version.cuda}, nccl {version}')\n"
    )
    gpus, versions = _ask([sys.executable, "-c", code]).splitlines()[-2:]
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = "unknown"
    with suppress(OSError, subprocess.SubprocessError):
        driver = _ask(query).splitlines()[0]
    commit = "unknown"
    with suppress(OSError, subprocess.SubprocessError):
        commit = _ask(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"])
    system = f"{platform.system()} on {platform.machine()}, {os.cpu_count()} cores"
    return (
        f"{gpus}; {system}; {versions}, driver {driver}, Python {platform.python_version()}; "
        f"commit {commit}, {f'{date.today():%d %B %Y}'.lstrip('0')}."
    )


def _ask(command: Sequence[str]) -> str:
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return answer.stdout.strip()


def run_all(
    machine: str, found: Sequence[Check], left_out: Sequence[str], target: Path
) -> list[Outcome]:
    """Run all checks; write the record into `target` after each of them."""
    done: list[Outcome] = []
    for number, check in enumerate(found, 1):
        print(f"{number} of {len(found)}: {check.title}", flush=True)
        done.append(run(check))
        state = "" if done[-1].passed else "FAILED: "
        print(f"    {state}{done[-1].lines[0]}", flush=True)
        missing = [f"{check.title}: the run ended before it." for check in found[number:]]
        target.write_text(record(machine, done, [*left_out, *missing]), "utf-8")
    return done


def main() -> int:
    """Run all checks and write GPU.md, if there is a GPU."""
    import torch  # here, because this process needs it for nothing else
    import torch.distributed as dist

    if not torch.cuda.is_available():
        print(
            f"make gpu needs a GPU, and PyTorch {torch.__version__} sees none here. "
            "Nothing was run, and tests/benchmarks/GPU.md is as it was.",
            file=sys.stderr,
        )
        return 2
    found, left_out = checks(torch.cuda.device_count(), dist.is_nccl_available())
    done = run_all(machine(), found, left_out, RECORD)
    return 0 if all(outcome.passed for outcome in done) else 1


if __name__ == "__main__":
    sys.exit(main())
