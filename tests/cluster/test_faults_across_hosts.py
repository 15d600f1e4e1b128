"""A fault between hosts ends the run within bounds, is reported, and leaves no process behind."""

from __future__ import annotations

import pytest
from processes import assert_gone, wait_until
from torchrun import RENDEZVOUS, Torchrun

SLOW = """
import torch
from ddp_kit.lessons._launch import open_ranks
from ddp_kit.lessons.ring_allreduce import whole_ring

def add_up(rank, world_size):
    tensor = torch.full((150_000,), rank + 1.0)
    whole_ring(tensor)
    return tensor.unique().tolist()

with open_ranks() as ranks:
    ranks.say(list(ranks(add_up)))
"""
# Ranks that exchange messages forever. Each creates a file in a folder once all are communicating.
TALKING = """
import sys
from datetime import timedelta
from itertools import count
from pathlib import Path
import torch, torch.distributed as dist
from ddp_kit.lessons._launch import open_ranks

def talk(rank, world_size, folder):
    group = dist.new_group(timeout=timedelta(seconds=10))  # a lesson's ranks wait five minutes
    for turn in count():
        dist.all_reduce(torch.ones(250_000), group=group)
        if turn == 10:
            Path(folder, str(rank)).touch()

with open_ranks() as ranks:
    ranks(talk, sys.argv[1])
"""
pytestmark = pytest.mark.usefixtures("forked_torchrun")

START = 300  # seconds; every process imports PyTorch, and the machine may have other work
END = 300
GLOO = "gloo/transport/tcp"  # its message for a broken connection varies


@pytest.fixture
def talk(hosts, tmp_path):
    """Start ranks, one on each host, and return when they are in the middle of a run."""

    def start(rendezvous: str) -> Torchrun:
        folder, talking = tmp_path / "ranks", tmp_path / "talking.py"
        folder.mkdir()
        talking.write_text(TALKING)
        program, how = [str(talking), str(folder)], {"rendezvous": rendezvous, "per_host": 1}
        run = Torchrun(hosts, tmp_path / "output", *program, **how)
        wait_until(lambda: len(list(folder.iterdir())) == 2, START, "the ranks communicate")
        return run

    return start


@pytest.mark.parametrize(
    "rendezvous", [RENDEZVOUS[0], pytest.param(RENDEZVOUS[1], marks=pytest.mark.long)]
)
def test_ranks_and_agents_end_behind_a_dead_link(rendezvous, talk):
    run = talk(rendezvous)
    ranks = run.ranks()
    run.hosts[1].link("down")
    assert run.wait(END) == [1, 1], run.printed("err")
    assert_gone(ranks, "the link went down")
    for errors in run.printed("err"):
        assert GLOO in errors or "RendezvousConnectionError" in errors, errors


def test_the_ranks_of_a_killed_agent_end(talk):
    run = talk("c10d")
    ranks = run.ranks()
    run.agents[1].kill()
    assert run.wait(END) == [1, -9], run.printed("err")
    assert_gone(ranks, "an agent was killed")
    errors = run.printed("err")[0]
    assert GLOO in errors, errors


def test_a_slow_run_ends_with_the_right_sums(hosts, tmp_path):
    """A message takes 5 s, and those of the agents wait behind it in the queue."""
    program = tmp_path / "slow.py"
    program.write_text(SLOW)
    for host in hosts:
        host.shape("1mbit")
    run = Torchrun(hosts, tmp_path / "output", str(program), per_host=1)
    codes = run.wait(START + END)
    assert (codes, run.printed("out")) == ([0, 0], ["[[3.0], [3.0]]\n", ""]), run.printed("err")
