"""The kit's side of every comparison."""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from functools import partial

if sys.argv[1] == "notebook_import":  # the kit asks at its import whether it is in a notebook
    from IPython.core.interactiveshell import InteractiveShell

    InteractiveShell.instance()

began = time.perf_counter()
import torch  # noqa: E402

gc.freeze()  # by chance, a collection of torch's objects falls into one import or the other
torch_done = time.perf_counter()
import ddp_kit as kit  # noqa: E402

kit_done = time.perf_counter()
import psutil  # noqa: E402
import torch.distributed as dist  # noqa: E402
from jupyter_client.manager import start_new_kernel  # noqa: E402
from side import seconds, serve  # noqa: E402

from ddp_kit.trace.rank import recorder  # noqa: E402

HEAVY = ("matplotlib", "IPython", "torchvision", "ipywidgets")


def all_reduce(rank, world_size):
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def hundred_megabytes(rank, world_size):
    return torch.zeros(25_000_000)


def many_all_reduces(rank, world_size, traced):
    if not traced:
        recorder.current = None  # until the end of the run: then nothing is recorded
    number = torch.ones(1)
    dist.barrier()
    began = time.perf_counter()
    for _ in range(3000):
        dist.all_reduce(number)
    return time.perf_counter() - began


def recorder_time(rank, world_size):
    """Return the processor time of this thread for an all_reduce that is recorded, beyond one that
    is not; both take turns.
    """
    number, recorded, added = torch.ones(1), recorder.current, []
    for _ in range(5):
        took = []
        for recorder.current in (recorded, None):
            dist.barrier()
            began = time.thread_time()
            for _ in range(3000):
                dist.all_reduce(number)
            took.append((time.thread_time() - began) / 3000)
        added.append(took[0] - took[1])
    recorder.current = recorded
    return statistics.median(added)


def timed_all_reduces(rank, world_size, nbytes, repeats, how):
    """Time all_reduces of a tensor, or only a copy of it, which all ranks do at once.

    how: "copy", "ring" (of lesson 04), or any other word for `dist.all_reduce`.
    """
    from ddp_kit.lessons.your_own_backend import ring

    recorder.current = None  # until the end of the run
    tensor = torch.ones(nbytes // 4)
    copy = torch.empty_like(tensor if how == "copy" else tensor[:0])
    call = {"copy": copy.copy_, "ring": ring}.get(how, dist.all_reduce)
    times = []
    for number in range(repeats + 1):  # the first is not counted
        dist.barrier()
        tensor.fill_(1)
        dist.barrier()
        began = time.perf_counter()
        call(tensor)
        times += [time.perf_counter() - began] if number else []
    return times


def timed_steps(rank, world_size, width, repeats, with_ddp):
    """Time steps of DDP, or of the model alone. width: of four layers; 0: the net of lesson 03."""
    from torch.nn.parallel import DistributedDataParallel

    from ddp_kit.lessons.partitioned_sgd import Net
    from ddp_kit.lessons.your_own_backend import one_step, timed

    recorder.current = None  # until the end of the run
    torch.manual_seed(0)
    layers = [torch.nn.Linear(width, width) for _ in range(4)] if width else [Net().eval()]
    model = torch.nn.Sequential(*layers)
    x = torch.randn(32, width) if width else torch.randn(32, 1, 28, 28)
    replica = DistributedDataParallel(model) if with_ddp else model
    return [timed(one_step, replica, x) for _ in range(3 + repeats)][3:]  # DDP orders its buckets


def heavy_modules(rank, world_size):
    return [name for name in HEAVY if name in sys.modules]


def cold():
    """From nothing to the first result, in a process that has imported the kit."""
    yield "ready"
    began = time.perf_counter()
    pool = kit.WorkerPool(4)
    result = pool.run(all_reduce)
    took = time.perf_counter() - began
    assert list(result) == [4.0] * 4
    yield [took]
    pool.close()


def warm():
    """Calls on a pool that has answered before."""
    with kit.WorkerPool(4) as pool:
        pool.run(all_reduce)
        yield "ready"
        while True:
            yield [seconds(pool.run, all_reduce) for _ in range(20)]


def resize(before: int, after: int):
    """Calls that change the world size of warm processes."""
    with kit.WorkerPool(4) as pool:
        pool.run(all_reduce)
        yield "ready"
        while True:
            pool.run(all_reduce, world_size=before)
            yield [seconds(pool.run, all_reduce, world_size=after)]


def traced(yes: bool):
    """3,000 all_reduces of one number on 2 ranks; rank 0's clock."""
    with kit.WorkerPool(2) as pool:
        yield "ready"
        while True:
            yield [pool.run(many_all_reduces, yes)[0]]


def recording(ranks: int):
    """The processor time that recording adds to an all_reduce; rank 0's."""
    with kit.WorkerPool(ranks) as pool:
        yield "ready"
        while True:
            yield [pool.run(recorder_time)[0]]


def all_reduces(backend: str, world_size: int, nbytes: int, how: str = "all_reduce"):
    """all_reduces on a backend, one after another; rank 0's clock."""
    repeats = 50 if nbytes < 1e5 else 10 if nbytes < 1e7 else 3
    with kit.WorkerPool(world_size, backend) as pool:
        yield "ready"
        while True:
            yield pool.run(timed_all_reduces, nbytes, repeats, how)[0]


def steps(backend: str, width: int):
    """Steps of DDP on 2 ranks, or without DDP ("alone"); rank 0's clock."""
    with_ddp = backend != "alone"
    with kit.WorkerPool(2, backend if with_ddp else "gloo") as pool:
        yield "ready"
        while True:
            yield pool.run(timed_steps, width, 20, with_ddp)[0]


def values():
    """Two ranks return 100 MB each."""
    with kit.WorkerPool(2) as pool:
        pool.run(hundred_megabytes)
        yield "ready"
        while True:
            yield [seconds(pool.run, hundred_megabytes)]


def torch_import():
    """How long `import torch` took above."""
    yield "ready"
    yield [torch_done - began]


def kit_import():
    """How long `import ddp_kit` took above, after torch."""
    yield "ready"
    yield [kit_done - torch_done]


def wait_for_neighbour(rank, world_size):
    dist.recv(torch.zeros(1), src=(rank + 1) % world_size)


def exchange(rank, world_size, events):
    """Call `events` operations in all, 50 messages each way at a time."""
    arriving, leaving = torch.zeros(50), torch.ones(50)
    for _ in range(events // world_size // 100):
        works = [dist.irecv(arriving[i : i + 1], rank ^ 1) for i in range(50)]
        works += [dist.isend(leaving[i : i + 1], rank ^ 1) for i in range(50)]
        for work in works:
            work.wait()


def deadlock_found(pool):
    try:
        pool.run(wait_for_neighbour)
    except kit.DeadlockError:
        return


def growth(world_size: int):
    """What a pool of so many ranks costs; seconds, and bytes that only one rank uses."""
    yield "ready"
    found = {}
    began = time.perf_counter()
    with kit.WorkerPool(world_size) as pool:
        assert list(pool.run(all_reduce)) == [world_size] * world_size
        found["start"] = time.perf_counter() - began
        found["warm"] = statistics.median(seconds(pool.run, all_reduce) for _ in range(50))
        pids = pool.run(lambda rank, world_size: os.getpid())
        memory = [psutil.Process(pid).memory_full_info().uss for pid in pids]
        found["memory"] = statistics.median(memory)
        found["events"] = seconds(lambda: len(pool.run(exchange, 100_000).trace))
        found["deadlock"] = seconds(deadlock_found, pool)
        pool.run(all_reduce)
        found["smaller"] = seconds(pool.run, all_reduce, world_size=world_size // 2)
    yield found


FIRST_RUN = """
import time, torch, torch.distributed as dist

def all_reduce(rank, world_size):
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()

began = time.perf_counter()
kit.run(all_reduce)
took = time.perf_counter() - began
"""


def first_run():
    """The first `kit.run` of a notebook's kernel, 10 s after its import of the kit."""
    manager, client = start_new_kernel()
    try:
        client.execute("import ddp_kit as kit", reply=True, timeout=60)
        time.sleep(10)
        yield "ready"
        wanted = {"took": "took"}
        answer = client.execute(FIRST_RUN, user_expressions=wanted, reply=True, timeout=60)
        yield [float(answer["content"]["user_expressions"]["took"]["data"]["text/plain"])]
    finally:
        client.stop_channels()
        manager.shutdown_kernel()


def cells(warm: bool):
    """Trivial cells in the 10 s after a notebook's import of the kit."""
    os.environ["DDP_KIT_WARM"] = str(int(warm))
    manager, client = start_new_kernel()
    try:
        client.execute("import ddp_kit", reply=True, timeout=60)
        yield "ready"
        times, ends = [], time.monotonic() + 10
        while time.monotonic() < ends:
            times.append(seconds(client.execute, "1", reply=True, timeout=60))
            time.sleep(0.02)
        yield times
    finally:
        client.stop_channels()
        manager.shutdown_kernel()


def modules():
    """Which heavy modules a rank has loaded whose worker asked for none."""
    with kit.WorkerPool(1) as pool:
        yield "ready"
        yield pool.run(heavy_modules)[0]


if __name__ == "__main__":
    serve(
        {
            "cold": cold,
            "warm": warm,
            "smaller": lambda: resize(4, 2),
            "larger": lambda: resize(2, 4),
            "traced": lambda: traced(True),
            "untraced": lambda: traced(False),
            **{f"recording {ranks}": partial(recording, ranks) for ranks in (1, 2)},
            "values": values,
            **{
                f"all_reduce {backend} {ranks} {nbytes}": partial(
                    all_reduces, backend.replace("copy", "gloo"), ranks, nbytes, backend
                )
                for backend in ("shm", "gloo", "mpi", "copy")
                for ranks in (2, 4)
                for nbytes in (4, 10_000, 2**20, 40_000_000, 100_000_000)
            },
            **{
                f"ring {backend} {ranks} {2**20}": partial(
                    all_reduces, backend, ranks, 2**20, "ring"
                )
                for backend in ("shm", "gloo")
                for ranks in (2, 4)
            },
            **{
                f"step {backend} {width}": partial(steps, backend, width)
                for backend in ("shm", "gloo", "alone")
                for width in (0, 512)
            },
            **{f"growth {n}": partial(growth, n) for n in (2, 4, 8, 16, 32, 64)},
            "first_run": first_run,
            "cells_while_starting": lambda: cells(True),
            "cells_without_ranks": lambda: cells(False),
            "torch_import": torch_import,
            "kit_import": kit_import,
            "notebook_import": kit_import,
            "modules": modules,
        }
    )
