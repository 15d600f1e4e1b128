# Made from notebooks/21_your_own_backend.ipynb by `make editions`: edit that, not this.
"""Your own backend: the ranks of a host share memory."""

import copy
import mmap
import os
import time
from datetime import timedelta
from functools import partial
from itertools import product

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_kit.lessons._digits import first_digits, flat
from ddp_kit.lessons._launch import run_as_script
from ddp_kit.lessons._your_own_backend import (
    Receive,
    all_gather,
    broadcast,
    join_anywhere,
    main,
    one_step,
    slowest,
    tell_by_store,
    this_host,
    timed,
    without_store,
)
from ddp_kit.lessons.partitioned_sgd import SEED, Net


def create(nbytes):
    if not hasattr(os, "memfd_create"):
        raise RuntimeError("this lesson needs Linux, for os.memfd_create; on Windows, use WSL")
    descriptor = os.memfd_create("segment")
    os.ftruncate(descriptor, nbytes)
    return descriptor


def address(descriptor):
    return f"{this_host()} /proc/{os.getpid()}/fd/{descriptor}"


def attach(where):
    host, path = where.split(" ")
    if host != this_host():
        raise RuntimeError("shared memory needs all ranks on one host; rank 0 is on another one")
    try:
        with open(path, "r+b", buffering=0) as file:
            return mmap.mmap(file.fileno(), 0)  # 0: all of it
    except OSError as error:
        raise RuntimeError(f"cannot open the memory of rank 0: {error.strerror}") from None


def tell_all(where):
    told = [where]
    dist.broadcast_object_list(told, src=0)
    return told[0]


def see_each_other(rank, world_size):
    own = create(4096) if rank == 0 else None
    memory = attach(tell_all(address(own) if rank == 0 else None))
    numbers = torch.frombuffer(memory, dtype=torch.int64)
    numbers[rank] = 10 + rank
    dist.barrier()
    if own is not None:
        os.close(own)
    return numbers[: world_size + 1].tolist()


LIMIT = 60.0  # seconds to wait for another rank


ROOM = 4 * 2**20  # bytes of what a rank shares at once


LINE = 64  # bytes of a cache line


def spin(looks):
    pass


def give_way(looks):
    os.sched_yield()


def nap(looks):
    time.sleep(50e-6)


def give_way_then_nap(looks):
    if looks < 100:
        os.sched_yield()
    else:
        time.sleep(50e-6)


class Flags:
    def __init__(self, memory, count, limit=LIMIT, pause=give_way_then_nap):
        self.numbers = memoryview(memory)[: count * LINE].cast("q")  # of 8 bytes each
        self.limit, self.pause = limit, pause

    def __getitem__(self, line):
        return self.numbers[line * LINE // 8]

    def __setitem__(self, line, number):
        self.numbers[line * LINE // 8] = number

    def wait(self, lines, number, what):
        looks, end = 0, time.monotonic() + self.limit
        message = f"waited {self.limit:g} s for {what}"
        while missing := [line for line in lines if self[line] < number]:
            looks += 1
            self.pause(looks)
            if time.monotonic() > end:
                raise RuntimeError(f"{message} {missing}")


class Segment:
    def __init__(self, rank, size, tell=tell_all, **waiting):
        self.rank, self.size, self.turn = rank, size, 0
        self.written = self.read = 0
        lines = size + 2 * size**2  # barrier, and two for each mailbox
        start = -(-lines * LINE // 4096) * 4096
        own = create(start + (size + size**2) * ROOM) if rank == 0 else None
        memory = attach(tell(address(own) if rank == 0 else None))
        self.flags = Flags(memory, lines, **waiting)
        whole = torch.frombuffer(memory, dtype=torch.uint8, offset=start).view(-1, ROOM)
        self.slots, self.mail = whole[:size], whole[size:].view(size, size, ROOM)
        self.barrier()
        if own is not None:
            os.close(own)  # all have mapped the memory

    def barrier(self):
        self.turn += 1
        self.flags[self.rank] = self.turn
        self.flags.wait(range(self.size), self.turn, "ranks")


def miss_a_barrier(rank, world_size, limit=1.0):
    segment = Segment(rank, world_size, limit=limit)
    if rank != world_size - 1:
        segment.barrier()


def barrier_seconds(rank, world_size, pause, rounds=5):
    segment, seconds = Segment(rank, world_size, pause=pause), []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(4):
            segment.barrier()
        seconds.append((time.perf_counter() - start) / 4)
    return seconds


def put(segment, place, tensor):
    place.copy_(tensor)
    segment.written += tensor.nbytes


def get(segment, place):
    segment.read += place.nbytes
    return place


def slots_for(segment, piece):
    return [slot.view(piece.dtype)[: len(piece)] for slot in segment.slots]


def all_reduce_of_two(segment, piece):
    slots = slots_for(segment, piece)
    put(segment, slots[segment.rank], piece)
    segment.barrier()  # both have written
    piece += get(segment, slots[1 - segment.rank])
    segment.barrier()


def numbers(rank, count, dtype=torch.float32):
    return ((torch.arange(count) + 3 * rank) % 7).to(dtype)


def reduce_in(rank, world_size, algorithm, count):
    segment, tensor = Segment(rank, world_size), numbers(rank, count)
    algorithm(segment, tensor)
    return tensor, (segment.written, segment.read)


def all_reduce(segment, piece):
    me, ranks = segment.rank, range(segment.size)
    chunks = piece.tensor_split(segment.size)
    shared = [slot.tensor_split(segment.size) for slot in slots_for(segment, piece)]
    others = [rank for rank in ranks if rank != me]
    for owner in others:
        put(segment, shared[me][owner], chunks[owner])
    segment.barrier()
    for rank in others:
        chunks[me].add_(get(segment, shared[rank][me]))
    put(segment, shared[me][me], chunks[me])
    segment.barrier()
    for owner in others:
        chunks[owner].copy_(get(segment, shared[owner][owner]))
    segment.barrier()


class Finished(dist.Work):
    def __init__(self, tensors):
        super().__init__()
        self.future = torch.futures.Future()
        self.future.set_result(list(tensors))

    def wait(self, timeout=None):
        return True

    def is_completed(self):
        return True

    def get_future(self):
        return self.future


def pieces(*tensors):
    for tensor in tensors:
        yield from tensor.detach().view(-1).split(ROOM // tensor.itemsize)


class BareGroup(dist.ProcessGroup):
    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        tell = partial(tell_by_store, store)
        self.segment = Segment(rank, size, tell, limit=timeout.total_seconds())

    def setGroupName(self, name):
        self.name = name

    def getGroupName(self):
        return self.name

    def shutdown(self):
        del self.segment


class CollectiveGroup(BareGroup):
    def allreduce(self, tensors, opts=None):
        if opts is not None and opts.reduceOp != dist.ReduceOp.SUM:
            raise ValueError(f"this backend can only sum, got {opts.reduceOp}")
        for piece in pieces(*tensors):
            all_reduce(self.segment, piece)
        return Finished(tensors)

    def broadcast(self, tensors, opts):
        for piece in pieces(*tensors):
            broadcast(self.segment, piece, opts.rootRank)
        return Finished(tensors)

    def allgather(self, outputs, inputs, opts=None):
        for gathered, tensor in zip(outputs, inputs, strict=True):
            for *parts, piece in zip(*map(pieces, gathered), pieces(tensor), strict=True):
                all_gather(self.segment, parts, piece)
        return Finished([tensor for gathered in outputs for tensor in gathered])


def mailbox(segment, src, dst, piece):
    line = segment.size + 2 * (src * segment.size + dst)
    if piece.nbytes > ROOM:
        raise ValueError(f"a message has at most {ROOM:,} bytes here, got {piece.nbytes:,}")
    return segment.mail[src, dst].view(piece.dtype)[: len(piece)], line, line + 1


def send(segment, piece, dst):
    box, sent, taken = mailbox(segment, segment.rank, dst, piece)
    flags = segment.flags
    flags.wait([taken], flags[sent], f"rank {dst}, which has not taken a message: flag")
    put(segment, box, piece)
    flags[sent] += 1


def recv(segment, piece, src):
    box, sent, taken = mailbox(segment, src, segment.rank, piece)
    flags, late = segment.flags, f"rank {src}, which has not sent a message: flag"
    flags.wait([sent], flags[taken] + 1, late)
    piece.copy_(get(segment, box))
    flags[taken] += 1


class SegmentGroup(CollectiveGroup):
    def send(self, tensors, dst, tag=0):
        send(self.segment, tensors[0].detach().view(-1), dst)
        return Finished(tensors)

    def recv(self, tensors, src, tag=0):
        return Receive(partial(recv, self.segment, tensors[0].detach().view(-1), src))

    def barrier(self, opts=None):
        self.segment.barrier()
        return Finished([])


def join(creator=SegmentGroup):
    dist.Backend.register_backend("segment", creator, devices=["cpu"])
    return dist.new_group(backend="segment", timeout=timedelta(seconds=60))


def first_sum(rank, world_size):
    group = join()
    tensor = torch.full((3,), 10.0**rank)
    dist.all_reduce(tensor, group=group)
    return dist.get_backend(group), tensor, group.segment.turn


def ring(tensor, group=None):
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(n)
    arriving = torch.empty_like(chunks[0])
    for step in range(2 * (n - 1)):
        going, coming = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        into = arriving[: len(coming)] if step < n - 1 else coming
        sending = dist.isend(going, (rank + 1) % n, group=group)
        dist.recv(into, (rank - 1) % n, group=group)
        sending.wait()
        if step < n - 1:
            coming += into


def ring_on_both(rank, world_size):
    groups, tensors = (None, join()), [numbers(rank, 1001), numbers(rank, 1001)]
    for group, tensor in zip(groups, tensors, strict=True):
        ring(tensor, group)
    return torch.equal(*tensors)


BATCH = 128  # digits for all ranks together


def train(rank, world_size, own=True, steps=20, join=join):
    torch.manual_seed(SEED)
    group = join() if own else None
    model = DistributedDataParallel(Net().eval(), process_group=group)  # without dropout
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9), []
    images, labels = (part.cpu().split(BATCH) for part in first_digits(10 * BATCH))
    for step in range(steps):
        mine = slice(rank, None, world_size)
        optimizer.zero_grad()
        loss = F.nll_loss(model(images[step % 10][mine]), labels[step % 10][mine])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if group is not None:
        dist.destroy_process_group(group)
    return {"losses": losses, "parameters": flat(model.parameters())}


SIZES = (4, 4_000, 40_000, 400_000, 4_000_000, 40_000_000)  # bytes


def measure(rank, world_size, sizes=SIZES, rounds=5):
    group, seconds = join(), {}
    calls = {
        "gloo": dist.all_reduce,
        "segment": lambda tensor: dist.all_reduce(tensor, group=group),
        "ring on gloo": ring,
        "ring on segment": lambda tensor: ring(tensor, group),
    }
    for nbytes, round_ in product(sizes, range(1 + rounds)):
        tensor = torch.zeros(nbytes // 4)
        for name, call in calls.items():
            if "ring" not in name or 400 <= nbytes <= ROOM:
                spent = timed(call, tensor)
                if round_:
                    seconds.setdefault(name, {}).setdefault(nbytes, []).append(spent)
    dist.destroy_process_group(group)
    return seconds


def step_seconds(rank, world_size, width=0, rounds=10):
    group, seconds = join(), {}
    layers = [torch.nn.Linear(width, width) for _ in range(4)] if width else [Net().eval()]
    x = torch.randn(32, width) if width else torch.randn(32, 1, 28, 28)
    model = torch.nn.Sequential(*layers)
    for name, used in (("gloo", None), ("segment", group)) * 2:
        replica = DistributedDataParallel(copy.deepcopy(model), process_group=used)
        step = partial(one_step, replica, x)
        samples = [timed(step) for _ in range(2 + rounds)]
        seconds.setdefault(name, []).extend(samples[2:])  # DDP orders its buckets first
    dist.destroy_process_group(group)
    return seconds


if __name__ == "__main__":
    run_as_script(main)
