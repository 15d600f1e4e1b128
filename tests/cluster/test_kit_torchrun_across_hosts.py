"""`kit.torchrun` on two hosts: what it says of a run that cannot end, or of a host that is lost."""

from __future__ import annotations

import pytest
from notebook import Notebook

pytestmark = pytest.mark.usefixtures("forked_torchrun")

BOUND = 60  # seconds for a verdict; README.md has the true figures
# The last rank may come 5 s after the others. Until 20 s have passed, all are judged together; with
# equal limits, those that came first would be judged without the last one.
ALL_ARE_THERE = "settings.RUN_JUDGED_AFTER, settings.RANKS_JUDGED_AFTER = 5, 20"

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
ELSEWHERE = """
def worker(rank, world_size):
    pair = dist.new_group([2, 3])
    if rank == 2:
        note("2")
        dist.all_reduce(torch.ones(1), group=pair)
"""
SLOW = """
import threading

def worker(rank, world_size):
    tensor = torch.zeros(1)
    dist.barrier()
    if rank == 1:
        sum(range(120_000_000))  # one call of native code that holds the GIL
        time.sleep(3)
        dist.send(torch.ones(1), 0)
        threading.Timer(4, dist.send, (torch.ones(1), 0)).start()
        dist.recv(tensor, 0)
    else:
        dist.recv(tensor, 1)
        dist.recv(tensor, 1)  # from the thread
        dist.send(tensor, 1)
    dist.barrier()
    if rank == 0:
        dist.recv(tensor, 1)
    else:  # returns at once
        threading.Timer(4, dist.send, (2 * torch.ones(1), 0)).start()
    return tensor.item()
"""
WAITING = """
def worker(rank, world_size):
    dist.barrier()
    note(str(rank))
    if rank == 1:
        time.sleep(600)
    dist.barrier()
"""
SLEEPING = """
def worker(rank, world_size):
    dist.barrier()
    note(str(rank))
    time.sleep(600)
"""
DYING = """
def worker(rank, world_size):
    dist.barrier()
    note(str(rank))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
"""
UNEQUAL = """
def worker(rank, world_size):
    if rank == 0:
        dist.send(torch.ones(2), 1)
    else:
        dist.recv(torch.zeros(1), 0)  # gloo aborts
"""
RANKS = ("0", "1")


@pytest.fixture
def notebook(hosts, tmp_path):
    """Return a function that starts a run on both hosts; nothing of it may be left."""
    started = []

    def start(worker: str, before: str = "", per_host: int = 1, options: tuple = ()) -> Notebook:
        started.append(Notebook(hosts, tmp_path, worker, before, per_host, options))
        return started[-1]

    yield start
    for one in started:
        one.assert_nothing_is_left()


def test_a_deadlock_across_hosts_is_found_with_all_its_waits(notebook):
    run = notebook(MUTUAL, ALL_ARE_THERE, per_host=2)
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


def test_a_deadlock_among_ranks_of_another_host_is_found(notebook):
    run = notebook(ELSEWHERE, per_host=2)
    told = run.told()
    assert (told["error"], told["returned"]) == ("DeadlockError", [0, 1, 3]), told
    assert [(rank, op) for rank, op, _ in told["waits"]] == [(2, "all_reduce(group=[2, 3])")]
    assert run.since(told, "2") < BOUND


def test_a_rank_or_thread_on_another_host_may_be_slow(notebook):
    told = notebook(SLOW, before="settings.HOST_LOST_AFTER = 3").told()
    assert told["error"] is None, told
    assert (told["values"], told["messages"]) == ([2, 1], 3)  # without what a thread sends late


def test_a_host_that_is_cut_off_is_reported(notebook):
    run = notebook(WAITING, before="settings.HOST_LOST_AFTER = 5")
    run.wait_for(*RANKS)
    run.hosts[1].link("down")
    told = run.told()
    assert told["error"] == "PoolError", told
    assert told["text"] == (
        "host 1 (rank 1) has not answered for 5 s: it was stopped, or the connection to it is lost"
    )


def test_the_end_of_an_agent_is_reported(notebook):
    run = notebook(WAITING)
    run.wait_for(*RANKS)
    run.agent.kill()
    told = run.told()
    assert told["error"] == "PoolError", told
    assert told["text"] == "host 1 (rank 1) has stopped: torchrun has ended there"


def test_ranks_on_another_host_end_with_the_notebook(notebook, tmp_path):
    run = notebook(SLEEPING)
    run.wait_for(*RANKS)
    run.script.kill()
    assert run.agent.wait(BOUND) != 0  # the fixture looks for what is left
    for file in tmp_path.glob("*_for_port_*"):
        file.unlink()


def test_a_run_whose_time_is_up_has_the_waits_of_another_host(notebook):
    told = notebook(WAITING, before="options['timeout'] = 5").told()
    assert told["error"] == "RunTimeoutError", told
    assert [(rank, op) for rank, op, _ in told["waits"]] == [(0, "barrier"), (1, None)]


def test_the_ends_of_a_message_between_hosts_are_compared(notebook):
    told = notebook(UNEQUAL).told()
    assert told["error"] == "MismatchError", told
    assert told["text"].startswith("rank 0 sends 8 bytes, rank 1 receives into a tensor of 4 bytes")


def test_a_rank_that_dies_on_another_host_is_reported(notebook):
    # On a busy machine: wait long for the reason, and let the agent outlive its rank. If both are
    # gone when the observer looks, it cannot know which ended first.
    late = "--monitor-interval", "10"
    told = notebook(DYING, before="settings.HOSTS_EXPLAIN_WITHIN = 60", options=late).told()
    assert told["error"] == "RankDiedError", told
    assert told["text"].startswith("rank 1 died on host 1;"), told
