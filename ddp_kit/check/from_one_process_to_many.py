"""The milestones of project 1: a training program runs under torchrun, is killed, and is timed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from ddp_kit.check.project import ProgramGrader, project
from ddp_kit.error_text import count

STEPS, BATCH, CONTEXT = 60, 48, 32  # of the start
LOSSES = {0: 2.7189069675, 30: 2.1441055835, 59: 1.8723700144}  # of the start, on one process
CLOSE = 1e-6  # more than rounding explains, less than any mistake makes
SIZES = (2, 1, 4)  # the most frequent mistakes show on two ranks
KILLS = ((13, 1), (24, 0), (35, None))  # after which step, and which rank; None: every process
MOST_LOST = 10  # steps that a kill may cost
LIMIT = 240.0  # seconds for one run, which takes ten on an idle machine
TRIES = 2  # if a busy machine looks up only when the training is over
LINE = re.compile(r"(?<!\S )step (\d+) loss (-?\d+\.\d+(?:e-?\d+)?|nan)")
SPEED = "speed.json"
KEYS = (
    "ranks",
    "tokens",
    "tokens_of_each_rank",
    "seconds",
    "tokens_per_second",
    "communication_seconds",
    "communication_share",
)
SET = {
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # a fresh store for each restart
    "OMP_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
# What torchrun or the kit may have set for the process that checks.
UNSET = re.compile(r"MASTER_|RANK$|WORLD_SIZE$|GROUP_|ROLE_|TORCHELASTIC_|TORCH_FR_|DDP_KIT")


class Training(NamedTuple):
    """What a run did: the steps and losses that it printed, and what it wrote at the end.

    kills: how many came before the end. seconds: it took, with the start of its processes.
    """

    printed: list[tuple[int, float]]
    speed: Any
    kills: int
    seconds: float


class TrainingGrader(ProgramGrader):
    """Runs a program under torchrun, and reads what it prints."""

    def check_form(self) -> None:
        self._trainings: dict[int, Training] = {}
        super().check_form()

    def training(self, ranks: int) -> Training:
        """Return an undisturbed run, in which rank 0 prints each step once."""
        if ranks not in self._trainings:
            self._trainings[ranks] = self._checked(ranks)
        return self._trainings[ranks]

    def _checked(self, ranks: int) -> Training:
        found = self.run_killed(ranks, ())
        steps = [step for step, _ in found.printed]
        if not steps:
            self.fail('it prints no line such as "step 0 loss 2.7189069675"', hint="no lines")
        if steps != list(range(STEPS)):
            missing = sorted(set(range(STEPS)) - set(steps))
            which = f"step {missing[0]} is missing" if missing else f"{steps} was printed"
            self.fail(f"it should print the steps 0 to {STEPS - 1}, but {which}", hint="no lines")
        return found

    def run_killed(self, ranks: int, kills: tuple[tuple[int, int | None], ...]) -> Training:
        """Return a run of the program that is killed after these steps, and started again."""
        self.case = f"on {count(ranks, 'rank')}{', killed three times' * bool(kills)}"
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as folder, Runs(self.answer, ranks, folder) as runs:
            printed, left = [], list(kills)
            for line in runs.lines():
                # torchrun's ranks write a line and its end apart, so two lines may become one.
                for match in LINE.finditer(line):
                    step = int(match[1])
                    if not kills and any(step == before for before, _ in printed):
                        self.fail(f"step {step} is printed twice", hint="every rank prints")
                    printed.append((step, float(match[2])))
                    if left and step >= left[0][0] and runs.kill(left[0][1]):
                        del left[0]
            if runs.timed_out:
                self.fail(f"it did not finish within {LIMIT:.0f} s", hint="never ends")
            if runs.status:
                mistake = "fails after a kill" if kills else "raises"
                self.fail("it raised an error", *runs.error(), hint=mistake)
            done = len(kills) - len(left)
            return Training(printed, runs.speed(), done, time.monotonic() - begin)


class Runs:
    """Runs of one program under torchrun, one after the other, with one folder for its files.

    As a context, it ends every process that it has started.
    """

    def __init__(self, program: str | os.PathLike, ranks: int, folder: str) -> None:
        self.status, self.timed_out = 0, False
        self._folder, self._logs = Path(folder, "run"), Path(folder, "logs")
        self._limit = threading.Timer(LIMIT, self._time_is_over)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        options = ["--max-restarts", "3", "--redirects", "2", "--log-dir", str(self._logs)]
        own = [str(Path(program).resolve()), str(self._folder)]
        self._command = [*torchrun, *options, "--nproc-per-node", str(ranks), *own]
        self._begun: list[psutil.Process] = []
        self._again = False
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Runs:
        self._limit.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._limit.cancel()
        self._end_all()

    def _time_is_over(self) -> None:
        self.timed_out, self._again = True, False
        self._end_all()  # which ends the lines, too

    def lines(self) -> Iterator[str]:
        """Yield the lines that the ranks print, until the program ends or its time is over."""
        self._again = True
        while self._again:
            self._again = False
            yield from self._one_run()

    def kill(self, rank: int | None) -> bool:
        """Kill a rank, which torchrun starts again, or with None all; return whether it ran."""
        assert self._process is not None
        ranks = self._ranks()
        if rank is None:
            self._again = bool(ranks)
            if ranks:
                self._end_all()
            return bool(ranks)
        if rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                ranks[rank].kill()
                return True
        return False

    def error(self) -> list[str]:
        """Return the end of the first error that a rank wrote."""
        files = sorted(self._logs.rglob("stderr.log"), key=lambda file: file.stat().st_mtime)
        texts = [file.read_text("utf-8", "replace") for file in files]
        # A program that Python or argparse refuses leaves no traceback.
        texts = [text for text in texts if "Traceback" in text] or list(filter(None, texts))
        # A rank whose peer is gone only says so.
        texts.sort(key=lambda text: "Connection" in text.rstrip().rpartition("\n")[2])
        lines = [re.sub(r'File "[^"]*[/\\]', 'File "', line) for line in texts[:1]]
        last = "".join(lines).rstrip().splitlines()
        own = [line for line in last if f'File "{Path(self._command[-2]).name}"' in line]
        return [line.strip() for line in [*own[-1:], *last[-1:]]]

    def speed(self) -> Any:
        """Return what the program wrote about its speed; None if it is missing or no JSON."""
        try:
            return json.loads((self._folder / SPEED).read_text("utf-8"))
        except (OSError, ValueError):
            return None

    def _one_run(self) -> Iterator[str]:
        environment = {name: text for name, text in os.environ.items() if not UNSET.search(name)}
        self._process = subprocess.Popen(
            self._command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            cwd=self._folder.parent,
            env=environment | SET,
            text=True,
            errors="replace",
        )
        if self.timed_out:  # just before
            self._end_all()
        with self._process.stdout as lines:  # type: ignore[union-attr]
            yield from lines
        status = self._process.wait()
        self.status = 0 if self._again or self.timed_out else status

    def _ranks(self) -> dict[int, psutil.Process]:
        found = {}
        for process in self._children():
            with contextlib.suppress(psutil.Error):
                if process.ppid() == self._process.pid and process.is_running():
                    found[int(process.environ().get("RANK", -1))] = process
        return found

    def _children(self) -> list[psutil.Process]:
        """Return the processes that torchrun has started, and remember them."""
        try:
            found = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        self._begun += found
        return found

    def _end_all(self) -> None:
        if self._process is None:
            return
        if self._process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(self._process.pid).suspend()  # so that it starts nothing more
            self._children()
            self._process.kill()
        for process in self._begun:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()  # which does nothing to another process with the same number
        self._process.wait()
        psutil.wait_procs(self._begun, timeout=10)


def _equal(grader: TrainingGrader) -> None:
    trainings = [grader.training(ranks) for ranks in SIZES]
    wanted = dict(grader.training(1).printed) | LOSSES  # all of one rank's, three of them known
    # On one rank first, which the others are compared with.
    for ranks, (printed, *_) in sorted(zip(SIZES, trainings, strict=True)):
        grader.case = f"on {count(ranks, 'rank')}"
        for step, loss in sorted(printed, key=lambda pair: pair[0] not in LOSSES):
            if not abs(loss - wanted[step]) <= CLOSE:
                should = f"step {step} should have the loss {wanted[step]:.10f}, as in the start"
                mistake = "other loss" if step == 0 else "other gradient"
                grader.fail(f"{should}, but has {loss:.10f}", hint=mistake)


def _survives(grader: TrainingGrader) -> None:
    undisturbed = dict(grader.training(2).printed)
    for _ in range(TRIES):
        killed = grader.run_killed(2, KILLS)
        if killed.kills == len(KILLS):
            break
    else:
        grader.fail("the training was over before all three kills", hint="over too soon")
    steps = [step for step, _ in killed.printed]
    again = [now for now, before in zip(steps[1:], steps, strict=False) if now <= before]
    before = -1
    for step, loss in killed.printed:
        lost = before + 1 - step
        follows = f"after a kill, step {step} follows step {before}"
        if lost < 0:
            grader.fail(follows, hint="steps left out")
        if lost > MOST_LOST:
            mistake = "too far back" if any(again) else "from the beginning"
            grader.fail(f"{follows}, where at most {MOST_LOST} may be lost", hint=mistake)
        if step not in undisturbed or not abs(loss - undisturbed[step]) <= CLOSE:
            want = undisturbed.get(step, float("nan"))
            fact = f"step {step} has the loss {loss:.10f}, and undisturbed {want:.10f}"
            grader.fail(fact, hint="something is not saved")
        before = step
    if before != STEPS - 1:
        grader.fail(f"the last step is {before} and not {STEPS - 1}", hint="steps left out")


def _reports(grader: TrainingGrader) -> None:
    training = grader.training(2)
    speed, tokens = training.speed, STEPS * BATCH * CONTEXT
    if not isinstance(speed, dict):
        grader.fail(f"there is no {SPEED} with a dict in the folder", hint="no report")
    for key in KEYS:
        value = speed.get(key)
        numbers = value if key == "tokens_of_each_rank" and isinstance(value, list) else [value]
        if not all(isinstance(one, int | float) for one in numbers):
            grader.fail(f"{key} is {value!r} in {SPEED}", hint="no report")
    each = speed["tokens_of_each_rank"]
    if speed["ranks"] != 2 or speed["tokens"] != tokens:
        said = f"{SPEED} says {speed['tokens']:,} tokens on {count(speed['ranks'], 'rank')}"
        grader.fail(f"{said}, where the training has {tokens:,}", hint="not all tokens")
    if each != [tokens / 2] * 2:
        mistake = "the whole batch" if each == [tokens] * 2 else "not all tokens"
        grader.fail(f"the ranks trained on {each} tokens of {tokens:,}", hint=mistake)
    seconds, waited = speed["seconds"], speed["communication_seconds"]
    if not 0 < waited < seconds <= training.seconds:
        said = f"it says {seconds:.3g} s, {waited:.3g} s of them communication"
        known = f"its processes ran for {training.seconds:.3g} s"
        grader.fail(f"{said}, and {known}", hint="no such times")
    for key, want in {
        "tokens_per_second": tokens / seconds,
        "communication_share": waited / seconds,
    }.items():
        if not abs(speed[key] - want) <= 0.01 * want:
            fact = f"{key} is {speed[key]:.4g}, but by the other numbers {want:.4g}"
            grader.fail(fact, hint="sums disagree")


project(
    "P1",
    "program",
    {
        "runs on 2 ranks of torchrun": lambda grader: grader.training(2),
        "equal losses on 1, 2 and 4 ranks": _equal,
        "survives three kills": _survives,
        "reports its speed": _reports,
    },
    graded_by=TrainingGrader,
)
