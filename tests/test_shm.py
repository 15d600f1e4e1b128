"""The backend "shm", on plain processes that PyTorch connects."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import group_cases
import psutil
import pytest
import random_collectives
import torch
import torch.distributed as dist
from processes import wait_until

import ddp_kit as kit
from ddp_kit.backends import shm
from ddp_kit.backends.shm import segment
from ddp_kit.errors import BackendError
from ddp_kit.trace.events import Event, Group
from ddp_kit.verdict import graph

ROOT = Path(__file__).resolve().parents[1]
WORLD_SIZES = (1, 3, *(pytest.param(size, marks=pytest.mark.long) for size in (2, 4)))
CASES = [*group_cases.COMPARED, *group_cases.OWN]
LIMIT = 240.0  # seconds for all cases of a world size; far more than they need

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has futexes")


@contextlib.contextmanager
def started(scenario: str, world_size: int, folder: Path, *more: str) -> Iterator[list]:
    """Start the ranks of a scenario of `group_program.py`; kill those that do not end."""
    program = [sys.executable, "-m", "tests.group_program", scenario, str(folder), *more]
    ranks = []
    try:
        for rank in range(world_size):
            with open(folder / f"output-{rank}", "w") as output:
                own = {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
                ranks.append(
                    subprocess.Popen(
                        program,
                        cwd=ROOT,
                        env=os.environ | own,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def launch(
    scenario: str, world_size: int, folder: Path, *more: str, seconds: float = 120.0
) -> tuple[list[int], str]:
    """Run a scenario; return the exit codes and what was printed. Fail if it does not end."""
    with started(scenario, world_size, folder, *more) as ranks:
        try:
            codes = [process.wait(timeout=seconds) for process in ranks]
        except subprocess.TimeoutExpired:
            codes = None
    text = "".join(path.read_text() for path in sorted(folder.glob("output-*")))
    assert codes is not None, f"{scenario} did not end within {seconds} s:\n{text}"
    return codes, text


@functools.cache
def failures(world_size: int) -> dict[str, str]:
    """Run all cases once at a world size; return what failed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        codes, text = launch("cases", world_size, folder, seconds=LIMIT)
        written = folder / "failures.json"
        assert written.exists(), f"the ranks failed:\n{text}"
        assert codes == [0] * world_size, text
        return json.loads(written.read_text())


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("case", [case for case in CASES if case not in group_cases.ONLY_MPI])
def test_shm_does_what_gloo_and_its_docstring_say(case, world_size):
    problem = failures(world_size)[case]
    assert not problem, problem


@pytest.mark.parametrize("repeats", [25, pytest.param(1000, marks=pytest.mark.long)])
def test_collectives_with_random_arguments_equal_those_of_gloo(repeats, forked_ranks):
    counts = kit.run(random_collectives.compare, repeats, world_size=3, backend="shm")
    assert all(count > repeats / 2 for count in counts[0].values())


@pytest.mark.parametrize("world_size", [2, 4])
def test_sums_are_added_in_the_order_of_the_ranks(world_size, forked_ranks):
    def worker(rank, world_size):
        torch.manual_seed(rank)
        own = torch.randn(2_500_000)
        every = [torch.empty(2_500_000) for _ in range(world_size)]
        dist.all_gather(every, own)
        dist.all_reduce(own)
        in_order = every[0]
        for each in every[1:]:
            in_order = in_order + each
        return torch.equal(own, in_order)

    assert list(kit.run(worker, world_size=world_size, backend="shm")) == [True] * world_size


def test_an_operation_that_nobody_waits_for_ends(forked_ranks):
    def worker(rank, world_size):
        first, second = torch.ones(2_000_000), torch.ones(3)
        work = dist.all_reduce(first, async_op=True)
        later = dist.all_reduce(second, async_op=True)
        done = []
        before = work.get_future().then(lambda _: done.append("first"))
        later.get_future().then(lambda _: done.append("second")).wait()
        before.wait()
        return sorted(done), first[-1].item(), second[0].item()

    assert (
        list(kit.run(worker, world_size=2, backend="shm")) == [(["first", "second"], 2.0, 2.0)] * 2
    )


def leaves_without(rank, world_size):
    """Return the calls that a rank leaves without one that it needs, as the verdict has it."""
    checked, found = dist.new_group(backend="gloo"), []
    world, ranks = Group("world", tuple(range(world_size)), "cpu:shm"), range(world_size)
    for method, numel in itertools.product(
        ("broadcast", "reduce", "gather", "scatter"), (1, 100_000, 3 << 20)
    ):
        for root, absent in itertools.product(ranks, ranks):
            event = Event(rank, 0, method, "collective", method, world, 0, root=root)
            event = replace(event, inputs=((numel,),), nbytes=4 * numel)
            is_needed = absent in graph.needed(event)
            tensor = torch.ones(numel)
            parts = [torch.ones(numel) for _ in ranks] if rank == root else None
            given = {"gather": [parts], "scatter": [parts]}.get(method, [])
            from_root = method in ("broadcast", "scatter")
            where = {"group_src" if from_root else "group_dst": root, "async_op": True}
            call = functools.partial(getattr(dist, method), tensor, *given, **where)
            if rank != absent:
                work = call()
                if not is_needed:
                    work.wait()  # it fails after the run's time limit
                else:
                    time.sleep(0.001)  # it shall not end, however long it has
                    if work.is_completed():
                        found.append((method, numel, root, absent))
            dist.barrier(checked)
            if rank == absent:
                work = call()
            work.wait()
    return found


def test_a_rank_leaves_a_collective_only_after_those_that_it_needs(forked_ranks):
    found = kit.run(leaves_without, world_size=3, backend="shm", timeout=60)
    assert list(found) == [[], [], []]


def test_a_rank_that_cannot_see_the_memory_refuses_and_the_others_do_not_wait_for_it(forked_ranks):
    def worker(rank, world_size):
        shm.register()
        if rank == 1:  # as on another host, or in another container
            shm._where = lambda *_: "/proc/0/fd/3"
        dist.new_group(backend="shm")

    with kit.WorkerPool(3, backend="gloo") as pool, pytest.raises(kit.RankError) as caught:
        pool.run(worker, timeout=60)
    assert list(caught.value.failures) == [1]
    assert "let all ranks run on one host" in caught.value.failures[1].message


def test_another_system_is_refused(monkeypatch):
    monkeypatch.setattr(segment, "is_supported", False)
    with pytest.raises(BackendError, match='backend="shm" needs Linux'):
        kit.run(many_collectives, backend="shm")
    with pytest.raises(BackendError, match='backend="shm" needs Linux'):
        shm.register()


def maps(processes: Iterable[psutil.Process]) -> dict[int, str]:
    """Return what each of these processes has mapped."""
    found = {}
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            found[process.pid] = Path(f"/proc/{process.pid}/maps").read_text()
    return found


def segments(processes: Iterable[psutil.Process]) -> set[int]:
    """Return the processes that have shared memory of the backend mapped."""
    return {pid for pid, mapped in maps(processes).items() if "memfd:ddp_kit shm" in mapped}


def files_of_nobody() -> set[str]:
    """Return the named shared memory that no process has mapped: those of other tests are."""
    names = os.listdir("/dev/shm")
    mapped = "".join(maps(psutil.process_iter()).values())
    return {name for name in names if name not in mapped and Path("/dev/shm", name).exists()}


@pytest.mark.parametrize("kills", [5, pytest.param(50, marks=pytest.mark.long)])
def test_a_killed_rank_leaves_nothing_behind(kills, forked_ranks, monkeypatch, tmp_path):
    chance = random.Random(kills)
    family = psutil.Process().children
    before, files = segments(family(recursive=True)), set(os.listdir("/dev/shm"))
    for _ in range(kills):
        with kit.WorkerPool(2, backend="shm") as pool:
            pids = list(pool.run(lambda rank, world_size: os.getpid()))
            ranks = [psutil.Process(pid) for pid in pids]
            assert segments(ranks) == set(pids), "this test looks in the wrong place"
            begun = tmp_path / str(pids[0])
            late, pid = chance.random() * 0.2, chance.choice(pids)

            def kill(begun=begun, late=late, pid=pid):
                wait_until(begun.exists, 60, "the run has begun")
                time.sleep(late)
                os.kill(pid, signal.SIGKILL)

            killer = threading.Thread(target=kill)
            killer.start()
            with pytest.raises(kit.RankDiedError):
                pool.run(many_collectives, begun, timeout=120)
            killer.join()
        wait_until(lambda ranks=ranks: not segments(ranks), 60, "the ranks have ended")
    assert segments(family(recursive=True)) <= before
    wait_until(lambda: not files_of_nobody() - files, 60, "no file is left")


def many_collectives(rank, world_size, begun):
    begun.touch()
    small, large = torch.ones(1), torch.ones(3_000_000)
    while True:
        dist.all_reduce(small)
        dist.all_reduce(large)
        dist.broadcast(large, 0)
        works = [dist.isend(large, 1 - rank), dist.irecv(small.new_zeros(3_000_000), 1 - rank)]
        for work in works:
            work.wait()
