"""DDP's buckets: when they are sent, how that overlaps with backward, and the time it saves."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from ddp_kit import device
from ddp_kit.lessons._ddp_by_hand import DistributedDataParallel, Replicated
from ddp_kit.lessons.partitioned_sgd import SEED, average_gradients
from ddp_kit.notebook.controls import Explorer, positive
from ddp_kit.trace import Trace

if TYPE_CHECKING:
    from ddp_kit.plot.picture import Picture
    from ddp_kit.pool.result import Result

USUAL_CAPS = (0.5, 1, 2, 4, 25)  # MiB; the last is DDP's default


class Stack(nn.Module):
    """Four linear layers with 1 MiB of weights each; input and output are (batch, 512).

    order: in which the layers are registered; they are used from 0 to 3. spare: register one
    more parameter, a single number that is never used.
    """

    def __init__(self, order: Iterable[int] = range(4), spare: bool = False) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        for number in order:
            self.add_module(f"layer{number}", nn.Linear(512, 512))
        if spare:
            self.spare = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layers."""
        for number in range(4):
            x = torch.relu(self.get_submodule(f"layer{number}")(x))
        return x


def one_backward(rank: int, world_size: int, hooks: bool) -> None:
    """Run one backward of four layers and average their gradients by hand, for the trace.

    hooks: average each gradient during the backward, and not all of them after it.
    """
    widths = (512, 768, 640, 896, 512)
    layers = [nn.Linear(a, b, bias=False) for a, b in pairwise(widths)]
    module = nn.Sequential(*layers).to(device())
    x = torch.ones(512, 512, device=device())
    module(x).sum().backward()  # warms up
    module.zero_grad()
    model = (DistributedDataParallel if hooks else Replicated)(module)
    loss = model(x).sum()
    dist.barrier()
    loss.backward()
    if hooks:
        model.finish_gradient_synchronization()
    else:
        average_gradients(model)


def watch(
    rank: int,
    world_size: int,
    bucket_cap_mb: float | None = None,
    find_unused_parameters: bool = False,
    order: Iterable[int] = range(4),
    spare: bool = False,
) -> list[list[str]]:
    """Note when each gradient is ready and each bucket is sent, in two backwards of a Stack.

    Returns the notes of each backward, in order.
    """
    model = Stack(order, spare).to(device())
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    notes: list[list[str]] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: notes[-1].append(names[id(p)]))

    def note_and_reduce(group, bucket):
        held = [names[id(parameter)] for parameter in bucket.parameters()]
        notes[-1].append(f"-> bucket {bucket.index()}: {', '.join(held)}")
        return allreduce_hook(group, bucket)  # what DDP does without a hook

    options = {"find_unused_parameters": find_unused_parameters}
    wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb, **options)
    wrapped.register_comm_hook(None, note_and_reduce)
    for _ in range(2):
        notes.append([])
        wrapped(torch.ones(1, 512, device=device())).sum().backward()
    return notes


def backwards(
    rank: int, world_size: int, bucket_cap_mb: float | None = None, steps: int = 10
) -> list[int]:
    """Run some backwards of a Stack of 4 MiB on 256 rows, for the trace.

    Returns when each of them began, in nanoseconds of `time.monotonic_ns()`.
    """
    stack = Stack().to(device())
    model = nn.parallel.DistributedDataParallel(stack, bucket_cap_mb=bucket_cap_mb)
    x = torch.ones(256, 512, device=device())
    began = []
    for _ in range(steps):
        loss = model(x).sum()
        began.append(time.monotonic_ns())
        loss.backward()
    return began


def on_one_axis(*results: Result) -> list[Picture]:
    """Draw the buckets of a typical backward of rank 0 from each run of `backwards`.

    The pictures have the same time axis, which starts when backward begins.
    """
    from ddp_kit import plot  # ranks do not need it

    pictures = []
    for result in results:
        step = typical(result.trace)
        pictures.append(plot.buckets(result, step=step, began=result[0][step]))
    charts = [picture.axes[1] for picture in pictures]  # axes[0] is the sheet of paper
    longest = max(chart.get_xlim()[1] for chart in charts)
    for chart in charts:
        chart.set_xlim(0, longest)
    return pictures


def typical(trace: Trace) -> int:
    """Return the index of the backward with rank 0's median wait; the first does not count."""
    reduced = [event for event in trace if event.rank == 0 and event.op == "DDP all_reduce"]
    waits = [event.end - event.waited for event in reduced if event.end and event.waited][1:]
    return 1 + waits.index(sorted(waits)[len(waits) // 2])


def explore(bucket_cap_mb: float = 1, world_size: int = 2) -> Explorer:
    """Run ten backwards of a Stack and draw the buckets of a typical one on rank 0.

    In JupyterLab, controls follow. Raises PoolError for an invalid choice.
    """
    caps = positive("bucket_cap_mb", bucket_cap_mb, USUAL_CAPS)
    return Explorer(
        "ddp",
        {"bucket_cap_mb": bucket_cap_mb, "world_size": world_size},
        choices=lambda settings: {
            "bucket_cap_mb": caps,
            "world_size": range(1, max(4, world_size) + 1),
        },
        ask=lambda settings: (backwards, settings["bucket_cap_mb"]),
        draw=lambda result, settings: on_one_axis(result)[0],
    )


OPTIONS = {
    "one bucket: no overlap": {"bucket_cap_mb": 1000},
    "buckets of 1 MiB": {"bucket_cap_mb": 1},
    "and find_unused_parameters": {"bucket_cap_mb": 1, "find_unused_parameters": True},
}


def step_seconds(
    rank: int, world_size: int, bytes_per_second: float | None = None, steps: int = 30
) -> dict[str, list[float]]:
    """Time forward and backward of a Stack with each of OPTIONS, in turn.

    bytes_per_second: of a slow network to imitate, with gloo. Each bucket is then delayed by its
    time on that network, one after the other; the cores are free meanwhile.
    Returns seconds per step for each name in OPTIONS, `steps` of them.
    """
    x = torch.ones(128, 512, device=device())
    seconds: dict[str, list[float]] = {name: [] for name in OPTIONS}
    with ThreadPoolExecutor(1) as wire:
        models = {}
        for name, options in OPTIONS.items():
            stack = Stack(spare="find_unused_parameters" in options).to(device())
            models[name] = nn.parallel.DistributedDataParallel(stack, **options)
            if bytes_per_second:
                models[name].register_comm_hook((wire, bytes_per_second), carry_slowly)
        for step in range(steps + 3):
            for name, model in models.items():
                dist.barrier()
                start = time.perf_counter()
                model(x).sum().backward()
                if x.is_cuda:
                    torch.cuda.synchronize()
                if step >= 3:  # the first steps warm up, and rebuild the buckets
                    seconds[name].append(time.perf_counter() - start)
    return seconds


def carry_slowly(state, bucket):
    """Reduce a bucket, then delay it as a slow network would: a hook for tensors on the CPU."""
    wire, bytes_per_second = state
    reduced, arrived = allreduce_hook(None, bucket), torch.futures.Future()
    nbytes = bucket.buffer().numel() * bucket.buffer().element_size()

    def carry() -> None:
        value = reduced.wait()
        time.sleep(nbytes / bytes_per_second)
        arrived.set_result(value)

    wire.submit(carry)
    return arrived
