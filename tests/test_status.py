"""`kit.status`, and the end of ranks that no run uses any more."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time

import psutil
import pytest
from processes import ended, wait_until

import ddp_kit as kit
from ddp_kit import settings
from ddp_kit.pool import keep_names
from ddp_kit.pool import pool as pool_module


def pid(rank, world_size):
    return os.getpid()


def last() -> object:
    """Return the status of the pool that was made last."""
    return kit.status().pools[-1]


# --- status --------------------------------------------------------------------------------


def test_a_pool_shows_its_ranks_their_state_and_their_memory():
    with kit.WorkerPool(2) as pool:
        assert [rank.state for rank in last().ranks] == ["starting"] * 2
        assert str(last()).startswith("WorkerPool: 2 ranks, gloo, starting")
        pids = list(pool.run(pid))
        found = last()
        assert [rank.state for rank in found.ranks] == ["idle"] * 2
        assert [rank.pid for rank in found.ranks] == pids

        def is_what_only_each_uses():  # an idle rank gives memory back at some moment
            ranks = last().ranks
            used = [psutil.Process(rank.pid).memory_full_info().uss for rank in ranks]
            return all(abs(r.memory - u) < 20e6 for r, u in zip(ranks, used, strict=True))

        wait_until(is_what_only_each_uses, 60, "the memory shown is that of the processes")
        assert (found.shared, found.running, found.backend) == (False, False, "gloo")
        assert found.memory == sum(rank.memory for rank in found.ranks)
        megabytes = r"[\d,]+ MB"
        assert re.fullmatch(
            rf"WorkerPool: 2 ranks, gloo, ready, {megabytes}\n"
            rf"  rank 0: idle, {megabytes}\n  rank 1: idle, {megabytes}",
            str(found),
        )
        shown = re.sub(megabytes, "MB", repr(kit.status()))
        assert shown.endswith(re.sub(megabytes, "MB", str(found)))
    assert found.ranks[0].pid not in {one.pid for pool in kit.status().pools for one in pool.ranks}


@pytest.mark.usefixtures("forked_ranks")
def test_a_run_that_is_going_on_is_shown(watch, pool, tmp_path):
    seen: list[object] = []

    def look(lines):
        seen.append(last())
        if {rank.state for rank in seen[-1].ranks} == {"running"}:
            (tmp_path / "seen").touch()

    def until_seen(rank, world_size):
        while not (tmp_path / "seen").exists():
            time.sleep(0.01)

    watch(look)
    pool.run(until_seen, timeout=60)
    assert seen[-1].running
    assert str(seen[-1]).startswith("WorkerPool: 2 ranks, gloo, running")


@pytest.mark.usefixtures("forked_ranks")
def test_ranks_that_were_killed_or_are_unreadable_are_shown_as_far_as_is_known(monkeypatch, pool):
    first, second = map(psutil.Process, pool.run(pid))
    first.kill()
    wait_until(lambda: last().ranks[0].state == "ended", 100, "rank 0 was killed")
    monkeypatch.setattr(pool._processes.ranks[1].psutil, "memory_full_info", _refuse)
    shown = last()
    assert [rank.state for rank in shown.ranks] == ["ended", "idle"]
    assert [rank.memory for rank in shown.ranks] == [None, None]
    assert str(shown) == "WorkerPool: 2 ranks, gloo, ready\n  rank 0: ended\n  rank 1: idle"
    second.kill()
    pool._processes.ranks[1].control.close()
    assert [rank.state for rank in last().ranks] == ["ended"] * 2


def _refuse():
    raise psutil.AccessDenied


@pytest.mark.usefixtures("forked_ranks")
def test_the_shared_pool_comes_first_and_nothing_is_said_plainly(monkeypatch, pool):
    kit.run(pid, world_size=1)
    shared, *_, own = kit.status().pools
    assert (shared.shared, own.shared) == (True, False)
    assert str(shared).startswith("shared pool: ")
    monkeypatch.setattr(pool_module, "_shared", {})
    monkeypatch.setattr(pool_module, "_all", {})
    assert repr(kit.status()) == "no ranks are running; kit.run starts them"
    assert kit.status().memory == 0


# --- unused ranks --------------------------------------------------------------------------


def in_loop(call, until, seconds=30):
    """Call something in an event loop, as a kernel does a cell; then let the loop run."""

    async def cell():
        value = call()
        deadline = asyncio.get_running_loop().time() + seconds
        while not until():
            assert asyncio.get_running_loop().time() < deadline, f"not within {seconds} s"
            await asyncio.sleep(0.02)
        return value

    return asyncio.run(cell())


@pytest.mark.usefixtures("forked_ranks")
def test_ranks_that_no_run_has_used_for_a_while_end_and_the_next_run_starts_new_ones(monkeypatch):
    with kit.WorkerPool(1) as pool:
        in_loop(lambda: pool.run(pid), lambda: True)  # a loop that is closed before they end
        monkeypatch.setattr(settings, "UNUSED_RANKS_END_AFTER", 0.3)
        three = in_loop(lambda: pool.run(pid, world_size=3), lambda: not pool._processes.ranks)
        assert not any(map(psutil.pid_exists, three))
        assert str(last()) == "WorkerPool: no ranks; the next run starts them"
        again = list(pool.run(pid, world_size=2))
        assert len(set(again) - set(three)) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc can be asked to")
def test_a_rank_gives_back_the_memory_of_a_training_step():
    def train(rank, world_size):
        kept = [bytes(1000) for _ in range(200_000)]  # noqa: F841 - it is freed at the end
        sys.last = bytes(1000)  # above all others: the heap alone would stay as long as it is

    with kit.WorkerPool(1) as pool:
        rank = psutil.Process(pool.run(pid)[0])
        before = rank.memory_full_info().uss
        pool.run(train)
        wait_until(lambda: rank.memory_full_info().uss < before + 50e6, 30, "it was given back")


@pytest.mark.usefixtures("forked_ranks")
def test_ranks_are_kept_for_names_only_as_long_as_they_have_any(monkeypatch):
    with kit.WorkerPool(2) as pool:
        monkeypatch.setitem(pool_module._shared, "spawn", pool)
        assert keep_names("spawn")
        assert pool._processes.has_names
        pool.restart()
        assert not pool._processes.has_names
        assert keep_names("spawn")
        assert keep_names("spawn", keep=False)
        assert not pool._processes.has_names
        monkeypatch.delitem(pool_module._shared, "spawn")
        assert not keep_names("spawn")


@pytest.mark.usefixtures("forked_ranks")
def test_unused_ranks_stay_in_a_script_and_during_a_run(monkeypatch):
    with kit.WorkerPool(1) as pool:
        pool.run(pid, world_size=2)
        pool.run(pid)
        assert pool_module._looks_in is None, "there is no event loop"
        monkeypatch.setattr(settings, "UNUSED_RANKS_END_AFTER", 0.0)
        pool._running = True
        in_loop(pool_module._end_unused, lambda: True)
        pool._running = False
        assert len(pool._processes.ranks) == 2


@pytest.mark.usefixtures("forked_spawn")
def test_in_a_notebook_unused_ranks_end_between_two_cells_unless_they_hold_names(kernel):
    kernel.run("%load_ext ddp_kit\nkit.settings.UNUSED_RANKS_END_AFTER = 1.0")
    kernel.run("%%ranks -n 2\nkept = rank")
    two = kernel.ranks(2)
    time.sleep(2)
    assert kernel.run("%%ranks\nkept").stdout == "rank 0: 0\nrank 1: 1\n"
    assert "kept for their names of %%ranks cells" in kernel.value("kit.status()")
    kernel.run("%ranks reset")
    wait_until(lambda: ended(two, 0), 100, "the unused ranks have ended")
    assert kernel.value("kit.status()") == "shared pool: no ranks; the next run starts them"
    assert len(kernel.ranks(3)) == 3
