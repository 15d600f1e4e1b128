"""What a rank does for its pool: join process groups, call workers, report what came of it."""

from __future__ import annotations

import builtins
import ctypes
import gc
import itertools
import linecache
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch.distributed as dist

# Before there is a group: the defaults of its functions would keep the first one for ever.
import torch.distributed.nn  # noqa: F401

from ddp_kit import backends, torch_internals
from ddp_kit.error_text import RankFailure, text_of
from ddp_kit.pool.rank import displayed
from ddp_kit.pool.rank.import_hooks import instead_of, on_import
from ddp_kit.pool.rank.post_mortem import capture
from ddp_kit.pool.rank.state import Imports, State, thread_left_running
from ddp_kit.pool.wire import pickling
from ddp_kit.pool.wire.messages import (
    Bundle,
    CallWorker,
    Environment,
    Joined,
    JoinGroup,
    KitFailed,
    Raised,
    RankStatus,
    Returned,
)
from ddp_kit.trace import IMPORTING, SERVING, Board, InternTable, describe_line, recording
from ddp_kit.trace.rank import progress

LONGEST_MESSAGE = 10_000  # characters of an exception's text
MOST_LINKED = 16  # causes of an exception and members of a group that are described
# A training run may keep a rank waiting for hours; the pool ends what must end.
GROUP_TIMEOUT = timedelta(days=30)
_IDLE = 0.3  # seconds without a call after which a rank collects garbage
_TWICE = "initialize the default process group twice"  # PyTorch's words
_HAS_GROUP = (
    "The kit has already called init_process_group for this worker: leave that call out. To call "
    "it yourself, use kit.WorkerPool(..., init=False)."
)


class RankServer:
    """The loop of a rank's process, and its part in the pool: rank, group, past runs."""

    def __init__(self, control: Connection, board: Board) -> None:
        self._control, self._board, self._table = control, board, InternTable(board)
        self._joined: JoinGroup | None = None
        self._group: dist.ProcessGroup | None = None
        self._state = State()
        self._environment: Environment | None = None  # comes with the first run
        self._is_restored = False  # nothing of the previous run is left
        self._imports = Imports()
        on_import("tqdm.std", progress.take_over_tqdm)
        instead_of("tqdm.notebook", progress.fill_tqdm_notebook)

    def serve(self) -> None:
        """Handle messages until the pool closes its end of the control pipe."""
        while True:
            try:
                message = pickling.receive(self._control)
            except (EOFError, ConnectionResetError):
                return
            try:
                is_join = isinstance(message, JoinGroup)
                reply = self._join(message) if is_join else self._run(message)
            except Exception:
                pickling.send(self._control, KitFailed(traceback.format_exc()))
                return
            _flush()
            try:
                pickling.send(self._control, reply)
            except Exception:  # half of it may be in the pipe, so nothing else can be sent
                traceback.print_exc()
                _exit(1)
            if isinstance(reply, Returned):
                reply.payload.close()
            del message, reply  # an idle rank keeps nothing of the last run alive
            self._tidy()

    def _join(self, group: JoinGroup) -> Joined | Raised:
        self._joined = group
        try:
            if dist.is_initialized():
                dist.destroy_process_group()
            torch_internals.restart_group_names()
            os.environ.update(backends.LOOPBACK_ENVIRONMENT)
            backends.take_device(group.backend, group.rank)
            if group.store is not None:
                dist.init_process_group(
                    backends.for_group(group.backend),
                    store=dist.FileStore(group.store, group.world_size),
                    rank=group.rank,
                    world_size=group.world_size,
                    timeout=GROUP_TIMEOUT,
                )
            self._group = dist.group.WORLD  # None if there is no group
            torch_internals.wait_until_connected(self._group)
        except Exception as error:
            return Raised(describe(group.rank, error), RankStatus(self._imports.take()))
        return Joined(RankStatus(self._imports.take()))

    def _run(self, call: CallWorker) -> Returned | Raised:
        assert self._joined is not None, "the pool sends JoinGroup before CallWorker"
        rank, world_size = self._joined.rank, self._joined.world_size
        self._board.answer_with_stacks()  # an earlier run may have changed what its signal does
        if call.environment is not None:
            self._environment, self._is_restored = call.environment, False
            progress.is_live = call.environment.is_live
        for name, source in call.cells.items():
            # No mtime: linecache keeps such an entry, as it does for IPython's own.
            linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        groups, keeps_groups = torch_internals.count_groups(), False
        store = self._joined.store
        recorded = recording(self._table, call.number, rank, store)
        if not self._is_restored:
            self._restore()
        self._is_restored = False
        with recorded as recorder, warnings.catch_warnings():
            try:
                self._board.write_phase(IMPORTING)  # what the worker needs
                try:
                    worker, args = call.payload.unpack()
                    self._board.write_phase(SERVING)
                    keeps_groups = getattr(worker, "keeps_groups", False)
                    value = call_worker(worker, rank, world_size, args)
                    if self._in_notebook:
                        displayed.show_figures()
                finally:
                    self._state.put_back(is_cell=keeps_groups)
                packed = pack(value)
            except BaseException as error:
                broken, inside = recorder.broken or (None, None)
                if self._group is not None and _TWICE in text_of(error):
                    # As the method `add_note` does from Python 3.11 on.
                    vars(error).setdefault("__notes__", []).append(_HAS_GROUP)
                failure = describe(rank, error)
                whole = keeps_groups and broken is None and recorder.all_awaited
                status = self._status(whole, groups)
                inside = inside if broken == id(error) else None
                displayed_here = self._take_displayed()
                return Raised(failure, status, inside, displayed_here, capture(error))
        groups = None if keeps_groups else groups
        status = self._status(recorder.all_awaited, groups)
        return Returned(packed, status, self._take_displayed())

    def _take_displayed(self) -> Sequence[Bundle]:
        return displayed.take() if self._in_notebook else ()

    @property
    def _in_notebook(self) -> bool:
        return self._environment is not None and self._environment.in_notebook

    def _tidy(self) -> None:
        """Restore the process after a run, when the pool has the reply and nobody waits.

        At once, because a file that is opened now may get the number of one that a worker closed.
        """
        self._is_restored = False
        if self._environment:
            with suppress(Exception):  # the next run tries again, and reports it
                self._restore()
                self._is_restored = True
        # Cycles may keep a model's memory, and a process group, whose thread wakes up every 10 ms.
        if not self._control.poll(_IDLE):
            gc.collect()
            if hasattr(_C, "malloc_trim"):
                _C.malloc_trim(0)  # glibc keeps what was freed

    def _restore(self) -> None:
        assert self._joined, "the pool sends JoinGroup before CallWorker"
        assert self._environment, "and the environment with the first CallWorker"
        self._state.restore(self._joined, self._environment)

    def _status(self, whole: bool, groups: object | None) -> RankStatus:
        intact = whole and self._group_is_intact(groups)
        return RankStatus(self._imports.take(), intact, thread_left_running())

    def _group_is_intact(self, groups: object | None) -> bool:
        """Return whether the groups are the same as before; None: new ones may stay."""
        if self._group is None and torch_internals.any_group_made():
            return False  # one that failed has counted
        return dist.group.WORLD is self._group and groups in (None, torch_internals.count_groups())


def call_worker(worker: Callable[..., Any], rank: int, world_size: int, args: tuple) -> Any:
    """Return what a worker returns; None if it exits with code 0."""
    try:
        return worker(rank, world_size, *args)
    except SystemExit as leaving:
        if leaving.code in (None, 0):
            return None
        raise


def pack(value: object) -> pickling.Payload:
    """Pickle what a worker returned. Raise TypeError, in one sentence, if that is impossible."""
    try:
        return pickling.pack(value)
    except Exception as error:
        failed = error
    path, culprit, reason = pickling.find_culprit(value) or ("", value, failed)
    what = f"a {type(culprit).__name__}"
    if path:
        what = f"a {type(value).__name__} whose {path} is {what}"
    raise TypeError(
        f"the worker returned {what}, which cannot be sent to the notebook ({reason}); "
        "return tensors, numbers, strings, or lists and dicts of them"
    ) from None


def describe(rank: int, error: BaseException, left: Iterator[bool] | None = None) -> RankFailure:
    """Return an exception as plain data, which the pool can hold without the rank's modules.

    left: an item for each further exception that may be described, as its cause or its member.
    """
    left = left or itertools.repeat(True, MOST_LINKED)
    cause, context = error.__cause__, None
    if cause is None and not error.__suppress_context__:
        context = error.__context__
    group = getattr(builtins, "BaseExceptionGroup", ())  # Python 3.10 has none
    members = error.exceptions if isinstance(error, group) else ()
    notes = vars(error).get("__notes__")
    notes = notes[:MOST_LINKED] if isinstance(notes, list) else []
    frames = tuple(
        describe_line(line.filename, line.lineno or 0, line.name)
        for line in traceback.extract_tb(error.__traceback__)
    )
    linked = [
        describe(rank, each, left) if each is not None and next(left, False) else None
        for each in (cause, context)
    ]
    return RankFailure(
        rank,
        type(error).__name__,
        text_of(error)[:LONGEST_MESSAGE],
        frames,
        tuple(text_of(note)[:LONGEST_MESSAGE] for note in notes),
        *linked,
        tuple(describe(rank, member, left) for member, _ in zip(members, left, strict=False)),
    )


def _exit(code: int) -> NoReturn:
    """End the process at once, without waiting for threads."""
    _flush()
    os._exit(code & 0xFF)


_C = ctypes.CDLL(None)  # the C library of this process


def _flush() -> None:
    """Write out what Python and C still buffer, because it belongs to this run."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # the worker closed or replaced it
            continue
    if os.name == "posix":
        _C.fflush(None)
