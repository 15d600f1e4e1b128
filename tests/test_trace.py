"""The recorder's events agree with the calls and the sizes of the tensors."""

from __future__ import annotations

import json
import tempfile
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import send as send_by_name
from torch.nn.parallel import DistributedDataParallel

import ddp_kit as kit
from ddp_kit import settings
from ddp_kit.error_text import Wait
from ddp_kit.pool.live_view import draw_bar
from ddp_kit.trace import (
    EMPTY,
    Board,
    Event,
    Group,
    InternTable,
    Message,
    Snapshot,
    Trace,
    board,
    join,
    recording,
    stacks,
)
from ddp_kit.trace.board import RowBits
from ddp_kit.trace.calls import facts
from ddp_kit.trace.rank import recorder

pytestmark = pytest.mark.usefixtures("forked_ranks")

WORLD = Group("0", (0, 1))


def calls(trace, rank=0):
    return [event.call for event in trace if event.rank == rank]


def message(src, dst, tag=0, nbytes=4, sequence=0):
    return Event(
        src, sequence, "send", "send", "send", WORLD, sequence, dst, tag=tag, nbytes=nbytes
    )


# --- point to point ------------------------------------------------------------------------


def test_every_form_of_send_is_recorded_and_matched():
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
    sent = [(m.src, m.dst, m.tag, m.nbytes) for m in trace.messages()]
    assert sent == [(0, 1, 3, 40), (0, 1, 0, 16), (0, 1, 0, 8), (0, 1, 0, 40), (1, 0, 0, 40)]
    assert [m.recv.op for m in trace.messages()] == [
        *("recv", "recv", "irecv", "batch_isend_irecv", "batch_isend_irecv")
    ]
    assert (trace.bytes_sent(0), trace.bytes_sent(1)) == (104, 40)
    assert repr(trace) == "Trace(2 ranks: 5 messages of 144 bytes)"


def test_the_methods_of_a_process_group_are_recorded_however_they_are_called():
    def worker(rank, world_size):
        tensor = torch.zeros(2)
        if rank == 0:
            dist.group.WORLD.send([tensor], dstRank=1, tag=5).wait()
        else:
            dist.group.WORLD.recv([tensor], 0, 5).wait()
        dist.group.WORLD.allreduce(tensor, op=dist.ReduceOp.MAX).wait()
        dist.group.WORLD.barrier().wait()

    trace = kit.run(worker, world_size=2).trace
    assert calls(trace) == ["send(dst=1, tag=5)", "allreduce", "barrier"]
    assert trace.messages()[0].recv.rank == 1


def test_a_message_from_any_source_is_matched_with_its_sender():
    def worker(rank, world_size):
        for number in range(2):
            if rank == 0:
                for _ in range(2):
                    dist.recv(torch.zeros(1), tag=number)
            else:
                dist.send(torch.zeros(1), 0, tag=number)

    trace = kit.run(worker, world_size=3).trace
    assert all(m.recv.peer == m.src and m.recv.tag == m.tag for m in trace.messages())
    assert [(m.src, m.tag) for m in trace.messages()] == [(1, 0), (1, 1), (2, 0), (2, 1)]


def test_receives_from_any_source_are_matched_in_the_order_of_their_calls():
    def worker(rank, world_size):
        if rank:
            for size in range(1, 4):
                dist.send(torch.zeros(size), 0, tag=rank)
            return []
        works = [dist.irecv(torch.zeros(n), tag=t) for n in range(1, 4) for t in (1, 2)]
        for work in reversed(works[1:]):
            work.wait()
        before = [event.peer for event in Snapshot(0, recorder.current.table.board.read()).events]
        works[0].wait()
        return before

    result = kit.run(worker, world_size=3)
    # A receive has no place while an earlier one with the same tag may take its message.
    assert result[0] == [None, 2, None, 2, None, 2]
    pairs = [(m.src, m.nbytes, m.recv.nbytes) for m in result.trace.messages()]
    assert pairs == [(src, size, size) for src in (1, 2) for size in (4, 8, 12)]


def test_ranks_of_a_sub_group_are_recorded_as_ranks_of_the_world():
    def worker(rank, world_size):
        pair = dist.new_group([1, 2])
        if rank == 1:
            dist.send(torch.zeros(1), 2, group=pair)
        if rank == 2:
            dist.recv(torch.zeros(1), 1, group=pair)
        if rank:
            dist.broadcast(torch.zeros(1), 2, group=pair)

    trace = kit.run(worker, world_size=3).trace
    (sent,) = trace.messages()
    assert (sent.src, sent.dst, sent.recv.rank, sent.send.group.ranks) == (1, 2, 2, (1, 2))
    assert calls(trace, 2) == ["new_group", "recv(src=1)", "broadcast(src=2)"]


def test_messages_can_be_asked_for_by_receiver():
    trace = Trace(3, (message(0, 1), message(0, 2, nbytes=8), message(1, 2, nbytes=8)))
    assert [sent.src for sent in trace.messages(dst=2)] == [0, 1]
    assert [sent.nbytes for sent in trace.messages(src=0, dst=2)] == [8]
    assert repr(trace) == "Trace(3 ranks: 3 messages of 20 bytes, 3 of them never received)"


# --- collectives ---------------------------------------------------------------------------


def all_collectives(rank, world_size):
    one, two = torch.ones(1), torch.arange(2.0)
    dist.broadcast(one, src=1)
    dist.all_reduce(one, op=dist.ReduceOp.MAX)
    dist.reduce(one, dst=1)
    dist.all_gather([torch.zeros(1), torch.zeros(1)], one)
    dist.all_gather_into_tensor(torch.zeros(2), one)
    dist.gather(one, [torch.zeros(1), torch.zeros(1)] if rank == 0 else None, dst=0)
    dist.scatter(one, [torch.zeros(1), torch.zeros(1)] if rank == 1 else None, src=1)
    dist.reduce_scatter(torch.zeros(1), [one, one])
    dist.reduce_scatter_tensor(torch.zeros(1), two)
    dist.all_to_all_single(torch.zeros(2), two)
    dist.all_gather_object([None, None], "object")
    dist.broadcast_object_list([None], src=0)
    dist.barrier()
    dist.monitored_barrier()
    dist.all_reduce(one, async_op=True).wait()
    dist.all_reduce_coalesced([one, two])


def test_every_collective_is_recorded_with_its_partners():
    trace = kit.run(all_collectives, world_size=2).trace
    assert calls(trace) == [
        *("broadcast(src=1)", "all_reduce", "reduce(dst=1)", "all_gather"),
        *("all_gather_into_tensor", "gather(dst=0)", "scatter(src=1)", "reduce_scatter"),
        *("reduce_scatter_tensor", "all_to_all_single"),
        *("all_gather_object", "all_gather_object"),  # first its size, then the object
        *("broadcast_object_list(src=0)", "broadcast_object_list(src=0)"),
        *("barrier", "monitored_barrier", "all_reduce", "all_reduce_coalesced"),
    ]
    assert calls(trace) == calls(trace, 1)
    assert [sorted(partners) for partners in trace.collectives] == [[0, 1]] * 18
    assert all(e.waited and e.end and e.start <= e.waited <= e.end for e in trace)
    first, second = trace.collectives[:2]
    assert (first[0].root, first[0].shape, first[0].dtype, first[0].nbytes) == (
        1,
        (1,),
        "float32",
        4,
    )
    assert (second[1].reduce_op, second[1].method) == ("MAX", "allreduce")
    assert {event.where.function for event in trace} == {"all_collectives"}
    assert repr(trace) == "Trace(2 ranks: 18 collectives)"


def test_a_call_that_waits_itself_is_blocking():
    def worker(rank, world_size):
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, async_op=True).wait()
        dist.barrier()
        dist.all_gather_object([None, None], "text")
        dist.monitored_barrier()
        dist.new_group([0, 1])
        (dist.send if rank == 0 else dist.recv)(tensor, 1 - rank)
        (dist.isend if rank == 0 else dist.irecv)(tensor, 1 - rank).wait()
        dist.all_reduce(tensor, async_op=True).get_future().wait()
        model = DistributedDataParallel(torch.nn.Linear(1, 1))
        model(tensor[:1]).sum().backward()

    trace = kit.run(worker, world_size=2).trace
    later = ["all_reduce", "isend", "all_reduce", "DDP all_reduce"]
    assert [event.op for event in trace if event.rank == 0 and not event.blocking] == later
    assert {event.op for event in trace if event.blocking} == {
        *("all_reduce", "barrier", "all_gather_object", "monitored_barrier", "new_group"),
        *("send", "recv", "DistributedDataParallel", "DDP broadcast"),
    }


def test_splits_are_recorded_as_rows_to_and_from_each_rank():
    def worker(rank, world_size):
        rows_to, rows_from = ([1, 2], [1, 0]) if rank == 0 else ([0, 1], [2, 1])
        dist.all_to_all_single(
            torch.zeros(sum(rows_from)), torch.ones(sum(rows_to)), rows_from, rows_to
        )

    assert [event.splits for event in kit.run(worker, world_size=2).trace] == [
        *(((1, 2), (1, 0)), ((0, 1), (2, 1)))
    ]


def test_what_ddp_sends_is_recorded_and_its_gradients_stay_the_same_to_the_last_bit():
    def worker(rank, world_size, recorded):
        if not recorded:
            recorder.current = None  # until the end of the run
        torch.manual_seed(rank)
        model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.BatchNorm1d(5))
        ddp = DistributedDataParallel(model, bucket_cap_mb=1e-5)
        for _ in range(2):
            ddp(torch.randn(8, 7)).square().sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    result, bare = (kit.run(worker, recorded, world_size=3) for recorded in (True, False))
    for ours, theirs in zip(result, bare, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert calls(result.trace)[:2] == ["DistributedDataParallel", "DDP broadcast(src=0)"]
    reduced = [e for e in result.trace if e.rank == 0 and e.op == "DDP all_reduce"]
    assert len(reduced) > 2
    assert sum(e.nbytes for e in reduced) == 2 * 4 * (7 * 5 + 5 + 5 + 5)
    assert all(event.end for event in reduced)
    assert [bool(event.waited) for event in reduced[-2:]] == [False, True]
    assert reduced[0].where.source == "ddp(torch.randn(8, 7)).square().sum().backward()"
    assert "DDP all_reduce" not in calls(bare.trace)


def test_a_hook_of_the_learner_does_what_ddp_would_have_done():
    def worker(rank, world_size):
        seen = []

        def hook(state, bucket):
            seen.append((state, bucket.index()))
            future = torch.futures.Future()
            future.set_result(bucket.buffer() * 0 + 7)
            return future

        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        model.register_comm_hook("state", hook)
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(RuntimeError, match="only be called once"):
            model.register_comm_hook("state", hook)
        return seen, model.module.weight.grad.tolist()

    result = kit.run(worker, world_size=2)
    assert list(result) == [([("state", 0)], [[7.0, 7.0]])] * 2
    assert "DDP all_reduce" not in calls(result.trace)


# --- what a rank waits in, and what it never waited for ------------------------------------


@pytest.mark.parametrize("unused", [False, True])
def test_what_join_starts_for_other_ranks_needs_no_wait(unused, capsys):
    def worker(rank, world_size):
        model = DistributedDataParallel(torch.nn.Linear(1, 1), find_unused_parameters=unused)
        with model.join():
            for _ in range(3 - rank):
                model(torch.ones(1, 1)).sum().backward()

    kit.run(worker, world_size=2)
    assert "never waited" not in capsys.readouterr().out


def test_gradients_in_join_are_divided_by_the_ranks_that_still_have_data():
    def worker(rank, world_size, divide_by_all):
        model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
        gradients = []
        with model.join(divide_by_initial_world_size=divide_by_all):
            for step in range(1 + rank):
                model.zero_grad()
                model(torch.tensor([[1.0 + step]])).sum().backward()
                gradients.append(model.module.weight.grad.item())
        return gradients

    assert list(kit.run(worker, False, world_size=2)) == [[1.0], [1.0, 2.0]]
    assert list(kit.run(worker, True, world_size=2)) == [[1.0], [1.0, 1.0]]


@pytest.mark.parametrize("static", [False, True])
def test_the_collective_that_finds_unused_parameters_is_recorded(static):
    def worker(rank, world_size):
        layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        if not static:
            layers.forward = lambda x: layers[rank](x)
        model = DistributedDataParallel(layers, find_unused_parameters=True, static_graph=static)
        model(torch.ones(1, 2)).sum().backward()

    trace = kit.run(worker, world_size=2).trace
    found = [event for event in trace if event.op == "DDP find_unused_parameters"]
    if static:  # the first backward shows what is used
        assert found == []
        return
    assert [event.rank for event in found] == [0, 1]
    assert len({event.match_key for event in found}) == 1
    assert {(event.inputs, event.dtype, event.method) for event in found} == {
        (((4,),), "int32", "allreduce")
    }
    assert all(event.start <= event.waited <= event.end for event in found)
    assert {event.where.source for event in found} == {"model(torch.ones(1, 2)).sum().backward()"}


@pytest.mark.parametrize("kind", dist.BuiltinCommHookType.__members__.values())
def test_a_hook_that_torch_has_built_in_can_be_registered(kind):
    def worker(rank, world_size):
        model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
        model._register_builtin_comm_hook(kind)
        model(torch.tensor([[1.0 + rank]])).sum().backward()
        return model.module.weight.grad.item()

    result = kit.run(worker, world_size=2)
    assert list(result) == [1.5, 1.5]
    assert "DDP all_reduce" in calls(result.trace)


def test_a_model_that_outlives_its_run_is_recorded_in_the_next():
    def make(rank, world_size):
        torch.kept = DistributedDataParallel(torch.nn.Linear(1, 1))

    def use(rank, world_size):
        torch.kept(torch.ones(1, 1)).sum().backward()
        del torch.kept

    kit.run(make, world_size=2)
    trace = kit.run(use, world_size=2).trace
    reduced = [event for event in trace if event.op == "DDP all_reduce"]
    assert len(reduced) == 2
    assert all(event.end for event in reduced)


def test_what_was_never_waited_for_takes_few_lines(capsys):
    def worker(rank, world_size):
        works = [dist.isend(torch.zeros(1), 1 - rank, tag=tag) for tag in range(100)]
        works += [dist.irecv(torch.zeros(1), 1 - rank, tag=tag) for tag in range(100)]
        dist.barrier()

    kit.run(worker, world_size=2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("rank 0 never waited for i")
    assert lines[-1] == "... and 392 more such calls"
    assert len(lines) < 20


def test_one_run_does_not_count_the_events_of_another():
    def worker(rank, world_size):
        if rank == 0:
            dist.send(torch.zeros(1), 1)
        else:
            dist.recv(torch.zeros(1), 0)

    for _ in range(2):
        assert len(kit.run(worker, world_size=2).trace) == 2


def test_a_recording_inside_another_one_knows_its_lines_of_code():
    def call():
        dist.all_reduce(torch.ones(1))

    def worker(rank, world_size):
        call()
        for size in range(300):  # more texts than stay on the board
            dist.all_reduce(torch.ones(size))
        with recording():
            call()

    trace = kit.run(worker, world_size=2).trace
    assert [event.where.function for event in trace] == ["call", "call"]


def test_outside_of_a_run_nothing_is_recorded():
    def worker(rank, world_size):
        tensor, page = torch.ones(1), Board()
        with recording(InternTable(page)):
            dist.all_reduce(tensor)
        dist.all_reduce(tensor)
        return page.head().events, tensor.item()

    result = kit.run(worker, world_size=2)
    assert list(result) == [(1, 4.0)] * 2
    assert len(result.trace) == 2, "a block inside a run takes its events from the run"


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
        with recording() as recorder:
            future = dist.all_reduce(tensor, async_op=True).get_future()
            future.wait()
            dist.barrier()
            seen.append(recorder.all_awaited)
        return seen

    assert list(kit.run(worker, world_size=2)) == [[False, True, False, True]] * 2


@pytest.mark.parametrize("use", ["wait", "then", "done", "add_done_callback", "collect", None])
def test_the_future_of_a_coalesced_call_is_used(use, capsys):
    def worker(rank, world_size):
        future = dist.all_reduce_coalesced([torch.ones(2)], async_op=True)
        if use == "collect":
            torch.futures.collect_all([future]).wait()
        elif use is not None:
            getattr(future, use)(*[lambda _: None] * (use in ("then", "add_done_callback")))
        dist.barrier()

    kit.run(worker, world_size=2)
    notice = "ranks 0 and 1 never waited for all_reduce_coalesced"
    assert (notice in capsys.readouterr().out) == (use is None)


def test_the_work_of_a_coalescing_manager_is_forgotten(capsys):
    def worker(rank, world_size):
        with dist._coalescing_manager(async_ops=True):
            for _ in range(2):
                dist.all_reduce(torch.ones(2))
        dist.barrier()

    kit.run(worker, world_size=2)
    assert "ranks 0 and 1 never waited for allreduce_coalesced" in capsys.readouterr().out


def test_a_line_names_what_was_never_waited_for(capsys):
    def worker(rank, world_size, how):
        work = dist.all_reduce(torch.ones(1), async_op=True)
        if how == "wait":
            work.wait()
        elif how == "ask":
            while not work.is_completed():
                pass
        elif how == "future":
            work.get_future().wait()
        dist.barrier()

    for how in ("wait", "future", "ask"):
        kit.run(worker, how, world_size=2)
        assert capsys.readouterr().out == ""
    kit.run(worker, "", world_size=2)
    warning, line = capsys.readouterr().out.splitlines()
    assert warning == (
        "ranks 0 and 1 never waited for all_reduce, which may still be in flight; keep what it "
        "returns and call wait()"
    )
    assert line.endswith(
        "of worker in test_trace.py: work = dist.all_reduce(torch.ones(1), async_op=True)"
    )


def test_a_receive_in_a_thread_that_was_left_is_nothing_to_wait_for(page):
    with recording(InternTable(page)):
        pass
    page.begin(1, 1)
    page.add_text(["group", "0", [0, 1]])
    for number, op, bits in ((2, "recv", RowBits.BLOCKING), (3, "irecv", 0)):
        page.add_text(["call", op, "recv", "recv", 1, None, "", [], [], [], None, 4, "cpu", []])
        page.post((number, 0, 1, bits, 0), -1, number, 1)
    assert [event.op for event in Snapshot(0, page.read()).unawaited] == ["irecv"]


# --- progress ------------------------------------------------------------------------------


def test_progress_asks_for_something_to_loop_over():
    with pytest.raises(TypeError, match=r"such as range\(5\), got 5") as caught:
        kit.progress(5)
    assert caught.value._render_traceback_() == [f"TypeError: {caught.value}"]


def test_progress_yields_what_it_is_given_and_takes_its_bar_away(page):
    assert list(kit.progress(range(3))) == [0, 1, 2]
    with recording(InternTable(page)):
        seen = []
        for item in kit.progress("abc"):
            seen.append((item, page.progress()))
        assert seen == [("a", (0, 3)), ("b", (1, 3)), ("c", (2, 3))]
        assert page.progress() is None
        for _ in kit.progress(iter("abc")):
            assert page.progress() == (0, None)
            break
        assert page.progress() is None, "a loop that was left early has no bar"
        bar = kit.progress("abc")
        next(bar)
    assert page.progress() is None, "a run that is over has no bar"


@pytest.mark.parametrize("total", [-1, 2.5, True, "many"])
def test_a_total_that_is_no_number_is_refused(total):
    with pytest.raises(kit.TraceError, match="total must be a whole number such as 100, or None"):
        kit.progress([1], total=total)


@pytest.mark.parametrize(
    ("done", "total", "bar"),
    [
        (0, 4, "░░░░ 0 of 4"),
        (3, 4, "███░ 3 of 4"),
        (5, 4, "████ 5 of 4"),
        (1000, None, "1,000"),
        (0, 0, "0"),
    ],
)
def test_a_bar_is_as_full_as_the_loop_has_come(done, total, bar):
    assert draw_bar(done, total, width=4) == bar


# --- figures of a run ----------------------------------------------------------------------


def test_the_time_that_a_rank_was_blocked_is_its_waits():
    def worker(rank, world_size):
        dist.barrier()
        if rank == 0:
            time.sleep(3)  # rank 1 is there, even if it comes 2 s later
            dist.send(torch.zeros(1), 1)
        else:
            dist.recv(torch.zeros(1), 0)

    trace = kit.run(worker, world_size=2).trace
    began, ended = trace.spans[1]
    assert 0.2 < trace.blocked(1) <= (ended - began) / 1e9
    assert 0 <= trace.blocked(0) < trace.blocked(1)


def test_a_run_that_was_ended_has_spans_and_can_be_drawn_and_written(tmp_path):
    with pytest.raises(kit.DeadlockError) as caught:
        kit.run(lambda rank, world_size: dist.recv(torch.zeros(1), 1 - rank), world_size=2)
    trace = caught.value.trace
    for began, ended in trace.spans:
        assert 0 < began < ended
    trace.to_chrome(tmp_path / "ended.json")
    written = json.loads((tmp_path / "ended.json").read_text())["traceEvents"]
    assert all(event["dur"] >= 0 for event in written if "dur" in event)
    low, high = kit.plot.timeline(trace, timed=True).axes[0].get_xlim()
    assert low < high < 60_000  # milliseconds


def test_messages_on_more_channels_than_the_board_counts_are_matched():
    def worker(rank, world_size):
        counted, board.COUNTED = board.COUNTED, 4
        for tag in (0, 1, 2, 3, 4, 5, 5, 5):
            if rank == 0:
                dist.send(torch.zeros(1), 1, tag=tag)
            else:
                dist.recv(torch.zeros(1), 0, tag=tag)
        dist.barrier()
        dist.all_reduce(torch.zeros(1))
        board.COUNTED = counted

    trace = kit.run(worker, world_size=2).trace
    assert len(trace.messages()) == 8
    assert not trace.lost
    assert [members[0].op for members in trace.collectives] == ["barrier", "all_reduce"]


def test_a_rank_that_does_not_exist_is_named():
    def sends_off_the_end(rank, world_size):
        dist.send(torch.zeros(1), rank + 1)

    def has_no_root(rank, world_size):
        dist.broadcast(torch.zeros(1), src=world_size)

    for worker in (sends_off_the_end, has_no_root):
        with pytest.raises(kit.RankError) as caught:
            kit.run(worker, world_size=2)
        failure = caught.value.failures[1]
        assert failure.type == "ValueError"
        assert failure.message == "there is no rank 2: the ranks of this group are 0 to 1"
    trace = kit.run(lambda rank, world_size: None, world_size=2).trace
    for ask in (trace.bytes_sent, trace.blocked, trace.messages):
        with pytest.raises(kit.TraceError, match="there is no rank 9: the ranks of this run"):
            ask(9)


def test_a_receive_from_its_own_rank_is_refused():
    def in_a_group(rank, world_size):
        group = dist.new_group([1])
        if rank == 1:
            dist.recv(torch.zeros(1), group_src=0, group=group)

    for worker in (lambda rank, world_size: dist.recv(torch.zeros(1), src=rank), in_a_group):
        with pytest.raises(kit.RankError) as caught:
            kit.run(worker, world_size=2)
        failure = caught.value.failures[1]
        assert failure.type == "ValueError"
        assert failure.message == "a rank cannot receive from itself: src is its own rank"


def test_a_message_says_who_sent_how_much_to_whom():
    def worker(rank, world_size):
        if rank == 0:
            dist.send(torch.zeros(2), 1)
            dist.send(torch.zeros(1), 1, tag=7)
        else:
            dist.recv(torch.zeros(2), 0)
            dist.recv(torch.zeros(1), 0, tag=7)

    first, second = kit.run(worker, world_size=2).trace.messages()
    assert repr(first) == "Message(0 → 1, 8 bytes)"
    assert repr(second) == "Message(0 → 1, 4 bytes, tag=7)"
    assert repr(Message(first.send, None)) == "Message(0 → 1, 8 bytes, never received)"


def test_a_message_whose_receive_was_dropped_is_not_lost():
    send = Event(0, 0, "send", "send", "send", Group("0", (0, 1)), 0, peer=1)
    assert Trace(2, (send,), (0, 0)).lost
    assert not Trace(2, (send,), (0, 3)).lost
    assert "never received" not in repr(Trace(2, (send,), (0, 3)))


def test_what_nccl_starts_as_one_is_neither_a_collective_nor_unawaited():
    def worker(rank, world_size):
        # The fake backend coalesces as nccl does, and sends nothing. Importing this registers it,
        # which every rank must do itself.
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
        page, tensor = Board(), torch.ones(1)
        with recording(InternTable(page)) as recorder:
            with dist._coalescing_manager(None, tensor.device, async_ops=True) as batch:
                dist.isend(tensor, 1 - rank)
                dist.irecv(tensor, 1 - rank)
            batch.wait()
            all_awaited = recorder.all_awaited
        snapshot = Snapshot(rank, page.read())
        return [event.kind for event in snapshot.events], snapshot.unawaited, all_awaited

    assert list(kit.run(worker, world_size=2)) == [(["send", "recv"], [], True)] * 2


# --- the board -----------------------------------------------------------------------------


@pytest.fixture
def page():
    page = Board()
    page.begin(1, 100)
    group = page.add_text(["group", "0", [0, 1]])
    page.call = page.add_text(
        ["call", "isend", "send", "send", group, None, "float32", [[1]], [], [], None, 4, "cpu", []]
    )
    yield page
    page.close()


def add(page, index):
    page.post((page.call, 0, 1, 0, 0), -1, index, 1000 + index)


def test_a_wait_is_read_as_it_was_written(page):
    add(page, 0)
    assert Snapshot(3, page.read()).as_wait() == Wait(3, None)
    page.begin_wait(0, 2000, limited=False, shown=True)
    assert Snapshot(3, page.read()).as_wait() == Wait(3, "isend(dst=1)")
    assert Snapshot(3, page.read()).waits_forever
    page.end_wait(0, 3000, shown=True)
    snapshot = Snapshot(3, page.read())
    assert (snapshot.waiting, snapshot.waits_forever) == (None, False)
    assert (snapshot.events[0].waited, snapshot.events[0].end) == (2000, 3000)
    page.begin_wait(0, 2000, limited=True, shown=True)
    assert not Snapshot(3, page.read()).waits_forever


def test_equal_tensors_with_other_splits_strides_or_roots_are_other_calls():
    square, root = torch.ones(4, 4), dist.BroadcastOptions()
    first, second = (facts("broadcast", ([square], root)) for root.rootRank in (0, 1))
    assert first != second
    assert facts("allreduce", ([square],)) == facts("allreduce", ([torch.zeros(4, 4)],))
    assert facts("allreduce", ([square],)) != facts("allreduce", ([square.t()],))
    for kind in (int, np.int64, torch.tensor):
        splits = ([kind(1), kind(3)], [kind(3), kind(1)])
        both = (facts("alltoall_base", (square, square, rows, rows, None)) for rows in splits)
        assert len(set(both)) == 2


def test_older_events_make_room_and_the_trace_says_so(page, monkeypatch):
    monkeypatch.setattr(settings, "EVENTS_KEPT", 8)
    for index in range(11):
        add(page, index)
    page.begin_wait(9, 2000, limited=False, shown=True)
    snapshot = Snapshot(0, page.read())
    assert [event.index for event in snapshot.unawaited] == [3, 4, 5, 6, 7, 8, 10]
    trace = join([snapshot, Snapshot(1, EMPTY)])
    assert [event.index for event in trace] == list(range(3, 11))
    assert [event.sequence for event in trace] == list(range(3, 11))
    assert repr(trace).endswith("3 older events dropped)")


def test_a_board_without_room_says_so_and_breaks_nothing(page, monkeypatch):
    monkeypatch.setattr(board, "COUNTED", 1)
    assert page.add_count(["count", "send", 1, 0, 1]) == 0
    add(page, 0)
    assert not Snapshot(0, page.read()).is_crowded
    assert page.add_count(["count", "send", 2, 0, 1]) == -1
    add(page, 1)
    assert Snapshot(0, page.read()).is_crowded
    monkeypatch.setattr(board, "TEXTS", 10)
    assert page.add_text(["a text"]) == 0
    page.post((0, 0, 1, 0, 0), -1, 0, 1)
    page.begin_wait(2, 1, limited=False, shown=True)
    snapshot = Snapshot(0, page.read())
    assert (len(snapshot.events), snapshot.dropped) == (2, 1)
    assert snapshot.waiting is None


def test_a_count_is_visible_as_soon_as_it_is_made(page):
    slot = page.add_count(["count", "send", 1, 0, 1])
    page.write_count(slot, 5, 2)
    key = ("send", 1, 0, Group("0", (0, 1)))
    assert Snapshot(0, page.read()).counts() == {key: (5, 2)}


def test_a_new_run_finds_an_empty_board(page):
    add(page, 0)
    page.begin_wait(0, 1, limited=False, shown=True)
    page.begin(2, 500)
    snapshot = Snapshot(0, page.read())
    assert (snapshot.board.head.run, snapshot.events, snapshot.waiting, snapshot.counts()) == (
        *(2, [], None, {}),
    )


def test_numpy_integers_and_tensors_are_numbers_as_in_pytorch():
    def worker(rank, world_size):
        pair = dist.new_group(list(np.arange(world_size)))
        for tag in (np.int64(3), torch.tensor(4)):
            if rank == 0:
                dist.send(torch.ones(2), 1, tag=tag)
            else:
                dist.recv(torch.zeros(2), 0, tag=tag)
        splits = np.array([1, 2])
        received = torch.empty(2 * int(splits[rank]))
        dist.all_to_all_single(received, torch.ones(3), [splits[rank]] * 2, splits, group=pair)

    trace = kit.run(worker, world_size=2).trace
    assert [message.tag for message in trace.messages()] == [3, 4]


@pytest.mark.parametrize(
    ("file", "own"),
    [
        ("/opt/torch/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", False),
        ("/usr/lib/python3/dist-packages/numpy/__init__.py", False),
        ("/home/me/site-packages.py", True),
        ("/home/me/torchinductor_notes.py", True),
        (f"{tempfile.gettempdir()}/torchinductor_me/a6/ca6a.py", False),
        ("<string>", False),
        ("<eval_with_key>.12 from /torch/fx/experimental/proxy_tensor.py:1400", False),
        ("<ipython-input-3-0a1b>", True),
        ("<timed exec>", True),
        ("<stdin>", True),
    ],
)
def test_packages_and_generated_code_are_not_the_learners(file, own):
    assert stacks.is_own(file) == own
