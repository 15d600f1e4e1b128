"""What torchrun tells a process, and what is wrong with it."""

from __future__ import annotations

from datetime import timedelta
from itertools import count

import pytest
import torch.distributed as dist

import ddp_kit as kit
from ddp_kit.launch.rank import environment
from ddp_kit.lessons import point_to_point
from ddp_kit.lessons.init_methods import free_ports

TOLD = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}


@pytest.fixture
def told(monkeypatch):
    def tell(**changes):
        for name, value in (TOLD | changes).items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)

    return tell


def test_a_place_is_read_as_it_was_told(told):
    told()
    assert environment.rank_info() == (1, 4, 1, 2)
    told(LOCAL_WORLD_SIZE=None)  # somebody has set the others by hand, on one host
    assert environment.rank_info() == (1, 4, 1, 4)


@pytest.mark.parametrize(
    ("changes", "said"),
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
def test_a_place_that_cannot_be_is_told_to_whoever_starts_a_lesson(changes, said, told):
    told(**changes)
    with pytest.raises(kit.PoolError) as caught:
        point_to_point.main()
    assert str(caught.value).startswith(said)


def test_nobody_at_the_address_is_told(told, monkeypatch):
    told(MASTER_PORT=str(free_ports(1)[0]))
    monkeypatch.setattr(environment, "JOIN_TIMEOUT", timedelta(seconds=1))
    with pytest.raises(kit.PoolError, match=r"did not meet at 127\.0\.0\.1:\d+ within 1 s"):
        environment.store.__wrapped__()


def test_two_processes_with_one_rank_are_told(told, monkeypatch):
    told()
    store = dist.HashStore()
    monkeypatch.setattr(environment, "store", lambda: store)
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kwargs: None)
    monkeypatch.setattr(environment, "_groups", count())
    environment.join_group("gloo")
    monkeypatch.setattr(
        environment, "_groups", count()
    )  # another process counts from the first, too
    with pytest.raises(kit.PoolError, match="two processes have rank 1"):
        environment.join_group("gloo")
