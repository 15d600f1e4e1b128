"""The recorder of sends, against what the tensors' sizes say."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import send as send_by_name

import ddp_kit as kit
from ddp_kit.failures import Frame, Wait
from ddp_kit.trace import Board, Send, Trace, recording


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


def test_what_a_rank_waits_in_is_written_as_it_was_called():
    class Notes:
        """A board that keeps everything."""

        def __init__(self):
            self.entries = []

        def enter(self, op, where):
            self.entries.append((op, where.function))

        def leave(self):
            self.entries.append("left")

    def worker(rank, world_size):
        tensor, other, notes = torch.ones(1), 1 - rank, Notes()
        send, recv = (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send)
        with recording(notes):
            send(tensor, other, tag=7)
            recv(tensor, other)
            if rank == 0:
                dist.recv(tensor)
            else:
                dist.send(tensor, 0)
            works = [dist.isend(tensor, other), dist.irecv(tensor, src=other)]
            for work in works:
                work.wait()
            dist.all_reduce(tensor, async_op=True).wait()
            dist.broadcast_object_list([None], src=0)
            dist.reduce(tensor, dst=1)
            dist.monitored_barrier()
        return notes.entries

    entries = kit.run(worker, world_size=2)[0]
    assert entries[1::2] == ["left"] * (len(entries) // 2)
    # An object's size is broadcast before the object; gloo's monitored barrier is many messages.
    assert list(dict.fromkeys(op for op, _ in entries[::2])) == [
        "send(dst=1, tag=7)",
        "recv(src=1)",
        "recv",
        "isend(dst=1)",
        "irecv(src=1)",
        "all_reduce",
        "broadcast_object_list(src=0)",
        "reduce(dst=1)",
        "monitored_barrier",
    ]
    assert {function for _, function in entries[::2]} == {"worker"}


def test_torch_is_as_it_was_when_nothing_is_recorded():
    before = dict(vars(dist.ProcessGroup)), dict(vars(dist.Work))
    with recording():
        assert vars(dist.ProcessGroup)["send"] is not before[0]["send"]
    assert (dict(vars(dist.ProcessGroup)), dict(vars(dist.Work))) == before


def test_work_that_nobody_waited_for_is_noticed():
    def worker(rank, world_size):
        tensor, seen = torch.ones(1), []
        with recording() as recorder:
            work = dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0)
            seen.append(recorder.all_awaited)
            work.wait()
            seen.append(recorder.all_awaited)
        with recording() as recorder:
            work = dist.all_reduce(tensor, async_op=True)
            dist.barrier()
            del work
            seen.append(recorder.all_awaited)
        return seen

    assert list(kit.run(worker, world_size=2)) == [[False, True, False]] * 2


def test_a_page_of_the_board_is_read_as_it_was_written_and_survives_a_long_path():
    board = Board()
    assert board.read(3) == Wait(3, None)
    where = Frame("cell", 4, "worker", "dist.recv(t, src=1)", True)
    board.enter("recv(src=1)", where)
    assert board.read(3) == Wait(3, "recv(src=1)", where)
    board.enter("barrier", Frame("x" * 5000, 4, "worker", "", True))
    assert board.read(0) == Wait(0, "barrier")
    board.leave()
    assert board.read(3) == Wait(3, None)
    board.close()
