"""Backends: what each of them can do on this machine, and what a message costs.

Each operation is tried on real ranks with each dtype, and its numbers are checked. Sources: section
Communication Backends of "Writing Distributed Applications with PyTorch"; MLBench, "Communication
Backends, Raw performance benchmarking" (2020), for the old table and for the costs.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from statistics import fmean, median, pstdev

import psutil
import torch
import torch.distributed as dist

from ddp_kit import backends, device, pool
from ddp_kit.errors import BackendError
from ddp_kit.launch import lesson_parser, open_ranks, prove, run_as_script
from ddp_kit.lessons._backend_probes import (  # noqa: F401 - the notebook uses them
    BITWISE,
    DTYPES,
    LIMIT,
    OPERATIONS,
    WITHOUT_DTYPE,
    Cells,
    attempt,
    has_answer,
    probe,
    refusals,
)
from ddp_kit.model import fit
from ddp_kit.renamed import renamed

PLACES = {
    "gloo on the CPU": "gloo",
    "mpi on the CPU": "mpi",
    "gloo on GPUs": "cuda:gloo",
    "nccl on GPUs": "nccl",
}
EVERYWHERE = ("float32", "float64", "int64", "int32", "uint8")  # dtypes of all backends
NCCL_DTYPES = (*EVERYWHERE, "float16", "bfloat16", "float8_e4m3fn", "bool")  # PyTorch maps them
SIZES = (4, 64, 1_000, 16_000, 256_000, 4_000_000, 64_000_000)  # bytes
ALPHA, BETA = "\N{GREEK SMALL LETTER ALPHA}", "\N{GREEK SMALL LETTER BETA}"
Series = list[tuple[int, float]]

__getattr__ = renamed(__name__, told="format_fit")


def missing(backend: str, world_size: int = 2) -> str | None:
    """Return the kit's reason why a backend is unavailable here; None if it is available."""
    try:
        backends.choose_backend(backend, world_size)
    except BackendError as error:
        return str(error)
    return None


def here(world_size: int = 2) -> list[str]:
    """Return the backends available here for tensors on the CPU: gloo, and perhaps mpi."""
    return [name for name in ("gloo", "mpi") if missing(name, world_size) is None]


def probe_here() -> dict[str, Cells | str]:
    """Probe each of PLACES with two ranks; an unavailable one gets the kit's reason instead.

    nccl is probed with as many ranks as there are GPUs, but at most two.
    """
    found: dict[str, Cells | str] = {}
    for place, backend in PLACES.items():
        gpus = torch.cuda.device_count()
        world_size = min(2, gpus) if backend == "nccl" and gpus else 2
        reason = missing(backend, world_size)
        run = partial(pool.run, world_size=world_size, backend=backend, timeout=LIMIT)
        found[place] = probe(run) if reason is None else reason
    return found


def nccl_documented() -> Cells:
    """Return what is documented about nccl, for each cell of a probe; nothing is run.

    Sources: the table of backends and the notes on ReduceOp in the documentation of
    `torch.distributed`, and the map ncclDataType in NCCLUtils.hpp, which comes with PyTorch. It
    sends a bool as a uint8, and ProcessGroupNCCL refuses AVG of bools. "not run" is what none of
    them says.
    """
    cells = {}
    for name in OPERATIONS:
        op = name.split()[-1]
        for kind in DTYPES:
            dtype = getattr(torch, kind)
            complex_refused = dtype.is_complex and op in ("PRODUCT", "MIN", "MAX")
            if op in BITWISE or complex_refused or (op, kind) == ("AVG", "bool"):
                cells[name, kind] = "excluded"
            elif kind in NCCL_DTYPES and has_answer(op, dtype):
                cells[name, kind] = "documented"
            else:
                cells[name, kind] = "not run"
    return cells | {("barrier", "any"): "documented", ("objects", "any"): "not run"}


def accepts(rank: int, world_size: int, backend: str) -> str:
    """Call all_reduce with a CPU tensor, in a group with this backend; return how it went."""
    group = dist.new_group(backend=backend)
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError as error:
        return f"refused: {error}"
    return "works"


def started_by(rank: int, world_size: int) -> str:
    """Return the name of the program that started this process."""
    parent = psutil.Process(os.getppid()).name()
    return "Python" if parent.lower().startswith("python") else parent


def both_send_first(rank: int, world_size: int, nbytes: int) -> float:
    """Send to the other rank before receiving from it; return the first number received."""
    mine = torch.full((nbytes // 4,), float(rank), device=device())
    into = torch.empty_like(mine)
    dist.send(mine, 1 - rank)
    dist.recv(into, 1 - rank)
    return into[0].item()


def lopsided_sum(rank: int, world_size: int, dtype: torch.dtype) -> list[float]:
    """Sum ones and one number so large that adding a single 1 to it changes nothing in `dtype`.

    Each rank has the large number at another position, so at one position it comes first.
    """
    large = 2.0 / torch.finfo(dtype).eps
    tensor = torch.ones(world_size, dtype=dtype, device=device())
    tensor[rank] = large
    dist.all_reduce(tensor)
    return (tensor.double() - large).tolist()


def true_until(rank: int, world_size: int, most: int = 20) -> int | None:
    """Sum True over and over; return after how many sums it is False, None if it stays True."""
    tensor = torch.tensor([True], device=device())
    for count in range(1, most + 1):
        dist.all_reduce(tensor)
        if not tensor.item():
            return count
    return None


# --- what a message costs ------------------------------------------------------------------


def ping_pong(tensor: torch.Tensor) -> None:
    """Send a tensor from rank 0 to rank 1 and back; other ranks do nothing."""
    rank = dist.get_rank()
    if rank == 0:
        dist.send(tensor, 1)
        dist.recv(tensor, 1)
    elif rank == 1:
        dist.recv(tensor, 0)
        dist.send(tensor, 0)


TIMED: dict[str, Callable[[torch.Tensor], None]] = {
    "all_reduce": dist.all_reduce,
    "broadcast": partial(dist.broadcast, src=0),
    "send and back": ping_pong,
}


def measure(
    rank: int,
    world_size: int,
    operation: Callable[[torch.Tensor], None],
    sizes: Iterable[int],
    dtype: torch.dtype = torch.float32,
    most: int = 15,
) -> list[list[float]]:
    """Time rounds of an operation at each size on this rank; return the seconds of each round.

    A round takes the sizes in turn, so that a busy second of the machine slows all of them and not
    one. A barrier comes before each time. most: rounds of sizes below 1 MB; others get at most 5.
    """
    tensors = [
        torch.zeros(max(1, nbytes // dtype.itemsize), dtype=dtype, device=device())
        for nbytes in sizes
    ]
    samples = [[] for _ in tensors]
    for turn in range(1 + most):
        for tensor, seconds in zip(tensors, samples, strict=True):
            if tensor.nbytes >= 1_000_000 and turn > 5:
                continue
            dist.barrier()
            start = time.perf_counter()
            operation(tensor)
            if tensor.is_cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    return [seconds[1:] for seconds in samples]  # the first round warms up


def samples(
    run: Callable, operation: str, sizes: Iterable[int] = SIZES, dtype: torch.dtype = torch.float32
) -> list[tuple[int, list[float]]]:
    """Return bytes with the seconds of each round on its slowest rank; a round trip counts half.

    run: calls a worker on all ranks, such as `functools.partial(kit.run, world_size=2)`.
    operation: a name in TIMED.
    """
    sizes = tuple(sizes)
    per_rank = list(run(measure, TIMED[operation], sizes, dtype))
    share = 0.5 if operation == "send and back" else 1.0
    slowest = [
        [share * max(times) for times in zip(*rounds, strict=True)]
        for rounds in zip(*per_rank, strict=True)
    ]
    return list(zip(sizes, slowest, strict=True))


def series(
    run: Callable, operation: str, sizes: Iterable[int] = SIZES, dtype: torch.dtype = torch.float32
) -> Series:
    """Return pairs of bytes and median seconds; arguments as in `samples`."""
    return [(nbytes, median(seconds)) for nbytes, seconds in samples(run, operation, sizes, dtype)]


def fit_by_hand(points: Iterable[tuple[int, float]]) -> tuple[float, float]:
    """Return alpha and beta of the line that is closest on a logarithmic scale, to about 5 %.

    points: pairs of bytes and seconds. `ddp_kit.model.fit` searches more finely.
    """
    fits = []
    for k in [10 ** (i / 50) for i in range(451)]:  # bytes: from 1 to 1,000,000,000
        logs = [math.log(seconds / (1 + nbytes / k)) for nbytes, seconds in points]
        fits.append((pstdev(logs), math.exp(fmean(logs)), k))
    _, alpha, k = min(fits)
    return alpha, alpha / k


def direct_and_wrapped(rank: int, world_size: int, rounds: int = 300) -> list[float]:
    """Return the median seconds of 4 bytes by MPI_Allreduce alone, and by `dist.all_reduce`.

    Only in ranks with backend="mpi". The first is mpi4py's blocking call, which waits inside MPI.
    """
    from mpi4py import MPI

    ranks = MPI.COMM_WORLD.Create_group(MPI.COMM_WORLD.Get_group().Incl(range(world_size)))
    tensor, medians = torch.zeros(1), []
    native = partial(ranks.Allreduce, MPI.IN_PLACE, tensor.numpy())
    for call in (native, partial(dist.all_reduce, tensor)):
        seconds = []
        for _ in range(rounds):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        medians.append(median(seconds))
    return medians


def format_fit(points: Iterable[tuple[int, float]]) -> str:
    """Return alpha in microseconds and beta in nanoseconds a byte and as GB/s, in one line."""
    alpha, beta = fit(points)
    rate = 1e-9 / beta if beta else math.inf
    return (
        f"{ALPHA} = {1e6 * alpha:7,.0f} µs   {BETA} = {1e9 * beta:6.3f} ns a byte ({rate:.2f} GB/s)"
    )


def main(argv: list[str] | None = None) -> None:
    """Try all operations with the dtypes that every backend has, and print one line.

    On GPUs a backend may refuse an operation; a wrong answer is an error everywhere.
    """
    options = lesson_parser("backends", __doc__).parse_args(argv or [])
    operations = {name: OPERATIONS[name] for name in OPERATIONS if name.split()[-1] not in BITWISE}
    with open_ranks(options.world_size, options.backend, options.trace) as ranks:
        cells = probe(ranks, operations, EVERYWHERE)
        on_gpus = backends.choose_backend(ranks.backend, ranks.world_size) in backends.ON_GPUS
        well = ("works", "no answer", "refused") if on_gpus else ("works", "no answer")
        for (name, kind), outcome in cells.items():
            claim = f"{name} gives the right answer for {kind}; got: {outcome}"
            prove(claim, outcome.partition(":")[0] in well)
        refused = {name for (name, _), outcome in cells.items() if outcome.startswith("refused")}
        right = len({name for name, _ in cells} - refused)
        ranks.say(f"backends: {ranks}, {right} operations right on {len(EVERYWHERE)} dtypes")


if __name__ == "__main__":
    run_as_script(main)
