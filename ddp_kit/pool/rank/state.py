"""What a run may change in its rank's process, and how that is undone before the next run.

Most of it is put back. What cannot be costs the rank a fresh process, and a line says so. Functions
are looked at in the modules and classes of `_OWNERS` only.
"""

from __future__ import annotations

import builtins
import faulthandler
import gc
import logging
import multiprocessing
import os
import pickle
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
from importlib.machinery import SourceFileLoader
from operator import is_
from typing import Any, NamedTuple, NoReturn, TextIO

import numpy
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.modules import module
from torch.optim import optimizer

from ddp_kit import backends, torch_internals
from ddp_kit.pool.rank import displayed
from ddp_kit.pool.wire.messages import (
    RANK_MARK,
    Environment,
    FileStamp,
    JoinGroup,
    LogSettings,
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
        self._output, self._streams = os.dup(1), _streams()
        self._objects = os.environ, sys.path, sys.argv
        self._log = logging.root
        self._own_handlers = self._log_handlers = list(self._log.handlers)
        self._log_level = self._log.level
        self._logs: LogSettings | None = None  # the notebook's, as they were taken over last
        self._own_levels: dict[str, int] = {}  # of loggers whose level the notebook has set
        # The pool finds what a rank has started by this variable.
        mark = {RANK_MARK: os.environ[RANK_MARK]} if RANK_MARK in os.environ else {}
        self._own_environment = mark | backends.LOOPBACK_ENVIRONMENT
        self._seed = torch.initial_seed()
        self.settings = Settings()

    def put_back(self, is_cell: bool) -> str | None:
        """Undo at once what would break the kit's own code after a worker.

        is_cell: the process stays in any case, because it has the names of cells. Return why it
        cannot serve another run; None: it can.
        """
        names = self.settings.put_back_functions()
        os.environ, sys.path, sys.argv = self._objects
        done = self.settings.put_back(is_cell)
        if not names:
            return f"the worker {done}" if done and not is_cell else None
        replaced = f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]
        if not is_cell:
            return f"the worker replaced {replaced}"
        with suppress(Exception):  # the cell may have closed sys.stdout
            print(f"the next cell has the original {replaced} again")
        return None

    def restore(self, joined: JoinGroup, environment: Environment) -> None:
        """Undo what earlier runs have changed, and take over the notebook's environment."""
        if _streams() != self._streams:
            for number in (1, 2):
                os.dup2(self._output, number)
            print_to_descriptors()  # the streams before may be closed
            self._streams = _streams()
        sys.argv[:] = environment.argv
        # For the names of the next worker; processes that it spawns know them by the second one.
        sys.modules["__main__"] = sys.modules["__mp_main__"] = types.ModuleType("__main__")
        if environment.logs != self._logs:
            self._take_over(environment.logs)
        if environment.in_notebook:
            displayed.restore()
        logging.root, self._log.handlers = self._log, list(self._log_handlers)
        if self._log.level != self._log_level:  # the setter empties a cache
            self._log.setLevel(self._log_level)
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

    def _take_over(self, logs: LogSettings) -> None:
        """Configure logging as in the notebook, as far as that prints."""
        self._logs, self._log_level = logs, logs.level
        self._log_handlers = [*self._own_handlers, *(_PrintingHandler(*h) for h in logs.handlers)]
        for name in self._own_levels.keys() - logs.levels.keys():
            logging.getLogger(name).setLevel(self._own_levels.pop(name))
        for name, level in logs.levels.items():
            logger = logging.getLogger(name)
            self._own_levels.setdefault(name, logger.level)
            logger.setLevel(level)


class _PrintingHandler(logging.StreamHandler):
    """A handler of the notebook, in a rank. It prints to what `sys.stderr` is at the moment."""

    def __init__(self, level: int, formatter: bytes) -> None:
        logging.Handler.__init__(self, level)
        with suppress(Exception):  # its class may be nowhere but in the notebook
            self.setFormatter(pickle.loads(formatter))

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def _streams() -> list[object]:
    """Return what prints of Python and C go through; [] if some of it is closed."""
    streams = [sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__]
    with suppress(Exception):
        files = [os.path.sameopenfile(1, 2), os.fstat(1).st_ino, *(one.closed for one in streams)]
        return streams + files
    return []


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

_OWNERS = (
    *(builtins, dist, os, sys, random, socket, time, threading, torch, torch.cuda),
    *(torch.nn.functional, torch.nn.Module, torch.Tensor),
)


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
        if _all(_map(is_, self._originals.values(), _map(self._there.get, self._originals))):
            return []  # nearly always
        replaced = {}
        for name in self._originals:  # without a function of Python's: it may be among them
            value = self._there.get(name)
            if value is not self._originals[name]:
                _setattr(self._owner, name, self._originals[name])
                replaced[name] = value
        for name, value in list(replaced.items()):
            if _is_by_library(name, value):
                self._originals[name] = replaced.pop(name)
                _setattr(self._owner, name, value)
        prefix = "" if self._owner is builtins else f"{self._owner.__name__}."
        return [f"{prefix}{name}" for name in replaced]


_all, _map, _setattr = all, map, setattr  # a worker may replace them


def _is_by_library(name: str, value: object) -> bool:
    """Return whether a library has wrapped a function, as `torch.compile` does."""
    if not isinstance(value, types.FunctionType):
        return False
    if value.__name__ != name and "<locals>" not in value.__qualname__:
        return False
    while isinstance(value, types.FunctionType):
        if is_own(value.__code__.co_filename):
            return False
        value = getattr(value, "__wrapped__", None)
    return True


# --- settings that can be asked for ----------------------------------------------------------


def _handlers() -> list[Any]:
    """Return the handlers of signals that have names; one that a library has set may stay."""
    found = list(map(signal.getsignal, signal.Signals))
    codes = [getattr(handler, "__code__", None) for handler in found]
    by_library = [code is not None and not is_own(code.co_filename) for code in codes]
    return [h if not skip else signal.SIG_DFL for h, skip in zip(found, by_library, strict=True)]


def _cores() -> object:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None


def _start_method() -> str:
    first = multiprocessing.get_all_start_methods()[0]
    return multiprocessing.get_start_method(allow_none=True) or first


_HOOKS = [
    value
    for owner in (module, optimizer)
    for name, value in vars(owner).items()
    if name.startswith("_global_") and isinstance(value, dict)
]


class Setting(NamedTuple):
    """A setting of this process: what a worker did if it has changed, and how to read it.

    restore: puts a value back that was read, of a tuple each by itself; None: only a fresh process
    has it again.
    """

    done: str
    read: Callable[[], Any]
    restore: Callable[..., object] | None = None


_OF_PYTHON = [
    Setting("set a handler for a signal", _handlers),
    Setting("left a timer running", lambda: [signal.getitimer(n)[0] > 0 for n in range(3)]),
    Setting("blocked a signal", lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    Setting("changed the cores of its process", _cores),
    Setting("set a trace function", lambda: (sys.gettrace(), sys.getprofile())),
    Setting("changed the recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
    Setting("switched gc", gc.isenabled, lambda was: gc.enable() if was else gc.disable()),
    Setting("changed when gc collects", gc.get_threshold, gc.set_threshold),
    Setting("changed the start method", _start_method),
    Setting("changed the sharing strategy", mp.get_sharing_strategy, mp.set_sharing_strategy),
    Setting("changed NumPy's errors", numpy.geterr, lambda was: numpy.seterr(**was)),
    Setting(
        "changed how NumPy prints",
        numpy.get_printoptions,
        lambda was: numpy.set_printoptions(**was),
    ),
    Setting("disabled logging", lambda: logging.Logger.manager.disable, logging.disable),
    Setting("left a hook on all modules or optimizers", lambda: list(map(len, _HOOKS))),
    Setting("changed autocast", lambda: list(map(torch.get_autocast_dtype, ("cpu", "cuda")))),
    Setting("set flush_denormal", lambda: sys.float_info.min / 2 == 0, torch.set_flush_denormal),
    Setting("changed the debug level", dist.get_debug_level, dist.set_debug_level),
    Setting("left rpc open", torch_internals.rpc_is_open),
]


class Settings:
    """The settings of this process, as the run before has left them."""

    def __init__(self) -> None:
        self._functions = [Functions(owner) for owner in _OWNERS]
        self._of_torch = [
            Setting(f"changed torch's {what}", get, put)
            for what, get, put in torch_internals.settings()
        ]
        # What the first run finds, by what a worker does that changes it.
        self._values = {each.done: each.read() for each in self._of_torch}
        self._is_ready = False

    def remember(self) -> None:
        """Let the first run begin with the settings as they are now."""
        if not self._is_ready:
            self._values |= {each.done: each.read() for each in _OF_PYTHON}
            self._is_ready = True

    def put_back_functions(self) -> list[str]:
        """Put back functions that were replaced; return their names: others may hold them, too."""
        return [name for functions in self._functions for name in functions.put_back()]

    def put_back(self, is_cell: bool) -> str | None:
        """Put back the settings; return what was done to one that cannot be put back.

        is_cell: what was set outside PyTorch is for the next cell, too.
        """
        if not self._is_ready:
            return None  # the worker never began
        if torch.are_deterministic_algorithms_enabled():
            torch.use_deterministic_algorithms(False)  # tells the compiler, too
        torch.set_default_device(None)
        faulthandler.cancel_dump_traceback_later()  # nobody can ask whether there is one
        settings = [*self._of_torch, *_OF_PYTHON]
        if not self._changed(settings):
            return None  # nearly always
        for each in self._changed(self._of_torch if is_cell else settings):
            # What cannot be put back costs a fresh process.
            with suppress(Exception), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if each.restore is not None:
                    was = self._values[each.done]
                    each.restore(*was if isinstance(was, tuple) else (was,))
        left = self._changed(settings)  # after all, because some settings set others
        for each in left:
            with suppress(RuntimeError):
                self._values[each.done] = each.read()  # the next run is not to blame for it
        return left[0].done if left else None

    def _changed(self, settings: list[Setting]) -> list[Setting]:
        return [each for each in settings if self._has_changed(each)]

    def _has_changed(self, setting: Setting) -> bool:
        try:
            return setting.read() != self._values[setting.done]
        except RuntimeError:  # two settings contradict each other
            return True


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
