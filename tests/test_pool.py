"""The pool on real processes. Tests are named after what a learner would see go wrong."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from contextlib import suppress

import psutil
import pytest
import torch
import torch.distributed as dist
from conftest import ended

import ddp_kit as kit
from ddp_kit.pool import pool as pool_module
from ddp_kit.pool import process


def total(rank, world_size, scale=1):
    tensor = torch.tensor([rank * scale])
    dist.all_reduce(tensor)
    return tensor.item()


def pid(rank, world_size):
    return os.getpid()


def one_raises(rank, world_size):
    if rank == 1:
        raise ValueError("boom")
    dist.barrier()


# --- values and output ---------------------------------------------------------------------


def test_values_come_back_in_rank_order():
    result = kit.run(lambda rank, world_size: (rank, world_size), world_size=3)
    assert list(result) == [(0, 3), (1, 3), (2, 3)]
    assert len(result) == 3
    assert result[2] == (2, 3)


def test_arguments_reach_every_rank():
    assert list(kit.run(total, 10, world_size=3)) == [30, 30, 30]


class Scaled:
    def __init__(self, by):
        self.by = by

    def __call__(self, rank, world_size):
        return rank * self.by


def test_every_kind_of_callable_is_a_worker():
    by = 7
    workers = [
        lambda rank, world_size: rank * 7,
        lambda rank, world_size: rank * by,
        Scaled(7),
        functools.partial(lambda factor, rank, world_size: rank * factor, 7),
    ]
    for worker in workers:
        assert list(kit.run(worker, world_size=2)) == [0, 7]


def test_a_class_defined_here_comes_back_as_itself():
    class Local:
        pass

    result = kit.run(lambda rank, world_size: Local(), world_size=2)
    assert all(type(value) is Local for value in result)


def test_prints_of_python_c_and_grandchildren_come_through(capfd):
    def noisy(rank, world_size):
        print(f"python {rank}")
        sys.stderr.write("stderr\n")
        ctypes.CDLL(None).puts(b"from C")
        subprocess.run([sys.executable, "-c", "print('grandchild')"], check=True)

    result = kit.run(noisy, world_size=2)
    for rank in range(2):
        lines = result.output[rank].splitlines()
        assert sorted(lines) == sorted([f"python {rank}", "stderr", "from C", "grandchild"])
    shown = [line[:8] for line in capfd.readouterr().out.splitlines()]
    assert shown == ["[rank 0]"] * 4 + ["[rank 1]"] * 4


def test_output_of_one_run_does_not_leak_into_the_next():
    kit.run(lambda rank, world_size: print("first"), world_size=2)
    assert kit.run(lambda rank, world_size: print("second"), world_size=2).output == (
        "second\n",
        "second\n",
    )


def test_a_flood_of_prints_is_cut_and_says_so():
    def flood(rank, world_size):
        for _ in range(300):
            print("x" * 9_999)

    text = kit.run(flood, world_size=1).output[0]
    assert len(text) < process.OUTPUT_LIMIT + 200
    assert text.endswith("may print 1,000,000 bytes in one run\n")


def test_repr_tells_values_and_not_nothing():
    assert repr(kit.run(total, world_size=2)) == "rank 0: 1\nrank 1: 1"
    assert repr(kit.run(lambda r, w: None, world_size=2)) == "2 ranks returned None"


# --- warm processes and world sizes --------------------------------------------------------


def test_processes_stay_warm_when_the_world_size_changes():
    four = list(kit.run(pid, world_size=4))
    assert list(kit.run(pid, world_size=2)) == four[:2]
    assert list(kit.run(pid, world_size=4)) == four
    assert kit.run(total, world_size=3)[0] == 3


def test_growing_starts_only_the_missing_ranks(pool):
    two = list(pool.run(pid))
    three = list(pool.run(pid, world_size=3))
    assert three[:2] == two
    assert len(set(three)) == 3


def test_restart_gives_fresh_processes(pool):
    before = set(pool.run(pid))
    pool.restart()
    assert not before & set(pool.run(pid))


def test_two_pools_live_side_by_side(pool):
    assert not set(pool.run(pid)) & set(kit.run(pid, world_size=2))


def test_a_rank_loads_no_notebook_and_no_picture_library(pool):
    heavy = {"matplotlib", "IPython", "torchvision", "ipywidgets"}
    loaded = pool.run(lambda rank, world_size: sorted(heavy & set(sys.modules)))
    assert list(loaded) == [[], []]


def test_a_rank_computes_on_its_share_of_the_cores():
    cores = len(os.sched_getaffinity(0))
    threads = kit.run(lambda rank, world_size: torch.get_num_threads(), world_size=2)
    assert list(threads) == [max(1, cores // 2)] * 2


def test_device_is_the_cpu_under_gloo():
    assert set(kit.run(lambda r, w: str(kit.device()), backend="gloo")) == {"cpu"}


def test_the_notebooks_folder_and_path_reach_the_ranks(tmp_path, monkeypatch):
    (tmp_path / "learners_own.py").write_text("def f(rank, world_size):\n    return rank + 100\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    import learners_own

    assert list(kit.run(learners_own.f, world_size=2)) == [100, 101]
    assert set(kit.run(lambda r, w: os.getcwd(), world_size=2)) == {str(tmp_path)}


# --- failures ------------------------------------------------------------------------------


def test_one_rank_raises_while_others_wait():
    start = time.monotonic()
    with pytest.raises(kit.RankError) as caught:
        kit.run(one_raises, world_size=3)
    assert time.monotonic() - start < 10
    assert set(caught.value.failures) == {1}
    line = one_raises.__code__.co_firstlineno + 2
    assert str(caught.value) == (
        f'rank 1 raised ValueError: boom\n    line {line} of one_raises: raise ValueError("boom")'
    )
    assert kit.run(total, world_size=3)[0] == 3


def test_equal_failures_are_told_once():
    def two_ways(rank, world_size):
        if rank == 2:
            raise KeyError("other")
        raise ValueError("same")

    with pytest.raises(kit.RankError) as caught:
        kit.run(two_ways)
    assert set(caught.value.failures) == {0, 1, 2, 3}
    told = [line for line in str(caught.value).splitlines() if "raised" in line and "rank" in line]
    assert told[0] == "ranks 0, 1 and 3 raised ValueError: same"
    assert told[1] == "rank 2 raised KeyError: 'other'"


def test_output_before_a_failure_is_not_lost(capsys):
    def talk_then_raise(rank, world_size):
        print("last words")
        raise RuntimeError

    with pytest.raises(kit.RankError, match="ranks 0 and 1 raised RuntimeError"):
        kit.run(talk_then_raise, world_size=2)
    assert capsys.readouterr().out == "[rank 0] last words\n[rank 1] last words\n"


def test_keyboard_interrupt_in_a_rank_is_a_failure():
    def interrupted(rank, world_size):
        raise KeyboardInterrupt

    with pytest.raises(kit.RankError, match="KeyboardInterrupt"):
        kit.run(interrupted, world_size=2)


@pytest.mark.parametrize(
    ("leave", "exitcode", "words"),
    [
        (lambda: os._exit(3), 3, "left with exit code 3"),
        (lambda: sys.exit(4), 4, "left with exit code 4"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), -9, "ended by SIGKILL"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), -11, "ended by SIGSEGV"),
    ],
    ids=["os._exit", "sys.exit", "SIGKILL", "SIGSEGV"],
)
def test_a_rank_that_dies_is_named(leave, exitcode, words):
    def die(rank, world_size):
        if rank == 1:
            leave()
        dist.barrier()

    with pytest.raises(kit.RankDiedError) as caught:
        kit.run(die, world_size=3)
    assert (caught.value.rank, caught.value.exitcode) == (1, exitcode)
    assert words in str(caught.value)
    assert kit.run(total, world_size=3)[0] == 3


def test_a_rank_killed_between_runs_is_replaced(pool):
    victim = pool.run(pid)[1]
    os.kill(victim, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(victim)], timeout=5)
    assert victim not in list(pool.run(pid))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_rank_that_dies_while_starting_is_replaced(world_size):
    with kit.WorkerPool(2) as pool:
        pool._ranks[1].process.kill()
        pool._ranks[1].process.join()
        assert len(pool.run(pid, world_size=world_size)) == world_size


def test_a_rank_that_dies_while_the_group_forms_is_told_and_replaced():
    with kit.WorkerPool(2) as pool:
        pool._ranks[1].process.kill()  # still counts as alive for a moment
        with suppress(kit.RankDiedError):
            pool.run(pid)
        assert len(pool.run(pid)) == 2


def test_a_grandchild_does_not_hide_the_death_of_its_rank(pool):
    def die(rank, world_size):
        os.system("sleep 60 &")
        if rank == 1:
            os._exit(3)
        dist.barrier()

    start = time.monotonic()
    with pytest.raises(kit.RankDiedError):
        pool.run(die)
    assert time.monotonic() - start < 20


def test_close_ends_what_a_worker_left_running(pool):
    def leave(rank, world_size):
        os.system("sleep 60 &")
        return [child.pid for child in psutil.Process().children()]

    left = [psutil.Process(child) for children in pool.run(leave) for child in children]
    assert len(left) == 2
    pool.close()
    assert ended(left)


def test_an_exception_that_cannot_be_printed_is_still_told(pool):
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError("no words")

    def fail(rank, world_size):
        raise Mute

    with pytest.raises(kit.RankError, match=r"Mute: .its message could not be read"):
        pool.run(fail)


def test_a_worker_that_takes_stdout_away_does_not_silence_the_next(pool):
    def take(rank, world_size):
        sys.stdout = None

    pool.run(take)
    assert pool.run(lambda rank, world_size: print("here")).output == ("here\n", "here\n")


def test_failures_that_come_one_after_the_other_are_all_told(pool):
    def stagger(rank, world_size):
        if rank == 1:
            for _ in range(20):
                time.sleep(0.01)
        raise ValueError(f"rank {rank}")

    with pytest.raises(kit.RankError) as caught:
        pool.run(stagger)
    assert set(caught.value.failures) == {0, 1}


def test_a_forked_child_does_not_close_the_pool(pool):
    before = list(pool.run(pid))
    child = os.fork()
    if child == 0:
        pool.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert list(pool.run(pid)) == before


def test_bad_input_starts_no_process(monkeypatch):
    monkeypatch.setattr(pool_module, "_shared", None)
    monkeypatch.setattr(pool_module, "RankProcess", None)  # calling it would be a TypeError
    with pytest.raises(kit.PoolError):
        kit.run(pid, timeout=-1)
    with pytest.raises(kit.PoolError):
        kit.run(lambda rank, world_size, *args: None, threading.Lock())


def test_a_run_ends_at_its_timeout(pool):
    start = time.monotonic()
    with pytest.raises(kit.RunTimeoutError) as caught:
        pool.run(lambda rank, world_size: rank or time.sleep(60), timeout=0.5)
    assert time.monotonic() - start < 10
    assert 0 in caught.value.unfinished
    assert pool.run(total)[0] == 1


def test_a_destroyed_process_group_is_formed_again(pool):
    pool.run(lambda rank, world_size: dist.destroy_process_group())
    assert pool.run(total)[0] == 1


def test_a_left_over_sub_group_does_not_disturb_the_next_run(pool):
    def half(rank, world_size):
        dist.new_group([0])

    pool.run(half)
    assert pool.run(lambda r, w: dist.get_world_size(dist.new_group([0, 1])))[0] == 2


def test_children_of_a_stuck_rank_end_with_it(pool):
    def parent(rank, world_size):
        child = subprocess.Popen(["sleep", "60"])
        print(child.pid)
        if rank == 0:
            raise ValueError("done")
        time.sleep(60)

    with pytest.raises(kit.RankError):
        pool.run(parent)
    pool.close()  # rank 0 is idle until then; the fixture sees whether both sleeps are gone


# --- bad input -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "words"),
    [
        (0, "world_size must be at least 1, got 0"),
        (-2, "world_size must be at least 1, got -2"),
        (2.0, "world_size must be a whole number such as 4, got 2.0"),
        ("4", "world_size must be a whole number such as 4, got '4'"),
        (True, "world_size must be a whole number such as 4, got True"),
        (10**6, "on this machine, got 1000000"),
    ],
)
def test_an_impossible_world_size_is_refused(world_size, words):
    for call in (lambda: kit.run(pid, world_size=world_size), lambda: kit.WorkerPool(world_size)):
        with pytest.raises(kit.PoolError, match="world_size") as caught:
            call()
        assert words in str(caught.value)


def test_an_unknown_backend_is_refused():
    with pytest.raises(kit.BackendError, match="got 'smoke'"):
        kit.run(pid, backend="smoke")


@pytest.mark.skipif(torch.cuda.device_count() > 3, reason="this machine has the GPUs")
def test_nccl_without_gpus_is_refused():
    with pytest.raises(kit.BackendError, match='use backend="gloo"'):
        kit.run(pid, backend="nccl")


def test_a_worker_of_the_wrong_signature_is_refused():
    def alone(rank):
        return rank

    with pytest.raises(kit.PoolError, match=r"alone\(rank\) cannot be called as alone"):
        kit.run(alone)
    with pytest.raises(kit.PoolError, match=r"cannot be called as total\(rank, world_size, 1, 2\)"):
        kit.run(total, 1, 2)
    with pytest.raises(kit.PoolError, match="must be a function, got 3"):
        kit.run(3)


def test_an_argument_that_cannot_be_pickled_is_named():
    with pytest.raises(kit.PoolError, match=r"argument 1 cannot be sent to the ranks: lock"):
        kit.run(lambda rank, world_size, *args: None, 1, threading.Lock())


def test_a_closure_that_cannot_be_pickled_is_named():
    lock = threading.Lock()
    with pytest.raises(kit.PoolError, match="the worker, or something that it uses"):
        kit.run(lambda rank, world_size: lock)


def test_a_return_value_that_cannot_be_pickled_is_named():
    with pytest.raises(kit.RankError, match="returned a generator that cannot be sent"):
        kit.run(lambda rank, world_size: (i for i in range(3)), world_size=2)


def test_a_machine_that_starts_no_process_says_so(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(process.mp, "spawn", refuse)
    with pytest.raises(kit.PoolError, match=r"no further process can be started here.*open files"):
        kit.WorkerPool(1)


@pytest.mark.parametrize("timeout", [0, -1, "soon", True])
def test_an_impossible_timeout_is_refused(timeout):
    with pytest.raises(kit.PoolError, match="timeout must be a positive number"):
        kit.run(pid, timeout=timeout)


def test_a_rank_cannot_start_ranks():
    with pytest.raises(kit.RankError, match="a rank cannot start ranks of its own"):
        kit.run(lambda rank, world_size: kit.run(pid), world_size=1)


def test_a_helper_thread_cannot_run_ranks():
    errors = []

    def call():
        try:
            kit.run(pid)
        except kit.PoolError as error:
            errors.append(str(error))

    thread = threading.Thread(target=call, name="helper")
    thread.start()
    thread.join()
    assert errors
    assert "not from the thread 'helper'" in errors[0]


def test_a_closed_pool_says_so(pool):
    pool.close()
    pool.close()
    with pytest.raises(kit.PoolError, match="this pool is closed"):
        pool.run(pid)
    with pytest.raises(kit.PoolError, match="this pool is closed"):
        pool.restart()
    assert "closed" in repr(pool)


# --- nothing left, nothing open ------------------------------------------------------------


def test_close_leaves_no_process_and_no_folder(pool):
    pids, folder = list(pool.run(pid)), pool._folder
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    pool.close()
    assert not [p for p in pids if psutil.pid_exists(p)]
    assert not os.path.exists(folder)


def test_a_killed_process_leaves_a_folder_that_the_next_pool_sweeps(tmp_path, monkeypatch):
    monkeypatch.setattr(pool_module.tempfile, "tempdir", str(tmp_path))
    gone = subprocess.Popen(["true"])
    gone.wait()
    for name in (
        f"ddp_kit-{gone.pid}-abcd_123",
        f"ddp_kit-{os.getpid()}-abcd_123",
        f"ddp_kit-{gone.pid}-notes",
    ):
        (tmp_path / name).mkdir()
    with kit.WorkerPool(1):
        assert not (tmp_path / f"ddp_kit-{gone.pid}-abcd_123").exists()
        assert (tmp_path / f"ddp_kit-{os.getpid()}-abcd_123").exists()
        assert (tmp_path / f"ddp_kit-{gone.pid}-notes").exists()


def test_ranks_listen_on_loopback_only():
    def listening(rank, world_size):
        dist.barrier()
        sockets = psutil.Process().net_connections("inet")
        return [s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN]

    for addresses in kit.run(listening, world_size=2):
        assert addresses, "gloo listens somewhere; if not, this test looks at the wrong thing"
        assert set(addresses) <= {"127.0.0.1", "::1"}


SCRIPT = """
import os, sys, signal, time
import torch, torch.distributed as dist
import ddp_kit as kit

# A shell's background job ignores SIGINT, and passes that on; a notebook's kernel does not.
signal.signal(signal.SIGINT, signal.default_int_handler)

def pid(rank, world_size):
    return os.getpid()

def stuck(rank, world_size):
    dist.recv(torch.zeros(1), src=1 - rank)

print(*kit.run(pid, world_size=2), flush=True)
"""


def _start(body: str) -> tuple[subprocess.Popen, list[psutil.Process]]:
    script = subprocess.Popen(
        [sys.executable, "-c", SCRIPT + body],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # as a notebook's kernel is
    )
    ranks = [psutil.Process(int(p)) for p in script.stdout.readline().split()]
    assert len(ranks) == 2
    return script, ranks


def test_ranks_end_when_the_interpreter_ends_without_close():
    script, ranks = _start("")
    assert script.wait(timeout=20) == 0
    assert script.communicate()[1] == ""
    assert ended(ranks)


def test_ranks_stuck_in_native_code_end_when_the_parent_is_killed():
    script, ranks = _start("print('going', flush=True); kit.run(stuck, world_size=2)")
    assert script.stdout.readline() == "going\n"
    _wait_until_stuck(ranks)
    script.kill()
    script.communicate()
    assert ended(ranks)


def test_an_interrupt_ends_a_deadlock_and_the_next_run_works():
    script, ranks = _start(
        """
print('going', flush=True)
try:
    kit.run(stuck, world_size=2)
except KeyboardInterrupt:
    print('interrupted', flush=True)
print(len(kit.run(pid, world_size=2)), flush=True)
"""
    )
    assert script.stdout.readline() == "going\n"
    _wait_until_stuck(ranks)
    os.killpg(script.pid, signal.SIGINT)  # what the notebook's stop button sends
    out, err = script.communicate(timeout=30)
    assert (out, err, script.returncode) == ("interrupted\n2\n", "", 0)
    assert ended(ranks)


def _wait_until_stuck(ranks: list[psutil.Process]) -> None:
    """Return once both ranks sleep and have used no processor time for a while."""
    deadline, calm, before = time.monotonic() + 20, 0, None
    while calm < 10:
        assert time.monotonic() < deadline, "the ranks never came to rest"
        now = [sum(rank.cpu_times()[:2]) for rank in ranks]
        calm, before = (calm + 1 if now == before else 0), now
        time.sleep(0.02)
