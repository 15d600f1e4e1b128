"""Ranks for `test_mpi.py` and `test_shm.py`: `python -m tests.group_program SCENARIO FOLDER`.

mpiexec starts those of the first, and those of the second find RANK and WORLD_SIZE as environment
variables.

Several scenarios are separated by commas; all but the last destroy their group.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import zlib
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_kit.backends import mpi, shm

LIMIT = timedelta(seconds=20)


def start(folder: Path, size: int | None = None, timeout: timedelta = LIMIT) -> tuple[int, int]:
    """Initialise the default group; return rank and world size."""
    torch.set_num_threads(1)
    folder.mkdir(exist_ok=True)  # of the store
    backend = mpi if mpi.started_by_mpiexec() else shm
    if backend is mpi:
        rank, world_size, _, _ = mpi.rank_info()
    else:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    size = size or world_size
    backend.register()
    dist.init_process_group(
        backend.NAME,
        store=dist.FileStore(str(folder / "store"), size),
        rank=rank,
        world_size=size,
        timeout=timeout,
    )
    return rank, size


def cases(folder: Path) -> None:
    """Run every case, and write what failed on which rank to failures.json."""
    import group_cases

    rank, size = start(folder)
    gloo = dist.new_group(backend="gloo", timeout=LIMIT)
    report = dist.new_group(backend="gloo", timeout=10 * LIMIT)
    failures: dict[str, str | None] = {}
    for name, case in (group_cases.COMPARED | group_cases.OWN).items():
        if len(sys.argv) > 3 and name not in sys.argv[3:]:
            continue
        if name in group_cases.ONLY_MPI and dist.get_backend() != mpi.NAME:
            continue
        problem = None
        try:
            if name in group_cases.OWN:
                seed(name, rank)
                case(dist.group.WORLD)
            else:
                compare([run(case, name, group) for group in (dist.group.WORLD, gloo)])
        except Exception:
            problem = f"rank {rank}: {traceback.format_exc()}"
        problems = [None] * size
        dist.all_gather_object(problems, problem, group=report)
        failures[name] = "\n".join(filter(None, problems))
        if failures[name]:  # gloo closed the connections of ranks whose waits timed out
            gloo = dist.new_group(backend="gloo", timeout=LIMIT)
    if rank == 0:
        (folder / "failures.json").write_text(json.dumps(failures))
    dist.destroy_process_group()


def run(case, name: str, group: dist.ProcessGroup) -> list[torch.Tensor]:
    seed(name, dist.get_rank())
    return case(group)


def seed(name: str, rank: int) -> None:
    torch.manual_seed(1000 * zlib.crc32(name.encode()) + rank)


def compare(results: list[list[torch.Tensor]]) -> None:
    ours, gloos = results
    assert len(ours) == len(gloos)
    for one, other in zip(ours, gloos, strict=True):
        small = one.dtype in (torch.float16, torch.bfloat16)  # gloo rounds after every step
        tolerance = {"rtol": 0.03, "atol": 0.1} if small else {}
        torch.testing.assert_close(one, other, **tolerance)


def raising(folder: Path) -> None:
    """Rank 1 raises, while the others wait for it."""
    if alone_as_rank_1(folder, timedelta(minutes=10)):
        raise ValueError("rank 1 has had enough")


def vanishing(folder: Path) -> None:
    """Rank 1 ends as if it had crashed."""
    if alone_as_rank_1(folder, timedelta(minutes=10)):
        os._exit(3)


def exiting(folder: Path) -> None:
    """Rank 1 calls sys.exit, which looks the same as a normal end."""
    if alone_as_rank_1(folder, timedelta(seconds=3)):
        sys.exit(3)


def alone_as_rank_1(folder: Path, timeout: timedelta) -> bool:
    """Return True on rank 1, for which all others wait in an all_reduce."""
    rank, _ = start(folder, timeout=timeout)
    dist.barrier()
    if rank != 1:
        dist.all_reduce(torch.ones(1))
    return rank == 1


def early(folder: Path) -> None:
    """Rank 1 is done long before rank 0; nobody destroys the group."""
    rank, _ = start(folder)
    dist.barrier()
    if rank == 0:
        time.sleep(1.5)
        (folder / "done").write_text("rank 0 came to its end")


def untidy(folder: Path) -> None:
    """Ranks end with operations in flight that no rank will ever match."""
    rank, size = start(folder)
    dist.irecv(torch.empty(1), (rank + 1) % size, tag=4)
    dist.isend(torch.ones(1_000_000), (rank + 1) % size, tag=5)
    dist.barrier()
    (folder / f"done-untidy-{rank}").write_text("")


def again(folder: Path) -> None:
    """The default group is destroyed and made again."""
    for turn in range(3):
        rank, size = start(folder / str(turn))
        tensor = torch.tensor([rank])
        dist.all_reduce(tensor)
        assert tensor.item() == sum(range(size))
        dist.destroy_process_group()
    (folder / f"done-again-{rank}").write_text("")


def fewer(folder: Path) -> None:
    """The default group has all MPI ranks except the last."""
    rank, size = mpi.rank_info()[:2]
    if rank < size - 1:
        start(folder, size - 1)
        tensor = torch.tensor([1])
        dist.all_reduce(tensor)
        assert tensor.item() == size - 1
    else:
        from mpi4py import MPI  # every process that mpiexec starts must initialise MPI

        assert MPI.COMM_WORLD.Get_size() == size
    (folder / f"done-fewer-{rank}").write_text("")


def wrong(folder: Path) -> None:
    """PyTorch is given a rank or world size that differs from MPI's."""
    from ddp_kit.errors import BackendError

    rank, size = mpi.rank_info()[:2]
    mpi.register()
    for given, of, words in (
        ((rank + 1) % size, size, "take rank and world_size from ddp_kit.backends.mpi.rank_info()"),
        (rank, size + 1, f"mpiexec started {size} ranks; start them with mpiexec -n {size + 1}"),
    ):
        try:
            dist.init_process_group(mpi.NAME, store=dist.HashStore(), rank=given, world_size=of)
        except BackendError as error:
            message = str(error)
        else:
            message = "no error"
        assert words in message, message
    # A store of one process is enough, because nothing goes through it.
    dist.init_process_group(mpi.NAME, store=dist.HashStore(), rank=rank, world_size=size)
    dist.new_group([0])
    dist.barrier()
    dist.destroy_process_group()
    (folder / f"done-wrong-{rank}").write_text("")


def beside(folder: Path) -> None:
    """The program uses mpi4py itself, and imports it first."""
    from mpi4py import MPI

    rank, size = start(folder / "beside")
    work = dist.all_reduce(torch.ones(1), async_op=True)
    assert MPI.COMM_WORLD.allreduce(rank) == sum(range(size))
    work.wait()
    dist.destroy_process_group()
    (folder / f"done-beside-{rank}").write_text("")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    for scenario in sys.argv[1].split(","):
        globals()[scenario](Path(sys.argv[2]))
