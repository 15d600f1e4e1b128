"""Other world sizes, other pools, other notebooks: warm where possible, and never mixed up."""

from __future__ import annotations

import os

import psutil
import pytest
from kernels import Kernel
from processes import wait_until

import ddp_kit as kit
from ddp_kit.pool import arguments


def pid(rank, world_size):
    return os.getpid()


def test_processes_stay_warm_when_the_world_size_changes():
    four = list(kit.run(pid, world_size=4))
    assert list(kit.run(pid, world_size=2)) == four[:2]
    assert list(kit.run(pid, world_size=4)) == four
    assert list(kit.run(lambda rank, world_size: world_size, world_size=3)) == [3, 3, 3]


def test_growing_starts_only_the_missing_ranks_with_as_many_open_files_as_expected():
    """Else the pool would allow a world size for which there are too few open files."""
    with kit.WorkerPool(1) as pool:
        one, before = list(pool.run(pid)), psutil.Process().num_fds()
        three = list(pool.run(pid, world_size=3))
        assert psutil.Process().num_fds() - before == 2 * arguments.FILES_A_RANK
        assert three[:1] == one
        assert len(set(three)) == 3
        pool.restart()
        assert pool.run(pid)[0] not in three


@pytest.mark.usefixtures("forked_ranks")
def test_two_pools_live_side_by_side():
    with kit.WorkerPool(1) as pool:
        own, shared = list(pool.run(pid)), list(kit.run(pid, world_size=2))
        assert not set(own) & set(shared)
        assert list(pool.run(pid)) == own, "the other pool's run left this one warm"


def test_two_notebooks_run_at_the_same_time(kernel, tmp_path):
    other = Kernel(tmp_path)
    meet = (
        "def meet(rank, world_size, mine, theirs):\n"
        "    pathlib.Path(mine).touch()\n"
        "    while not os.path.exists(theirs):\n"
        "        time.sleep(0.01)\n"
        "    dist.barrier()\n"
        "    return os.getpid()"
    )
    try:
        files = [str(tmp_path / "one"), str(tmp_path / "other")]
        cells = []
        for notebook, (mine, theirs) in ((kernel, files), (other, files[::-1])):
            notebook.run(meet)
            cells.append(notebook.send(f"list(kit.run(meet, {mine!r}, {theirs!r}, world_size=2))"))
        for cell in cells:
            assert cell.finish().error is None
        ranks = psutil.Process(other.process.pid).children()
        kernel.end()
        wait_until(lambda: not kernel.process.is_running(), 60, "the first notebook is gone")
        assert len(other.ranks(2)) == 2, "the end of one notebook left the other's ranks alone"
        assert {p.pid for p in psutil.Process(other.process.pid).children()} == {
            p.pid for p in ranks
        }
    finally:
        other.end()
