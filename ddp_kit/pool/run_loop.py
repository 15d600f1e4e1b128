"""One run of a worker on the ranks of a pool, from the call to its result or its error.

The thread of the cell does all the work: it waits on the ranks' pipes and on the sentinels of their
processes, updates the live view, and has ranks judged that have not moved for a while.
"""

from __future__ import annotations

import math
import sys
import time
from multiprocessing import connection
from typing import Any

from ddp_kit import settings, torch_internals
from ddp_kit.error_text import (
    TracebackFormatter,
    Wait,
    format_notes,
    format_returned,
    format_unawaited,
    name_ranks,
)
from ddp_kit.errors import DeadlockError, KitError, MismatchError, RankError
from ddp_kit.pool import ipython, live_view
from ddp_kit.pool.deadlock_watch import DeadlockWatch
from ddp_kit.pool.interrupts import check_main_thread, holding_interrupt, show_interrupt
from ddp_kit.pool.other_hosts import OtherHosts
from ddp_kit.pool.ranks import RankHandle, RankProcesses, current_environment, stop_ranks
from ddp_kit.pool.result import (
    Reports,
    Result,
    error_of_ranks,
    error_while_joining,
    rebuild,
    remember,
)
from ddp_kit.pool.wire.messages import KitFailed, Raised, Returned
from ddp_kit.pool.wire.output import drain
from ddp_kit.pool.wire.pickling import Payload
from ddp_kit.trace import EMPTY, FORMING, IMPORTING, Snapshot, join, read_wait
from ddp_kit.verdict import Verdict, judge

REFRESH = 0.1  # seconds between two updates of the live view


class Run:
    """One run: what its ranks have reported so far, and the wait for the rest.

    world_size: how many of the processes take part; number: of the run, counted by its pool.
    """

    def __init__(self, processes: RankProcesses, world_size: int, number: int) -> None:
        self._processes, self._world_size, self._number = processes, world_size, number
        self._has_begun = False  # the worker was sent; before that the ranks form their group
        self._ranks: list[RankHandle] = []
        self._view = live_view.LiveView(world_size)
        self._opened = time.monotonic()
        self._since: dict[int, tuple[tuple, float]] = {}  # what each rank is doing, and since when
        self._reports = Reports()
        self._snapshots: list[Snapshot] = []
        self._waiting: set[int] = set()
        self._watch: DeadlockWatch | None = None
        self.others: OtherHosts | None = None  # once the worker was sent, if there are any
        self._verdict: Verdict | None = None

    def execute(self, packed: Payload, backend: str, timeout: float | None) -> Result:
        """Call the worker in `packed` on every rank and return what came back.

        Raises what `WorkerPool.run` raises.
        """
        processes = self._processes
        check_main_thread()
        try:
            environment = current_environment()
            processes.restart_changed(self._world_size)
            self._view = live_view.current.open_live(self._world_size * processes.launcher.hosts)
            processes.get_ready(self._world_size, backend, self._show_start)
            self._begin(processes.ranks)
            try:
                if self._collect(settings.START_TIMEOUT):  # replies to JoinGroup that are owed
                    self._begin(processes.ranks[: self._world_size], self._number)
                    processes.call_worker(self._ranks, packed, environment, self._number)
                    self._collect(math.inf if timeout is None else timeout)
            finally:
                intact = self._group_is_intact and not self._reports.threads
                with holding_interrupt():
                    output = self._close()
                    processes.end_run(intact)
                interrupted = isinstance(sys.exc_info()[1], KeyboardInterrupt)
                live_view.print_output(output, kept=not interrupted)
            self._print_notices()
            self._show_displayed()
            try:
                return self._result(output)
            except KitError as error:
                error.output = tuple(output)
                raise
        except BaseException as error:
            self._view.close()
            remember(error, self._reports)
            if isinstance(error, KeyboardInterrupt):
                show_interrupt(error, self.positions())
            raise

    def _begin(self, ranks: list[RankHandle], run: int | None = None) -> None:
        """Start to wait for these ranks. run: its number; None: they form their group."""
        self._ranks = list(ranks)  # the pool may replace some before the run is over
        self._has_begun = run is not None
        self._reports = Reports()
        if run is not None:
            launcher = self._processes.launcher
            if launcher.store is not None:
                self.others = OtherHosts(*launcher.store, len(ranks), launcher.hosts)
            self._watch = DeadlockWatch(self._ranks, run, self.others)

    def _collect(self, timeout: float) -> bool:
        """Wait until all ranks have replied; return False if one failed or time is up."""
        now = time.monotonic()
        deadline, tick = now + timeout, now + REFRESH
        self._waiting = {number for number, rank in enumerate(self._ranks) if rank.owed}
        first_failure = newest_failure = math.inf
        failed = 0
        while self._waiting or (self.others is not None and self.others.unfinished):
            self._handle(REFRESH)
            now = time.monotonic()
            if now >= tick:
                tick = now + REFRESH
                shown = min(self._world_size, len(self._ranks))  # others may be starting, too
                self._view.update([self._line(number) for number in range(shown)])
                for number in sorted(self._waiting):  # a grandchild may hold a sentinel open
                    if self._ranks[number].process.exitcode is not None:
                        self._note_end(number)
                if self.others is not None:
                    self.others.look()
                if not failed and self._cannot_end(now):
                    return False
            if self._failed > failed:  # each report may bring others
                failed = self._failed
                first_failure, newest_failure = min(first_failure, now), now
            elif not failed and now >= deadline:
                self._reports.timeout = timeout
                return False
            if now >= first_failure + settings.LONGEST_FAILURE_GRACE:
                break
            if now >= newest_failure + settings.FAILURE_GRACE and all(
                self._snapshot(number).waiting for number in self._waiting
            ):
                break  # none of them will report by itself
        if failed and self.others is not None:
            self.others.find_reason(self._reports)
        return not failed

    @property
    def _failed(self) -> int:
        return self._reports.failed + (0 if self.others is None else self.others.failed)

    def _handle(self, seconds: float) -> None:
        """Handle what comes from the ranks; return after `seconds` if nothing does."""
        sources: dict[Any, tuple[int, str]] = {}
        for number in self._waiting:
            rank = self._ranks[number]
            sources |= {rank.control: (number, "reply"), rank.process.sentinel: (number, "end")}
            if rank.output.is_open:
                sources[rank.output.pipe] = number, "output"
        ended = []
        for number, what in [sources[ready] for ready in connection.wait(list(sources), seconds)]:
            if what == "output":
                self._ranks[number].output.read()
            elif what == "end":
                ended.append(number)
            else:
                self._take_reply(number)
        for number in ended:
            self._note_end(number)

    def _note_end(self, number: int) -> None:
        # A rank that replied and then ended still has its reply in the pipe.
        if number in self._waiting and not self._ranks[number].control.poll():
            self._note_death(number)

    def _take_reply(self, number: int) -> None:
        rank, reports = self._ranks[number], self._reports
        reply = rank.receive()
        if reply is None:
            self._note_death(number)
            return
        if isinstance(reply, Returned):
            reports.returned[number] = reply
        elif isinstance(reply, Raised):
            reports.raised[number] = reply
        elif isinstance(reply, KitFailed):
            reports.broken[number] = reply
        elif rank.owed:
            return  # it joined one group, and was asked to join another
        self._waiting.discard(number)

    def _note_death(self, number: int) -> None:
        self._reports.died[number] = self._ranks[number].join(1)
        self._waiting.discard(number)

    def _cannot_end(self, now: float) -> bool:
        if self._watch is not None:
            returned = self._reports.returned.keys() | (self.others.returned if self.others else ())
            self._verdict = self._watch.look(now, returned, self._reports.threads)
            for line in self._watch.notices:
                self._view.close()  # it is shown again below the line
                live_view.say(line)
            self._watch.notices.clear()
        return self._verdict is not None

    def _line(self, number: int) -> live_view.RankLine:
        rank, reports, seconds = self._ranks[number], self._reports, None
        head = rank.board.head()
        if number in reports.returned:
            doing = "done"
        elif number in reports.raised:
            doing = "raised"
        elif number in reports.died or number in reports.broken:
            doing = "ended"
        elif rank.board.phase() == IMPORTING:
            doing = "starting" if self._has_begun else "importing torch"
        elif not self._has_begun:
            doing = "forming the group" if number in self._waiting else "ready"
        elif head.run != self._number:
            doing = "starting"
        else:
            doing = "forming the group" if rank.board.phase() == FORMING else "computing"
            now = time.monotonic_ns()
            shown = now - int(settings.LIVE_WAIT_SHOWN_AFTER * 1e9)
            if wait := read_wait(rank.board, self._number, shown):
                doing, seconds = f"waiting in {wait[0]}", round((now - wait[1]) / 1e9, 1)
        if doing not in ("done", "raised", "ended") and seconds is None:
            seconds = self._seconds(number, doing, head.moves)
        newest = live_view.newest_line(rank.board.label() or rank.output.newest)
        return live_view.RankLine(doing, seconds, rank.board.progress(), newest)

    def _seconds(self, number: int, *state: object) -> int | None:
        """Return how long a rank has been in this state, in seconds; None if less than one."""
        now = time.monotonic()
        before, since = self._since.get(number, (state, self._opened))
        if state != before:
            since = now
        self._since[number] = state, since
        return int(now - since) or None

    def _show_start(self, doing: list[str]) -> None:
        lines = enumerate(doing)
        self._view.update([live_view.RankLine(what, self._seconds(n, what)) for n, what in lines])

    def _snapshot(self, number: int) -> Snapshot:
        """Return what is on a rank's board; nothing if that is about another run."""
        log = self._ranks[number].board.read()
        current = self._has_begun and log.head.run == self._number
        return Snapshot(number, log if current else EMPTY)

    def _close(self) -> list[str]:
        """Stop the ranks that still owe a reply, and return what each rank has printed."""
        stuck = {number for number, rank in enumerate(self._ranks) if rank.owed}
        # Ask all ranks first, because stopping one would end the waits of others.
        self._snapshots = [self._snapshot(number) for number in range(len(self._ranks))]
        if self._has_begun:
            self._reports.locate(stuck, self._ranks, self._snapshots)
            if self.others is not None and self._reports.timeout is not None:
                self._reports.stopped += self.others.waits()
        # Before one is stopped: others would print that it is gone.
        drain([rank.output for rank in self._ranks])
        unusable = stuck.union(self._reports.threads)
        if self._reports.died:  # what others have in flight may never end, and keeps their group
            unusable |= set(self._reports.raised)
        if self._reports.broken:  # what broke the kit there may have happened in every rank
            unusable = set(range(len(self._ranks)))
        stop_ranks([self._ranks[number] for number in sorted(unusable)])
        self._view.close()
        return [rank.output.take() for rank in self._ranks]

    def _result(self, output: list[str]) -> Result:
        """Return what the ranks returned, or raise the error that kept them from it.

        What ranks raised may be a consequence of what they did not agree on, so that is the error.
        """
        if not self._has_begun:
            error = error_while_joining(self._reports, self._ranks)
            assert error is not None, "without one the worker is called"
            raise error
        trace, result = join(self._snapshots), None
        elsewhere = self.others.error(self._reports) if self.others is not None else None
        failure = elsewhere or error_of_ranks(self._reports, self._ranks)
        verdict = self._last_verdict(failure)
        if failure is None and self._verdict is None:
            replies = sorted(self._reports.returned.items())
            values = tuple(rebuild(rank, reply.payload.unpack) for rank, reply in replies)
            result = Result(values, tuple(output), trace)
            if verdict is None:
                return result
        error = failure if verdict is None else self._error_of(verdict, result)
        assert error is not None, "without one there is a result"
        error.trace, error.cell_names = trace, ipython.cell_names()
        error.handled = self._reports.handled
        raise error

    def _last_verdict(self, failure: KitError | None) -> Verdict | None:
        """Return why the ranks' calls do not fit together; None if they do."""
        verdict = self._verdict  # on ranks that were still waiting
        if verdict is None and not self._reports.broken:
            others = self.others.snapshots() if self.others is not None else []
            verdict = judge(self._snapshots + others, self._reports.returned, over=True)
        if verdict is None and isinstance(failure, RankError) and self._watch is not None:
            verdict = self._watch.why_raised(self._snapshots, self._reports.raised)
        return verdict

    def _error_of(self, verdict: Verdict, result: Result | None) -> DeadlockError | MismatchError:
        """Return the error of a verdict, with what ranks raised because of it or returned."""
        error = verdict.error()
        error.failures = self._reports.own_failures
        if self.others is not None:
            error.failures |= self.others.failures
        if isinstance(error, MismatchError):
            error.result = result
        else:
            error.draw_waits = live_view.current.draw_waits
        if self._reports.handled:
            rank, handled = min(self._reports.handled.items())
            error.hint = f"The {handled.type} of rank {rank} may be the reason. {error.hint}"
        return error

    @property
    def _group_is_intact(self) -> bool:
        """Every rank has replied, and left the process group unchanged."""
        replies = self._reports.replies
        return len(replies) == len(self._ranks) and all(
            reply.status.group_intact for reply in replies.values()
        )

    def _print_notices(self) -> None:
        """Print what would otherwise surprise a learner."""
        if self._processes.launcher.reusable:
            threads = self._reports.threads
            for name in dict.fromkeys(threads.values()):
                ranks = name_ranks(rank for rank, left in threads.items() if left == name)
                live_view.say(f"restarting {ranks}: the worker left its thread {name!r} running")
        if len(self._reports.returned) == len(self._ranks):
            events = (event for snapshot in self._snapshots for event in snapshot.unawaited)
            for line in format_unawaited({Wait(e.rank, e.call, e.where) for e in events}):
                live_view.say(line)
            notes = [(each.rank, *note) for each in self._snapshots for note in each.notes]
            for line in format_notes(notes):
                live_view.say(line)
        once = torch_internals.notices()
        if any(reply.payload.from_gpu for reply in self._reports.returned.values()):
            once.append("tensors returned from a GPU were copied to the CPU")
        for line in once if live_view.current.visible else []:
            if line not in self._processes.notified:
                self._processes.notified.add(line)
                live_view.say(line)

    def _show_displayed(self) -> None:
        """Show what ranks have displayed; of one that was stopped it is unknown."""
        replies = self._reports.replies.items()
        displayed = {rank: reply.displayed for rank, reply in replies if reply.displayed}
        show = live_view.current.show_displayed
        if displayed and live_view.current.visible and show is not None:
            try:
                show(displayed)
            except Exception as error:  # the result or the error of the run matters more
                live_view.say(f"what the ranks displayed cannot be shown: {error!r}")

    def positions(self) -> list[str]:
        """Return lines that say where the ranks were when the run was stopped."""
        if not self._has_begun:
            return ["the ranks were still starting: no worker had begun"]
        waits = TracebackFormatter(ipython.cell_names()).waits(self._reports.stopped)
        return waits + format_returned(self._reports.returned)
