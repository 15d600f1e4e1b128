"""What a run may change in its rank's process, how it is restored, and what it has imported."""

from __future__ import annotations

import _thread
import builtins
import functools
import logging
import os
import random
import socket
import sys
import threading
import time
import types
import weakref
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from operator import itemgetter
from typing import NoReturn, TextIO

import torch
import torch.distributed as dist

from ddp_kit import backends
from ddp_kit.pool.rank import displayed
from ddp_kit.pool.wire.log_settings import LogSettings, PrintingHandler
from ddp_kit.pool.wire.messages import (
    RANK_MARK,
    Environment,
    FileStamp,
    JoinGroup,
    file_stamp,
    undecoded_variables,
)
from ddp_kit.trace import is_own, own_frame
from ddp_kit.trace.rank import recorder
from ddp_kit.trace.rank.posted import own_line


class State:
    """The process as the first run finds it."""

    def __init__(self) -> None:
        watch_threads()
        self._streams = {"stdout": sys.stdout, "stderr": sys.stderr}
        self._output = os.dup(1)
        self._output_file = _file_of(1)
        self._functions = _watched()
        self._objects = os.environ, sys.path, sys.argv
        self._log = logging.root
        self._own_handlers = self._log_handlers = list(self._log.handlers)
        self._log_level = self._log.level
        self._logs: LogSettings | None = None  # the notebook's, as they were taken over last
        self._own_levels: dict[str, int] = {}  # of loggers whose level the notebook has set
        # The pool finds what a rank has started by this variable.
        mark = {RANK_MARK: os.environ[RANK_MARK]} if RANK_MARK in os.environ else {}
        self._own_environment = mark | backends.LOOPBACK_ENVIRONMENT
        self._restored: tuple[JoinGroup, Environment, dict] | None = None  # and the result
        self._threads = functools.cache(backends.threads_per_rank)  # by world size
        self._dtype = torch.get_default_dtype()
        self._seed = torch.initial_seed()

    def put_back(self) -> list[str]:
        """Undo at once what would break the kit's own code after a worker.

        Return the names of functions that were replaced: other modules may hold replacements, too.
        """
        replaced: list[str] = []
        for functions in self._functions:
            replaced += functions.put_back()
        os.environ, sys.path, sys.argv = self._objects
        return replaced

    def restore(self, joined: JoinGroup, environment: Environment) -> None:
        """Undo what earlier runs have changed, and take over the notebook's environment."""
        for descriptor in (1, 2):
            if _file_of(descriptor) != self._output_file:
                os.dup2(self._output, descriptor)
        self._restore_streams()
        builtins.input = sys.breakpointhook = _refuse_input
        sys.argv[:] = environment.argv
        # For the names of the next worker; processes that it spawns know them by the second one.
        sys.modules["__main__"] = sys.modules["__mp_main__"] = types.ModuleType("__main__")
        if environment.logs is not self._logs:
            self._take_over(environment.logs)
        if environment.in_notebook:
            displayed.restore()
        logging.root, self._log.handlers = self._log, list(self._log_handlers)
        if self._log.level != self._log_level:  # the setter empties a cache
            self._log.setLevel(self._log_level)
        self._restore_variables(joined, environment)
        socket.setdefaulttimeout(None)
        sys.path[:] = environment.path
        os.chdir(environment.folder)
        backends.take_device(joined.backend, joined.rank)
        # Asking first, because each of these setters takes longer than all the questions.
        if torch.get_num_threads() != (threads := self._threads(joined.world_size)):
            torch.set_num_threads(threads)
        if torch.get_default_dtype() is not self._dtype:
            torch.set_default_dtype(self._dtype)
        torch.set_default_device(None)
        if not torch.is_grad_enabled():
            torch.set_grad_enabled(True)
        torch.set_printoptions(profile="default")
        if torch.are_deterministic_algorithms_enabled():  # the setter loads a compiler
            torch.use_deterministic_algorithms(False)
        # Each run begins with the seed of this process, as the first one did.
        torch.default_generator.manual_seed(self._seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(self._seed)
        # Python's and NumPy's are seeded from the system. A number takes half the time of none.
        random.seed(int.from_bytes(os.urandom(8), "little"))
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed()

    def _take_over(self, logs: LogSettings) -> None:
        """Configure logging as in the notebook, as far as that prints."""
        self._logs, self._log_level = logs, logs.level
        self._log_handlers = [*self._own_handlers, *map(PrintingHandler, logs.handlers)]
        for name in self._own_levels.keys() - logs.levels.keys():
            logging.getLogger(name).setLevel(self._own_levels.pop(name))
        for name, level in logs.levels.items():
            logger = logging.getLogger(name)
            self._own_levels.setdefault(name, logger.level)
            logger.setLevel(level)

    def _restore_streams(self) -> None:
        for number, (name, stream) in enumerate(self._streams.items(), start=1):
            if not _is_open(stream):
                stream = self._streams[name] = open_stream(number)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)

    def _restore_variables(self, joined: JoinGroup, environment: Environment) -> None:
        group, source, variables = self._restored or (None, None, {})
        now = undecoded_variables()
        if group is joined and source is environment and now == variables:
            return
        wanted = environment.variables | self._own_environment
        wanted |= rank_environment(joined.rank, joined.world_size)
        for name in os.environ.keys() - wanted.keys():
            del os.environ[name]
        for name, value in wanted.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        self._restored = None if now is None else (joined, environment, dict(now))


# Functions of these modules that most programs use, or the kit itself.
_WATCHED = {
    os: "chdir close dup dup2 fork fstat getcwd getenv getpid kill listdir open pipe read stat "
    "urandom write",
    random: "choice choices gauss normalvariate randint random randrange sample seed shuffle "
    "uniform",
    socket: "getdefaulttimeout setdefaulttimeout",
    time: "monotonic perf_counter sleep time",
    torch: "allclose arange are_deterministic_algorithms_enabled cat default_generator empty "
    "empty_like equal eye from_numpy full full_like get_default_dtype get_num_threads initial_seed "
    "is_grad_enabled linspace load manual_seed matmul mean mm no_grad ones ones_like rand randint "
    "randn randperm save set_default_device set_default_dtype set_grad_enabled set_num_threads "
    "set_printoptions stack sum tensor use_deterministic_algorithms zeros zeros_like",
    torch.cuda: "is_available is_initialized manual_seed_all set_device",
}


class Functions:
    """Functions of a module, of which a worker's replacements must not last."""

    def __init__(self, module: types.ModuleType, names: Sequence[str]) -> None:
        self._prefix = "" if module is builtins else f"{module.__name__}."
        self._there, self._get = vars(module), itemgetter(*names)
        self._originals = {name: self._there[name] for name in names}
        self._values = self._get(self._there)

    def put_back(self) -> list[str]:
        """Put back the functions that were replaced; return their names."""
        if self._are_unchanged():  # nearly always
            return []
        there, originals, replaced = self._there, self._originals, {}
        for name in originals:  # without a function of Python's: it may be among them
            value = there.get(name)
            if value is not originals[name]:
                there[name], replaced[name] = originals[name], value
        for name, value in list(replaced.items()):
            if _is_by_library(name, value):
                there[name] = originals[name] = replaced.pop(name)
        self._values = self._get(there)
        return [f"{self._prefix}{name}" for name in replaced]

    def _are_unchanged(self) -> bool:
        try:
            return self._get(self._there) == self._values
        except Exception:  # one is gone, or cannot be compared
            return False


def _watched() -> list[Functions]:
    """Return the functions that are watched; Python's own first, which the others need."""
    plain = types.BuiltinFunctionType, type
    own = [name for name, value in vars(builtins).items() if isinstance(value, plain)]
    own = [name for name in own if name[0].islower() and name != "input"]  # State replaces that
    c10d = [name for name, value in vars(dist).items() if type(value) is types.FunctionType]
    c10d = [name for name in c10d if getattr(dist, name).__module__ == dist.all_reduce.__module__]
    others = {module: names.split() for module, names in _WATCHED.items()}
    return [Functions(*pair) for pair in ({builtins: own, dist: c10d} | others).items()]


def _is_by_library(name: str, value: object) -> bool:
    """Return whether a library has wrapped a function, as `torch.compile` does."""
    if not isinstance(value, types.FunctionType) or value.__name__ != name:
        return False
    while isinstance(value, types.FunctionType):
        if is_own(value.__code__.co_filename):
            return False
        value = getattr(value, "__wrapped__", None)
    return True


def open_stream(descriptor: int) -> TextIO:
    """Return a stream for what this process prints; closing it leaves the descriptor open."""
    return open(
        descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
    )


def _is_open(stream: TextIO) -> bool:
    try:
        return not stream.closed
    except ValueError:  # its buffer was detached
        return False


def _refuse_input(*_args: object, **_kwargs: object) -> NoReturn:
    raise RuntimeError(
        "input() and debuggers do not work in a rank; ask in the notebook, and pass the answer to "
        "the ranks as an argument of kit.run or with %ranks push"
    )


_learners: list[weakref.ref[threading.Thread]] = []  # started by own code
_others = 0  # threads that were there before any of the learner's code


def watch_threads() -> None:
    """Record from now on which threads the learner's code starts, whatever they call."""
    global _others
    _others = _thread._count()
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


def thread_left_running(everywhere: bool) -> str | None:
    """Return the name of a thread that the learner's code started, or that runs it.

    everywhere: look at threads that C++ has started, too, which takes much longer.

    Libraries' own threads, which wait for work or watch something, may stay. None: there is no
    such thread.
    """
    for reference in _learners:
        if (thread := reference()) and thread.is_alive():
            return thread.name
    _learners.clear()
    if (
        not everywhere and _thread._count() <= _others
    ):  # nearly always; to look at frames takes much longer
        return None
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        if ident != threading.main_thread().ident and own_frame(frame):
            return names.get(ident, "without a name")
    return None


def rank_environment(rank: int, world_size: int) -> dict[str, str]:
    """Return the variables that torchrun would set for a process."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
    }


def _file_of(descriptor: int) -> tuple[int, int] | None:
    """Return what distinguishes an open file from all others; None if it was closed."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


class Imports:
    """Which of the learner's files this process has imported: the pool restarts it if one changes.

    Libraries do not count, because nobody edits them in a lesson.
    """

    def __init__(self) -> None:
        self._new: dict[str, FileStamp] = {}
        for module in list(sys.modules.values()):
            self._record(getattr(module, "__file__", None))
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
        """Return what was imported since the last call."""
        new, self._new = self._new, {}
        return new
