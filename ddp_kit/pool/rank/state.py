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
import types
import weakref
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from typing import NoReturn, TextIO

import torch

from ddp_kit import backends
from ddp_kit.pool.rank import displayed
from ddp_kit.pool.rank.settings import Settings
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
        self._restored: tuple[int, int, dict] | None = None  # for whom, and the result
        self._threads = functools.cache(backends.threads_per_rank)  # by world size
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
            for number, name in enumerate(("stdout", "stderr"), start=1):
                os.dup2(self._output, number)
                stream = open_stream(number)  # the one before may be closed
                setattr(sys, name, stream)
                setattr(sys, f"__{name}__", stream)
            self._streams = _streams()
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
        now = undecoded_variables()
        if now is None or self._restored != (id(joined), id(environment), now):
            wanted = environment.variables | self._own_environment
            wanted |= rank_environment(joined.rank, joined.world_size)
            for name in os.environ.keys() - wanted.keys():
                del os.environ[name]
            for name, value in wanted.items():
                if os.environ.get(name) != value:
                    os.environ[name] = value
            self._restored = id(joined), id(environment), dict(now or {})
        socket.setdefaulttimeout(None)
        sys.path[:] = environment.path
        os.chdir(environment.folder)
        backends.take_device(joined.backend, joined.rank)
        if torch.get_num_threads() != (threads := self._threads(joined.world_size)):
            torch.set_num_threads(threads)  # takes longer than the question
        torch.set_printoptions(profile="default")
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


def _streams() -> list[object]:
    """Return what prints of Python and C go through; [] if some of it is closed."""
    streams = [sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__]
    with suppress(Exception):
        files = [os.path.sameopenfile(1, 2), os.fstat(1).st_ino, *(one.closed for one in streams)]
        return streams + files
    return []


def open_stream(descriptor: int) -> TextIO:
    """Return a stream for what this process prints; closing it leaves the descriptor open."""
    return open(
        descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
    )


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
