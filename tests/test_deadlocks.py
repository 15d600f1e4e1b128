"""Runs that can never end are stopped, and the error says why; others are left alone."""

from __future__ import annotations

import asyncio
import datetime
import itertools
import math
import os
import pickle
import queue
import re
import signal
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures import process as futures_process
from concurrent.futures import thread as futures_thread
from contextlib import suppress
from dataclasses import replace
from multiprocessing import Pool, Queue, queues, resource_sharer
from multiprocessing import pool as mp_pool
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
from processes import BOUND, wait_until
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import ddp_kit as kit
from ddp_kit import settings
from ddp_kit.error_text import Frame
from ddp_kit.pool import deadlock_watch
from ddp_kit.trace import Board, InternTable, Snapshot, stacks
from ddp_kit.trace.calls import Call
from ddp_kit.trace.events import Event, Group
from ddp_kit.trace.rank import recorder
from ddp_kit.verdict import graph

pytestmark = pytest.mark.usefixtures("forked_ranks")


def name_of(parameter):
    return getattr(parameter, "__name__", "")


def mutual_recv(rank, world_size):
    dist.recv(torch.zeros(1), 1 - rank)


def cycle(rank, world_size):
    dist.recv(torch.zeros(1), (rank + 1) % world_size)


def mutual_large_sends(rank, world_size):
    dist.send(torch.zeros(1_000_000), 1 - rank)
    dist.recv(torch.zeros(1_000_000), 1 - rank)


def wrong_tag(rank, world_size):
    if rank == 0:
        dist.send(torch.zeros(1), 1, tag=1)
    else:
        dist.recv(torch.zeros(1), 0, tag=2)


def skipped_barrier(rank, world_size):
    if rank != 1:
        dist.barrier()


def isend_never_matched(rank, world_size):
    if rank == 0:
        dist.isend(torch.zeros(1), 1).wait()


def isend_thrown_away(rank, world_size):
    if rank == 0:
        dist.isend(torch.zeros(1), 1)
    dist.barrier()
    if rank == 1:
        dist.recv(torch.zeros(1), 0)


def one_more_backward(rank, world_size):
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    for _ in range(1 + rank):
        model(torch.ones(1, 2)).sum().backward()


def loads_ddp(rank, world_size):
    DistributedDataParallel(torch.nn.Linear(2, 2))


def two_ranks_beside_two_that_work(rank, world_size):
    if rank < 2:
        dist.recv(torch.zeros(1), 1 - rank)
    for _ in range(60):
        time.sleep(0.1 * (rank == 2))
        dist.send(torch.zeros(1), 3) if rank == 2 else dist.recv(torch.zeros(1), 2)


def waits_for_the_result_of_a_callback(rank, world_size):
    if rank == 0:
        future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
        future.then(lambda done: done.value()).wait()


def waits_for_a_callback_that_never_runs(rank, world_size):
    if rank == 0:
        future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
        future.then(lambda done: dist.send(torch.ones(1), 1))
    else:
        dist.recv(torch.ones(1), 0)


def waits_for_several_futures(rank, world_size):
    futures = []
    for _ in range(2 - rank):
        futures.append(dist.all_reduce(torch.ones(1), async_op=True).get_future())
    torch.futures.wait_all(futures)


def waits_for_collected_futures(rank, world_size):
    if rank == 0:
        one = dist.all_reduce(torch.ones(1), async_op=True).get_future()
        torch.futures.collect_all([one]).wait()


def waits_for_a_key(rank, world_size):
    store = distributed_c10d._get_default_store()
    dist.barrier()
    if rank == 1:
        store.get("nobody sets it")
    elif rank == 2:
        dist.recv(torch.zeros(1), 1)


def waits_for_a_key_after_a_fork(rank, world_size):
    dist.barrier()
    if os.fork() == 0:
        os._exit(0)  # nobody reaps it
    distributed_c10d._get_default_store().get("nobody sets it")


def waits_for_two_keys(rank, world_size):
    store = distributed_c10d._get_default_store()
    dist.barrier()
    store.set("one", "1")
    if rank == 1:
        store.wait(["one", "two"])


def waits_for_each_others_keys(rank, world_size):
    store = distributed_c10d._get_default_store()
    dist.barrier()
    store.wait([f"ready {1 - rank}"])
    store.set(f"ready {rank}", "yes")


def polls(rank, world_size):
    if rank == 0:
        jobs, tries = SimpleNamespace(), 0
        jobs.works = [dist.all_reduce(torch.ones(1), async_op=True)]
        while not jobs.works[0].is_completed():
            tries += 1
            time.sleep(0.01)
            print(f"\r{tries}", end="")


def joins_a_thread(rank, world_size):
    thread = threading.Thread(target=dist.recv, args=(torch.zeros(1), 1 - rank))
    thread.start()
    thread.join()


def joins_a_thread_with_loaded_data(rank, world_size):
    list(DataLoader([1, 2], num_workers=1))  # PyTorch handles SIGCHLD from here on
    thread = threading.Thread(target=dist.recv, args=(torch.zeros(1), 1 - rank))
    thread.start()
    thread.join()


def waits_for_a_task(rank, world_size):
    if rank == 0:
        with ThreadPoolExecutor(2) as threads:
            threads.submit(dist.recv, torch.zeros(1), 1, tag=2)
            threads.submit(dist.recv, torch.zeros(1), 1).result()


def waits_beside_a_thread(rank, world_size):
    if rank == 0:
        threading.Thread(target=dist.recv, args=(torch.zeros(1), 1)).start()
        dist.recv(torch.zeros(1), 1, tag=2)


DEADLOCKS = [
    (mutual_recv, 2, "rank 0 waits for rank 1, rank 1 waits for rank 0: neither can ever send"),
    (cycle, 3, "rank 2 waits for rank 0: none of them can ever send"),
    (mutual_large_sends, 2, "rank 1 waits until rank 0 receives: neither can ever receive"),
    (wrong_tag, 2, "rank 0 sends to rank 1 with tag 1, but rank 1 receives from rank 0 with tag 2"),
    (skipped_barrier, 3, "ranks 0 and 2 wait in barrier for rank 1, which has returned"),
    (
        isend_never_matched,
        2,
        "rank 0 sends a message to rank 1, which has returned without receiving it",
    ),
    (isend_thrown_away, 2, "rank 0, which started an isend but never waited"),
    (one_more_backward, 2, "rank 1 waits in DDP forward for rank 0, which has returned"),
    (two_ranks_beside_two_that_work, 4, "rank 0 waits for rank 1, rank 1 waits for rank 0"),
    (
        waits_for_the_result_of_a_callback,
        2,
        "rank 0 waits in all_reduce for rank 1, which has returned",
    ),
    (
        waits_for_a_callback_that_never_runs,
        2,
        "rank 1 waits for a message from rank 0, which has returned without sending it",
    ),
    (waits_for_several_futures, 2, "rank 0 waits in all_reduce for rank 1, which has returned"),
    (waits_for_collected_futures, 2, "rank 0 waits in all_reduce for rank 1, which has returned"),
    (
        waits_for_a_key,
        3,
        "rank 1 waits for the key 'nobody sets it', which no rank has set, "
        "but rank 0 has returned and rank 2 waits too",
    ),
    (waits_for_a_key_after_a_fork, 2, "rank 0 waits for the key 'nobody sets it'"),
    (waits_for_two_keys, 2, "rank 1 waits for the keys 'one', 'two', which are not all set, but"),
    (waits_for_each_others_keys, 2, "rank 1 waits for the key 'ready 0': neither can ever"),
    (joins_a_thread, 2, "rank 0 waits for rank 1, rank 1 waits for rank 0: neither can ever send"),
    (joins_a_thread_with_loaded_data, 2, "rank 0 waits for rank 1, rank 1 waits for rank 0: "),
    (waits_for_a_task, 2, "from rank 1, which has returned without sending it"),
    (waits_beside_a_thread, 2, "a message with tag 2 from rank 1, which has returned"),
    (polls, 2, "rank 0 waits in all_reduce for rank 1, which has returned without calling it"),
]


@pytest.mark.parametrize(
    ("worker", "world_size", "fact"), DEADLOCKS, ids=lambda p: getattr(p, "__name__", "")
)
def test_a_deadlock_is_ended_and_explained(worker, world_size, fact):
    kit.run(loads_ddp, world_size=world_size)  # that takes seconds, once
    began = time.monotonic()
    with pytest.raises(kit.DeadlockError) as caught:
        kit.run(worker, world_size=world_size, timeout=60)
    assert time.monotonic() - began < 30
    assert fact in str(caught.value).splitlines()[0]
    assert caught.value.trace.events
    for wait in caught.value.waits:
        assert wait.where.function == worker.__name__
        assert wait.where.source in str(caught.value)


def test_a_message_that_was_thrown_away_is_lost():
    with pytest.raises(kit.DeadlockError) as caught:
        kit.run(isend_thrown_away, world_size=2)
    (message,) = caught.value.trace.messages()
    assert message.recv is None
    assert caught.value.trace.lost == [message]


# --- ranks that disagree -------------------------------------------------------------------


def different_collectives(rank, world_size):
    if rank == 0:
        dist.broadcast(torch.ones(1), 0)
    else:
        dist.all_reduce(torch.ones(1))


def different_shapes(rank, world_size):
    dist.all_reduce(torch.ones(1 + rank))


def different_splits(rank, world_size):
    rows_to = [1, 2] if rank == 0 else [2, 1]
    dist.all_to_all_single(torch.zeros(3), torch.ones(3), [1, 2], rows_to)


def too_small_a_tensor(rank, world_size):
    if rank == 0:
        dist.send(torch.ones(4), 1)
    else:
        dist.recv(torch.ones(2), 0)


MISMATCHES = [
    (different_collectives, "rank 0 calls broadcast, rank 1 calls all_reduce"),
    (different_shapes, "rank 0 calls all_reduce with shape (1,), rank 1 with shape (2,)"),
    (different_splits, "in all_to_all_single, rank 0 sends shape (2,) to rank 1, but rank 1"),
    (too_small_a_tensor, "rank 0 sends 16 bytes, rank 1 receives into a tensor of 8 bytes"),
]


@pytest.mark.parametrize(("worker", "fact"), MISMATCHES, ids=name_of)
def test_ranks_that_disagree_are_ended_and_the_error_says_how(worker, fact):
    kit.run(lambda rank, world_size: None, world_size=2)  # warm
    began = time.monotonic()
    with pytest.raises(kit.MismatchError) as caught:
        kit.run(worker, world_size=2, timeout=60)
    assert time.monotonic() - began < 30
    assert str(caught.value).startswith(fact)
    assert caught.value.result is None


def small_broadcast(rank, world_size):
    dist.broadcast(torch.ones(1 + rank), 0)
    return rank


def different_ops(rank, world_size):
    dist.all_reduce(torch.ones(1), op=dist.ReduceOp.SUM if rank else dist.ReduceOp.PRODUCT)
    return rank


def too_large_a_tensor(rank, world_size):
    if rank == 0:
        dist.send(torch.ones(1), 1)
    else:
        dist.recv(torch.ones(2), 0)
    return rank


SILENT = [
    (small_broadcast, "rank 0 calls broadcast with shape (1,), rank 1 with shape (2,)"),
    (different_ops, "rank 0 calls all_reduce with op=PRODUCT, rank 1 with op=SUM"),
    (too_large_a_tensor, "rank 0 sends 4 bytes, rank 1 receives into a tensor of 8 bytes"),
]


@pytest.mark.parametrize(("worker", "fact"), SILENT, ids=name_of)
def test_a_wrong_answer_without_an_error_raises_and_nothing_is_lost(worker, fact):
    with pytest.raises(kit.MismatchError) as caught:
        kit.run(worker, world_size=2)
    assert str(caught.value).startswith(fact)
    assert list(caught.value.result) == [0, 1]


class MeetsOthers(torch.utils.data.Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        dist.barrier()


def test_a_process_that_a_rank_has_forked_cannot_use_its_groups():
    def worker(rank, world_size):
        list(torch.utils.data.DataLoader(MeetsOthers(), num_workers=1))

    with pytest.raises(kit.RankError, match="such as a worker of a DataLoader, cannot communicate"):
        kit.run(worker, world_size=2, timeout=60)


# --- no false alarm ------------------------------------------------------------------------


def sleeps(rank, world_size):
    if rank:
        time.sleep(1.5)
    dist.barrier()


def slow_data_loader(rank, world_size):
    class Slow(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            time.sleep(0.8)
            return index

    for _ in torch.utils.data.DataLoader(Slow(), num_workers=1) if rank else []:
        pass
    dist.barrier()


def waits_in_a_world_that_is_formed_again(rank, world_size, store):
    if rank == 0:
        with pytest.raises(RuntimeError):  # one call more than the other rank makes
            dist.monitored_barrier(timeout=datetime.timedelta(milliseconds=100))
    for _ in range(2):
        dist.destroy_process_group()
        store += "again"
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size
        )
        time.sleep(rank)
        dist.barrier()


def skips_a_barrier_in_the_new_world(rank, world_size, store):
    dist.barrier()
    waits_in_a_world_that_is_formed_again(rank, world_size, store)
    if rank == 1:
        dist.barrier()


def another_thread_sends(rank, world_size):
    def later():
        time.sleep(1.5)
        dist.send(torch.zeros(1), 0)

    if rank == 0:
        dist.recv(torch.zeros(1), 1)
        dist.send(torch.zeros(1), 1, tag=1)
    else:
        thread = threading.Thread(target=later)
        thread.start()
        dist.recv(torch.zeros(1), 0, tag=1)
        thread.join()


def a_timer_sends(rank, world_size):
    timer = threading.Timer(1.5, dist.send, (torch.zeros(1), 1 - rank))
    timer.start()
    dist.recv(torch.zeros(1), 1 - rank)
    timer.join()


def a_thread_pool_sends(rank, world_size):
    with ThreadPoolExecutor(1) as threads:
        threads.submit(time.sleep, 1.5)
        sent = threads.submit(dist.send, torch.zeros(1), 1 - rank)
        dist.recv(torch.zeros(1), 1 - rank)
        sent.result()


def a_callback_sends(rank, world_size):
    with ThreadPoolExecutor(1) as threads:
        slept = threads.submit(time.sleep, 1.5)
        slept.add_done_callback(lambda _: dist.send(torch.zeros(1), 1 - rank))
        dist.recv(torch.zeros(1), 1 - rank)


def drops_a_collective(rank, world_size):
    dist.all_reduce(torch.ones(1), async_op=True)
    if rank == 2:
        time.sleep(1.5)
    dist.barrier()


def joins_with_uneven_inputs(rank, world_size):
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    with model.join():
        for _ in range(1 + rank):
            time.sleep(1.5 * (rank == 2))
            model(torch.ones(1, 1)).sum().backward()


def a_callback_of_a_process_sends(rank, world_size):
    with ProcessPoolExecutor(1) as processes:
        slept = processes.submit(time.sleep, 1.5)
        slept.add_done_callback(lambda _: dist.send(torch.zeros(1), 1 - rank))
        dist.recv(torch.zeros(1), 1 - rank)


def drops_what_has_come(rank, world_size):
    tensor = torch.zeros(1)
    if rank == 1:
        work = dist.irecv(tensor, 0)
    dist.barrier()
    if rank == 0:
        dist.isend(tensor, 1)
        dist.barrier()
        dist.send(tensor, 1)
    else:
        work.wait()
        time.sleep(6)  # longer than a message takes that is only slow
        dist.barrier()
        dist.recv(tensor, 0)


def a_limit_goes_by(rank, world_size):
    if rank == 0:
        work = dist.irecv(torch.zeros(1), 1)
        with pytest.raises(RuntimeError):
            work.wait(datetime.timedelta(seconds=1.5))


@pytest.mark.parametrize(
    "worker",
    [
        *(sleeps, slow_data_loader, another_thread_sends, a_limit_goes_by, drops_what_has_come),
        *(a_timer_sends, a_thread_pool_sends, a_callback_sends, a_callback_of_a_process_sends),
    ],
)
def test_a_slow_run_is_left_alone(worker):
    kit.run(worker, world_size=2)


def test_calls_of_worlds_with_one_name_are_not_compared(tmp_path):
    kit.run(waits_in_a_world_that_is_formed_again, str(tmp_path / "store"), world_size=2)
    with pytest.raises(kit.DeadlockError, match="rank 1 waits in barrier for rank 0"):
        kit.run(skips_a_barrier_in_the_new_world, str(tmp_path / "other"), world_size=2)


@pytest.mark.parametrize("parents", [[[0, 2], [1, 3]], [[0, 1, 2], [3]]])
def test_groups_of_one_member_within_a_subgroup_concern_its_members_only(parents):
    def worker(rank, world_size):
        mine, _ = dist.new_subgroups_by_enumeration(parents)
        current, groups = dist.new_subgroups(group_size=1, group=mine)
        dist.barrier()
        return dist.get_process_group_ranks(current), len(groups)

    sizes = {rank: len(group) for group in parents for rank in group}
    assert list(kit.run(worker, world_size=4)) == [([rank], sizes[rank]) for rank in range(4)]


def test_larger_groups_with_one_number_are_a_mismatch(monkeypatch):
    monkeypatch.setattr(settings, "RUN_JUDGED_AFTER", 3.0)  # all ranks are there, also late ones

    def worker(rank, world_size):  # on gloo, each connects to ranks of the other
        mine, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
        dist.new_subgroups(group_size=2, group=mine)

    with pytest.raises(kit.MismatchError, match=r"new_subgroups with \[0, 1\], ranks 2 and 3"):
        kit.run(worker, world_size=4)


def returns_before_the_others_call(rank, world_size):
    if rank == 1:
        time.sleep(1.5)
    work = dist.all_reduce(torch.ones(1), async_op=True)
    if rank != 0:
        work.wait()


@pytest.mark.parametrize(
    "worker", [drops_a_collective, joins_with_uneven_inputs, returns_before_the_others_call]
)
def test_a_collective_that_somebody_does_not_wait_for_is_left_alone(worker):
    kit.run(worker, world_size=3)


def test_a_thread_that_watches_for_a_package_may_communicate():
    run = Frame(threading.__file__, 1, "run", "", False)
    monitor = Frame(psutil.__file__, 1, "run", "", False)
    assert deadlock_watch._may_act([[], [run]])
    assert not deadlock_watch._may_act([[], [run, monitor, run], []])
    assert deadlock_watch._may_act(
        [[], [run, Frame(distributed_c10d.__file__, 1, "send", "", False), run]]
    )


def stack_of(thread):
    """Return what a thread runs, as a rank answers it: the innermost line first."""
    frame, lines = sys._current_frames()[thread.ident], []
    while frame is not None:
        code = frame.f_code
        lines.append(stacks.describe_line(code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return lines


def test_the_threads_of_the_standard_library_have_the_names_that_are_known():
    known = (
        *(queues.Queue._feed, resource_sharer._ResourceSharer._serve),
        *(mp_pool.Pool._handle_workers, mp_pool.Pool._handle_tasks, mp_pool.Pool._handle_results),
        futures_process._ExecutorManagerThread.wait_result_broken_or_wakeup,
        *(threading.Condition.wait, futures_thread._worker, mp_pool.worker, queue.Queue.get),
    )
    codes = [function.__code__ for function in known]
    places = {(Path(code.co_filename).name, code.co_name) for code in codes}
    assert places == deadlock_watch._ROLES.keys()


def test_a_thread_that_waits_for_work_is_idle_and_one_that_works_in_c_is_not():
    tasks = queue.Queue()
    reader = threading.Thread(target=tasks.get, daemon=True)
    reader.start()
    lock = threading.Lock()
    lock.acquire()
    with ThreadPoolExecutor(1) as executor, ThreadPool(1) as pool:
        executor.submit(int).result()

        def are_idle(expected):
            workers = [*executor._threads, *pool._pool]
            return [deadlock_watch._is_idle(stack_of(w), False) for w in workers] == [expected] * 2

        wait_until(lambda: are_idle(True), BOUND, "both wait for work")
        executor.submit(lock.acquire, timeout=BOUND)
        pool.apply_async(lock.acquire, kwds={"timeout": BOUND})
        wait_until(lambda: are_idle(False), BOUND, "both work, in C")
        assert deadlock_watch._is_idle(stack_of(reader), False)
        for _ in range(2):
            wait_until(lock.locked, BOUND, "the first has let the second go on")
            lock.release()
    tasks.put(None)


def test_a_thread_counts_as_waiting_although_the_board_knows_of_no_such_wait():
    run = Frame(threading.__file__, 1, "run", "", False)
    wait = Frame(recorder.__file__, 1, "block", "", False)
    other = Frame(psutil.__file__, 1, "run", "", False)
    waiting = [wait, Frame(distributed_c10d.__file__, 1, "recv", "", False), run]
    assert deadlock_watch._may_act([[], waiting])
    assert not deadlock_watch._may_act([[], waiting], waits=1)
    assert deadlock_watch._may_act([[], waiting, waiting], waits=1)
    assert not deadlock_watch._may_act([[], waiting, [other]], waits=1)
    assert deadlock_watch._may_act([[], waiting, [other]], waits=1, joins=True)
    assert deadlock_watch._may_act([[], [wait, run]])


def test_a_rank_that_does_not_report_its_threads_is_left_alone(monkeypatch):
    monkeypatch.setattr(deadlock_watch, "ask_for_stacks", lambda ranks: [[] for _ in ranks])
    with pytest.raises(kit.RunTimeoutError):
        kit.run(mutual_recv, world_size=2, timeout=2)


def test_the_rest_of_an_earlier_answer_is_no_stack():
    (stack,) = stacks.parse(
        ' in wait\n  File "old.py", line 3 in old\n'
        "Current thread 0x000000000000000f (most recent call first):\n"
        '  File "new.py", line 4 in new\n'
    )
    assert [(frame.file, frame.line) for frame in stack] == [("new.py", 4)]
    assert stack.thread == 15


def test_ranks_that_all_wait_are_not_asked_for_their_threads_while_they_can_continue(monkeypatch):
    asked = []
    monkeypatch.setattr(deadlock_watch, "ask_for_stacks", asked.append)
    kit.run(sleeps, world_size=2)
    assert not asked


def test_all_ranks_are_asked_for_their_threads_before_the_first_answer_is_awaited(monkeypatch):
    kill, sleep, done = os.kill, time.sleep, []

    def noted_kill(pid, number):
        if number == stacks._SIGNAL:
            done.append("asked")
        kill(pid, number)

    def noted_sleep(seconds):
        done.append("waited")
        sleep(seconds)

    monkeypatch.setattr(os, "kill", noted_kill)
    monkeypatch.setattr(time, "sleep", noted_sleep)
    with pytest.raises(kit.DeadlockError):
        kit.run(cycle, world_size=4)
    assert done[:5] == [*["asked"] * 4, "waited"]


@pytest.mark.parametrize("handler", [lambda *_: None, signal.SIG_IGN, signal.SIG_DFL])
def test_a_worker_may_handle_every_signal_that_has_a_name(handler):
    def deadlock(rank, world_size):
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, handler)
        dist.recv(torch.zeros(1), 1 - rank)

    with pytest.raises(kit.DeadlockError, match="neither can ever send"):
        kit.run(deadlock, world_size=2, timeout=20)


def test_a_rank_that_would_not_survive_the_question_is_not_asked():
    def deadlock(rank, world_size):
        signal.signal(stacks._SIGNAL, signal.SIG_DFL)
        dist.recv(torch.zeros(1), 1 - rank)

    with pytest.raises(kit.RunTimeoutError):
        kit.run(deadlock, world_size=2, timeout=3)
    with pytest.raises(kit.DeadlockError):
        kit.run(cycle, world_size=2)


def test_a_stopped_rank_is_left_alone():
    def worker(rank, world_size):
        if rank == 1:
            dist.recv(torch.zeros(1), 0)
        else:
            time.sleep(1)
            dist.send(torch.zeros(1), 1)

    victim = psutil.Process(kit.run(lambda rank, world_size: os.getpid(), world_size=2)[0])

    def stop_and_continue():
        victim.send_signal(signal.SIGSTOP)
        time.sleep(2)  # the test itself: a long standstill
        victim.send_signal(signal.SIGCONT)

    thread = threading.Thread(target=stop_and_continue)
    thread.start()
    kit.run(worker, world_size=2)
    thread.join()


def test_idle_pools_of_the_standard_library_do_not_keep_ranks_from_a_verdict():
    def worker(rank, world_size):
        processes, threads = Pool(1), ThreadPool(1)
        for pool in (processes, threads):
            pool.apply_async(abs, (-1,), callback=print).get()
            pool.map(abs, [-2, -3])
        with ProcessPoolExecutor(1) as executor, ThreadPoolExecutor(1) as other:
            for each in (executor, other):
                each.submit(abs, -4).add_done_callback(print)
                assert each.submit(abs, -5).result() == 5
            queue = Queue()
            queue.put(1)  # starts its thread
            dist.recv(torch.zeros(1), 1 - rank)

    with pytest.raises(kit.DeadlockError):
        kit.run(worker, world_size=2, timeout=300)


def calls_in_a_thread(rank, world_size):
    thread = threading.Thread(target=dist.all_reduce, args=(torch.ones(3 + rank),))
    thread.start()
    thread.join()


def calls_in_a_pool(rank, world_size):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(dist.all_reduce, torch.ones(3)).result()
        pool.submit(dist.all_reduce, torch.ones(3 + rank)).result()


@pytest.mark.parametrize(
    ("worker", "line"), [(calls_in_a_thread, "thread.start()"), (calls_in_a_pool, "ones(3 + rank)")]
)
def test_a_call_in_another_thread_has_the_line_that_started_it(worker, line):
    with pytest.raises(kit.MismatchError) as caught:
        kit.run(worker, world_size=2, timeout=60)
    assert all(line in call.where.source for call in caught.value.calls)


def test_messages_with_thousands_of_tags_are_counted():
    def worker(rank, world_size):
        if rank == 0:
            works = [dist.isend(torch.zeros(1), 1, tag=tag) for tag in range(9_000)]
            works[-1].wait()
        else:
            dist.recv(torch.zeros(1), 0, tag=9_000)

    with pytest.raises(kit.DeadlockError, match="but rank 1 receives from rank 0 with tag 9000"):
        kit.run(worker, world_size=2, timeout=300)


def test_a_deadlock_is_found_when_the_last_thread_that_might_have_helped_has_ended():
    def worker(rank, world_size):
        def think():
            time.sleep(1.5)

        if rank == 1:
            threading.Thread(target=think).start()
        dist.recv(torch.zeros(1), 1 - rank)

    with pytest.raises(kit.DeadlockError):
        kit.run(worker, world_size=2, timeout=300)


def test_a_thread_that_a_returned_rank_had_left_cannot_help_once_it_has_ended():
    def worker(rank, world_size):
        threading.Thread(target=lambda: time.sleep(1.5)).start()
        if rank == 0:
            dist.recv(torch.zeros(1), 1)

    with pytest.raises(kit.DeadlockError, match="from rank 1, which has returned"):
        kit.run(worker, world_size=2, timeout=300)


def test_ranks_that_are_stopped_print_nothing_about_each_other(capfd):
    with pytest.raises(kit.DeadlockError):
        kit.run(joins_a_thread, world_size=2)
    assert "Traceback" not in "".join(capfd.readouterr())


# --- waits with a time limit ----------------------------------------------------------------


LIMIT = 5  # seconds of such a wait; it must be judged before they are over


def waits_for_a_while(rank, world_size):
    if rank == 0:
        dist.irecv(torch.zeros(1), 1).wait(datetime.timedelta(seconds=LIMIT))


def asks_again_and_again(rank, world_size):
    store = distributed_c10d._get_default_store()
    for _ in range(2 if rank == 0 else 0):
        with pytest.raises(RuntimeError):
            store.wait(["nobody sets it"], datetime.timedelta(seconds=LIMIT))


def raises_another_error(rank, world_size):
    try:
        waits_for_a_while(rank, world_size)
    except RuntimeError:
        raise ValueError("no message") from None


def waits_for_a_slow_rank(rank, world_size):
    waits_for_a_while(rank, world_size)
    time.sleep(60)


def asks_twice(rank, world_size):
    store = distributed_c10d._get_default_store()
    for step in range(2 if rank == 0 else 0):
        try:
            store.wait(["nobody sets it"], datetime.timedelta(seconds=LIMIT))
        except RuntimeError:
            if step:
                raise
            dist.send(torch.zeros(1), 1)
    if rank == 1:
        dist.recv(torch.zeros(1), 0)
        time.sleep(60)


LIMITED = (
    "rank 0 waits for a message from rank 1, which has returned without sending it; "
    "the wait of rank 0 ends by its own time limit"
)


def test_a_wait_that_its_time_limit_has_ended_is_explained(capsys):
    with pytest.raises(kit.DeadlockError) as caught:
        kit.run(waits_for_a_while, world_size=2)
    assert capsys.readouterr().out == f"{LIMITED}\n"
    error = pickle.loads(pickle.dumps(caught.value))
    assert error.fact == LIMITED
    assert list(caught.value.failures) == [0]
    assert "rank 0 raised RuntimeError: " in str(caught.value)
    assert [wait.op for wait in error.waits] == ["irecv(src=1)"]


def test_a_wait_whose_limit_is_handled_is_reported_more_than_once_or_as_an_error(capsys):
    kit.run(asks_again_and_again, world_size=2)
    notice = (
        "rank 0 waits for the key 'nobody sets it', which no rank has set, but rank 1 has "
        "returned; the wait of rank 0 ends by its own time limit\n"
    )
    assert capsys.readouterr().out == notice


@pytest.mark.parametrize("worker", [raises_another_error, waits_for_a_slow_rank, asks_twice])
def test_an_error_that_a_time_limit_alone_does_not_explain_is_called_a_deadlock(worker):
    with pytest.raises(kit.RankError) as caught:
        kit.run(worker, world_size=2)
    assert list(caught.value.failures) == [0]


# --- what is left to the timeout -----------------------------------------------------------


def beats(rank, world_size):
    def beat():
        while True:
            time.sleep(0.1)

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()
    mutual_recv(rank, world_size)


def ticks(rank, world_size):
    timer = threading.Timer(0.4, ticks, (None, None))
    timer.daemon = True
    timer.start()
    if rank is not None:
        mutual_recv(rank, world_size)


async def asks_in_a_thread(rank):
    await asyncio.to_thread(mutual_recv, rank, 2)


def runs_a_loop(rank, world_size):
    asyncio.run(asks_in_a_thread(rank))


def looks_after_a_thread(rank, world_size):
    thread = threading.Thread(target=mutual_recv, args=(rank, world_size), daemon=True)
    thread.start()
    while thread.is_alive():
        time.sleep(0.1)


def serves(rank, world_size):
    loop = asyncio.new_event_loop()
    if rank:
        threading.Thread(target=loop.run_forever, name="loop", daemon=True).start()
    mutual_recv(rank, world_size)


@pytest.mark.parametrize(
    ("worker", "thread"),
    [
        (beats, "'heartbeat' of ranks 0 and 1, line 4 of beat: time.sleep(0.1)"),
        (serves, "'loop' of rank 1, line 4 of serves: threading.Thread(target=loop.run_forever"),
        (runs_a_loop, "'MainThread' of ranks 0 and 1, line 4 of runs_a_loop: asyncio.run("),
        (
            looks_after_a_thread,
            "'MainThread' of ranks 0 and 1, line 4 of looks_after_a_thread: time.sleep(",
        ),
    ],
)
def test_a_line_names_the_thread_that_keeps_ranks_from_a_verdict(
    worker, thread, monkeypatch, capsys
):
    monkeypatch.setattr(settings, "NO_VERDICT_SAID_AFTER", 1)
    with pytest.raises(kit.RunTimeoutError):
        kit.run(worker, world_size=2, timeout=8)
    (line,) = capsys.readouterr().out.splitlines()
    where, _, first = thread.partition(", line 4 of ")
    assert line.startswith(f"no verdict while this thread may still act: {where}, line ")
    assert first in line


def test_a_worker_that_starts_thread_after_thread_gets_this_line_too(monkeypatch, capsys):
    monkeypatch.setattr(settings, "NO_VERDICT_SAID_AFTER", 1)
    with pytest.raises(kit.RunTimeoutError):
        kit.run(ticks, world_size=2, timeout=12)
    (line,) = capsys.readouterr().out.splitlines()
    assert re.search(r" act: 'Thread-\d+' of .* of ticks: ", line)


def handles_every_signal(rank, world_size):
    for number in set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        with suppress(OSError):
            signal.signal(number, lambda *_: None)
    mutual_recv(rank, world_size)


def test_a_line_says_that_a_rank_does_not_answer(monkeypatch, capsys):
    monkeypatch.setattr(settings, "NO_VERDICT_SAID_AFTER", 1)
    with pytest.raises(kit.RunTimeoutError):
        kit.run(handles_every_signal, world_size=2, timeout=12)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("no verdict while rank 0 does not say what it does: ")


def test_a_line_says_that_a_rank_has_more_calls_open_than_are_kept(monkeypatch):
    ranks = Ranks(monkeypatch, 2, 1, 0)
    monkeypatch.setattr(Snapshot, "is_crowded", property(lambda snapshot: snapshot.rank == 0))
    watch = deadlock_watch.DeadlockWatch(ranks, 1)
    said = settings.NO_VERDICT_SAID_AFTER
    for now in (0, 1, said, said + 1, 100):
        assert watch.look(now, (), ()) is None
    assert watch.notices == [
        "no verdict on rank 0: more than 65,536 calls are open, or as many tags were used"
    ]


def test_tensors_on_different_devices_are_a_mismatch():
    """PyTorch's "meta" device replaces a GPU here: it also has a backend of its own."""

    def worker(rank, world_size):
        dist.all_reduce(torch.zeros(2, device="meta" if rank == 1 else "cpu"))

    with pytest.raises(kit.MismatchError) as caught:
        kit.run(worker, world_size=2)
    fact = "rank 0 calls all_reduce with a tensor on cpu, rank 1 with a tensor on meta"
    assert caught.value.fact == fact


# --- when a run is judged, on a clock of its own -------------------------------------------


class Ranks(list):
    """Ranks of which the first ones wait in a recv, and the others have not called anything."""

    def __init__(self, monkeypatch, size, *sources):
        super().__init__(SimpleNamespace(board=Board()) for _ in range(size))
        self.reads = []
        for number, rank in enumerate(self):
            self._count_reads(monkeypatch, number, rank.board)
            table = InternTable(rank.board)
            table.begin(1, 1)
            if number < len(sources):
                group = table.group(("world", tuple(range(size))))
                count = table.count("recv", sources[number], 0, group)
                call = table.call("recv", group, Call("recv"))
                row = (call, 0, sources[number], 0, 0), -1, table.change(count, posted=1), 1
                rank.board.begin_wait(rank.board.post(*row), 1, limited=False, shown=True)
        monkeypatch.setattr(deadlock_watch, "ask_for_stacks", lambda ranks: [[[]] for _ in ranks])
        monkeypatch.setattr(deadlock_watch, "SHARE", math.inf)  # a slow machine changes nothing

    def _count_reads(self, monkeypatch, number, board):
        read = board.read

        def counted():
            self.reads.append(number)
            return read()

        monkeypatch.setattr(board, "read", counted)

    def move(self, *numbers):
        for number in numbers:
            self[number].board.end_wait(0, 0, shown=False)

    def watch(self, seconds, moving=(), returned=()):
        """Return when a verdict comes, and the verdict, if these ranks move all the time."""
        watch = deadlock_watch.DeadlockWatch(self, run=1)
        for tick in range(round(seconds * 10) + 1):
            self.move(*moving)
            if error := watch.look(tick / 10, returned, ()):
                return tick / 10, error
        return None


def test_two_stuck_ranks_are_found_only_when_all_others_have_come_to_rest(monkeypatch):
    when, error = Ranks(monkeypatch, 4, 1, 0).watch(10, moving=(2, 3))
    assert when == settings.RANKS_JUDGED_AFTER
    assert error.fact == "rank 0 waits for rank 1, rank 1 waits for rank 0: neither can ever send"


def test_a_run_in_which_nothing_moves_is_judged_late(monkeypatch):
    when, _ = Ranks(monkeypatch, 4, 1, 0).watch(10)
    assert when == settings.RUN_JUDGED_AFTER


def test_a_rank_that_waits_for_one_that_moves_is_called_stuck(monkeypatch):
    assert Ranks(monkeypatch, 4, 3, 0, 3, 0).watch(60, moving=(2, 3)) is None


def test_a_judge_is_not_told_that_nothing_has_moved_for_long(monkeypatch):
    told = []
    monkeypatch.setattr(deadlock_watch, "judge", lambda *_, long: told.append(long))
    Ranks(monkeypatch, 2, 1).watch(10)
    assert told == [False, True, True, True]  # after 0.5, 1.7, 4.1 and 8.9 s


def test_a_rank_that_has_returned_is_expected_to_send_while_others_move(monkeypatch):
    when, error = Ranks(monkeypatch, 3, 1).watch(10, moving=(2,), returned=(1,))
    assert when == settings.RANKS_JUDGED_AFTER
    assert error.returned == (1,)


def test_boards_are_copied_again_although_the_ranks_that_wait_are_the_same(monkeypatch):
    ranks = Ranks(monkeypatch, 4, 3, 0)
    ranks.watch(20, moving=(2, 3))
    assert ranks.reads == [0, 1] * 5  # after 1, 2.2, 4.6, 9.4 and 19 s


def test_boards_that_were_copied_while_a_rank_moved_are_judged(monkeypatch):
    ranks = Ranks(monkeypatch, 4, 1, 0)
    monkeypatch.setattr(deadlock_watch, "Snapshot", lambda *_: pytest.fail("judged"))
    read = ranks[1].board.read
    monkeypatch.setattr(ranks[1].board, "read", lambda: (read(), ranks.move(1))[0])
    assert ranks.watch(3, moving=(2, 3)) is None


# --- which ranks a collective needs, on gloo itself ----------------------------------------


def gloo_groups(store, size):
    """Return the groups of as many ranks, all in this process."""

    def join(rank):
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = datetime.timedelta(seconds=60)
        return dist.ProcessGroupGloo(dist.FileStore(store, size), rank, size, options)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(join, range(size)))


def start(method, group, root, numel):
    tensor, is_root = torch.ones(numel), group.rank() == root
    parts = [[torch.ones(numel) for _ in range(group.size())]] if is_root else []
    given = {"gather": (parts, [tensor]), "scatter": ([tensor], parts)}.get(method, ([tensor],))
    options = getattr(dist, f"{method.capitalize()}Options")()
    options.rootRank = root
    return getattr(group, method)(*given, options)


@pytest.mark.parametrize("method", ["broadcast", "reduce", "gather", "scatter"])
def test_a_rank_leaves_a_collective_on_gloo_without_one_that_it_needs(method, tmp_path):
    size = 5
    groups = gloo_groups(str(tmp_path / "store"), size)
    world = Group("world", tuple(range(size)), "cpu:gloo")
    for numel, root, absent in itertools.product([1, 4, 100_000], range(size), range(size)):
        works = {r: start(method, groups[r], root, numel) for r in range(size) if r != absent}
        for rank, work in works.items():
            event = Event(rank, 0, method, "collective", method, world, 0, root=root)
            event = replace(event, inputs=((numel,),), nbytes=4 * numel)
            if absent not in graph.needed(event):
                work.wait()
                continue
            time.sleep(0.001)  # it shall not leave, however long it has
            assert not work.is_completed(), (numel, root, absent, rank)
        start(method, groups[absent], root, numel).wait()
        for work in works.values():
            work.wait()


def test_a_key_that_no_rank_but_the_notebook_sets_is_taken_for_a_deadlock(tmp_path):
    path = str(tmp_path / "store")
    threading.Timer(3, dist.FileStore(path, -1).set, ("key", "value")).start()
    values = kit.run(lambda rank, world_size: dist.FileStore(path, -1).get("key"), world_size=2)
    assert list(values) == [b"value", b"value"]


# --- models that DDP does not reduce ---------------------------------------------------------


def two_layers():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))


def step(model):
    model(torch.ones(1, 4)).sum().backward()


def uses_autograd_grad(rank, world_size):
    model = DistributedDataParallel(two_layers())
    torch.autograd.grad(model(torch.ones(1, 4)).sum(), model.parameters())


def unfreezes_a_layer(rank, world_size):
    layers = two_layers()
    layers[1].requires_grad_(False)
    model = DistributedDataParallel(layers)
    step(model)
    layers[1].requires_grad_(True)
    step(model)


def replaces_a_layer(rank, world_size):
    model = DistributedDataParallel(two_layers(), bucket_cap_mb=1e-5)
    model.module[1] = torch.nn.Linear(4, 3)
    step(model)


def drops_the_wrapper(rank, world_size):
    layers = two_layers()
    DistributedDataParallel(layers)
    step(layers)


def calls_the_inner_model(rank, world_size):
    model = DistributedDataParallel(two_layers())
    step(model.module)


def reduces_all(rank, world_size):
    layers = two_layers()
    layers[0].requires_grad_(False)
    model = DistributedDataParallel(layers)
    with model.no_sync():
        step(model)
    step(model)
    inputs = torch.ones(1, 4, requires_grad=True)
    torch.autograd.grad(model.module(inputs).sum(), [inputs, *layers[1].parameters()])
    edge = torch.autograd.graph.get_gradient_edge(inputs)  # one input, although it is a tuple
    torch.autograd.grad(model.module(inputs).sum(), edge)
    step(layers)


def freezes_a_layer(rank, world_size):
    model = DistributedDataParallel(two_layers())
    model.module[0].requires_grad_(False)
    step(model)


def averages_by_hand(rank, world_size):
    layers = two_layers()
    model = DistributedDataParallel(layers)
    step(model.module)
    for parameter in layers.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world_size


AROUND = (
    "keep what DistributedDataParallel returns, call it, let the loss depend on all parameters, "
    "and use backward(), not torch.autograd.grad"
)
LATE = "replace, freeze or unfreeze layers before DistributedDataParallel wraps the model"


@pytest.mark.parametrize(
    ("worker", "many", "hint"),
    [
        (uses_autograd_grad, 4, AROUND),
        (unfreezes_a_layer, 2, LATE),
        (replaces_a_layer, None, LATE),
        (freezes_a_layer, 2, LATE),
        (drops_the_wrapper, 4, AROUND),
        (calls_the_inner_model, 4, AROUND),
    ],
)
def test_a_note_says_how_many_parameters_of_a_model_were_never_reduced(worker, many, hint, capsys):
    for _ in range(2):
        kit.run(worker, world_size=2)
        note, line = capsys.readouterr().out.splitlines()
        assert note.startswith(f"ranks 0 and 1 found that {many or ''}")
        assert note.endswith(f" parameters of this model were never reduced: {hint}")
        assert "DistributedDataParallel(" in line


@pytest.mark.parametrize("worker", [reduces_all, averages_by_hand])
def test_a_model_whose_parameters_were_all_reduced_has_no_note(worker, capsys):
    kit.run(worker, world_size=2)
    assert not capsys.readouterr().out
