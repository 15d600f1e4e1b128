"""Wrong answers to the exercises of lesson 05, and the errors that the learner gets."""

from __future__ import annotations

import pytest
import torch
from answers import assert_mistake, mistake

import ddp_kit as kit


def placing(
    number="LOCAL_RANK", ranks="LOCAL_WORLD_SIZE", alone=True, convert=True, one="nccl", parts=2
):
    """Return an answer to 5.1; each argument can make it wrong in one way."""

    def answer(environ, gpus):
        rank = environ.get(number, "0") if alone else environ[number]
        here = environ.get(ranks, "1") if ranks else 1
        if gpus >= (int(here) if convert else here):
            return (f"cuda:{rank}", one)[:parts]
        return ("cpu", "gloo")[:parts]

    return answer


@pytest.mark.parametrize(
    ("wrong", "name", "fact"),
    [
        (
            {"number": "RANK"},
            "rank chooses gpu",
            "place(environ, gpus=2), 2 hosts on 4 ranks: wrong result\n"
            "rank 2 should return ('cuda:0', 'nccl') but returns ('cuda:2', 'nccl')\n",
        ),
        (
            {"ranks": None},
            "too few gpus",
            "place(environ, gpus=1), 2 hosts on 4 ranks: wrong result\n"
            "rank 0 should return ('cpu', 'gloo') but returns ('cuda:0', 'nccl')\n",
        ),
        (
            {"ranks": "WORLD_SIZE"},
            "world size compared",
            "rank 0 should return ('cuda:0', 'nccl') but returns ('cpu', 'gloo')\n",
        ),
        ({"alone": False}, "environ misread", "place({}, gpus=2) on 1 rank: it raised an error\n"),
        ({"convert": False}, "environ misread", "1 host on 2 ranks: it raised an error\n"),
        (
            {"parts": 1},
            "another form",
            "rank 0 should return ('cuda:0', 'nccl') but returns ('cuda:0',)\n",
        ),
        (
            {"one": "gloo"},
            "otherwise",
            "rank 0 should return ('cuda:0', 'nccl') but returns ('cuda:0', 'gloo')\n",
        ),
    ],
)
def test_a_place_that_is(wrong, name, fact):
    assert_mistake(kit.check.exercise_5_1, placing(**wrong), name, "exercise 5.1, place(", fact)


@mistake(
    "5.1",
    "alone differs",
    "place({}, gpus=2) on 1 rank: wrong result\nrank 0 should return ('cuda:0', ",
)
def test_a_place_of_a_process_that_expects_company(environ, gpus):
    return placing()(environ, gpus) if environ else ("cpu", "gloo")


def test_a_device_may_be_a_torch_device():
    def place(environ, gpus):
        device, backend = placing()(environ, gpus)
        return torch.device(device), backend

    kit.check.exercise_5_1(place)


def sharing(ranks="LOCAL_WORLD_SIZE", least=1, divide=int.__floordiv__, sets=True, alone=True):
    """Return an answer to 5.2; each argument can make it wrong in one way."""

    def answer(environ, cores):
        here = int(environ.get(ranks, 1) if alone else environ[ranks]) if ranks else 1
        threads = max(least, divide(cores, here))
        if sets:
            torch.set_num_threads(threads)
        return threads

    return answer


@pytest.mark.parametrize(
    ("wrong", "name", "fact"),
    [
        (
            {"sets": False},
            "not set",
            "rank 0 should hold 4 in torch.get_num_threads() but holds 7\n",
        ),
        (
            {"ranks": "WORLD_SIZE"},
            "world size divides",
            "cores=8), 2 hosts on 4 ranks: wrong result\nrank 0 should hold 4 in "
            "torch.get_num_threads() but holds 2\n",
        ),
        (
            {"ranks": None},
            "all cores",
            "rank 0 should hold 4 in torch.get_num_threads() but holds 8\n",
        ),
        ({"least": 0}, "bad number", "cores=4), 1 host on 5 ranks: it raised an error\n"),
        ({"divide": int.__truediv__}, "bad number", "it raised an error\n"),
        (
            {"divide": lambda a, b: -(-a // b)},
            "otherwise",
            "cores=8), 1 host on 3 ranks: wrong result\nrank 0 should hold 2 in "
            "torch.get_num_threads() but holds 3\n",
        ),
        ({"alone": False}, "bad number", "share_cores({}, cores=6) on 1 rank: it raised an error"),
    ],
)
def test_shared_cores_that_are(wrong, name, fact):
    case = "exercise 5.2, share_cores("
    assert_mistake(kit.check.exercise_5_2, sharing(**wrong), name, case, fact)


def test_shared_cores_are_right_and_the_ranks_keep_their_threads(capsys):
    before = list(kit.run(lambda rank, n: torch.get_num_threads(), world_size=2, backend="gloo"))
    kit.check.exercise_5_2(sharing())
    assert capsys.readouterr().out.startswith("Exercise 5.2: right for 1 to 5 ranks on a host")
    after = list(kit.run(lambda rank, n: torch.get_num_threads(), world_size=2, backend="gloo"))
    assert after == before


def threads_by_tensor_split(local_rank, gpu_socket, sockets, core_of):
    near = [rank for rank in range(len(gpu_socket)) if gpu_socket[rank] == gpu_socket[local_rank]]
    threads, place = sockets[gpu_socket[local_rank]], near.index(local_rank)
    cores = torch.tensor(sorted({core_of[thread] for thread in threads}))
    mine = cores.tensor_split(len(near))[place].tolist()
    if len(near) > len(cores):
        mine = [cores[place % len(cores)].item()]
    return [thread for thread in sorted(threads) if core_of[thread] in mine]


def test_cores_that_are_divided_in_another_way_are_right():
    kit.check.exercise_5_3(threads_by_tensor_split)


@mistake("5.a", "fails", "it deadlocks")
def test_a_barrier_of_rank_0_alone():
    if not torch.distributed.is_available():
        return "torch has no distributed package"
    if not torch.distributed.is_initialized():
        return "there is no process group"
    if torch.distributed.get_world_size() == 1:
        return "the world is one rank"
    if torch.distributed.get_rank() == 0:
        torch.distributed.barrier()
    return "all ranks are here"
