"""Processes that a rank starts: they work, and they end with it."""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import suppress

import psutil
import pytest
import torch
import torch.distributed as dist
from processes import assert_gone, ended

import ddp_kit as kit
from ddp_kit.trace.rank import recorder


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor([index**2]), os.getpid()


def test_a_data_loader_with_workers_works_inside_a_rank():
    def load(rank, world_size):
        loader = torch.utils.data.DataLoader(Squares(), batch_size=4, num_workers=2)
        squares = torch.cat([batch.flatten() for batch, _ in loader])
        workers = {int(number) for _, pids in loader for number in pids}
        dist.all_reduce(squares)
        return squares.tolist(), len(workers), os.getpid() in workers

    for squares, workers, in_the_rank in kit.run(load, world_size=2):
        assert squares == [2 * i**2 for i in range(8)]
        assert (workers, in_the_rank) == (2, False)


def loaders_in_use(rank, world_size, path):
    workers = {"num_workers": 2, "persistent_workers": True}
    loader = torch.utils.data.DataLoader(Squares(), batch_size=1, **workers)
    with open(f"{path}{rank}", "w") as file:
        print(*{int(pids) for _, pids in loader}, file=file)
    os.rename(f"{path}{rank}", f"{path}{rank}.done")
    time.sleep(600)


def test_the_workers_of_a_data_loader_end_with_a_killed_rank(watch, tmp_path):
    """The rank is killed from outside, so that only the system can notify its children."""
    pids = list(kit.run(lambda rank, world_size: os.getpid(), world_size=2))
    found: list[psutil.Process] = []
    written = tmp_path / "rank0.done"

    def look(lines):
        if written.exists() and not found:
            found.extend(psutil.Process(int(number)) for number in written.read_text().split())
            os.kill(pids[0], 9)

    watch(look)
    with pytest.raises(kit.RankDiedError):
        kit.run(loaders_in_use, str(tmp_path / "rank"), world_size=2, timeout=60)
    assert len(found) == 2
    assert_gone(found, "their rank was killed")


def test_close_ends_what_stuck_and_idle_ranks_have_started(pool):
    def parent(rank, world_size):
        os.system("sleep 60 &")
        if rank == 0:
            raise ValueError(*(child.pid for child in psutil.Process().children()))
        time.sleep(60)

    with pytest.raises(kit.RankError) as caught:
        pool.run(parent)
    left = [psutil.Process(int(caught.value.failures[0].message))]
    pool.close()  # rank 0 is idle until then; the fixture sees whether both sleeps are gone
    assert ended(left)


def test_children_of_a_rank_that_died_end_and_do_not_hide_its_death(pool, tmp_path):
    file = tmp_path / "children"

    def die(rank, world_size):
        if rank == 1:
            plain = subprocess.Popen(["sleep", "60"])
            apart = subprocess.Popen(["sleep", "60"], start_new_session=True)
            file.write_text(f"{plain.pid} {apart.pid}")
            os._exit(3)
        dist.barrier()

    start = time.monotonic()
    with pytest.raises(kit.RankDiedError):
        pool.run(die)
    assert time.monotonic() - start < 50
    numbers = [int(number) for number in file.read_text().split()]
    assert len(numbers) == 2
    assert ended(psutil.Process(number) for number in numbers if psutil.pid_exists(number))


def test_the_processes_of_the_machine_are_listed_once_for_all_ranks_that_are_stopped(monkeypatch):
    def stuck(rank, world_size):
        subprocess.Popen(["sleep", "60"])
        dist.recv(torch.zeros(1), src=(rank + 1) % world_size)

    listed, pids = [], psutil._psplatform.pids
    monkeypatch.setattr(psutil._psplatform, "pids", lambda: listed.append(1) or pids())
    with kit.WorkerPool(2) as pool:
        with pytest.raises(kit.DeadlockError):
            pool.run(stuck)
        assert len(listed) == 1
        started = pool.run(lambda rank, world_size: subprocess.Popen(["sleep", "60"]).pid)
        left = [psutil.Process(number) for number in started]
        listed.clear()
    assert len(listed) == 2, "before the ranks leave, and before those that have not are killed"
    assert ended(left)


def sockets():
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return {os.readlink(link) for link in links if os.path.exists(link)}


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="open files are read from /proc")
def test_a_fork_of_a_rank_neither_holds_its_pipe_nor_writes_on_its_board():
    def look(rank, world_size):
        board, mine = recorder.current.table.board, sockets()
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            with suppress(RuntimeError):  # a fork has no thread of gloo's that would send it
                dist.barrier(async_op=True)
            os.write(writing, "\n".join(sockets()).encode())
            os._exit(0)
        os.close(writing)
        with open(reading) as pipe:
            its = set(pipe.read().split())
        os.waitpid(child, 0)
        return len({name for name in mine - its if "socket" in name}), board.head().events

    assert list(kit.run(look, world_size=2, timeout=60)) == [(1, 0)] * 2
