"""The environment that torchrun gives a process, and what can be wrong with it."""

from __future__ import annotations

from itertools import count

import pytest
import torch.distributed as dist

import ddp_kit as kit
from ddp_kit import settings
from ddp_kit.lessons import point_to_point
from ddp_kit.lessons.init_methods import free_ports
from ddp_kit.pool.rank import torchrun_environment

VARIABLES = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}


@pytest.fixture
def set_environ(monkeypatch):
    def set_variables(**changes):
        for name, value in (VARIABLES | changes).items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)

    return set_variables


def test_rank_info_is_read_from_the_environment(set_environ):
    set_environ()
    assert torchrun_environment.rank_info() == (1, 4, 1, 2)
    set_environ(LOCAL_WORLD_SIZE=None)  # the others were set by hand, on one host
    assert torchrun_environment.rank_info() == (1, 4, 1, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": None}, "the environment of this rank lacks RANK; start it with torchrun"),
        (
            {"WORLD_SIZE": None, "MASTER_PORT": None},
            "the environment of this rank lacks WORLD_SIZE, MASTER_PORT; start it with torchrun",
        ),
        ({"RANK": "first"}, "RANK must be a whole number, got 'first'"),
        ({"RANK": "4"}, "RANK is 4 and WORLD_SIZE is 4: RANK must be one of 0 to 3"),
        (
            {"LOCAL_RANK": "2"},
            "LOCAL_RANK is 2 and LOCAL_WORLD_SIZE is 2: LOCAL_RANK must be one of 0 to 1",
        ),
    ],
)
def test_impossible_rank_info_is_reported_to_whoever_starts_a_lesson(changes, message, set_environ):
    set_environ(**changes)
    with pytest.raises(kit.PoolError) as caught:
        point_to_point.main()
    assert str(caught.value).startswith(message)


def test_an_address_at_which_nothing_listens_is_reported(set_environ, monkeypatch):
    set_environ(MASTER_PORT=str(free_ports(1)[0]))
    monkeypatch.setattr(settings, "JOIN_TIMEOUT", 1)
    with pytest.raises(kit.PoolError, match=r"did not meet at 127\.0\.0\.1:\d+ within 1 s"):
        torchrun_environment.store.__wrapped__()


def test_two_processes_with_one_rank_are_reported(set_environ, monkeypatch):
    set_environ()
    store = dist.HashStore()
    monkeypatch.setattr(torchrun_environment, "store", lambda: store)
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kwargs: None)
    monkeypatch.setattr(torchrun_environment, "_groups", count())
    torchrun_environment.join_group("gloo")
    monkeypatch.setattr(
        torchrun_environment, "_groups", count()
    )  # another process counts from the first, too
    with pytest.raises(kit.PoolError, match="two processes have rank 1"):
        torchrun_environment.join_group("gloo")
