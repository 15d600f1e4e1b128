"""The watch over a run: is it one that cannot end?"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from ddp_kit.errors import DeadlockError, MismatchError
from ddp_kit.pool.process import RankProcess
from ddp_kit.trace import Snapshot, join
from ddp_kit.verdict import RankState, deadlock, mismatch, plainly_agree

QUIET = 0.5  # seconds in which nothing moves before a run is looked at
AGAIN = 5.0  # seconds until it is looked at again, then twice as many, and so on


class Watch:
    """Looks at the boards of a run's ranks, and judges when nothing moves on them."""

    def __init__(self, ranks: Sequence[RankProcess], run: int) -> None:
        self._ranks = ranks
        self._run = run
        self._seen: object = None
        self._since = math.inf
        self._again = AGAIN

    def look(
        self, now: float, returned: Collection[int], left_threads: Collection[int]
    ) -> DeadlockError | MismatchError | None:
        """Return why the run cannot end, if that is so. now: seconds.

        returned: the ranks that have; left_threads: those of them that had left a thread of the
        worker running, which may send.
        """
        heads = [rank.board.head() for rank in self._ranks]
        seen = [head.moves for head in heads], len(returned)
        if seen != self._seen:
            self._seen, self._since, self._again = seen, now, AGAIN
            return None
        if now - self._since < QUIET:
            return None
        # A thread that keeps the run from being judged may end; asking costs room on the board.
        self._since, self._again = now + self._again - QUIET, 2 * self._again
        if all(head.waiting < 0 for head in heads):
            return None
        snapshots = [Snapshot(n, rank.board.read()) for n, rank in enumerate(self._ranks)]
        if any(snapshot.log.head.run != self._run for snapshot in snapshots):
            return None  # a rank has not begun
        error = self._judge(snapshots, returned)
        if error is None:
            return None
        waiting = {snapshot.rank for snapshot in snapshots if snapshot.waiting}
        return None if any(map(self._may_go_on, sorted(waiting | set(left_threads)))) else error

    def _judge(
        self, snapshots: list[Snapshot], returned: Collection[int]
    ) -> DeadlockError | MismatchError | None:
        if any(snapshot.is_crowded for snapshot in snapshots):
            return None  # not everything was counted
        error = deadlock([_state(snapshot, snapshot.rank in returned) for snapshot in snapshots])
        if not plainly_agree(snapshots):
            events = join(snapshots).events
            # If it is stuck, that may come of something earlier; else what it waits for counts.
            waited = {event.match_key for r in snapshots if (event := r.waiting)}
            wrong = mismatch(e for e in events if error is not None or e.match_key in waited)
            error = wrong or error
        return error

    def _may_go_on(self, number: int) -> bool:
        """Whether another thread of a rank runs the worker's code, as far as one can know."""
        stacks = self._ranks[number].stacks()
        return not stacks or any(frame.own for stack in stacks[1:] for frame in stack)


def _state(snapshot: Snapshot, returned: bool) -> RankState:
    """Return what the verdict looks at."""
    waits_for = snapshot.waiting if snapshot.waits_forever else None
    status = "returned" if returned else "waiting" if waits_for else "running"
    state = RankState(snapshot.rank, status, waits_for, {}, {}, {}, {}, {})
    for (kind, peer, tag, group), (posted, given_up) in snapshot.counts().items():
        if kind == "send":
            state.sends[snapshot.rank, peer, tag, group] = posted - given_up
            state.given_up[snapshot.rank, peer, tag, group] = given_up
        elif kind == "recv":
            state.recvs[peer, snapshot.rank, tag, group] = posted - given_up
        elif kind == "any":
            state.any_source[tag, group] = posted - given_up
        else:
            state.collectives[group] = posted - given_up
    return state
