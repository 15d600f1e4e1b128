"""`kit.torchrun` on two hosts: what it says of a run that cannot end, or of a host that is lost."""

from __future__ import annotations

import pytest
from notebook import Notebook

BOUND = 20  # seconds for a verdict; README.md has the true figures

MUTUAL = """
def worker(rank, world_size):
    tensor = torch.zeros(1)
    if rank == 0:
        note("0")
        dist.recv(tensor, 2)
    if rank == 2:
        note("2")
        dist.recv(tensor, 0)  # of rank 0
    dist.barrier()
"""
SKIPPED = """
def worker(rank, world_size):
    dist.barrier()
    if rank != 2:
        note(str(rank))
        dist.all_reduce(torch.ones(1))
"""
ELSEWHERE = """
def worker(rank, world_size):
    dist.barrier()
    if rank >= 2:
        note(str(rank))
        dist.recv(torch.zeros(1), 5 - rank)
"""
SLOW = """
def worker(rank, world_size):
    dist.barrier()
    if rank == 2:
        sum(range(120_000_000))  # one call of native code that holds the GIL
        time.sleep(3)
        for other in (0, 1, 3):
            dist.send(torch.ones(1), other)
    else:
        dist.recv(torch.zeros(1), 2)
    total = torch.tensor([rank])
    dist.all_reduce(total)
    return total.item()
"""
THREAD = """
import threading

def worker(rank, world_size):
    tensor = torch.zeros(1)
    if rank == 1:
        dist.recv(tensor, 3)
        dist.send(tensor, 3)
    if rank == 3:
        threading.Timer(4, dist.send, (torch.ones(1), 1)).start()
        dist.recv(tensor, 1)
    dist.barrier()
    if rank == 0:
        dist.recv(tensor, 2)
    if rank == 2:  # returns at once
        threading.Timer(4, dist.send, (torch.ones(1), 0)).start()
    return tensor.item()
"""
WAITING = """
def worker(rank, world_size):
    dist.barrier()
    note(str(rank))
    if rank == 2:
        time.sleep(600)
    dist.barrier()
"""
SLEEPING = """
def worker(rank, world_size):
    dist.barrier()
    note(str(rank))
    time.sleep(600)
"""
RAISING = """
def worker(rank, world_size):
    if rank == 0:
        note("0")
        time.sleep(600)
    if rank == 3:
        raise ValueError("boom")
    dist.barrier()
"""
DYING = """
def worker(rank, world_size):
    dist.barrier()
    note(str(rank))
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
"""
UNEQUAL = """
def worker(rank, world_size):
    if rank == 0:
        dist.send(torch.ones(2), 2)
    if rank == 2:
        dist.recv(torch.zeros(1), 0)  # gloo aborts
"""
RANKS = ("0", "1", "2", "3")


@pytest.fixture
def notebook(hosts, tmp_path):
    """Return a function that starts a run on both hosts; nothing of it may be left."""
    started = []

    def start(worker: str, before: str = "") -> Notebook:
        started.append(Notebook(hosts, tmp_path, worker, before))
        return started[-1]

    yield start
    for one in started:
        one.assert_nothing_is_left()


def test_a_deadlock_across_hosts_lasts_until_gloo_gives_up(notebook):
    run = notebook(MUTUAL)
    told = run.told()
    assert told["error"] == "DeadlockError", told
    assert "rank 0 waits for rank 2, rank 2 waits for rank 0" in told["text"]
    assert told["waits"] == [
        [0, "recv(src=2)", "dist.recv(tensor, 2)"],
        [1, "barrier", "dist.barrier()"],
        [2, "recv(src=0)", "dist.recv(tensor, 0)  # of rank 0"],
        [3, "barrier", "dist.barrier()"],
    ]
    assert run.since(told, "0", "2") < BOUND


def test_a_collective_that_a_rank_of_another_host_skips_is_not_found(notebook):
    run = notebook(SKIPPED)
    told = run.told()
    assert (told["error"], told["returned"]) == ("DeadlockError", [2]), told
    assert [(rank, op) for rank, op, _ in told["waits"]] == [(n, "all_reduce") for n in (0, 1, 3)]
    assert run.since(told, "0", "1", "3") < BOUND


def test_a_deadlock_among_ranks_of_another_host_is_not_seen(notebook):
    run = notebook(ELSEWHERE)
    told = run.told()
    assert (told["error"], told["returned"]) == ("DeadlockError", [0, 1]), told
    assert [(rank, op) for rank, op, _ in told["waits"]] == [(2, "recv(src=3)"), (3, "recv(src=2)")]
    assert run.since(told, "2", "3") < BOUND


def test_a_slow_rank_on_another_host_is_taken_for_a_deadlock_or_a_lost_host(notebook):
    told = notebook(SLOW, before="other_hosts.LOST = 3").told()
    assert told["error"] is None, told
    assert (told["values"], told["messages"]) == ([6, 6, 6, 6], 3)


def test_a_thread_on_another_host_that_will_send_is_forgotten(notebook):
    told = notebook(THREAD).told()
    assert told["error"] is None, told
    assert told["values"] == [1, 1, 0, 1]


def test_a_host_that_is_cut_off_is_waited_for_forever(notebook):
    run = notebook(WAITING, before="other_hosts.LOST = 5")
    run.wait_for(*RANKS)
    run.hosts[1].link("down")
    told = run.told()
    assert told["error"] == "PoolError", told
    assert told["text"] == (
        "host 1 (ranks 2 and 3) has not answered for 5 s: it was stopped, or the connection to it "
        "is lost"
    )


def test_the_end_of_an_agent_is_told_as_a_broken_connection(notebook):
    run = notebook(WAITING)
    run.wait_for(*RANKS)
    run.agent.kill()
    told = run.told()
    assert told["error"] == "PoolError", told
    assert told["text"] == "host 1 (ranks 2 and 3) has stopped: torchrun has ended there"


def test_ranks_outlive_the_notebook_on_another_host(notebook, tmp_path):
    run = notebook(SLEEPING)
    run.wait_for(*RANKS)
    run.script.kill()
    assert run.agent.wait(BOUND) != 0  # the fixture looks for what is left
    for file in tmp_path.glob("*_for_port_*"):
        file.unlink()


def test_the_ranks_of_another_host_are_missing_when_time_is_up(notebook):
    told = notebook(WAITING, before="options['timeout'] = 5").told()
    assert told["error"] == "RunTimeoutError", told
    assert [(rank, op) for rank, op, _ in told["waits"]] == [
        (0, "barrier"),
        (1, "barrier"),
        (2, None),
        (3, "barrier"),
    ]


def test_a_message_between_hosts_of_unequal_ends_is_not_compared(notebook):
    told = notebook(UNEQUAL).told()
    assert told["error"] == "MismatchError", told
    assert told["text"].startswith("rank 0 sends 8 bytes, rank 2 receives into a tensor of 4 bytes")


def test_what_a_rank_of_another_host_raises_is_told_only_at_the_end(notebook):
    run = notebook(RAISING)
    told = run.told()
    assert told["error"] == "RankError", told
    assert told["text"].startswith("rank 3 raised ValueError: boom"), told
    assert run.since(told, "0") < BOUND


def test_a_rank_that_dies_on_another_host_is_told_as_a_broken_connection(notebook):
    run = notebook(DYING)
    told = run.told()
    assert told["error"] == "RankDiedError", told
    assert told["text"].startswith("rank 3 died on host 1;"), told
