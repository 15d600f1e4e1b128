"""The events of one run, as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Send:
    """One point-to-point message, as its sender saw it."""

    src: int  # rank in the world
    dst: int  # rank in the world
    tag: int
    nbytes: int
    sequence: int  # the how-manieth message of this sender, from 0


@dataclass(frozen=True)
class Trace:
    """Every point-to-point message of one run. Collectives are not recorded.

    world_size: number of ranks in the run.
    sends: messages, by sender and then in the order in which it sent them.
    """

    world_size: int
    sends: tuple[Send, ...] = ()

    def messages(self, src: int | None = None, dst: int | None = None) -> list[Send]:
        """Return the messages, or those from `src` and to `dst` only."""
        return [
            send
            for send in self.sends
            if (src is None or send.src == src) and (dst is None or send.dst == dst)
        ]

    def bytes_sent(self, rank: int) -> int:
        """Return how many bytes of tensors `rank` sent, point to point."""
        return sum(send.nbytes for send in self.messages(src=rank))

    def __len__(self) -> int:
        return len(self.sends)

    def __iter__(self) -> Iterator[Send]:
        return iter(self.sends)

    def __repr__(self) -> str:
        total = sum(send.nbytes for send in self.sends)
        messages = "1 message" if len(self) == 1 else f"{len(self):,} messages"
        return f"Trace({messages} between {self.world_size} ranks, {total:,} bytes)"
