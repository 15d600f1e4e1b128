"""What a rank started by `kit.torchrun` does.

On the notebook's own host it connects to the notebook's socket and gets pipes and a board, as the
ranks of a pool do, so its prints, errors and waits are visible at once. On another host an observer
beside it shows its board to the notebook through torchrun's store, and at the end the rank puts a
report there.
"""

from __future__ import annotations

import base64
import builtins
import faulthandler
import os
import pickle
import runpy
import select
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from typing import Any, TextIO

import psutil
import torch.distributed as dist

from ddp_kit import backends, settings
from ddp_kit.errors import PoolError
from ddp_kit.pool.rank import torchrun_environment
from ddp_kit.pool.rank.bootstrap import connect, leave, serve_connected
from ddp_kit.pool.rank.server import GROUP_TIMEOUT, call_worker, describe
from ddp_kit.pool.rank.server import pack as pack_value
from ddp_kit.pool.wire import torchrun_store as wire
from ddp_kit.pool.wire.messages import SOCKET
from ddp_kit.pool.wire.output import KeptOutput
from ddp_kit.pool.wire.pickling import pickle_whole
from ddp_kit.pool.wire.torchrun_store import Answer, RemoteReport, Sign, Silence, encode, newest
from ddp_kit.trace import Board, Clock, InternTable, recording, stacks, unrecorded

_environment: dict[str, str] = {}  # torchrun's; a pool replaces it with the notebook's
_failed = False  # whether the worker has failed


@dataclass
class Script:
    """A module or a file as a worker; it forms a group itself if it needs one."""

    name: str

    def __call__(self, rank: int, world_size: int, *options: str) -> None:
        """Run it as torchrun would, with these options on its command line."""
        before, sys.argv[:] = list(sys.argv), [self.name, *options]
        try:
            if self.name.endswith(".py"):
                sys.path.insert(0, os.path.dirname(os.path.abspath(self.name)))
                runpy.run_path(self.name, run_name="__main__")
            else:
                runpy.run_module(self.name, run_name="__main__", alter_sys=True)
        finally:
            sys.argv[:] = before


@dataclass
class Task:
    """A worker as each rank calls it: in a process group that the ranks form first.

    backend: None if the worker forms its group itself.
    """

    worker: Callable[..., Any]
    args: tuple
    backend: str | None

    def __call__(self, rank: int, world_size: int) -> Any:
        """Run the worker on the notebook's own host."""
        global _failed
        os.environ.clear()
        os.environ.update(_environment)
        _, started, *_ = torchrun_environment.rank_info()
        try:
            if started != world_size:
                raise PoolError(
                    f"torchrun has started {started} ranks instead of {world_size}; run the "
                    "printed command unchanged on every host"
                )
            value, _ = self.call(rank, world_size)
        except BaseException:
            _failed = True
            raise
        return value

    def call(self, rank: int, world_size: int) -> tuple[Any, Clock | None]:
        """Call the worker; return its value, and this host's clock relative to rank 0's.

        The rank stays in the process group, as those of a pool do: others would report a broken
        connection instead of what they were waiting for.
        """
        _, _, local_rank, local_size = torchrun_environment.rank_info()
        clock = None
        if local_size < world_size:
            with unrecorded():
                torchrun_environment.join_group("gloo")
                clock = torchrun_environment.compare_clocks()
                dist.destroy_process_group()
        backends.share_cores(local_size)
        backends.take_device(self.backend or "gloo", local_rank)
        if self.backend is not None:
            torchrun_environment.join_group(backends.for_group(self.backend), GROUP_TIMEOUT)
        value = call_worker(self.worker, rank, world_size, self.args)
        pack_value(value).close()  # raises for what cannot be sent
        return value, clock


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def run(packed: str) -> None:
    """Run as a rank of the task in `packed`; exit with 1 if its worker has failed."""
    _environment.update(os.environ)
    path = _environment.pop(SOCKET, None)
    rank = torchrun_environment.rank_info().rank
    if path is None:
        _run_elsewhere(packed, rank)
        leave(0)
    serve_connected(connect(path, rank))
    if not _failed:
        _leave_group()
    leave(int(_failed))


def pack(task: Task) -> str:
    """Return a task as text, for the file that torchrun runs."""
    return base64.b64encode(pickle_whole(task, for_ranks=True)).decode()


def _run_elsewhere(packed: str, rank: int) -> None:
    """Run the task on another host; put a report of it into the store."""
    world_size = torchrun_environment.rank_info().world_size
    board, report, printed = Board(), RemoteReport(), KeptOutput()
    observer = Observer(board, rank)  # a fork, which shares the board
    os.register_at_fork(after_in_child=board.unshare)
    torchrun_environment.end_with_agent()  # not the observer, which reports that it has ended
    board.answer_with_stacks()
    # Only the ranks on the notebook's host show pictures.
    builtins.display = lambda *values, **_options: print(*values)  # type: ignore[attr-defined]
    out, err = _Tee(printed, sys.stdout), _Tee(printed, sys.stderr)
    how, recorder = wire.RETURNED, None
    try:
        # Before anything else can happen: the notebook counts a rank's silence from its first sign.
        torchrun_environment.own_store().set(f"sign {rank}", encode(Sign(-1, False, board.head())))
        with (
            recording(InternTable(board), 1, rank) as recorder,
            redirect_stdout(out),
            redirect_stderr(err),
        ):
            task: Task = pickle.loads(base64.b64decode(packed))
            value, report.clock = task.call(rank, world_size)
            report.value = pickle_whole(value)
    except BaseException as error:
        report.failure = describe(rank, error)
        broken, _ = (recorder and recorder.broken) or (None, None)
        how = wire.CUT if broken == id(error) else wire.RAISED
        raise
    finally:
        report.output, report.log = printed.text(), board.read()
        with suppress(dist.DistError):  # the notebook's host is gone
            _send(report, rank, how)
        if how == wire.RETURNED:
            _leave_group()
        observer.end()


def _send(report: RemoteReport, rank: int, how: str) -> None:
    """Put a report into the store. If the worker has returned, wait until all have."""
    store = torchrun_environment.own_store()
    store.set(f"report {rank}", encode(report))
    store.append(wire.ENDS, f"{rank} {how}\n")
    if how == wire.RETURNED:
        store.wait([wire.OVER], GROUP_TIMEOUT)  # the observer ends this process if the host is lost


class _Tee:
    """A stream that keeps what it writes to another, as much of it as the pipe of a rank does."""

    def __init__(self, kept: KeptOutput, stream: TextIO) -> None:
        self._kept, self._stream = kept, stream

    def write(self, text: str) -> int:
        written = self._stream.write(text)
        self._kept.add(text.encode("utf-8", errors="replace"))
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


# --- the observer --------------------------------------------------------------------------

# A process beside a rank on another host, which shows the notebook what is on the rank's board. It
# is a fork of the rank, made before the rank does anything, so that it shares the board and little
# else. A rank that is stuck in native code, or holds the GIL for minutes, does not delay it: if it
# is silent, its host is gone.
#
#     main thread     looks at the board, at the rank, and at whether the store still answers
#     second thread   talks to the store, which may block for minutes if the connection is lost

LOOK = 0.05  # seconds between two looks at the board
QUIET = 0.2  # seconds for which a board has not moved when it is shown
SHOWN = 1 << 12  # events, the newest ones, of a board that is shown
PATIENCE = 5.0  # seconds to report that the rank has died


class Observer:
    """The rank's handle on its observer. board: the rank's, for which nothing is written yet."""

    def __init__(self, board: Board, rank: int) -> None:
        parent, agent = os.getpid(), psutil.Process(os.getppid())
        terminated, self._line = os.pipe()  # both processes keep it open for writing
        with warnings.catch_warnings():
            # Python warns of locks that other threads may hold; the fork needs none of them.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if self._pid == 0:
            try:
                _Observation(board, rank, parent, agent, terminated).run()
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(0)
        os.close(terminated)
        self._note_termination()

    def _note_termination(self) -> None:
        """Let the observer know when this process gets SIGTERM, even if it runs no Python."""
        faulthandler.register(signal.SIGTERM, self._line, all_threads=False, chain=True)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.register_at_fork(after_in_child=lambda: os.dup2(nowhere, self._line))

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        with suppress(ChildProcessError):  # the worker has waited for any child
            os.waitpid(self._pid, 0)


class _Observation:
    """What the observer knows.

    parent: the rank's process id. agent: torchrun's, on this host. terminated: a pipe in which
    something is when the rank has got SIGTERM.
    """

    def __init__(
        self, board: Board, rank: int, parent: int, agent: psutil.Process, terminated: int
    ) -> None:
        self._board, self._rank, self._parent, self._agent = board, rank, parent, agent
        self._terminated = terminated
        self._moves, self._since = -1, time.monotonic()  # what the board showed, and since when
        self._shown = -1  # the moves of the board that is in the store
        self._answers = 0  # of the store
        self._is_cut = False  # the store is gone
        self._died = threading.Event()
        self._done = threading.Event()  # the second thread has nothing more to say

    def run(self) -> None:
        """Observe until the rank has ended; end it if the notebook's host is gone."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the agent and the rank
        threading.Thread(target=self._talk, daemon=True).start()
        silence, known = Silence(), 0
        while self._rank_lives:
            time.sleep(LOOK)
            self._quiet()
            silence.look(self._answers > known or not known)  # the rank itself limits the joining
            known = self._answers
            if self._is_cut or silence.seconds > settings.HOST_LOST_AFTER:
                self._end_rank()
                return
        self._died.set()
        self._done.wait(PATIENCE)

    @property
    def _rank_lives(self) -> bool:
        return os.getppid() == self._parent

    def _quiet(self) -> float:
        """Return for how many seconds nothing has moved on the board."""
        moves, now = self._board.head().moves, time.monotonic()
        if moves != self._moves:
            self._moves, self._since = moves, now
        return now - self._since

    def _end_rank(self) -> None:
        if self._rank_lives:
            why = "the notebook's host has ended the run, or the connection to it is lost"
            print(f"rank {self._rank} is ended: {why}", file=sys.stderr, flush=True)
            os.kill(self._parent, signal.SIGKILL)

    def _talk(self) -> None:
        try:
            store = torchrun_environment.own_store()
            answered, number = store.add(wire.ASKED, 0), 0
            while True:
                lived = self._rank_lives
                self._show(store, number)
                asked, number = store.add(wire.ASKED, 0), number + 1
                self._answers += 1
                if asked > answered:
                    answered = asked
                    store.set(f"answer {asked} {self._rank}", encode(self._answer()))
                if not lived:
                    break
                self._died.wait(settings.SIGN_OF_LIFE_EVERY)
            self._report_death(store)
        except RuntimeError:  # what a store raises that is gone
            self._is_cut = True
        self._done.set()

    def _show(self, store: dist.Store, number: int) -> None:
        """Give a sign of life, and show the board first if it has not moved for a while.

        The notebook needs the board of a rank that waits, or whose worker has ended.
        """
        head = self._board.head()
        rests = head.waits or head.ended > 0
        if rests and head.moves != self._shown and self._quiet() >= QUIET:
            self._show_board(store)
        sign = Sign(number, head.moves == self._shown or not rests, head)
        store.set(f"sign {self._rank}", encode(sign))

    def _show_board(self, store: dist.Store) -> None:
        copy = newest(self._board.read(), SHOWN)
        store.set(f"board {self._rank}", encode(copy))
        self._shown = copy.head.moves

    def _answer(self) -> Answer:
        quiet, moves = self._quiet(), self._moves
        (found,) = stacks.ask({self._parent: self._board.read_stacks})
        return Answer(moves, quiet, stacks.parse(found))

    def _report_death(self, store: dist.Store) -> None:
        """Report that the rank's process has ended, unless the rank itself has reported its end."""
        known = store.get(wire.ENDS).decode() if store.check([wire.ENDS]) else ""
        if any(line.split()[0] == str(self._rank) for line in known.splitlines()):
            return
        how = wire.TERMINATED if select.select([self._terminated], [], [], 0)[0] else wire.DIED
        if not self._agent_lives:
            how = wire.STOPPED
        self._show_board(store)
        store.append(wire.ENDS, f"{self._rank} {how}\n")

    @property
    def _agent_lives(self) -> bool:
        try:
            return self._agent.is_running() and self._agent.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False
