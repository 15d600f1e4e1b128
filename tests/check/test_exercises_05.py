"""Wrong answers to the exercises of lesson 05, and the errors that the learner gets."""

from __future__ import annotations

import torch
from answers import solved

import ddp_kit as kit


def test_a_device_may_be_a_torch_device():
    changes = {'f"cuda:{local_rank}"': 'torch.device("cuda", local_rank)'}
    kit.check.exercise_5_1(solved("5.1", changes))


def test_shared_cores_are_right_and_the_ranks_keep_their_threads(capsys):
    before = list(kit.run(lambda rank, n: torch.get_num_threads(), world_size=2, backend="gloo"))
    kit.check.exercise_5_2(solved("5.2"))
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
