"""The events of one run as plain data: which send and receive, which calls belong together."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from ddp_kit.error_text import Frame, count
from ddp_kit.errors import TraceError

if TYPE_CHECKING:
    from ddp_kit.trace.summary import Summary

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Group:
    """A process group: its name and its ranks in the world.

    name: PyTorch's, and which world it belongs to if that was formed in the run.
    backends: for each kind of device, as in "cpu:gloo,cuda:nccl"; "" if that is unknown.
    """

    name: str
    ranks: tuple[int, ...]
    backends: str = field(default="", compare=False, repr=False)


@dataclass(frozen=True)
class Event:
    """One operation of one rank, as that rank saw it.

    Ranks are always those of the world. Times are nanoseconds of the monotonic clock, which all
    processes of one machine share.
    """

    rank: int
    index: int  # of this operation on its rank, from 0
    op: str  # as it was called: "send", "all_reduce", "all_gather_object"
    kind: str  # "send", "recv" or "collective"
    method: str  # of ProcessGroup; all ranks of a collective must call the same
    group: Group
    sequence: int  # a message on its channel (src, dst, tag, group), a collective in its group
    peer: int | None = None  # dst of a send, src of a recv; None: any source, not known yet
    tag: int = 0
    root: int | None = None  # src or dst of a collective
    dtype: str = ""  # "float32"; "" without a tensor
    inputs: tuple[Shape, ...] = ()  # shapes of the tensors that this rank sends
    outputs: tuple[Shape, ...] = ()  # shapes of the tensors that it receives into
    splits: tuple[Shape, ...] = ()  # all_to_all_single: how many rows to and from each rank
    reduce_op: str | None = None  # "SUM"
    nbytes: int = 0  # of the inputs; for a recv, of the output
    start: int = 0  # when it was called
    waited: int | None = None  # when the rank began to wait for it
    end: int | None = None  # when the wait ended; None: it never did, or nobody waited
    where: Frame | None = None  # the learner's own line
    given_up: bool = False  # a message whose Work was deleted before anybody had waited for it
    device: str = "cpu"  # of its tensors: "cpu" or "cuda"
    strides: tuple[int, ...] = ()  # that gloo ignores; (): its tensors are contiguous
    blocking: bool = False  # the call itself waited, and not a Work or a future that it returned

    @property
    def shape(self) -> Shape:
        """The shape of its first tensor; () without one."""
        return next(iter(self.inputs + self.outputs), ())

    @property
    def never_ended(self) -> bool:
        """Whether its rank still waited for it when the run ended."""
        return self.waited is not None and self.end is None

    @property
    def call(self) -> str:
        """The call as the learner wrote it, as in "recv(src=1, tag=7)"."""
        return format_call(self.op, self.method, self.peer, self.tag, self.root)

    @property
    def match_key(self) -> tuple:
        """Equal for the two ends of one message, and for all ranks of one collective."""
        return self.channel or self.group, self.sequence

    @property
    def channel(self) -> tuple | None:
        """The (src, dst, tag, group) of a send or receive; None for a collective."""
        if self.kind == "send":
            return self.rank, self.peer, self.tag, self.group
        return (self.peer, self.rank, self.tag, self.group) if self.kind == "recv" else None


def format_call(op: str, method: str, peer: int | None, tag: int, root: int | None) -> str:
    """Return a call as the learner wrote it, as in "recv(src=1, tag=7)"."""
    shown = format_arguments(method, peer, tag, root)
    return f"{op}({', '.join(shown)})" if shown else op


def format_arguments(method: str, peer: int | None, tag: int, root: int | None) -> list[str]:
    """Return the arguments that name a rank or a tag, as in ["src=1", "tag=7"]; tag 0 is usual."""
    arguments = [f"{'dst' if method == 'send' else 'src'}={peer}"] if peer is not None else []
    arguments += [format_root(method, root)] if root is not None else []
    return arguments + ([f"tag={tag}"] if tag else [])


def format_root(method: str, root: int) -> str:
    """Return the root of a collective: PyTorch calls it "dst" if it receives, else "src"."""
    return f"{'dst' if method in ('gather', 'reduce') else 'src'}={root}"


@dataclass(frozen=True)
class Message:
    """A send, and the receive that took it; None if nobody received it."""

    send: Event
    recv: Event | None

    @property
    def src(self) -> int:
        """The sender's rank in the world."""
        return self.send.rank

    @property
    def dst(self) -> int:
        """The receiver's rank in the world."""
        assert self.send.peer is not None, "a send has a receiver"
        return self.send.peer

    @property
    def tag(self) -> int:
        """The tag of the send and the receive."""
        return self.send.tag

    @property
    def nbytes(self) -> int:
        """How many bytes of tensors were sent."""
        return self.send.nbytes

    def __repr__(self) -> str:
        parts = [f"{self.src} \N{RIGHTWARDS ARROW} {self.dst}", count(self.nbytes, "byte")]
        parts += [f"tag={self.tag}"] if self.tag else []
        parts += ["never received"] if self.recv is None else []
        return f"Message({', '.join(parts)})"


class NoMessages(list):
    """The messages of a run that had only collectives: an empty list whose repr says so."""

    def __init__(self, collectives: int) -> None:
        super().__init__()
        self._collectives = collectives

    def __repr__(self) -> str:
        if self:
            return super().__repr__()
        left_out = count(self._collectives, "collective")
        return f"[]  # no messages between two ranks; {left_out} in trace.collectives"


@dataclass(frozen=True)
class Trace:
    """What the ranks of one run communicated.

    world_size: number of ranks in the run.
    events: by rank, and then in the order in which the rank called them.
    dropped: for each rank, how many of its oldest events were not kept.
    spans: for each rank, when its worker began and ended, in nanoseconds of the monotonic clock.
    clock_error: for each rank, by how many nanoseconds its times may differ from those of rank 0,
        if hosts' clocks had to be compared; () if all ranks share one clock.
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
                recv = None  # the message was given up; the receive waited for another one
            messages.append(Message(send, recv))
        return messages

    @property
    def lost(self) -> list[Message]:
        """The messages that nobody received, as far as is known."""
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

        They are ordered by sender, and then as it sent them. Collectives are not among them, but in
        `collectives`: if the run had nothing else, the repr of the empty list says so. Raises
        TraceError for a rank that the run did not have.
        """
        for rank in (src, dst):
            if rank is not None:
                self._check(rank)
        if not self._messages and self.collectives:
            return NoMessages(len(self.collectives))
        return [
            message
            for message in self._messages
            if (src is None or message.src == src) and (dst is None or message.dst == dst)
        ]

    def bytes_sent(self, rank: int) -> int:
        """Return how many bytes `rank` sent in messages. Raises TraceError as `messages` does."""
        return sum(message.nbytes for message in self.messages(src=rank))

    def blocked(self, rank: int) -> float:
        """Return how many seconds `rank` waited for communication that was completed.

        Raises TraceError for a rank that the run did not have.
        """
        self._check(rank)
        ends = ((e.waited, e.end) for e in self.events if e.rank == rank)
        return sum(end - waited for waited, end in ends if waited and end) / 1e9

    def summary(self, timed: bool = False, rank: int | None = None) -> Summary:
        """Return a table of the calls: how many, and the bytes that each rank sent.

        timed: add how long each rank waited, and how much of its communication was hidden behind
            computing. Without these times, the text is the same on every run of a deterministic
            program. rank: only this one.

        If the ranks repeat the same calls, as in training, the table has the numbers of a training
        step as well. The bytes come from formulas, such as 2(n-1)/n times the size of the tensor
        for an all_reduce on n ranks; `ddp_kit.trace.collectives` has them all. What the table shows
        is also in its `rows`. Raises TraceError for a rank that the run did not have.
        """
        from ddp_kit.trace.summary import summarize  # which imports this module

        if rank is not None:
            self._check(rank)
        return summarize(self, timed, rank)

    def _check(self, rank: int) -> None:
        if rank not in range(self.world_size):
            last = self.world_size - 1
            raise TraceError(f"there is no rank {rank!r}: the ranks of this run are 0 to {last}")

    def to_chrome(self, path: str | os.PathLike) -> None:
        """Write the trace as a file that ui.perfetto.dev opens. Raises OSError."""
        from ddp_kit.trace.trace_files import write_chrome  # which imports this module

        write_chrome(self, path)

    def __len__(self) -> int:
        return len(self.events)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __repr__(self) -> str:
        sends = self.messages()
        total = sum(message.nbytes for message in sends)
        parts = [count(len(sends), "message") + f" of {total:,} bytes"] if sends else []
        if self.lost:
            parts.append(f"{len(self.lost):,} of them never received")
        if self.collectives:
            parts.append(count(len(self.collectives), "collective"))
        if any(self.dropped):
            parts.append(f"{sum(self.dropped):,} older events dropped")
        return f"Trace({count(self.world_size, 'rank')}: {', '.join(parts) or 'nothing sent'})"
