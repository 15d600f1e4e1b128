"""What a worker breaks in its rank is repaired: the next run starts as if it were the first."""

from __future__ import annotations

import builtins
import contextlib
import datetime
import faulthandler
import gc
import logging
import os
import random
import signal
import sys
import threading
import time
import warnings

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import distributed_c10d

import ddp_kit as kit

pytestmark = pytest.mark.usefixtures("forked_ranks")


def pid(rank, world_size):
    return os.getpid()


def total(rank, world_size):
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor)
    return tensor.item()


def leave_isend(rank, world_size):
    if rank == 0:
        dist.isend(torch.tensor([99.0]), 1)  # nobody receives it


def leave_isend_in_a_global(rank, world_size):
    if rank == 0:
        sys.left = dist.isend(torch.tensor([99.0]), 1)


def leave_irecv(rank, world_size):
    if rank == 1:
        sys.left = torch.zeros(1), dist.irecv(torch.zeros(1), 0)


def leave_all_reduce(rank, world_size):
    if rank == 0:
        sys.left = dist.all_reduce(torch.ones(1), async_op=True)


def catch_a_timeout(rank, world_size):
    if rank == 0:
        with contextlib.suppress(RuntimeError):
            dist.irecv(torch.zeros(1), 1).wait(datetime.timedelta(seconds=0.2))


def send_one(rank, world_size):
    tensor = torch.tensor([7.0])
    if rank == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor.zero_(), 0)
    return tensor.item()


def leave_sub_group(rank, world_size):
    dist.new_group([0])


def leave_no_group(rank, world_size):
    dist.destroy_process_group()


LEAVES = [leave_isend, leave_isend_in_a_global, leave_irecv, leave_all_reduce, catch_a_timeout]


@pytest.mark.parametrize("leave", [*LEAVES, leave_sub_group, leave_no_group])
def test_communication_left_in_flight_does_not_reach_the_next_run(leave):
    warm = list(kit.run(pid, world_size=2))
    kit.run(leave, world_size=2, timeout=60)
    assert list(kit.run(send_one, world_size=2)) == [7.0, 7.0]
    assert list(kit.run(total, world_size=2)) == [3.0, 3.0]
    assert list(kit.run(pid, world_size=2)) == warm, "none of this needs a fresh process"


def look(rank, world_size):
    return {
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "path": list(sys.path),
        "threads": torch.get_num_threads(),
        "dtype": torch.tensor(0.5).dtype,
        "device": torch.zeros(1).device.type,
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "printed": str(torch.tensor(1 / 3)),
        "drawn": torch.rand(3).tolist(),
        "warnings": list(warnings.filters),
        "log": (logging.root.level, list(map(type, logging.root.handlers))),
        "argv": list(sys.argv),
        "stdout": print("seen"),
    }


def break_much(rank, world_size):
    os.environ["LEARNER"] = "was here"
    os.environ.pop("PATH")
    os.environ["GLOO_SOCKET_IFNAME"] = "nowhere"
    os.chdir("/")
    torch.set_num_threads(7)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    torch.set_printoptions(precision=1)
    torch.manual_seed(1)
    warnings.simplefilter("error")
    logging.basicConfig(level=10)
    sys.argv.append("more")
    sys.path.clear()
    sys.stdout = None
    os.close(1)
    os.close(2)


def assert_as_before(spoil):
    """Let ranks look, then spoil something; assert that they see the same again, still warm."""
    first, warm = kit.run(look, world_size=2), list(kit.run(pid, world_size=2))
    spoil()
    again = kit.run(look, world_size=2)
    for rank in range(2):
        for what, value in first[rank].items():
            assert again[rank][what] == value, what
    assert again.output == ("seen\n", "seen\n")
    assert list(kit.run(total, world_size=2)) == [3.0, 3.0]
    assert list(kit.run(pid, world_size=2)) == warm, "none of this needs a fresh process"


def test_everything_else_that_a_worker_changes_is_put_back():
    def spoil():
        assert kit.run(break_much, world_size=2).output == ("", "")

    assert_as_before(spoil)


def test_a_seed_does_not_reach_the_next_run():
    def seed(rank, world_size):
        random.seed(0)
        numpy.random.seed(0)
        return draw(rank, world_size)

    def draw(rank, world_size):
        return random.random(), numpy.random.random()

    seeded = kit.run(seed, world_size=1)[0]
    again = kit.run(draw, world_size=1)[0]
    random.seed(0)
    numpy.random.seed(0)
    assert seeded == draw(0, 1)
    assert not set(again) & set(draw(0, 1))


def test_a_removed_working_directory_is_reported(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(kit.PoolError, match="working directory no longer exists"):
        kit.run(pid, world_size=2)


def test_ranks_follow_the_notebooks_environment(monkeypatch):
    read = lambda rank, world_size: os.environ.get("LEARNER")  # noqa: E731
    monkeypatch.setenv("LEARNER", "set")
    assert list(kit.run(read, world_size=2)) == ["set", "set"]
    monkeypatch.delenv("LEARNER")
    assert list(kit.run(read, world_size=2)) == [None, None]


def keep_going(path):
    while True:
        with open(path, "a") as file:
            file.write(".")
        time.sleep(0.001)


def test_a_thread_left_running_ends_with_a_fresh_rank_and_a_line_says_so(tmp_path, capsys):
    path = str(tmp_path / "dots")

    def leave_thread(rank, world_size):
        if rank == 1:
            threading.Thread(target=keep_going, args=(path,), name="dotter", daemon=True).start()

    before = list(kit.run(pid, world_size=2))
    kit.run(leave_thread, world_size=2)
    assert capsys.readouterr().out == (
        "restarting rank 1: the worker left its thread 'dotter' running\n"
    )
    size = os.path.getsize(path) if os.path.exists(path) else 0
    after = list(kit.run(pid, world_size=2))
    assert (after[0], after[1] == before[1]) == (before[0], False)
    assert (os.path.getsize(path) if os.path.exists(path) else 0) == size


def leave_callback(rank, world_size):
    began = threading.Event()

    def late(_):
        began.set()
        time.sleep(30)
        print("late")

    store = distributed_c10d._get_default_store()
    if rank == 0:
        store.wait(["then"])  # a future that is complete calls its callback in `then`
        dist.all_reduce(torch.ones(1))
    else:
        dist.all_reduce(torch.ones(1), async_op=True).get_future().then(late)
        store.set("then", "")
        began.wait()


def leave_timer(rank, world_size):
    if rank == 1:
        threading.Timer(30, print, ("late",)).start()


def leave_collective(rank, world_size):
    if rank == 1:
        threading.Thread(target=dist.all_reduce, args=(torch.ones(1),), daemon=True).start()


@pytest.mark.parametrize("leave", [leave_callback, leave_timer, leave_collective])
def test_a_thread_left_running_neither_prints_nor_communicates_in_the_next_run(leave, capsys):
    before = list(kit.run(pid, world_size=2))
    kit.run(leave, world_size=2)
    assert "restarting rank 1: the worker left its thread" in capsys.readouterr().out
    assert list(kit.run(total, world_size=2, timeout=60)) == [3.0, 3.0]
    assert kit.run(pid, world_size=2)[1] != before[1]


def test_a_librarys_idle_thread_costs_no_fresh_rank():
    def leave_pool(rank, world_size):
        from concurrent.futures import ThreadPoolExecutor

        sys.left = ThreadPoolExecutor(1)
        return sys.left.submit(int, 3).result()

    before = list(kit.run(pid, world_size=2))
    assert list(kit.run(leave_pool, world_size=2)) == [3, 3]
    assert list(kit.run(pid, world_size=2)) == before


def test_what_the_next_run_prints_is_kept_after_a_closed_stream():
    def close(rank, world_size):
        sys.stdout.close()
        sys.stderr.detach()
        sys.__stdout__ = sys.__stderr__ = None

    def print_much(rank, world_size):
        print("to stdout")
        print("to stderr", file=sys.stderr)
        print("by its second name", file=sys.__stdout__)

    warm = list(kit.run(pid, world_size=2))
    kit.run(close, world_size=2)
    for _ in range(2):
        printed = kit.run(print_much, world_size=2).output
        assert printed == ("to stdout\nto stderr\nby its second name\n",) * 2
    assert list(kit.run(pid, world_size=2)) == warm, "none of this needs a fresh process"


@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
def test_an_object_that_a_worker_has_replaced_is_put_back(fails):
    def spoil(rank, world_size):
        os.environ, sys.path, sys.argv = {"LEARNER": "was here"}, [], ["other"]
        if fails:
            raise ValueError("spoiled")

    def run():
        error = pytest.raises(kit.RankError, match="spoiled")
        with error if fails else contextlib.nullcontext():
            kit.run(spoil, world_size=2)

    assert_as_before(run)


def test_a_replaced_function_is_put_back_in_a_warm_rank(capsys):
    def replace(rank, world_size, fails=False):
        os.chdir = torch.manual_seed = None
        torch.matmul = numpy.zeros(3)  # which cannot be compared
        dist.all_reduce = dist.reduce  # of the same library
        torch.nn.Module.__call__ = None
        builtins.print = None
        if fails:
            raise ValueError("spoiled")
        return {"rank": rank}

    before = list(kit.run(pid, world_size=2))
    assert list(kit.run(replace, world_size=2)) == [{"rank": 0}, {"rank": 1}]
    with pytest.raises(kit.RankError, match="spoiled"):
        kit.run(replace, True, world_size=2)
    assert list(kit.run(total, world_size=2)) == [3.0, 3.0]
    assert kit.run(look, world_size=2).output == ("seen\n", "seen\n")
    assert list(kit.run(pid, world_size=2)) == before
    assert "restarting" not in capsys.readouterr().out


def test_a_function_that_a_library_wraps_stays_in_a_warm_rank(capsys):
    def compile_something(rank, world_size):
        import torch._dynamo  # torch.compile loads it; it wraps torch.manual_seed

        return torch.manual_seed is not torch.random.manual_seed

    warm = list(kit.run(pid, world_size=2))
    assert list(kit.run(compile_something, world_size=2)) == [True, True]
    assert list(kit.run(compile_something, world_size=2)) == [True, True]
    assert list(kit.run(pid, world_size=2)) == warm
    assert capsys.readouterr().out == ""


def trainer(*_):
    pass


# How to change a setting that is put back, and how to read it.
PLAIN = [
    (lambda: torch.autograd.set_detect_anomaly(True), torch.is_anomaly_enabled),
    (lambda: torch.set_float32_matmul_precision("high"), torch.get_float32_matmul_precision),
    (
        lambda: setattr(torch.backends.cudnn, "benchmark", True),
        lambda: torch.backends.cudnn.benchmark,
    ),
    (lambda: torch.set_warn_always(True), torch.is_warn_always_enabled),
    (lambda: sys.setrecursionlimit(5000), sys.getrecursionlimit),
    (lambda: mp.set_sharing_strategy("file_system"), mp.get_sharing_strategy),
    (lambda: mp.set_start_method("spawn", force=True), mp.get_start_method),
    (lambda: numpy.seterr(all="raise"), numpy.geterr),
    (lambda: numpy.set_printoptions(precision=2), numpy.get_printoptions),
    (logging.disable, lambda: logging.root.manager.disable),
    (gc.disable, gc.isenabled),
    (lambda: signal.signal(signal.SIGTERM, trainer), lambda: signal.getsignal(signal.SIGTERM)),
    (lambda: signal.alarm(300), lambda: signal.getitimer(signal.ITIMER_REAL)),
    (lambda: sys.setprofile(trainer), sys.getprofile),
    (
        lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}),
        lambda: os.sched_getaffinity(0),
    ),
]


def change_plain_settings(rank, world_size):
    before = [read() for _, read in PLAIN]
    for change, _ in PLAIN:
        change()
    return before, os.getpid()


def test_plain_settings_are_put_back_in_warm_ranks():
    first, second = (list(kit.run(change_plain_settings, world_size=2)) for _ in range(2))
    assert first == second


class Cell:
    keeps_groups = True  # as a %%ranks cell

    def __call__(self, rank, world_size):
        was = numpy.geterr()["divide"], torch.get_default_dtype()
        numpy.seterr(all="raise")
        torch.set_default_dtype(torch.float64)
        return was


def test_what_a_cell_of_ranks_sets_outside_pytorch_is_for_the_next_cell():
    assert set(kit.run(Cell(), world_size=2)) == {("warn", torch.float32)}
    assert set(kit.run(Cell(), world_size=2)) == {("raise", torch.float32)}
    kit.run(pid, world_size=2)
    assert set(kit.run(Cell(), world_size=2)) == {("warn", torch.float32)}
    kit.run(pid, world_size=2)


def test_what_libraries_set_costs_no_fresh_rank(capsys):
    def train(rank, world_size):
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        loader = torch.utils.data.DataLoader(torch.ones(4, 2), num_workers=1)
        for batch in loader:  # sets a handler of SIGCHLD
            with torch.autocast("cpu"), numpy.errstate(all="raise"):
                model(batch).sum().backward()
        torch.compile(lambda x: x + 1, backend="eager")(batch)
        return os.getpid()

    assert list(kit.run(train, world_size=2)) == list(kit.run(train, world_size=2))
    assert capsys.readouterr().out == ""


def test_a_timer_of_faulthandler_does_not_end_the_next_run():
    def worker(rank, world_size):
        faulthandler.dump_traceback_later(5, exit=True)

    with kit.WorkerPool(1) as pool:
        pool.run(worker)
        pool.run(lambda rank, world_size: time.sleep(6))
