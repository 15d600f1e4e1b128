"""The pool on real processes."""

from __future__ import annotations

import ctypes
import functools
import importlib
import inspect
import io
import multiprocessing
import os
import random
import re
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy
import psutil
import pytest
import torch
import torch.distributed as dist
from processes import wait_until

import ddp_kit as kit
from ddp_kit import doctor_checks as checks
from ddp_kit import settings
from ddp_kit.pool import arguments, pool
from ddp_kit.pool.wire import pickling


def total(rank, world_size, scale=1):
    tensor = torch.tensor([rank * scale])
    dist.all_reduce(tensor)
    return tensor.item()


def pid(rank, world_size):
    return os.getpid()


# --- values and output ---------------------------------------------------------------------


def test_values_come_back_in_rank_order():
    result = kit.run(lambda rank, world_size, tail: (rank, world_size, tail), "x", world_size=3)
    assert list(result) == [(0, 3, "x"), (1, 3, "x"), (2, 3, "x")]
    assert (len(result), result[2]) == (3, (2, 3, "x"))


class Scaled:
    def __call__(self, rank, world_size):
        return rank * 7


def test_every_kind_of_callable_is_a_worker():
    by = 7
    seven = functools.partial(lambda factor, rank, world_size: rank * factor, 7)
    for worker in (lambda rank, world_size: rank * by, Scaled(), seven):
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
    for words in ("first", "second"):
        result = kit.run(lambda rank, world_size, words: print(words), words, world_size=2)
    assert result.output == ("second\n",) * 2


def test_random_numbers_without_a_seed_are_as_the_readme_says():
    def draw(rank, world_size):
        return torch.rand(1).item(), random.random(), numpy.random.random()

    first, second = (list(kit.run(draw, world_size=2)) for _ in range(2))
    assert first[0][0] != first[1][0], "torch draws other numbers on each rank"
    assert [one[0] for one in first] == [one[0] for one in second], "and the same in every run"
    others = [number for one in first + second for number in one[1:]]
    assert len(set(others)) == 8


class Table:
    """Its repr has columns, as that of a DataFrame."""

    def __repr__(self):
        return "   a\n0  1"


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((1, 1), "rank 0: 1\nrank 1: 1"),
        ((None, None), "2 ranks returned None"),
        ((Table(),), "rank 0:    a\n        0  1"),
    ],
)
def test_repr_shows_values_below_each_other_or_that_there_are_none(values, text):
    assert repr(kit.Result(values, ("",) * len(values), None)) == text


# --- warm processes and world sizes --------------------------------------------------------


def test_a_rank_loads_no_notebook_and_no_picture_library(pool):
    heavy = {"matplotlib", "IPython", "torchvision", "ipywidgets"}
    loaded = pool.run(lambda rank, world_size: sorted(heavy & set(sys.modules)))
    assert list(loaded) == [[], []]


def test_a_rank_has_its_share_of_the_cores_a_device_and_torchruns_variables():
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")

    def look(rank, world_size):
        return torch.get_num_threads(), str(kit.device()), [os.environ[name] for name in names]

    cores = len(os.sched_getaffinity(0))
    for size in (3, 2):
        expected = [
            (max(1, cores // size), "cpu", [str(r), str(r), *[str(size)] * 2]) for r in range(size)
        ]
        assert list(kit.run(look, world_size=size, backend="gloo")) == expected


def test_the_notebooks_folder_and_path_reach_the_ranks(tmp_path, monkeypatch):
    (tmp_path / "learners_own.py").write_text("def f(rank, world_size):\n    return rank + 100\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    import learners_own

    assert list(kit.run(learners_own.f, world_size=2)) == [100, 101]
    assert set(kit.run(lambda r, w: os.getcwd(), world_size=2)) == {str(tmp_path)}


# --- bad input -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "words"),
    [
        (0, "world_size must be at least 1, got 0"),
        (-2, "world_size must be at least 1, got -2"),
        (2.0, "world_size must be a whole number such as 4, got 2.0"),
        ("4", "world_size must be a whole number such as 4, got '4'"),
        (True, "world_size must be a whole number such as 4, got True"),
        (torch.tensor(0), "world_size must be at least 1, got 0"),
        (10**6, "world_size must be at most "),
    ],
)
def test_an_impossible_world_size_is_refused(world_size, words):
    for call in (lambda: kit.run(pid, world_size=world_size), lambda: kit.WorkerPool(world_size)):
        with pytest.raises(kit.PoolError, match="world_size") as caught:
            call()
        assert words in str(caught.value)


@pytest.mark.usefixtures("forked_ranks")
def test_more_ranks_than_fit_into_free_memory_are_refused_unless_they_are_small(monkeypatch):
    kit.run(pid, world_size=2)
    have = pool.living_ranks()
    for module in (arguments, checks):
        monkeypatch.setattr(module, "available_memory", lambda: 2.2e9)
    most = f"world_size must be at most {have + 8} now, .* 2.2 GB are free, got 100; .*RANK_MEMORY"
    with pytest.raises(kit.PoolError, match=most):
        kit.run(pid, world_size=100)
    with pytest.raises(kit.PoolError, match="world_size must be at most 8 now"):
        kit.WorkerPool(9)
    assert f"Enough for {have + 8} ranks now, " in checks.memory().consequence
    monkeypatch.setattr(settings, "RANK_MEMORY", 22e6)
    assert pool.check_world_size(100) == 100
    monkeypatch.setattr(arguments, "available_memory", lambda: 0)
    assert len(kit.run(pid, world_size=2)) == 2, "they run already"


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("size", [numpy.int64(2), torch.tensor(2)])
def test_a_whole_number_of_another_type_reaches_the_worker_as_an_int(size):
    def what(rank, world_size):
        return type(world_size) is int and world_size

    assert list(kit.run(what, world_size=size)) == [2, 2]
    with kit.WorkerPool(size) as pool:
        assert list(pool.run(what)) == [2, 2]
        assert "2 ranks" in repr(pool)


@pytest.mark.skipif(torch.cuda.device_count() > 3, reason="this machine has the GPUs")
def test_nccl_without_gpus_is_refused():
    with pytest.raises(kit.BackendError, match='use backend="gloo"'):
        kit.run(pid, backend="nccl")


def alone(rank):
    return rank


async def awaits(rank, world_size):
    return rank


def yields(rank, world_size):
    yield rank


def with_a_lock():
    """Return workers that are sent by value, and use a lock in one way each."""
    lock = threading.Lock()

    def helper():
        return lock

    def keeps(rank, world_size, lock=lock):
        pass

    return (lambda rank, world_size: lock), (lambda rank, world_size: helper()), keeps


USES, CALLS, KEEPS = with_a_lock()
ONLY_CHILDREN = "return values from the worker, or pass an object of multi"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((alone,), r"alone\(rank\) cannot be called as alone.*write alone\(rank, world_size\)"),
        ((total, 1, 2), r"cannot be called as total\(rank, world_size, 1, 2\)"),
        ((3,), "must be a function, got 3; pass the function itself"),
        ((awaits,), r"awaits is an async function.*asyncio\.run"),
        ((yields,), "yields is a generator function.*in a list"),
        ((total, threading.Lock()), "argument 0 cannot be sent to the ranks: lock"),
        ((USES,), "^lock, which the worker uses, cannot be sent to the ranks: lock"),
        ((CALLS,), r"^lock, which helper\(\) uses, cannot be sent"),
        ((KEEPS,), r"it uses something that only this process has \([^;]*$"),
        ((total, multiprocessing.Queue()), ONLY_CHILDREN),
        ((total, multiprocessing.Pipe()[0]), ONLY_CHILDREN),
    ],
)
def test_a_worker_that_cannot_be_called_or_sent_is_refused_before_anything_starts(args, message):
    with pytest.raises(kit.PoolError, match=message):
        kit.run(*args)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "smoke"}, "got 'smoke'"),
        *(
            ({"timeout": wrong}, "timeout must be a positive number")
            for wrong in (0, -1, "soon", True, float("nan"))
        ),
    ],
)
def test_an_impossible_backend_or_timeout_is_refused(options, message):
    with pytest.raises(kit.KitError, match=message):
        kit.run(pid, **options)


def test_a_worker_with_its_first_two_parameters_swapped_runs_with_a_line(capsys):
    def swapped(world_size, rank):
        return world_size, rank

    def other(size, rank):
        return size, rank

    assert list(kit.run(swapped, world_size=2)) == list(kit.run(other, world_size=2))
    assert capsys.readouterr().out == (
        "swapped gets the rank as its first argument, which it calls world_size: write "
        "swapped(rank, world_size)\n"
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: kit.run(pid, nproc_per_node=2),
            "kit.run has no argument nproc_per_node=; write kit.run(worker, *args, world_size=4); "
            "the worker's own arguments have no names",
        ),
        (lambda: kit.run(pid, timout=3), "kit.run has no argument timout=; did you mean timeout=?"),
        (
            lambda: kit.run(),
            "kit.run is missing a required argument: 'worker'; "
            "write kit.run(worker, *args, world_size=4)",
        ),
        (
            lambda: kit.WorkerPool(nprocs=2),
            "kit.WorkerPool has no argument nprocs=; write kit.WorkerPool(4)",
        ),
        (
            lambda: kit.torchrun(pid, world_size=2),
            "kit.torchrun has no argument world_size=; "
            "write kit.torchrun(worker, *args, nproc_per_node=4); "
            "the worker's own arguments have no names",
        ),
    ],
)
def test_a_wrong_argument_is_named_and_what_would_be_right(call, message):
    with pytest.raises(kit.PoolError) as caught:
        call()
    assert str(caught.value) == message
    assert caught.value._render_traceback_() == [f"PoolError: {caught.value}"]


def test_a_signature_is_there_for_completion_and_help():
    for function in (kit.run, kit.torchrun):
        assert next(iter(inspect.signature(function).parameters)) == "worker"
    assert list(inspect.signature(kit.WorkerPool).parameters) == ["world_size", "backend", "init"]


def test_a_type_error_that_has_another_cause_is_left_alone(monkeypatch):
    def fail(*_args):
        raise TypeError("of another kind")

    monkeypatch.setattr(importlib.import_module("ddp_kit.pool.pool"), "prepare", fail)
    with pytest.raises(TypeError, match="of another kind"):
        kit.run(pid)


def test_a_rank_that_a_result_lacks_is_named_with_those_that_it_has():
    result = kit.Result(("a", "b", "c"), ("", "", ""), None)
    assert (result[-1], result[1:]) == ("c", ("b", "c"))
    for rank in (5, -4, "loss"):
        with pytest.raises(
            kit.ResultError, match="in this result, which has ranks 0 to 2"
        ) as error:
            result[rank]
        assert f"there is no rank {rank!r}" in str(error.value)
        assert error.value._render_traceback_() == [f"ResultError: {error.value}"]
    assert list(reversed(result)) == ["c", "b", "a"]
    assert numpy.array(kit.Result((1, 2), ("", ""), None)).tolist() == [1, 2]
    with pytest.raises(IndexError, match=r"which has rank 0$"):
        kit.Result((None,), ("",), None)[1]


@pytest.mark.parametrize(
    "module",
    [
        *(torch.backends.cudnn, torch.ops, torch.ops.aten, torch.ops.aten.add.Tensor),
        *(torch.classes, torch.nn.attention.SDPBackend),
    ],
)
@pytest.mark.usefixtures("forked_ranks")
def test_what_can_be_imported_is_sent_by_name(module):
    def worker(rank, world_size):
        torch.backends.cudnn.deterministic = True
        return str(module)

    assert list(kit.run(worker, world_size=1)) == [str(module)]


def test_a_rank_that_reads_its_arguments_leaves_the_file_as_it_is_for_the_others():
    packed = pickling.pack([torch.arange(50_000)])
    os.lseek(packed.file.fileno(), 100, os.SEEK_SET)
    other = os.dup(packed.file.fileno())  # as each rank gets one
    assert torch.equal(packed.unpack()[0], torch.arange(50_000))
    assert os.lseek(other, 0, os.SEEK_CUR) == 100
    os.close(other)


def test_the_notebooks_standard_output_is_that_of_the_rank(monkeypatch, pool):
    class OutStream(io.StringIO):  # as ipykernel's, which has a key inside
        def __reduce_ex__(self, protocol):
            raise TypeError("cannot pickle '_hashlib.HMAC' object")

    monkeypatch.setattr(sys, "stdout", out := OutStream())

    def worker(rank, world_size, file=out):
        print("hello", file=file)

    assert set(pool.run(worker).output) == {"hello\n"}


def test_a_module_that_answers_for_every_name_can_be_used(tmp_path, monkeypatch):
    lazy = tmp_path / "lazy_names.py"
    lazy.write_text("x = 3\ndef __getattr__(name):\n    return {}[name]\n")
    monkeypatch.syspath_prepend(tmp_path)
    lazy_names = importlib.import_module("lazy_names")
    assert list(kit.run(lambda rank, world_size: lazy_names.x, world_size=2)) == [3, 3]


class EndsWhoeverUnpicklesIt:
    def __reduce__(self):
        return exec, ("raise SystemExit(3)",)


@pytest.mark.usefixtures("forked_ranks")
def test_a_value_whose_unpickling_ends_the_process_is_an_error():
    with pytest.raises(kit.PoolError, match="cannot be rebuilt in the notebook: SystemExit"):
        kit.run(lambda rank, world_size: EndsWhoeverUnpicklesIt(), world_size=1)


def test_a_rank_cannot_start_ranks():
    with pytest.raises(kit.RankError, match="a rank cannot start ranks of its own"):
        kit.run(lambda rank, world_size: kit.run(pid), world_size=1)


def test_a_helper_thread_cannot_run_ranks_also_not_warm_ones():
    kit.run(pid, world_size=2)
    with ThreadPoolExecutor(1, "helper") as executor:
        error = executor.submit(kit.run, pid, world_size=2).exception()
    assert isinstance(error, kit.PoolError)
    assert "main thread only" in str(error)
    assert "not from the thread 'helper_0'" in str(error)


def test_a_long_value_is_cut_in_a_cell():
    text = repr(kit.Result(("x" * 5_000,) * 2, ("", ""), None))
    assert len(text) < 3_300
    assert text.count(" more characters") == 2
    assert "... and 3,502 more characters\nrank 1: 'xxx" in text


class Slow:
    shown = 0

    def __repr__(self):
        Slow.shown += 1
        return "slow"


def test_of_a_long_value_not_much_more_than_is_shown_is_written():
    assert repr(kit.Result(([Slow()] * 9_000,), ("",), None)).count("slow") == 20
    assert Slow.shown < 600


def test_what_follows_a_long_list_in_a_value_is_shown():
    losses = [(step, 1 / (3 + step)) for step in range(500)]
    found = {"losses": losses, "note": "x)" * 999, "accuracy": 0.97}
    text = repr(kit.Result((found,), ("",), None))
    assert len(text) < 1_500
    assert "(9, 0.08333333333333333), ..., (490, 0.0020" in text
    assert re.search(r"x\.\.\.\)x.*accuracy': 0.97}$", text)
    many = {f"metric {n}": list(range(500)) for n in range(40)} | {"accuracy": 0.97}
    text = repr(kit.Result((many,), ("",), None))
    assert "'metric 0': [0, ..., 499]" in text
    assert text.endswith("'accuracy': 0.97}")


def leave_a_cycle(rank, world_size, folder):
    class Cycle:
        def __init__(self):
            self.itself = self

    weakref.finalize(Cycle(), (folder / str(rank)).touch)


def test_an_idle_rank_frees_what_only_the_garbage_collector_frees(tmp_path):
    kit.run(leave_a_cycle, tmp_path, world_size=2)
    wait_until(lambda: len([*tmp_path.iterdir()]) == 2, 60, "both ranks have collected garbage")


@pytest.mark.usefixtures("forked_ranks")
def test_shutdown_ends_the_ranks_and_the_next_run_starts_new_ones():
    kit.run(total, world_size=2)
    pids = kit.run(pid, world_size=2)
    kit.shutdown()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    kit.shutdown()  # there is nothing to end
    assert list(kit.run(total, world_size=2)) == [1, 1]


def test_a_closed_pool_says_so(pool):
    pool.close()
    pool.close()
    for call in (lambda: pool.run(pid), pool.restart):
        with pytest.raises(kit.PoolError, match="this pool is closed"):
            call()
    assert "closed" in repr(pool)


def test_functions_of_distributed_nn_use_the_group_of_each_run(pool):
    def total(rank, world_size):
        from torch.distributed.nn.functional import all_reduce

        return all_reduce(torch.ones(1)).item()

    assert [list(pool.run(total, world_size=n)) for n in (2, 1, 2)] == [[2, 2], [1], [2, 2]]


# --- ranks without a process group ---------------------------------------------------------


def forms_a_group(rank, world_size, store, leaves_it=False):
    before = dist.is_initialized()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    sum_of_ranks = total(rank, world_size)
    if not leaves_it:
        dist.destroy_process_group()
    return before, sum_of_ranks, os.getpid()


@pytest.mark.usefixtures("forked_ranks")
def test_bare_ranks_form_a_group_of_their_own_in_every_run(tmp_path):
    with kit.WorkerPool(2, init=False) as pool:
        first, left, next_one = (
            list(pool.run(forms_a_group, tmp_path / name, name == "left"))
            for name in ("first", "left", "next")
        )
        more = list(pool.run(forms_a_group, tmp_path / "more", world_size=3))
    assert first == left == next_one
    assert [value[:2] for value in more] == [(False, 3)] * 3
    assert [value[2] for value in more[:2]] == [value[2] for value in first]


@pytest.mark.usefixtures("forked_ranks")
def test_a_second_default_group_is_refused_with_what_to_do_instead(pool):
    def joins_again(rank, world_size):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    with pytest.raises(kit.RankError) as error:
        pool.run(joins_again)
    assert "has already called init_process_group for this worker" in str(error.value)
    assert str(error.value).count("leave that call out") == 1  # equal failures are merged
    with (
        kit.WorkerPool(1, init=False) as bare,
        pytest.raises(kit.RankError) as error,
    ):
        bare.run(joins_twice)
    assert "twice" in str(error.value)
    assert "has already called" not in str(error.value)


def joins_twice(rank, world_size):
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.mark.usefixtures("forked_ranks")
def test_a_group_that_bare_ranks_could_not_form_is_forgotten(tmp_path):
    def waits_alone(rank, world_size):
        if rank == 0:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{tmp_path}/alone",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=1),
            )

    with kit.WorkerPool(2, init=False) as pool:
        ranks = list(pool.run(pid))
        with pytest.raises(kit.RankError, match="rank 0 raised RuntimeError: Wait timeout"):
            pool.run(waits_alone)
        after = list(pool.run(forms_a_group, tmp_path / "after", timeout=300))
    assert after == [(False, 1, ranks[0]), (False, 1, ranks[1])]


# --- lines of a script and its modules ------------------------------------------------------

PARTS = """
import torch
import torch.distributed as dist

def start():
    dist.all_reduce(torch.ones(1), async_op=True)
"""

SCRIPT = """
import torch
import torch.distributed as dist
import ddp_kit as kit
import parts

def worker(rank, world_size, fails):
    dist.all_reduce(torch.ones(2), async_op=True)
    parts.start()
    dist.barrier()
    if fails:
        raise ValueError("boom")

if __name__ == "__main__":
    kit.run(worker, False, world_size=1)
    kit.run(worker, True, world_size=1)
"""


def test_lines_outside_the_script_name_their_file(tmp_path):
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    notices = done.stdout.splitlines()
    assert "    line 8 of worker: dist.all_reduce(torch.ones(2), async_op=True)" in notices
    assert (
        "    line 6 of start in parts.py: dist.all_reduce(torch.ones(1), async_op=True)" in notices
    )
    assert done.stderr.endswith('    line 12 of worker: raise ValueError("boom")\n')
