"""The recorder of sends, against what the tensors' sizes say."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import send as send_by_name

import ddp_kit as kit
from ddp_kit.trace import Send, Trace


def test_every_form_of_send_is_recorded():
    def worker(rank, world_size):
        tensor = torch.zeros(5, dtype=torch.float64)
        if rank == 0:
            dist.send(tensor, 1, tag=3)
            dist.isend(tensor[:2], 1).wait()
            send_by_name(tensor[:1], 1)
        else:
            dist.recv(tensor, 0, tag=3)
            dist.recv(tensor[:2], 0)
            dist.irecv(tensor[:1], 0).wait()
        ops = [dist.P2POp(dist.isend, tensor, 1 - rank), dist.P2POp(dist.irecv, tensor, 1 - rank)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    trace = kit.run(worker, world_size=2).trace
    assert trace.messages(src=0) == [
        Send(0, 1, 3, 40, 0),
        Send(0, 1, 0, 16, 1),
        Send(0, 1, 0, 8, 2),
        Send(0, 1, 0, 40, 3),
    ]
    assert trace.messages(src=1) == [Send(1, 0, 0, 40, 0)]
    assert (trace.bytes_sent(0), trace.bytes_sent(1)) == (104, 40)
    assert repr(trace) == "Trace(5 messages between 2 ranks, 144 bytes)"


def test_ranks_of_a_sub_group_are_told_as_ranks_of_the_world():
    def worker(rank, world_size):
        pair = dist.new_group([1, 2])
        if rank == 1:
            dist.send(torch.zeros(1), 2, group=pair)
        if rank == 2:
            dist.recv(torch.zeros(1), 1, group=pair)

    assert kit.run(worker, world_size=3).trace.sends == (Send(1, 2, 0, 4, 0),)


def test_one_run_does_not_count_the_sends_of_another():
    def worker(rank, world_size):
        if rank == 0:
            dist.send(torch.zeros(1), 1)
        else:
            dist.recv(torch.zeros(1), 0)

    for _ in range(2):
        assert len(kit.run(worker, world_size=2).trace) == 1


def test_messages_can_be_asked_for_by_receiver():
    trace = Trace(3, (Send(0, 1, 0, 4, 0), Send(0, 2, 0, 8, 1), Send(1, 2, 0, 8, 0)))
    assert [send.src for send in trace.messages(dst=2)] == [0, 1]
    assert trace.messages(src=0, dst=2) == [Send(0, 2, 0, 8, 1)]
