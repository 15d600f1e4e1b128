"""Where the ranks of a run are, as plain data: what the verdict looks at."""

from __future__ import annotations

from dataclasses import dataclass, field

from ddp_kit.trace.events import Event, Group

Channel = tuple[int, int, int, Group]  # src, dst, tag, group: the ranks are those of the world


@dataclass(frozen=True)
class RankState:
    """Where one rank is, and what it has posted so far.

    An operation is posted when it was called, whether or not it is complete. What a rank gave up
    (work that ended before anybody waited for it) is not counted.
    """

    rank: int
    status: str  # "running": it may do anything; "waiting"; "returned": it will do nothing more
    waits_for: Event | None = None  # of a rank that waits: the operation that must complete
    sends: dict[Channel, int] = field(default_factory=dict)
    recvs: dict[Channel, int] = field(default_factory=dict)  # from any source: once complete
    any_source: dict[tuple[int, Group], int] = field(default_factory=dict)  # (tag, group): open
    collectives: dict[Group, int] = field(default_factory=dict)
    given_up: dict[Channel, int] = field(default_factory=dict)  # sends, for the words only
