"""The kit's side of every comparison."""

from __future__ import annotations

import sys
import time

if sys.argv[1] == "notebook_import":  # the kit asks at its import whether it is in a notebook
    from IPython.core.interactiveshell import InteractiveShell

    InteractiveShell.instance()

began = time.perf_counter()
import torch  # noqa: E402

torch_done = time.perf_counter()
import ddp_kit as kit  # noqa: E402

kit_done = time.perf_counter()
import torch.distributed as dist  # noqa: E402
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
            "values": values,
            "torch_import": torch_import,
            "kit_import": kit_import,
            "notebook_import": kit_import,
            "modules": modules,
        }
    )
