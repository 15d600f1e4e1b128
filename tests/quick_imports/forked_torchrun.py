"""The ranks of a torchrun agent are forked from it, which has imported PyTorch.

torchrun starts a new Python for each rank, and each imports PyTorch for 1.5 s of CPU time. It does
so in a test of tests/lessons/test_every_lesson.py, and wherever it may restart ranks: in notebook
10 and in tests/test_torchrun.py.
"""

from __future__ import annotations

import atexit
import builtins
import importlib
import io
import os
import runpy
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import NoReturn

# What the agent imports for all its ranks, by a word in what they run.
PRELOAD = {
    "ddp_kit": "ddp_kit.pool.rank.torchrun_worker",
    "DistributedDataParallel": "torch._dynamo",
    "distributed.checkpoint": "torch.distributed.checkpoint.state_dict",
}


def install() -> None:
    """Let this process fork its ranks if it is an agent of torchrun.

    An agent that is to restart its ranks starts them as always: a test that kills one finds it by
    the variables that its process was started with, and a fork has those of the agent.
    """
    command = sys.orig_argv[1:]
    is_agent = command[:2] == ["-m", "torch.distributed.run"]
    restarts = "--max-restarts" in command and command[command.index("--max-restarts") + 1]
    if is_agent and restarts in (False, "0"):
        subprocess.Popen = Fork  # which the agent has not imported yet


class Fork(subprocess.Popen):
    """A rank, `python -u script` or `python -u -m module`, as a fork of this process."""

    def _execute_child(self, args, executable, preexec, close, keep, folder, env, *rest):
        if list(args[:2]) != [sys.executable, "-u"]:
            more = executable, preexec, close, keep, folder, env, *rest
            return super()._execute_child(args, *more)
        command = list(args[2:])
        _preload(command)
        files = {1: rest[6], 2: rest[8]}  # where to print; -1: where this process does
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self.pid = os.fork()
        if self.pid == 0:
            _become_rank(command, env, files, blocked)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        self._child_created = True


def _preload(command: list[str]) -> None:
    text = " ".join(command)
    if command[0] != "-m":
        with suppress(OSError):  # the rank will say so
            text += Path(command[0]).read_text("utf-8")
    for word, module in PRELOAD.items():
        if word in text:
            with suppress(ImportError):  # the kit, in a test of what runs without it
                importlib.import_module(module)


def _become_rank(command: list[str], env: dict, files: dict[int, int], blocked: set) -> NoReturn:
    """Run a command as a new Python would, in a fork."""
    code = 1
    try:
        os.setsid()
        _leave_agent(files)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        os.environ.clear()
        os.environ.update(env)
        sys.modules["torch"].set_num_threads(int(env["OMP_NUM_THREADS"]))
        code = _exit_code(command)
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        os._exit(code)


def _leave_agent(files: dict[int, int]) -> None:
    """Undo what the agent has set up in this process: signals, functions to call, open files."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)) and number != signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit._clear()
    for number, file in files.items():
        if file != -1:
            os.dup2(file, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    for number, name in (1, "stdout"), (2, "stderr"):
        stream = getattr(sys, name)
        how = {"encoding": stream.encoding, "errors": stream.errors, "write_through": True}
        stream = io.TextIOWrapper(io.FileIO(number, "w", closefd=False), **how)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _exit_code(command: list[str]) -> int:
    """Run a script or `-m` a module; return the exit code."""
    sys.modules["__main__"] = main = ModuleType("__main__")
    main.__builtins__ = builtins
    try:
        if command[0] == "-m":
            sys.argv, sys.path[0] = command[1:], os.getcwd()
            runpy._run_module_as_main(command[1])
        else:
            main.__file__ = script = os.path.abspath(command[0])
            sys.argv, sys.path[0] = command, os.path.dirname(script)
            exec(compile(Path(script).read_bytes(), script, "exec"), main.__dict__)
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return leaving.code or 0
        print(leaving.code, file=sys.stderr)
        return 1
    except BaseException as error:
        error.__traceback__ = error.__traceback__.tb_next
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0
