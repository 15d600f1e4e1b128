"""The collectives and the messages, as steps over slots and rings.

What all ranks need goes through slots, in rounds: each rank writes a chunk into its slot, announces
it, and reads the chunks of the others. What is for one rank alone goes through the ring to it: a
gather, scatter or all_to_all is a few messages. So a tensor of any size needs the same memory, and
is written once.

An `all_reduce` of more than a few pages takes two rounds for each chunk, as a reduce-scatter and an
all-gather do: the rank that owns a part of the chunk reads that part of all slots, and writes the
result into a slot of its own, from which the others read it.

In its ring, a message is a header of 16 bytes, with its tag and its size, and then the bytes. A
rank that receives reads all that comes until it has its message, and keeps the others. A send ends
when its message was read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ddp_kit.backends.engine import Steps
from ddp_kit.backends.process_group import REDUCTIONS
from ddp_kit.backends.shm.segment import READ, SLOT, SLOTS, WRITTEN, Ring, Segment, fence

_SMALL = 1 << 15  # bytes up to which every rank reduces everything itself, in one round
_NAMES = ("barrier", "broadcast", "reduce", "allreduce", "allgather", "reduce_scatter")
_TAGS = {"gather": -1, "scatter": -2, "alltoall": -3}  # of their messages
_DTYPES = tuple(sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str))


class SharedMemoryOperations:
    """The collectives and messages of one rank in a group; see `process_group`."""

    def __init__(self, segment: Segment) -> None:
        self._segment, self._words, self._lines = segment, segment.words, segment.lines
        self._rank, self._size = segment.rank, segment.size
        self._others = tuple(rank for rank in range(segment.size) if rank != segment.rank)
        self._round = 0  # since the group exists: the same number on all ranks
        self._inboxes = Inboxes(segment)
        self._outboxes = [Outbox(segment, rank) for rank in range(segment.size)]

    def send(self, data: Tensor, target: int, tag: int) -> Steps:
        return self._outboxes[target].send(data.view(torch.uint8), tag)

    def receive(self, work: Any, data: Tensor, source: int | None, tag: int) -> Steps:
        return self._inboxes.receive(work, data.view(torch.uint8), source, tag)

    # Rounds

    def _until(self, column: int, count: int, ranks: Sequence[int]) -> Steps:
        """Wait until a counter of each of the ranks has reached a number."""
        words, lines = self._words, self._lines
        for rank in ranks:
            while words[lines[rank] + column] < count:
                yield (rank,)
        fence()

    def _until_free(self) -> Steps:
        """Wait until everybody has read what was in this rank's next slot before."""
        return self._until(READ, self._round - SLOTS + 1, self._others)

    def _until_written(self, ranks: Sequence[int], call: tuple[int, int]) -> Steps:
        """Wait until ranks have written in this round. Raise RuntimeError if theirs differs."""
        yield from self._until(WRITTEN, self._round + 1, ranks)
        for rank in ranks:
            at = self._segment.header(rank, self._round % SLOTS)
            theirs = self._words[at], self._words[at + 1]
            if theirs != call:
                raise RuntimeError(
                    f"{_name(call)}: rank {self._rank} called {_describe(call)}, "
                    f"but rank {rank} called {_describe(theirs)}"
                )

    def _until_read(self, ranks: Sequence[int]) -> Steps:
        """Wait until ranks have read the last round.

        A rank could go on without that. But with gloo, too, a sender waits for its receivers, so
        that a rank that leaves out a collective is noticed.
        """
        return self._until(READ, self._round, ranks)

    def _slot(self, rank: int, dtype: torch.dtype) -> Tensor:
        return self._segment.slot(rank, self._round % SLOTS, dtype)

    def _publish(self, call: tuple[int, int]) -> None:
        """Announce what this rank has written into its slot."""
        at = self._segment.header(self._rank, self._round % SLOTS)
        self._words[at], self._words[at + 1] = call
        fence()
        self._words[self._lines[self._rank] + WRITTEN] = self._round + 1
        self._segment.announce()

    def _end_round(self) -> None:
        """Announce that this rank has read all that it needs."""
        self._round += 1
        fence()
        self._words[self._lines[self._rank] + READ] = self._round
        self._segment.announce()

    # Collectives over slots

    def barrier(self) -> Steps:
        call = _encode("barrier")
        yield from self._until_free()
        self._publish(call)
        yield from self._until_written(self._others, call)
        self._end_round()

    def broadcast(self, data: Tensor, root: int) -> Steps:
        call = _encode("broadcast", data, root)
        for start, end in _chunks(len(data), SLOT // data.itemsize):
            part = data[start:end]
            if root == self._rank:
                yield from self._until_free()
                self._slot(root, data.dtype)[: end - start].copy_(part)
                self._publish(call)
            else:
                yield from self._until_written((root,), call)
                part.copy_(self._slot(root, data.dtype)[: end - start])
            self._end_round()
        if root == self._rank:
            yield from self._until_read(self._others)

    def all_gather(self, data: Tensor, outputs: Sequence[Tensor]) -> Steps:
        calls = [_encode("allgather", output) for output in outputs]
        calls[self._rank] = _encode("allgather", data)
        longest = max(map(len, outputs))
        if outputs[self._rank].data_ptr() != data.data_ptr():
            outputs[self._rank].copy_(data)
        for start, end in _chunks(longest, SLOT // data.itemsize):
            yield from self._until_free()
            part = data[start:end]
            self._slot(self._rank, data.dtype)[: len(part)].copy_(part)
            self._publish(calls[self._rank])
            for rank in self._others:
                yield from self._until_written((rank,), calls[rank])
                part = outputs[rank][start:end]
                part.copy_(self._slot(rank, data.dtype)[: len(part)])
            self._end_round()

    def reduce(self, data: Tensor, op: str, root: int | None = None) -> Steps:
        name = "allreduce" if root is None else "reduce"
        call = _encode(name, data, root or 0, op)
        wants = root in (None, self._rank)
        if data.nbytes <= _SMALL:
            yield from self._until_free()
            slots = [self._slot(rank, data.dtype)[: len(data)] for rank in range(self._size)]
            slots[self._rank].copy_(data)
            self._publish(call)
            if wants:
                yield from self._until_written(self._others, call)
                combine(op, slots, data)
            self._end_round()
        else:
            for start, end in _chunks(len(data), SLOT // data.itemsize):
                yield from self._reduce_chunk(data[start:end], op, call, wants)
        if not wants:
            yield from self._until_read((root or 0,))

    def _reduce_chunk(self, data: Tensor, op: str, call: tuple[int, int], wants: bool) -> Steps:
        bounds = [len(data) * rank // self._size for rank in range(self._size + 1)]
        low, high = bounds[self._rank], bounds[self._rank + 1]
        yield from self._until_free()
        slot = self._slot(self._rank, data.dtype)
        slot[:low].copy_(data[:low])  # nobody reads the part that this rank owns
        slot[high : len(data)].copy_(data[high:])
        self._publish(call)
        yield from self._until_written(self._others, call)
        own = data[low:high]
        parts = [
            own if rank == self._rank else self._slot(rank, data.dtype)[low:high]
            for rank in range(self._size)
        ]
        # The result goes into the slot of the next round. This one ends when it is computed: then
        # a rank that does not wait for results may overwrite what was read.
        yield from self._until(READ, self._round - SLOTS + 2, self._others)
        following = self._segment.slot(self._rank, (self._round + 1) % SLOTS, data.dtype)
        result = following[: high - low]
        combine(op, parts, result)
        self._end_round()
        self._publish(call)
        if wants:
            own.copy_(result)
            for rank in (*self._others[self._rank :], *self._others[: self._rank]):
                yield from self._until_written((rank,), call)
                part = data[bounds[rank] : bounds[rank + 1]]
                part.copy_(self._slot(rank, data.dtype)[: len(part)])
        self._end_round()

    def reduce_scatter(self, inputs: Sequence[Tensor], output: Tensor, op: str) -> Steps:
        dtype = output.dtype
        call = _encode("reduce_scatter", sum(each.nbytes for each in inputs), 0, op)
        room = SLOT // dtype.itemsize // self._size
        for start, end in _chunks(max(map(len, inputs)), room):
            yield from self._until_free()
            slot = self._slot(self._rank, dtype)
            for rank in self._others:
                part = inputs[rank][start:end]
                slot[rank * room : rank * room + len(part)].copy_(part)
            self._publish(call)
            yield from self._until_written(self._others, call)
            own = inputs[self._rank][start:end]
            at = self._rank * room
            parts = [
                own if rank == self._rank else self._slot(rank, dtype)[at : at + len(own)]
                for rank in range(self._size)
            ]
            if len(own):
                combine(op, parts, output[start:end])
            self._end_round()

    # Collectives over rings

    def exchange(
        self, name: str, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]
    ) -> Steps:
        me, work = self._rank, SimpleNamespace(done=False, source=-1)
        if me in sends and me in receives:
            receives[me].copy_(sends[me])
        streams = [self.send(data, r, _TAGS[name]) for r, data in sends.items() if r != me]
        streams += [
            self.receive(work, data, r, _TAGS[name]) for r, data in receives.items() if r != me
        ]
        while streams:
            waiting = [(next(stream, None), stream) for stream in streams]
            streams = [stream for needs, stream in waiting if needs is not None]
            if streams:
                yield {rank for needs, _ in waiting if needs is not None for rank in needs}


def _chunks(length: int, most: int) -> list[tuple[int, int]]:
    """Return the start and end of equal chunks of at most so many elements; one if there are none.

    All ranks must get the same number of chunks, so it depends on the length alone.
    """
    count = max(1, -(-length // most))
    size = -(-length // count)
    return [(i * size, min(length, (i + 1) * size)) for i in range(count)]


def _encode(name: str, data: Tensor | int = 0, root: int = 0, op: str = "SUM") -> tuple[int, int]:
    """Return two numbers for what all ranks must agree on, and the bytes."""
    nbytes, dtype = (data, 0) if isinstance(data, int) else (data.nbytes, _DTYPE_CODES[data.dtype])
    code = _NAME_CODES[name] | root << 8 | dtype << 24 | REDUCTIONS.index(op) << 40
    return code, nbytes


def _name(call: tuple[int, int]) -> str:
    return _NAMES[call[0] & 0xFF]


def _describe(call: tuple[int, int]) -> str:
    code, nbytes = call
    name = _name(call)
    words = [name]
    if name != "barrier":
        dtype = _DTYPES[code >> 24 & 0xFFFF]
        words.append(f"of {nbytes} bytes" + (f" of {dtype}" if name != "reduce_scatter" else ""))
    if name in ("broadcast", "reduce"):
        words.append(f"with root {code >> 8 & 0xFFFF}")
    return " ".join(words)


_NAME_CODES = {name: code for code, name in enumerate(_NAMES)}
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def combine(op: str, parts: Sequence[Tensor], out: Tensor) -> None:
    """Reduce flat tensors into another one, which may be the first of them.

    The value of rank 0 is combined with that of rank 1, the result with that of rank 2, and so on.
    This order does not depend on which rank computes, so all get the same bits, in every run. gloo
    adds in another order, which differs from chunk to chunk: with two ranks the sums are equal bit
    by bit, because a + b is b + a, and with more the last bits of a sum of floats may differ.

    Floats of less than 32 bits are reduced in float32 and rounded once at the end, whereas gloo
    rounds after every addition.
    """
    function, total = _FUNCTIONS[op], out
    rounds = out.is_floating_point() and out.itemsize < 4
    if rounds:
        parts = [part.float() for part in parts]
        total = torch.empty_like(parts[0])
    if len(parts) == 1:
        total.copy_(parts[0])
    else:
        function(parts[0], parts[1], out=total)
        for part in parts[2:]:
            function(total, part, out=total)
    if op == "AVG":
        total.div_(len(parts))
    if rounds:
        out.copy_(total)


# --- messages ------------------------------------------------------------------------------

_HEADER = 2  # integers of 8 bytes


class Outbox:
    """The messages of this rank to one other."""

    def __init__(self, segment: Segment, target: int) -> None:
        self._needs = (target,)
        self._ring = Ring(segment, segment.rank, target)
        self._is_writing = False

    def send(self, data: torch.Tensor, tag: int) -> Steps:
        """Write a message into the ring, and wait until it was read.

        The engine moves sends on in the order in which they were started, so they are written in
        that order, too.
        """
        while self._is_writing:
            yield self._needs
        self._is_writing = True
        header = torch.tensor([tag, len(data)]).view(torch.uint8)
        for part in (header, data):
            for _ in self._ring.write_all(part):
                yield self._needs
        self._is_writing = False
        end = self._ring.written
        while self._ring.read_to < end:
            yield self._needs


class _Message:
    """A message that arrives from a rank. memory: where its bytes go; done: how many have come."""

    def __init__(self, source: int, tag: int, nbytes: int) -> None:
        self.source, self.tag, self.nbytes = source, tag, nbytes
        self.memory: torch.Tensor | None = None
        self.done = 0

    @property
    def is_complete(self) -> bool:
        return self.done == self.nbytes


class _Receive:
    """A receive. sources: the ranks from which it takes a message."""

    def __init__(self, work: Any, buffer: torch.Tensor, sources: Collection[int], tag: int) -> None:
        self.work, self.buffer, self.sources, self.tag = work, buffer, sources, tag
        self.message: _Message | None = None

    def takes(self, message: _Message) -> bool:
        is_for_it = message.tag == self.tag and message.source in self.sources
        return is_for_it and not self.work.done  # it may have timed out


class Inboxes:
    """What arrives from every rank, and the receives that wait for it, in their order."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        ranks = range(segment.size)
        self._rings = [Ring(segment, rank, segment.rank) for rank in ranks]
        self._arriving: list[_Message | None] = [None for _ in ranks]
        self._early: list[_Message] = []  # those that came before their receives
        self._posted: list[_Receive] = []

    def receive(self, work: Any, buffer: torch.Tensor, source: int | None, tag: int) -> Steps:
        """Fill a buffer with a message of a rank; None: of any."""
        sources = range(self._segment.size) if source is None else (source,)
        receive = _Receive(work, buffer, sources, tag)
        receive.message = next(filter(receive.takes, self._early), None)
        if receive.message is None:
            self._posted.append(receive)
        else:
            self._early.remove(receive.message)
        while receive.message is None or not receive.message.is_complete:
            if receive.message is None and work.done:
                self._posted.remove(receive)
                return
            ranks = sources if receive.message is None else (receive.message.source,)
            if not any(map(self._read_on, ranks)):
                yield ranks
        self._take(receive, receive.message)

    def _read_on(self, rank: int) -> bool:
        """Read on in the message of a rank, or in its next one; return whether it is complete."""
        ring = self._rings[rank]
        message = self._arriving[rank]
        if message is None:
            if ring.written - ring.read_to < _HEADER * 8:
                return False
            header = torch.empty(_HEADER, dtype=torch.int64)
            for _ in ring.read_all(header.view(torch.uint8)):
                pass  # it is all there
            message = self._arriving[rank] = _Message(rank, *header.tolist())
            self._find_receive(message)
        while not message.is_complete:
            count = ring.read(message.memory, message.done)
            if not count:
                return False
            message.done += count
        self._arriving[rank] = None
        return True

    def _find_receive(self, message: _Message) -> None:
        """Give a message to the first receive that takes it, which waits for no other one then."""
        for receive in self._posted:
            if receive.takes(message):
                self._posted.remove(receive)
                receive.message = message
                if len(receive.buffer) == message.nbytes:
                    message.memory = receive.buffer
                    return
                break
        else:
            self._early.append(message)
        message.memory = torch.empty(message.nbytes, dtype=torch.uint8)

    def _take(self, receive: _Receive, message: _Message) -> None:
        """Copy a complete message. Raise RuntimeError if it does not fit."""
        receive.work.source = message.source
        if len(receive.buffer) != message.nbytes:
            raise RuntimeError(
                f"recv got {message.nbytes} bytes from rank {message.source}, "
                f"but the tensor has {len(receive.buffer)}"
            )
        if message.memory is not receive.buffer:
            receive.buffer.copy_(message.memory)
