"""The events of one run, as plain data, and what belongs together among them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ddp_kit.failures import Frame

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Group:
    """A process group: PyTorch's name for it, and its ranks as the world counts them."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Event:
    """One operation of one rank, as that rank saw it.

    Ranks are those of the world, also in a sub-group. Times are nanoseconds of the monotonic
    clock, which all processes of one machine share.
    """

    rank: int
    index: int  # the how-manieth operation of this rank in the run, from 0
    op: str  # as it was called: "send", "all_reduce", "all_gather_object"
    kind: str  # "send", "recv" or "collective"
    method: str  # of ProcessGroup; what the ranks of a collective must have in common
    group: Group
    sequence: int  # a message on its channel (src, dst, tag, group), a collective in its group
    peer: int | None = None  # dst of a send, src of a recv; None: any, and it is not known yet
    tag: int = 0
    root: int | None = None  # of a collective that has one
    dtype: str = ""  # "float32"; "" where no tensor is given
    inputs: tuple[Shape, ...] = ()  # shapes of the tensors that this rank gives
    outputs: tuple[Shape, ...] = ()  # shapes of the tensors that it takes into
    splits: tuple[Shape, ...] = ()  # all_to_all_single: how many rows to and from each rank
    reduce_op: str | None = None  # "SUM"
    nbytes: int = 0  # of inputs; of a recv, of the tensor it takes into
    start: int = 0  # when it was called
    waited: int | None = None  # when the rank began to wait for it
    end: int | None = None  # when the wait was over; None: it never was, or nobody waited
    where: Frame | None = None  # the learner's own line
    given_up: bool = False  # a message whose work ended before anybody had waited for it
    device: str = "cpu"  # where its tensors are: "cpu" or "cuda"

    @property
    def shape(self) -> Shape:
        """The shape of its first tensor; () where there is none."""
        return next(iter(self.inputs + self.outputs), ())

    @property
    def call(self) -> str:
        """The call as the learner wrote it, as in "recv(src=1, tag=7)"."""
        return format_call(self.op, self.method, self.peer, self.tag, self.root)

    @property
    def match_key(self) -> tuple:
        """What the two ends of one message, or the ranks of one collective, have in common."""
        return self.channel or self.group, self.sequence

    @property
    def meeting(self) -> tuple:
        """Deprecated: use `match_key`."""
        warnings.warn("Event.meeting is now match_key", DeprecationWarning, stacklevel=2)
        return self.match_key

    @property
    def channel(self) -> tuple | None:
        """What a message and its receive share: (src, dst, tag, group); None for others."""
        if self.kind == "send":
            return self.rank, self.peer, self.tag, self.group
        return (self.peer, self.rank, self.tag, self.group) if self.kind == "recv" else None


def format_call(op: str, method: str, peer: int | None, tag: int, root: int | None) -> str:
    """Write a call as the learner did, as in "recv(src=1, tag=7)"."""
    shown = format_arguments(method, peer, tag, root)
    return f"{op}({', '.join(shown)})" if shown else op


def format_arguments(method: str, peer: int | None, tag: int, root: int | None) -> list[str]:
    """Write who is at the other end, as in ["src=1", "tag=7"]; tag 0 is what everybody uses."""
    said = [f"{'dst' if method == 'send' else 'src'}={peer}"] if peer is not None else []
    said += [format_root(method, root)] if root is not None else []
    return said + ([f"tag={tag}"] if tag else [])


def format_root(method: str, root: int) -> str:
    """Write the root of a collective: PyTorch calls it "dst" where it takes, else "src"."""
    return f"{'dst' if method in ('gather', 'reduce') else 'src'}={root}"


@dataclass(frozen=True)
class Message:
    """A send, and the receive that took it; None: nobody did."""

    send: Event
    recv: Event | None

    @property
    def src(self) -> int:
        """The sender, as the world counts ranks."""
        return self.send.rank

    @property
    def dst(self) -> int:
        """The receiver, as the world counts ranks."""
        assert self.send.peer is not None, "a send has a receiver"
        return self.send.peer

    @property
    def tag(self) -> int:
        """The tag of both."""
        return self.send.tag

    @property
    def nbytes(self) -> int:
        """How many bytes of tensor were sent."""
        return self.send.nbytes

    def __repr__(self) -> str:
        said = [f"{self.src} \N{RIGHTWARDS ARROW} {self.dst}", f"{_count(self.nbytes, 'byte')}"]
        said += [f"tag={self.tag}"] if self.tag else []
        said += ["never received"] if self.recv is None else []
        return f"Message({', '.join(said)})"


@dataclass(frozen=True)
class Trace:
    """What the ranks of one run communicated.

    world_size: number of ranks in the run.
    events: by rank, and then in the order in which the rank called them.
    dropped: for each rank, how many of its oldest events were not kept.
    spans: for each rank, when its worker began and ended, in nanoseconds of the monotonic clock.
    clock_error: for each rank, by how many nanoseconds its times may be off those of rank 0,
        where hosts' clocks had to be compared; () where all ranks share one clock.
    """

    world_size: int
    events: Sequence[Event] = ()
    dropped: tuple[int, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()
    clock_error: tuple[int, ...] = ()

    @cached_property
    def _messages(self) -> list[Message]:
        receives = {(e.channel, e.sequence): e for e in self.events if e.kind == "recv"}
        messages = []
        for send in (event for event in self.events if event.kind == "send"):
            recv = receives.get((send.channel, send.sequence))
            if send.given_up and recv is not None and recv.end is None:
                recv = None  # it waited for a message that went with its work
            messages.append(Message(send, recv))
        return messages

    @property
    def lost(self) -> list[Message]:
        """The messages that nobody received, as far as one can know."""
        dropped = self.dropped or (0,) * self.world_size
        return [m for m in self._messages if m.recv is None and not dropped[m.dst]]

    @cached_property
    def collectives(self) -> list[dict[int, Event]]:
        """The collectives, each as {rank: its event}, in the order of the lowest rank's calls."""
        found: dict[tuple, dict[int, Event]] = {}
        for event in self.events:
            if event.kind == "collective":
                found.setdefault((event.group, event.sequence), {})[event.rank] = event
        return list(found.values())

    def messages(self, src: int | None = None, dst: int | None = None) -> list[Message]:
        """Return the point-to-point messages, or those from `src` and to `dst` only.

        They come by sender and then in the order in which it sent them. Raises ValueError for a
        rank that the run did not have.
        """
        for rank in (src, dst):
            if rank is not None:
                self._check(rank)
        return [
            message
            for message in self._messages
            if (src is None or message.src == src) and (dst is None or message.dst == dst)
        ]

    def bytes_sent(self, rank: int) -> int:
        """Return how many bytes of tensors `rank` sent, point to point. Raises as `messages`."""
        return sum(message.nbytes for message in self.messages(src=rank))

    def blocked(self, rank: int) -> float:
        """Return how many seconds `rank` waited for communication that came to its end.

        Raises ValueError for a rank that the run did not have.
        """
        self._check(rank)
        ends = ((e.waited, e.end) for e in self.events if e.rank == rank)
        return sum(end - waited for waited, end in ends if waited and end) / 1e9

    def _check(self, rank: int) -> None:
        if rank not in range(self.world_size):
            last = self.world_size - 1
            raise ValueError(f"there is no rank {rank!r}: the ranks of this run are 0 to {last}")

    def to_chrome(self, path: str | os.PathLike) -> None:
        """Write the trace as a file that ui.perfetto.dev opens. Raises OSError."""
        from ddp_kit.trace.chrome import write_chrome  # it needs what stands here

        write_chrome(self, path)

    def __len__(self) -> int:
        return len(self.events)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __repr__(self) -> str:
        sends = self.messages()
        total = sum(message.nbytes for message in sends)
        parts = [_count(len(sends), "message") + f" of {total:,} bytes"] if sends else []
        if self.lost:
            parts.append(f"{len(self.lost):,} of them never received")
        if self.collectives:
            parts.append(_count(len(self.collectives), "collective"))
        if any(self.dropped):
            parts.append(f"{sum(self.dropped):,} older events dropped")
        return f"Trace({_count(self.world_size, 'rank')}: {', '.join(parts) or 'nothing sent'})"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
