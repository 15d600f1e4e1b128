"""Real Jupyter kernels for the tests: what a notebook's front end would see of a cell."""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from ipykernel.kernelspec import get_kernel_dict
from jupyter_client import KernelManager
from jupyter_client.kernelspec import KernelSpec
from processes import BOUND, wait_until, wait_until_calm

import ddp_kit as kit

ROOT = Path(kit.__file__).resolve().parents[1]

# With PYTEST_CURRENT_TEST set, ipykernel does not show what is written to its file descriptors 1
# and 2; in JupyterLab it does. PYTHONPATH: the kernel imports the same kit as this process.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
ENVIRONMENT["DDP_KIT_WARM"] = "0"  # only tests/test_warm_start.py starts kernels that warm up
ENVIRONMENT["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.getenv("PYTHONPATH")])])

# See quick_imports/forked_spawn.py and forked_torchrun.py. `make spawned` runs without.
FORKS = sys.platform == "linux" and "DDP_KIT_SPAWNED" not in os.environ
FORKED = {"DDP_KIT_FORKED_SPAWN": ""} if FORKS else {}

# For programs that are not to see what else this process has in its environment.
QUICK_START = FORKED | {"PYTHONPATH": str(Path(__file__).parent / "quick_imports")}
# What the kit, a launcher or a scheduler may have set, and a learner's shell has not.
UNSET = re.compile(r"MASTER_|RANK$|LOCAL_RANK$|WORLD_SIZE$|GLOO_|DDP_KIT|OMP_|PYTHON|SLURM")


def learners_shell(**more: str) -> dict[str, str]:
    """Return the environment of a learner's shell, and what is added to it."""
    return {name: value for name, value in os.environ.items() if not UNSET.match(name)} | more


SET_UP = """
import ctypes, os, pathlib, time
import torch, torch.distributed as dist
import ddp_kit as kit

def pid(rank, world_size):
    return os.getpid()
"""


class ThisPython(KernelManager):
    """Starts the kernel of this interpreter, whatever else is installed as python3."""

    @property
    def kernel_spec(self) -> KernelSpec:
        return KernelSpec(**get_kernel_dict(extra_arguments=["--log-level=ERROR"]))


class Cell:
    """One cell that was sent to a kernel, and what the front end has received from it so far."""

    def __init__(self, client, code: str, allow_stdin: bool = True) -> None:
        self._client = client
        self._code = code
        self._id = client.execute(code, allow_stdin=allow_stdin)
        self.ended = False
        self.messages: list[tuple[str, dict]] = []

    def read_until(self, seen: Callable[[Cell], bool], seconds: float = 300) -> Cell:
        """Read messages until `seen(self)` or the end of the cell; fail after `seconds`."""
        deadline = time.monotonic() + seconds
        while not (self.ended or seen(self)):
            try:
                message = self._client.get_iopub_msg(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"after {seconds} s still waiting for: {self._code}") from None
            if message["parent_header"].get("msg_id") != self._id:
                continue
            content = message["content"]
            self._add(message["msg_type"], content)
            self.ended = content.get("execution_state") == "idle"
        return self

    def _add(self, kind: str, content: dict) -> None:
        """Join what a stream sends in a row, as notebooks do: a message may end within a line."""
        if kind == "stream" and self.messages:
            last_kind, last = self.messages[-1]
            if last_kind == kind and last["name"] == content["name"]:
                last["text"] += content["text"]
                return
        self.messages.append((kind, content))

    def asked(self, seconds: float = 300) -> str:
        """Wait until the cell asks its reader for a line; return the prompt."""
        return self._client.get_stdin_msg(timeout=seconds)["content"]["prompt"]

    def finish(self, seconds: float = 300) -> Cell:
        return self.read_until(lambda cell: False, seconds)

    def contents(self, *kinds: str) -> list[dict]:
        return [content for kind, content in self.messages if kind in kinds]

    def stream(self, name: str) -> str:
        return "".join(c["text"] for c in self.contents("stream") if c["name"] == name)

    @property
    def stdout(self) -> str:
        return self.stream("stdout")

    @property
    def stderr(self) -> str:
        return self.stream("stderr")

    @property
    def error(self) -> dict | None:
        return next(iter(self.contents("error")), None)

    @property
    def rendered(self) -> str:
        """The traceback as a reader sees it, without colours."""
        return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(self.error["traceback"]))


class Kernel:
    """A kernel of this Python, as JupyterLab starts it: a session and process group of its own."""

    def __init__(self, folder: Path, set_up: str = SET_UP, **variables: str) -> None:
        self.set_up, environment = set_up, ENVIRONMENT | variables
        self.manager = ThisPython()
        self.manager.start_kernel(cwd=str(folder), env=environment)
        self.client = self.manager.client()
        try:
            self.client.start_channels()
            self.get_ready()
        except BaseException:
            self.end()
            raise

    def get_ready(self) -> None:
        self.process = psutil.Process(self.manager.provisioner.pid)
        self.client.wait_for_ready(timeout=300)
        self.run(self.set_up)

    def send(self, code: str, allow_stdin: bool = True) -> Cell:
        return Cell(self.client, code, allow_stdin)

    def run(self, code: str) -> Cell:
        """Run a cell that must neither raise nor write to stderr."""
        cell = self.send(code).finish()
        assert cell.error is None, cell.rendered
        assert cell.stderr == ""
        return cell

    def value(self, code: str) -> str:
        """Run a cell and return how the notebook shows its last expression."""
        return self.run(code).contents("execute_result")[0]["data"]["text/plain"]

    def raises(self, code: str) -> Cell:
        cell = self.send(code).finish()
        assert cell.error is not None, f"did not raise: {code}"
        return cell

    def ranks(self, world_size: int) -> list[psutil.Process]:
        """Return the processes of `world_size` ranks, after starting those that are missing."""
        pids = self.value(f"list(kit.run(pid, world_size={world_size}))")
        return [psutil.Process(int(number)) for number in re.findall(r"\d+", pids)]

    def end(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture
def kernel(tmp_path) -> Iterator[Kernel]:
    """A kernel of its own for a test that breaks it."""
    own = Kernel(tmp_path)
    try:
        yield own
    finally:
        own.end()


@pytest.fixture
def forked_spawn(monkeypatch) -> None:
    """Let the kernel of a test that is not about processes fork its ranks."""
    for name, value in FORKED.items():
        monkeypatch.setitem(ENVIRONMENT, name, value)


@pytest.fixture
def forked_torchrun(monkeypatch) -> None:
    """Let the agents of torchrun that a test starts fork their ranks."""
    for name, value in FORKED.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Iterator[Kernel]:
    """One kernel with four warm, forked ranks. Its tests let all ranks live, so that none is
    replaced: a process that a test starts and leaves fails that test.
    """
    kernel = Kernel(tmp_path_factory.mktemp("notebook"), **FORKED)
    try:
        kernel.ranks(4)
        yield kernel
    finally:
        kernel.end()


STUCK = """
kit.settings.RUN_JUDGED_AFTER = kit.settings.RANKS_JUDGED_AFTER = 600.0  # after the test

def say_begun(rank, folder):
    pathlib.Path(folder, str(rank)).touch()

def recv(rank, world_size, folder):
    say_begun(rank, folder)
    dist.recv(torch.zeros(1), src=1 - rank)

def loop(rank, world_size, folder):
    say_begun(rank, folder)
    while True:
        pass

def sleep(rank, world_size, folder):
    say_begun(rank, folder)
    time.sleep(600)

def frozen(rank, world_size, folder):
    say_begun(rank, folder)
    if rank == 0:
        dist.recv(torch.zeros(1), src=1)
    else:
        ctypes.PyDLL(None).sleep(600)  # keeps the GIL: no thread of this rank runs Python

def flood(rank, world_size, folder):
    say_begun(rank, folder)
    while True:
        print("x" * 99)
"""


def start_stuck(kernel: Kernel, worker: str, folder: Path) -> tuple[Cell, list[psutil.Process]]:
    """Send a cell that never ends, and return when both of its ranks are running it."""
    ranks = kernel.ranks(2)
    folder.mkdir()
    cell = kernel.send(f"kit.run({worker}, {str(folder)!r}, world_size=2)")
    wait_until(lambda: len(list(folder.iterdir())) == 2, BOUND, f"both ranks are in {worker}")
    if worker in ("recv", "sleep", "frozen"):
        wait_until_calm(ranks)
    return cell, ranks


def interrupt(kernel: Kernel, cell: Cell, during: str) -> None:
    kernel.manager.interrupt_kernel()
    cell.finish(BOUND)
    assert cell.error is not None, f"{during}: the cell ended as if nobody had interrupted"
    assert cell.error["ename"] == "KeyboardInterrupt", during
    assert cell.stderr == "", during


def call(folder: Path, *arguments: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
