"""Your own backend: a process group in Python, over memory that all ranks of a host share.

    sockets            a message through the loopback beside a copy in memory
    flags              a barrier in which each rank writes its own flag
    all_reduce         of two ranks; of any number, where each rank sums one chunk
    SegmentGroup       a `ProcessGroup` for `register_backend`, over which DDP trains

It is compared with the backend of the ranks: sums, bytes, and a network that is trained.
Source: PyTorch's tutorial "Customize Process Group Backends Using Cpp Extensions",
https://docs.pytorch.org/tutorials/intermediate/process_group_cpp_extension_tutorial.html.
"""

from __future__ import annotations

import copy
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import timedelta
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_kit import compare
from ddp_kit.launch import lesson_parser, open_ranks, prove, run_as_script
from ddp_kit.lessons._digits import first_digits, flat
from ddp_kit.lessons._segment_group import (  # noqa: F401 - the notebook uses them
    BareGroup,
    CollectiveGroup,
    Finished,
    Receive,
    SegmentGroup,
    pieces,
    tell_by_store,
    without_store,
)
from ddp_kit.lessons._shared_segment import (  # noqa: F401
    LIMIT,
    LINE,
    ROOM,
    Flags,
    Segment,
    address,
    all_gather,
    all_reduce,
    all_reduce_bytes,
    all_reduce_of_two,
    attach,
    broadcast,
    create,
    get,
    give_way,
    give_way_then_nap,
    mailbox,
    nap,
    put,
    recv,
    send,
    slots_for,
    spin,
    tell_all,
    this_host,
)
from ddp_kit.lessons.partitioned_sgd import SEED, Net

BATCH = 128  # digits for all ranks together
SIZES = (4, 4_000, 40_000, 400_000, 4_000_000, 40_000_000)  # bytes
COUNTS = (1, 7, 1000, ROOM // 8 + 3)  # elements; the last is more than a slot of float64 holds
DTYPES = (torch.float32, torch.float64, torch.int64, torch.float16)
Seconds = dict[str, list[float]]


def join(creator: Callable[..., dist.ProcessGroup] = SegmentGroup) -> dist.ProcessGroup:
    """Register a process group as the backend "segment", and return a group of all ranks."""
    dist.Backend.register_backend("segment", creator, devices=["cpu"])
    return dist.new_group(backend="segment", timeout=timedelta(seconds=60))


def join_anywhere() -> dist.ProcessGroup:
    """Do the same under any launcher: ranks of mpiexec have no store in common."""
    return join(without_store if "mpi" in dist.get_backend() else SegmentGroup)


def through_a_socket(rank: int, world_size: int, nbytes: int, rounds: int = 20) -> Seconds:
    """Time a message of rank 0 to rank 1 through the loopback, and a copy of it in memory.

    Returns the seconds of each round on rank 0: "socket" until rank 1 has answered, and "copy".
    """
    message, arrived = torch.ones(nbytes, dtype=torch.uint8), bytearray(nbytes)
    seconds: Seconds = {"socket": [], "copy": []}
    with closing(connect(rank)) as line:
        for _ in range(rounds):
            start = time.perf_counter()
            if rank == 0:
                line.sendall(message.numpy())
                line.recv(1)
            else:
                receive_all(line, memoryview(arrived))
                line.sendall(b"1")
            middle = time.perf_counter()
            message.clone()
            seconds["socket"].append(middle - start)
            seconds["copy"].append(time.perf_counter() - middle)
    return seconds


def connect(rank: int) -> socket.socket:
    """Return a TCP connection of two ranks over the loopback."""
    if rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(LIMIT)
            tell_all(str(server.getsockname()[1]))
            line, _ = server.accept()
    else:
        line = socket.create_connection(("127.0.0.1", int(tell_all(None))), timeout=LIMIT)
    line.settimeout(LIMIT)
    return line


def receive_all(line: socket.socket, room: memoryview) -> int:
    """Fill the room with what arrives; return how many calls it took."""
    calls = 0
    while room:
        room = room[line.recv_into(room) :]
        calls += 1
    return calls


def see_each_other(rank: int, world_size: int) -> list[int]:
    """Write this rank's number into memory that all share; return what is there."""
    own = create(4096) if rank == 0 else None
    memory = attach(tell_all(address(own) if rank == 0 else None))
    numbers = torch.frombuffer(memory, dtype=torch.int64)
    numbers[rank] = 10 + rank
    dist.barrier()
    if own is not None:
        os.close(own)
    return numbers[: world_size + 1].tolist()


def barrier_seconds(
    rank: int, world_size: int, pause: Callable[[int], None], rounds: int = 5
) -> list[float]:
    """Return how long a barrier takes on this rank, in each round the mean of four."""
    segment, seconds = Segment(rank, world_size, pause=pause), []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(4):
            segment.barrier()
        seconds.append((time.perf_counter() - start) / 4)
    return seconds


def miss_a_barrier(rank: int, world_size: int, limit: float = 1.0) -> None:
    """Have all ranks but the last one wait at a barrier, until the limit."""
    segment = Segment(rank, world_size, limit=limit)
    if rank != world_size - 1:
        segment.barrier()


def numbers(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return small whole numbers, different on each rank, whose sums are exact in any dtype."""
    return ((torch.arange(count) + 3 * rank) % 7).to(dtype)


def reduce_in(
    rank: int, world_size: int, algorithm: Callable[[Segment, torch.Tensor], None], count: int
) -> tuple[torch.Tensor, tuple[int, int]]:
    """Return this rank's result of an all_reduce, and the bytes that it wrote and read."""
    segment, tensor = Segment(rank, world_size), numbers(rank, count)
    algorithm(segment, tensor)
    return tensor, (segment.written, segment.read)


def try_group(rank: int, world_size: int) -> list[str]:
    """Compare the collectives of the new backend with those of the ranks' own; return faults."""
    group, wrong = join_anywhere(), []
    for count in COUNTS:
        for dtype in DTYPES:
            mine, theirs = (numbers(rank, count, dtype) for _ in range(2))
            dist.all_reduce(mine, group=group)
            dist.all_reduce(theirs)
            wrong += [f"all_reduce {count} {dtype}"] * (not torch.equal(mine, theirs))
            root = world_size - 1
            dist.broadcast(mine := numbers(rank, count, dtype), root, group=group)
            wrong += [f"broadcast {count}"] * (not torch.equal(mine, numbers(root, count, dtype)))
            lists = [torch.empty(count, dtype=dtype) for _ in range(world_size)]
            dist.all_gather(lists, numbers(rank, count, dtype), group=group)
            expected = [numbers(each, count, dtype) for each in range(world_size)]
            wrong += [f"all_gather {count}"] * (not all(map(torch.equal, lists, expected)))
    dist.barrier(group=group)
    mine = numbers(rank, 1000)
    ring(mine, group)
    wrong += ["ring"] * (not torch.equal(mine, sum(numbers(r, 1000) for r in range(world_size))))
    dist.destroy_process_group(group)
    return wrong


def ring(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Sum a flat tensor with the chunked ring of lesson 04, in a group."""
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


def train(
    rank: int, world_size: int, own: bool = True, steps: int = 30, join: Callable = join
) -> dict[str, Any]:
    """Train the network of lesson 03 with DDP on 1,280 digits, ten batches, in turn.

    own: over the new backend, else over that of the ranks. Returns "losses" of this rank, and
    "parameters" (all of them, one flat tensor).
    """
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


def timed(call: Callable[..., Any], *args: Any) -> float:
    """Return the seconds that a call takes after a barrier."""
    dist.barrier()
    start = time.perf_counter()
    call(*args)
    return time.perf_counter() - start


def measure(
    rank: int, world_size: int, sizes: Sequence[int] = SIZES, rounds: int = 5
) -> dict[str, dict[int, list[float]]]:
    """Time all_reduce and the ring over gloo and over the new backend, in turn.

    Returns this rank's seconds by name, bytes and round. The first round is left out. The ring is
    timed from 400 B to what a mailbox holds.
    """
    group, seconds = join(), {}
    calls: dict[str, Callable] = {
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


def slowest(result: Sequence[dict[str, dict[int, list[float]]]]) -> dict[str, list]:
    """Return for each name pairs of bytes and the seconds of each round of the slowest rank."""
    return {
        name: [
            (nbytes, list(map(max, zip(*(rank[name][nbytes] for rank in result), strict=True))))
            for nbytes in points
        ]
        for name, points in result[0].items()
    }


def step_seconds(rank: int, world_size: int, width: int = 0, rounds: int = 10) -> Seconds:
    """Time steps of DDP over gloo and over the new backend, in turn.

    width: of four linear layers; 0: the network of lesson 03. Returns this rank's seconds.
    """
    group, seconds = join(), {}
    layers = [torch.nn.Linear(width, width) for _ in range(4)] if width else [Net().eval()]
    x = torch.randn(32, width) if width else torch.randn(32, 1, 28, 28)
    model = torch.nn.Sequential(*layers)
    for name, used in (("gloo", None), ("segment", group)) * 2:
        replica = DistributedDataParallel(copy.deepcopy(model), process_group=used)
        step = partial(one_step, replica, x)
        samples = [timed(step) for _ in range(2 + rounds)][2:]  # DDP orders its buckets first
        seconds.setdefault(name, []).extend(samples)
    dist.destroy_process_group(group)
    return seconds


def one_step(model: torch.nn.Module, x: torch.Tensor) -> None:
    """Compute gradients, which DDP averages."""
    model(x).square().mean().backward()


def main(argv: list[str] | None = None) -> None:
    """Compare sums, bytes and a training with the ranks' own backend, and print one line."""
    options = lesson_parser("your_own_backend", __doc__).parse_args(argv or [])
    with open_ranks(options.world_size, options.backend, options.trace) as ranks:
        n, count = ranks.world_size, 1000
        whole = sum(numbers(rank, count) for rank in range(n))
        algorithms = [all_reduce, all_reduce_of_two] if n == 2 else [all_reduce]
        for algorithm in algorithms:
            sums = [tensor for tensor, _ in ranks(reduce_in, algorithm, count)]
            prove(f"{algorithm.__name__} is exact", all(torch.equal(each, whole) for each in sums))
        moved = list(zip(*(moved for _, moved in ranks(reduce_in, all_reduce, count)), strict=True))
        expected = all_reduce_bytes(n, 4 * count)
        means = [sum(each) / n for each in moved]
        prove(f"a rank writes and reads {expected} bytes on average", compare(means, expected))
        wrong = [fault for faults in ranks(try_group) for fault in faults]
        prove(f"the collectives are right, but not {wrong}", not wrong)
        ours, theirs = (list(ranks(train, own, 5, join_anywhere)) for own in (True, False))
        prove("DDP trains as over the other backend", compare(ours, theirs))
        if n <= 2:  # a sum of two is the same in either order
            same = all(
                torch.equal(a["parameters"], b["parameters"])
                for a, b in zip(ours, theirs, strict=True)
            )
            prove("the parameters are bit-equal", same)
        ranks.say(f"your_own_backend: {ranks}, sums are exact and DDP trains as over gloo")


if __name__ == "__main__":
    run_as_script(main)
