"""What gpu.py runs besides the lessons, one function each: python gpu_checks.py memory 2"""

from __future__ import annotations

import difflib
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

import ddp_kit as kit
from ddp_kit.lessons import data_parallel
from ddp_kit.lessons._launch import prove
from ddp_kit.lessons.backends import DTYPES, LIMIT
from ddp_kit.lessons.backends import probe as try_all

SCRIPT = Path(__file__).resolve().parents[2] / "notebooks" / "scripts" / "03_partitioned_sgd.py"
DEVICE = 'torch.device("cuda", rank % torch.cuda.device_count())'
# The tutorial's three lines: the device, the network on it, each batch on it. Ours also adds up
# the loss of an epoch, on the device.
PORT = (
    (
        "    torch.manual_seed(1234)  # the same data and the same parameters on every rank\n",
        "    torch.manual_seed(1234)  # the same data and the same parameters on every rank\n"
        "    device = {device}\n",
    ),
    ("nn.Linear(64, 10))\n", "nn.Linear(64, 10)).to(device)\n"),
    (
        "            total += train_step(model, optimizer, *batch)",
        "            batch = [part.to(device) for part in batch]\n"
        "            total += train_step(model, optimizer, *batch)",
    ),
    ("total = torch.zeros(1)\n", "total = torch.zeros(1, device=device)\n"),
)
MIB = 2**20
SIZES = (4, 4 * 2**10, 64 * 2**10, MIB, 16 * MIB, 100 * MIB, 1024 * MIB)  # bytes


def add_up(rank: int, world_size: int) -> torch.Tensor:
    """Return the sum of a tensor of each rank's, on this rank's device."""
    total = torch.full((4,), float(rank + 1), device=kit.device())
    dist.all_reduce(total)
    return total


def wait_for_nobody(rank: int, world_size: int) -> None:
    """Reduce on all ranks but the last: a deadlock."""
    if rank < world_size - 1:
        dist.all_reduce(torch.zeros(4, device=kit.device()))


def raise_on_the_last(rank: int, world_size: int) -> None:
    """Raise on the last rank, while the others reduce."""
    if rank == world_size - 1:
        raise ValueError("my mistake")
    dist.all_reduce(torch.zeros(4, device=kit.device()))


def first_run(places: Sequence[tuple[str, int]]) -> None:
    """Run right and wrong functions on each (backend, ranks); print the seconds that each took."""
    lines = []
    for backend, ranks in places:
        before = _used()
        with kit.WorkerPool(ranks, backend=backend) as pool:
            cold, result = _timed(pool.run, add_up)
            warm, _ = _timed(pool.run, add_up)
            each = (_used() - before) / ranks
            for value in result:
                prove("the sum is right", value.tolist() == 4 * [ranks * (ranks + 1) / 2])
                prove("tensors come back on the CPU", value.device.type == "cpu")
            line = f"{backend:9} on {ranks}: first {cold:5.2f} s, warm {1e3 * warm:3.0f} ms, "
            line += f"{each / MIB:4.0f} MiB of the GPU a rank"
            if ranks > 1:
                seconds = _raises(pool, wait_for_nobody, kit.DeadlockError)
                line += f", deadlock after {seconds:.2f} s"
            pool.run(add_up)  # ranks that were stuck have been replaced
            seconds = _raises(pool, raise_on_the_last, kit.RankError)
            lines.append(f"{line}, exception after {seconds:.2f} s")
            prove("the next run works", len(pool.run(add_up)) == ranks)
    print(f"first_run: {len(places)} backends give the right values and explain what is wrong")
    print("\n".join(lines))


def probe(backend: str, ranks: str, *dtypes: str) -> None:
    """Print what a backend does with each operation and dtype, tried on real ranks."""
    run = partial(kit.run, world_size=int(ranks), backend=backend, timeout=LIMIT)
    cells = try_all(run, dtypes=dtypes or DTYPES)
    outcomes = Counter(outcome.partition(":")[0] for outcome in cells.values())
    counted = ", ".join(f"{count} {word}" for word, count in outcomes.items())
    print(f"probe: {backend} on {ranks}: {counted}")
    by_outcome: dict[tuple[str, str], list[str]] = {}
    for (operation, dtype), outcome in cells.items():
        by_outcome.setdefault((operation, outcome[:150]), []).append(dtype)
    for (operation, outcome), kinds in by_outcome.items():
        print(f"{operation:22} {outcome}: {', '.join(kinds)}")


def _timed(call: Callable, *args) -> tuple[float, Any]:
    begin = time.perf_counter()
    value = call(*args)
    return time.perf_counter() - begin, value


def _raises(pool: kit.WorkerPool, worker: Callable, kind: type[Exception]) -> float:
    begin = time.perf_counter()
    try:
        pool.run(worker)
    except kind:
        return time.perf_counter() - begin
    raise kit.ProofError(f"{worker.__name__} did not raise {kind.__name__}")


def _used() -> int:
    return nvidia_smi(torch.device("cuda", 0)) if torch.cuda.is_available() else 0


def all_reduce_times(rank: int, world_size: int, sizes: Sequence[int]) -> list[float]:
    """Return the median seconds of an all_reduce of each size, in bytes."""
    found = []
    for nbytes in sizes:
        tensor, times = torch.ones(nbytes // 4, device=kit.device()), []
        is_large, until = nbytes >= 16 * MIB, time.monotonic() + 4
        while len(times) < 3 or (len(times) < 40 and not is_large):
            dist.barrier()
            begin = time.perf_counter()
            dist.all_reduce(tensor)
            if kit.device().type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
            if is_large and time.monotonic() > until:
                break
        found.append(statistics.median(times[1:] or times))
    return found


def all_reduce(places: Sequence[tuple[str, int]], sizes: Sequence[int] = SIZES) -> None:
    """Print the time of an all_reduce by size, for each (backend, ranks)."""
    columns = [
        kit.run(all_reduce_times, sizes, world_size=ranks, backend=backend)[0]
        for backend, ranks in places
    ]
    print(f"all_reduce: medians in ms, {sizes[0]} B to {sizes[-1] / MIB:,.0f} MiB, float32")
    print(f"{'bytes':>12} " + "".join(f"{f'{b}, {n}':>14}" for b, n in places))
    for nbytes, *row in zip(sizes, *columns, strict=True):
        print(f"{nbytes:12,} " + "".join(f"{1e3 * seconds:14.3f}" for seconds in row))


def ported(source: str, device: str, backend: str) -> str:
    """Return lesson 03's script with the lines changed that a GPU needs.

    Raises ProofError if one of these lines is not there exactly once.
    """
    for old, new in (*PORT, ('"gloo"', f'"{backend}"')):
        prove(f"the script has the line {old.strip()!r} once", source.count(old) == 1)
        source = source.replace(old, new.format(device=device))
    return source


def cuda_port(backend: str, ranks: int, device: str = DEVICE) -> None:
    """Train with lesson 03's script on the CPU and on GPUs; compare what both print.

    The data and the order of the digits are drawn on the CPU, so that only rounding differs.
    """
    source = SCRIPT.read_text("utf-8")
    four = "args=(4,), nprocs=4"
    prove("the script sets its world size once", source.count(four) == 1)
    started = source.replace(four, f"args=({ranks},), nprocs={ranks}")
    port = ported(started, device, backend)
    on_cpu, on_gpu = _train(started), _train(port)
    losses = [
        [float(number) for number in re.findall(r"loss (\S+)", out)] for out in (on_cpu, on_gpu)
    ]
    prove("both print the loss of four epochs", [len(of) for of in losses] == [4, 4])
    gap = max(abs(a - b) for a, b in zip(*losses, strict=True))
    prove(f"the losses are the same but for rounding, and differ by {gap:.2f}", gap < 0.015)
    prove("the replicas are the same", "differ by at most 0.0\n" in on_gpu)
    said = f"{ranks} rank{'s' if ranks > 1 else ''} over {backend}, last loss {losses[1][-1]:.2f}"
    print(f"cuda_port: {said}, on the CPU {losses[0][-1]:.2f}; the lines that change:")
    for line in difflib.unified_diff(started.splitlines(), port.splitlines(), lineterm="", n=0):
        if line[:1] in "+-" and line[:3] not in ("+++", "---"):
            print(line)


def _train(source: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(source, "utf-8")
        command = [sys.executable, str(script)]
        alone = os.environ | {"OMP_NUM_THREADS": "1"}  # ranks that share cores get slow with more
        out = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=240, env=alone)
    prove("the script ends well", out.returncode == 0)
    return out.stdout


def memory(
    places: Sequence[torch.device],
    smi: Callable[[torch.device], int],
    width: int = 2048,
    count: int = 16384,
) -> None:
    """Print what `kit.plot.memory` draws beside what PyTorch and nvidia-smi say, step by step.

    smi: returns the bytes of a device that are in use, as nvidia-smi shows them.
    """
    readings: list[list[tuple[int, int]]] = []

    def read() -> list[tuple[int, int]]:
        torch.cuda.empty_cache()  # PyTorch keeps what it has freed, and nvidia-smi counts it
        return [(torch.cuda.memory_allocated(place), smi(place)) for place in places]

    def watched(*args):
        for step in eight_steps(*args):
            readings.append(read())
            held = [step]
            del step  # this name would keep the memory alive
            yield held.pop()

    eight_steps = data_parallel.eight_steps
    for place in places:  # the context of CUDA and cuBLAS' workspace are there before we begin
        torch.ones(64, 64, device=place).matmul(torch.ones(64, 64, device=place)).sum().item()
    before = read()
    layers = [nn.Linear(width, width, bias=False) for _ in range(4)]
    model = nn.Sequential(*layers, nn.LogSoftmax(dim=1)).to(places[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    images = torch.randn(count, width, device=places[0])
    labels = torch.arange(count, device=places[0]) % width
    for _ in eight_steps(model, optimizer, images, labels, places):
        pass  # the first step makes the momentum
    with patch.object(data_parallel, "eight_steps", watched):
        held = data_parallel.held_after_each_step(places, model, optimizer, images, labels)
    rows = []
    for (step, by_kind), after in zip(held.items(), readings, strict=True):
        for place, kinds in enumerate(by_kind):
            used = [now - then for now, then in zip(after[place], before[place], strict=True)]
            rows.append((step, place, sum(kinds.values()), *used))
    prove("PyTorch has allocated what the lesson counts", all(row[2] <= row[3] for row in rows))
    most = max(rows, key=lambda row: row[2])
    counts, allocated, shown = (f"{number / MIB:,.0f}" for number in most[2:])
    print(
        f"memory: after {most[0]}, the lesson counts {counts} MiB on device {most[1]}, PyTorch has "
        f"allocated {allocated}, nvidia-smi shows {shown}, the context of CUDA not counted"
    )
    print(f"{'step':16} device {'lesson':>8} {'PyTorch':>8} {'nvidia-smi':>11}  MiB")
    for step, place, *numbers in rows:
        counts, allocated, shown = (f"{number / MIB:,.1f}" for number in numbers)
        print(f"{step:16} {place:6} {counts:>8} {allocated:>8} {shown:>11}")


def nvidia_smi(place: torch.device) -> int:
    """Return the bytes of a GPU that are in use, by all processes."""
    identity = f"GPU-{torch.cuda.get_device_properties(place).uuid}"
    query = ["nvidia-smi", f"--id={identity}", "--query-gpu=memory.used"]
    command = [*query, "--format=csv,noheader,nounits"]
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return int(out.stdout) * MIB


def places(names: Sequence[str]) -> list[tuple[str, int]]:
    """Return the backend and the number of ranks in each name such as "cuda:gloo:4"."""
    split = [name.rpartition(":") for name in names]
    return [(backend, int(ranks)) for backend, _, ranks in split]


def main(name: str, *arguments: str) -> None:
    """Run one of the checks on GPUs."""
    if name == "first_run":
        first_run(places(arguments))
    elif name == "all_reduce":
        all_reduce(places(arguments), SIZES if torch.cuda.is_available() else SIZES[:4])
    elif name == "cuda_port":
        cuda_port(arguments[0], int(arguments[1]))
    elif name == "memory":
        memory([torch.device("cuda", index) for index in range(int(arguments[0]))], nvidia_smi)
    else:
        globals()[name](*arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
