"""A backend in shared memory: values, bytes, races, limits, and nothing that is left behind."""

from __future__ import annotations

import os
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ddp_kit as kit
from ddp_kit.lessons import your_own_backend as yob

pytestmark = pytest.mark.usefixtures("forked_ranks")


def test_no_slot_is_written_while_a_slow_rank_reads_it():
    def worker(rank, world_size):
        segment = yob.Segment(rank, world_size)
        tensors, reads = [torch.full((length,), 1.0 + rank) for length in (4, 8)], []

        def slowly(segment, place):
            reads.append(place)
            if rank == 0 and len(reads) == 2:  # the sum of the other; let that rank go on first
                segment.flags.wait([1], segment.turn + 1, "ranks")
            return place

        with mock.patch.object(yob, "get", slowly):
            for tensor in tensors:  # other lengths have other chunks
                yob.all_reduce(segment, tensor)
        return [tensor.unique().tolist() for tensor in tensors]

    assert list(kit.run(worker, world_size=2)) == [[[3], [3]]] * 2


def test_a_rank_that_skips_a_barrier_is_named_after_the_limit():
    start = time.monotonic()
    with pytest.raises(kit.RankError, match=r"raised RuntimeError: waited 0.5 s for ranks \["):
        kit.run(yob.miss_a_barrier, 0.5, world_size=3)
    assert time.monotonic() - start >= 0.5


def test_a_message_that_nobody_sends_or_takes_is_named_after_the_limit():
    def receive(rank, world_size):
        segment = yob.Segment(rank, world_size)
        segment.flags.limit = 0.3
        if rank == 0:
            yob.recv(segment, torch.zeros(3), src=1)

    def send(rank, world_size):
        segment = yob.Segment(rank, world_size)
        segment.flags.limit = 0.3
        if rank == 0:
            yob.send(segment, torch.zeros(3), dst=1)
            yob.send(segment, torch.zeros(3), dst=1)

    for worker, words in (receive, "has not sent a message"), (send, "has not taken a message"):
        with pytest.raises(kit.RankError, match=f"waited 0.3 s for rank 1, which {words}"):
            kit.run(worker, world_size=2)


def test_messages_arrive_in_order_and_a_large_one_is_refused():
    def worker(rank, world_size):
        group, right = yob.join(), (rank + 1) % world_size
        got = torch.zeros(3, 2)
        works = [dist.irecv(t, (rank - 1) % world_size, group=group) for t in got]
        assert not works[0].is_completed()
        for number in range(3):
            dist.send(torch.full((2,), 10.0 * rank + number), right, group=group)
            works[number].wait()
        assert works[0].is_completed()
        with pytest.raises(ValueError, match="a message has at most 4,194,304 bytes here, got 4,1"):
            dist.send(torch.zeros(yob.ROOM // 4 + 1), right, group=group)
        return got[:, 0].tolist()

    assert list(kit.run(worker, world_size=3)) == [[20, 21, 22], [0, 1, 2], [10, 11, 12]]


def test_another_operation_than_a_sum_is_refused():
    def worker(rank, world_size):
        dist.all_reduce(torch.zeros(1), dist.ReduceOp.MAX, group=yob.join())

    with pytest.raises(kit.RankError, match="this backend can only sum, got "):
        kit.run(worker, world_size=1)


def test_nothing_is_left_mapped_or_open_once_a_group_is_destroyed():
    def worker(rank, world_size):
        dist.destroy_process_group(yob.join())
        yob.reduce_in(rank, world_size, yob.all_reduce, 10)

    def look(rank, world_size):
        with open("/proc/self/maps") as maps:
            mapped = [line for line in maps if "memfd:segment" in line]
        paths = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
        return mapped, [p for p in paths if os.path.islink(p) and "segment" in os.readlink(p)]

    with kit.WorkerPool(2) as pool:
        for _ in range(3):
            pool.run(worker)
        assert list(pool.run(look)) == [([], [])] * 2


def test_memory_of_another_host_or_system_is_refused(monkeypatch):
    with pytest.raises(RuntimeError, match="needs all ranks on one host; rank 0 is on another"):
        yob.attach("another /proc/1/fd/3")
    with pytest.raises(RuntimeError, match="cannot open the memory of rank 0: No such file"):
        yob.attach(f"{yob.this_host()} /proc/self/fd/987654")
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(RuntimeError, match=r"needs Linux, for os\.memfd_create; on Windows"):
        yob.create(4096)


def test_ranks_without_a_store_in_common_tell_the_address_by_broadcast():
    def worker(rank, world_size):
        group = yob.join(yob.without_store)
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=group)
        return tensor.tolist()

    assert list(kit.run(worker, world_size=2)) == [[2, 2, 2]] * 2
