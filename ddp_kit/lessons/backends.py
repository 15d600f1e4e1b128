"""Backends: what each of them can do on this machine, and what a message costs.

Every answer is probed on real ranks: an operation, a dtype, and the numbers that must come out.
Sources: the backend tables of "Writing Distributed Applications with PyTorch" and of notes on
`torch.distributed`; mlbench's comparison of communication backends (2020), for the costs.
"""

from __future__ import annotations

import os
from functools import partial

import psutil
import torch
import torch.distributed as dist

from ddp_kit import backends, device, pool
from ddp_kit.errors import BackendError
from ddp_kit.launch import lesson_parser, open_ranks, prove, run_as_script
from ddp_kit.lessons._costs import SIZES, TIMED, measure, series, told
from ddp_kit.lessons._operations import BITWISE, DTYPES, OPERATIONS, WITHOUT_DTYPE
from ddp_kit.lessons._probes import LIMIT, Cells, attempt, probe, refusals
from ddp_kit.model import fit

__all__ = [
    "DTYPES",
    "LIMIT",
    "OPERATIONS",
    "PLACES",
    "SIZES",
    "TIMED",
    "WITHOUT_DTYPE",
    "attempt",
    "both_send_first",
    "fit",
    "here",
    "lopsided_sum",
    "main",
    "measure",
    "missing",
    "probe",
    "probe_here",
    "refusals",
    "series",
    "started_by",
    "told",
    "true_until",
]

PLACES = {
    "gloo on the CPU": "gloo",
    "mpi on the CPU": "mpi",
    "gloo on GPUs": "cuda:gloo",
    "nccl on GPUs": "nccl",
}
EVERYWHERE = ("float32", "float64", "int64", "int32", "uint8")  # dtypes that all backends have


def missing(backend: str, world_size: int = 2) -> str | None:
    """Say in the kit's words why a backend cannot be had here; None: it can."""
    try:
        backends.choose_backend(backend, world_size)
    except BackendError as error:
        return str(error)
    return None


def here(world_size: int = 2) -> list[str]:
    """List the backends for tensors on the CPU that can be had here: gloo, and perhaps mpi."""
    return [name for name in ("gloo", "mpi") if missing(name, world_size) is None]


def probe_here() -> dict[str, Cells | str]:
    """Probe every place with two ranks; one that cannot be had gets the kit's reason.

    nccl is probed with as many ranks as there are GPUs, two at most.
    """
    found: dict[str, Cells | str] = {}
    for place, backend in PLACES.items():
        gpus = torch.cuda.device_count()
        world_size = min(2, gpus) if backend == "nccl" and gpus else 2
        reason = missing(backend, world_size)
        run = partial(pool.run, world_size=world_size, backend=backend, timeout=LIMIT)
        found[place] = probe(run) if reason is None else reason
    return found


def started_by(rank: int, world_size: int) -> str:
    """Return the name of the program that started this process."""
    parent = psutil.Process(os.getppid()).name()
    return "Python" if parent.lower().startswith("python") else parent


def both_send_first(rank: int, world_size: int, nbytes: int) -> float:
    """Send to the other rank before receiving from it; return a number that came."""
    mine = torch.full((nbytes // 4,), float(rank), device=device())
    into = torch.empty_like(mine)
    dist.send(mine, 1 - rank)
    dist.recv(into, 1 - rank)
    return into[0].item()


def lopsided_sum(rank: int, world_size: int, dtype: torch.dtype) -> list[float]:
    """Add up ones and one large number, from which `dtype` cannot tell the next odd one.

    Each rank has the large number at its own place, so at some place it is added first.
    """
    large = 2.0 / torch.finfo(dtype).eps
    tensor = torch.ones(world_size, dtype=dtype, device=device())
    tensor[rank] = large
    dist.all_reduce(tensor)
    return (tensor.double() - large).tolist()


def true_until(rank: int, world_size: int, most: int = 20) -> int | None:
    """Sum up True over and over; return after how many sums it is False. None: it stays True."""
    tensor = torch.tensor([True], device=device())
    for count in range(1, most + 1):
        dist.all_reduce(tensor)
        if not tensor.item():
            return count
    return None


def main(argv: list[str] | None = None) -> None:
    """Try what all backends can do with dtypes that all of them have, print one line.

    On GPUs a backend may refuse an operation; wherever it runs, no answer may be wrong.
    """
    options = lesson_parser("backends", __doc__).parse_args(argv or [])
    operations = {name: OPERATIONS[name] for name in OPERATIONS if name.split()[-1] not in BITWISE}
    with open_ranks(options.world_size, options.backend, options.trace) as ranks:
        cells = probe(ranks, operations, EVERYWHERE)
        on_gpus = backends.choose_backend(ranks.backend, ranks.world_size) in backends.ON_GPUS
        well = ("works", "no answer", "refused") if on_gpus else ("works", "no answer")
        for (name, kind), outcome in cells.items():
            prove(f"{name} is right for {kind}; it {outcome}", outcome.partition(":")[0] in well)
        refused = {name for (name, _), outcome in cells.items() if outcome.startswith("refused")}
        right = len({name for name, _ in cells} - refused)
        ranks.say(f"backends: {ranks}, {right} operations right on {len(EVERYWHERE)} dtypes")


if __name__ == "__main__":
    run_as_script(main)
