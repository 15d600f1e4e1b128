"""A process beside a rank on another host, which shows the notebook what is on the rank's board.

It is a fork of the rank, made before the rank does anything, so that it shares the board and little
else. A rank that is stuck in native code, or holds the GIL for minutes, does not delay it: if it is
silent, its host is gone.

    main thread     looks at the board, at the rank, and at whether the store still answers
    second thread   talks to the store, which may block for minutes if the connection is lost
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import sys
import threading
import time
import traceback
import warnings
from contextlib import suppress

import psutil
import torch.distributed as dist

from ddp_kit.pool.rank import environment
from ddp_kit.pool.wire import torchrun_store as wire
from ddp_kit.pool.wire.torchrun_store import Answer, Sign, Silence, encode, newest
from ddp_kit.trace import Board, stacks

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
            if self._is_cut or silence.seconds > wire.LOST:
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
            store = environment.own_store()
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
                self._died.wait(wire.PERIOD)
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
