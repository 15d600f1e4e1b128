"""What a run may change in its rank's process, and how that is undone before the next run.

It looks at functions in the modules and classes of `_OWNERS`, and at settings in `_OF_TORCH` and
`_OF_PYTHON`; what else a worker changes stays as long as the process. A thread that is left running
costs the rank a fresh process, and a line says so.
"""

from __future__ import annotations

import builtins
import faulthandler
import gc
import logging
import os
import random
import signal
import socket
import sys
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.machinery import SourceFileLoader
from operator import is_
from typing import Any, NamedTuple, NoReturn, TextIO

import numpy
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.backends import cudnn

from ddp_kit import backends
from ddp_kit.pool.rank import displayed
from ddp_kit.pool.wire.messages import (
    RANK_MARK,
    Environment,
    FileStamp,
    JoinGroup,
    file_stamp,
)
from ddp_kit.trace import is_own, own_frame
from ddp_kit.trace.rank import recorder
from ddp_kit.trace.rank.recorder import own_line


class State:
    """The process as the first run finds it."""

    def __init__(self) -> None:
        watch_threads()
        builtins.input = sys.breakpointhook = _refuse_input
        self._output = os.dup(1)
        self._objects = os.environ, sys.path, sys.argv
        self._log_handlers, self._log_level = list(logging.root.handlers), logging.root.level
        # The pool finds what a rank has started by this variable.
        mark = {RANK_MARK: os.environ[RANK_MARK]} if RANK_MARK in os.environ else {}
        self._own_environment = mark | backends.LOOPBACK_ENVIRONMENT
        self._seed = torch.initial_seed()
        self._functions = [Functions(owner) for owner in _OWNERS]
        self._settings = [(setting, setting.read()) for setting in (*_OF_TORCH, *_OF_PYTHON)]

    def put_back(self, is_cell: bool) -> None:
        """Undo at once what would break the kit's own code after a worker, and settings.

        is_cell: what was set outside PyTorch is for the next cell, too.
        """
        names = [name for functions in self._functions for name in functions.put_back()]
        os.environ, sys.path, sys.argv = self._objects
        torch.set_default_device(None)
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for setting, before in self._settings[: len(_OF_TORCH) if is_cell else None]:
                with suppress(RuntimeError):
                    if setting.read() != before:
                        setting.write(before)
        if names and is_cell:
            replaced = f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]
            print(f"the next cell has the original {replaced} again")

    def restore(self, joined: JoinGroup, environment: Environment) -> None:
        """Undo what earlier runs have changed, and take over the notebook's environment."""
        for number in (1, 2):
            os.dup2(self._output, number)
        print_to_descriptors()  # the streams before may be closed
        sys.argv[:] = environment.argv
        # For the names of the next worker; processes that it spawns know them by the second one.
        sys.modules["__main__"] = sys.modules["__mp_main__"] = types.ModuleType("__main__")
        if environment.in_notebook:
            displayed.restore()
        logging.root.handlers = list(self._log_handlers)
        if logging.root.level != self._log_level:  # the setter empties a cache
            logging.root.setLevel(self._log_level)
        variables = environment.variables | self._own_environment
        rank, world_size = str(joined.rank), str(joined.world_size)
        variables |= {"RANK": rank, "LOCAL_RANK": rank}  # as torchrun would set them
        variables |= {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        if os.environ != variables:
            os.environ.clear()
            os.environ.update(variables)
        socket.setdefaulttimeout(None)
        sys.path[:] = environment.path
        os.chdir(environment.folder)
        backends.take_device(joined.backend, joined.rank)
        backends.share_cores(joined.world_size)
        torch.set_printoptions(profile="default")
        # Each run begins with the seed of this process, as the first one did.
        torch.default_generator.manual_seed(self._seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(self._seed)
        random.seed()  # Python's and NumPy's are seeded from the system
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed(random.getrandbits(32))


def print_to_descriptors() -> None:
    """Let Python print to file descriptors 1 and 2, which stay open if a worker closes a stream."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream: TextIO = open(  # noqa: SIM115 - it is open as long as the process lives
            descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _refuse_input(*_args: object, **_kwargs: object) -> NoReturn:
    raise RuntimeError(
        "input() and debuggers do not work in a rank; ask in the notebook, and pass the answer to "
        "the ranks as an argument of kit.run or with %ranks push"
    )


# --- functions that a worker has replaced ----------------------------------------------------

_OWNERS = (builtins, dist, os, time, random, torch)
_OWNERS += (torch.nn.functional, torch.nn.Module, torch.Tensor)


class Functions:
    """The functions of a module or class, of which a worker's replacements must not last."""

    def __init__(self, owner: types.ModuleType | type) -> None:
        self._owner, self._there = owner, vars(owner)
        self._originals = {
            # Some classes are settings: `set_default_dtype` replaces `torch.Storage`.
            name: value
            for name, value in self._there.items()
            if callable(value) and not isinstance(value, type)
        }

    def put_back(self) -> list[str]:
        """Put back the functions that were replaced; return their names."""
        if all(map(is_, self._originals.values(), map(self._there.get, self._originals))):
            return []  # nearly always
        replaced = []
        for name, original in self._originals.items():
            value = self._there.get(name)
            if value is not original and not _is_wrapped(name, value):
                setattr(self._owner, name, original)
                replaced.append(name)
        prefix = "" if self._owner is builtins else f"{self._owner.__name__}."
        return [f"{prefix}{name}" for name in replaced]


def _is_wrapped(name: str, value: object) -> bool:
    """Return whether a library has wrapped a function there, as `torch.compile` does."""
    names = getattr(value, "__name__", ""), getattr(value, "__qualname__", "")
    return (names[0] == name or "<locals>" in names[1]) and _is_by_library(value)


def _is_by_library(function: object) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and not is_own(code.co_filename)


# --- settings that can be asked for ----------------------------------------------------------


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGCHLD)
_SIGNALS += (signal.SIGUSR1, signal.SIGUSR2)


def _handlers() -> dict[signal.Signals, Any]:
    """Return the handlers of signals, without those that libraries have set, which may stay."""
    found = {number: signal.getsignal(number) for number in _SIGNALS}
    return {n: each for n, each in found.items() if each and not _is_by_library(each)}


def _set_handlers(handlers: dict[signal.Signals, Any]) -> None:
    now = _handlers()
    for number in handlers.keys() | now.keys():
        before = handlers.get(number, signal.SIG_DFL)
        if now.get(number, signal.SIG_DFL) is not before:
            signal.signal(number, before)


class Setting(NamedTuple):
    """A setting of this process: how to read and how to write it."""

    read: Callable[[], Any]
    write: Callable[[Any], object]


def _attribute(owner: Any, name: str) -> Setting:
    return Setting(partial(getattr, owner, name), partial(setattr, owner, name))


_OF_TORCH = [
    Setting(torch.get_default_dtype, torch.set_default_dtype),
    Setting(torch.is_grad_enabled, torch.set_grad_enabled),
    Setting(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    Setting(torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    Setting(torch.is_warn_always_enabled, torch.set_warn_always),
    Setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    _attribute(cudnn, "benchmark"),
    _attribute(cudnn, "deterministic"),
    Setting(mp.get_sharing_strategy, mp.set_sharing_strategy),
]
_OF_PYTHON = [
    Setting(_handlers, _set_handlers),
    Setting(sys.gettrace, sys.settrace),
    Setting(sys.getprofile, sys.setprofile),
    Setting(sys.getrecursionlimit, sys.setrecursionlimit),
    Setting(gc.isenabled, lambda enabled: gc.enable() if enabled else gc.disable()),
    Setting(mp.get_start_method, partial(mp.set_start_method, force=True)),
    Setting(numpy.geterr, lambda errors: numpy.seterr(**errors)),
    Setting(numpy.get_printoptions, lambda options: numpy.set_printoptions(**options)),
    _attribute(logging.root.manager, "disable"),
]
if hasattr(os, "sched_setaffinity"):
    cores = Setting(partial(os.sched_getaffinity, 0), partial(os.sched_setaffinity, 0))
    _OF_PYTHON.append(cores)


# --- threads that a worker has left running --------------------------------------------------

_learners: list[weakref.ref[threading.Thread]] = []  # started by own code


def watch_threads() -> None:
    """Record from now on which threads the learner's code starts, whatever they call."""
    start = threading.Thread.start

    def start_and_record(thread: threading.Thread) -> None:
        caller = sys._getframe(1)
        if is_own(caller.f_code.co_filename):
            _learners.append(weakref.ref(thread))
        now = recorder.current
        if now is not None:
            now.lines[thread] = own_line(caller)
        start(thread)
        if now is not None:
            now.note_thread(thread)

    threading.Thread.start = start_and_record  # type: ignore[method-assign]


def thread_left_running() -> str | None:
    """Return the name of a thread that the learner's code started, or that runs it.

    Libraries' own threads, which wait for work or watch something, may stay. None: there is no
    such thread.
    """
    for reference in _learners:
        if (thread := reference()) and thread.is_alive():
            return thread.name
    _learners.clear()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        if ident != threading.main_thread().ident and own_frame(frame):
            return names.get(ident, "without a name")
    return None


# --- the learner's files ---------------------------------------------------------------------


class Imports:
    """Which of the learner's files this process has imported: the pool restarts it if one changes.

    Libraries do not count, because nobody edits them in a lesson.
    """

    def __init__(self) -> None:
        self._new: dict[str, FileStamp] = {}
        for loaded in list(sys.modules.values()):
            self._record(getattr(loaded, "__file__", None))
        path_stats = SourceFileLoader.path_stats

        def path_stats_of_learner(loader: SourceFileLoader, path: str) -> dict:
            if self._record(path):
                # Bytecode is matched with its source by whole seconds and size. Without stats
                # Python compiles the source, as it must after two edits in one second.
                raise OSError("the bytecode of a learner's module is not used")
            return path_stats(loader, path)

        SourceFileLoader.path_stats = path_stats_of_learner  # type: ignore[method-assign]

    def _record(self, file: str | None) -> bool:
        stamp = file_stamp(file) if file and is_own(file) else None
        if file and stamp:
            self._new[file] = stamp
        return stamp is not None

    def take(self) -> dict[str, FileStamp]:
        new, self._new = self._new, {}
        return new
