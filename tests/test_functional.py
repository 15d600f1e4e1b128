"""Functional collectives, and so those of DTensor, are in the trace as the calls that they are."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import ddp_kit as kit
from ddp_kit.trace import Snapshot
from ddp_kit.trace.collectives import method_of


def operators():
    return torch.ops._c10d_functional


def of_rank(trace, rank=0):
    return [event for event in trace if event.rank == rank]


def line(event):
    return event.where.source


def call_each(rank, world_size):
    world, mine = dist.group.WORLD, torch.arange(4.0).view(2, 2)
    functional.broadcast(mine, 1, world).sum()
    functional.all_reduce(mine, "max", world).sum()
    functional.all_gather_single(mine, 0, world).sum()
    functional.reduce_scatter_single(mine, "sum", 0, world).sum()
    functional.all_to_all_single(mine, [1, 1], [1, 1], world).sum()
    functional.permute_tensor(mine[0], [1, 0], world).sum()
    for make in (
        lambda: functional.all_reduce_coalesced([mine, mine[0]], "sum", world),
        lambda: functional.all_gather_single_coalesced([mine, mine[0]], world),
        lambda: functional.reduce_scatter_single_coalesced([mine, mine[0]], "sum", [0, 0], world),
    ):
        for result in make():
            result.sum()
    ops = torch.ops._c10d_functional
    ops.wait_tensor(ops.all_reduce_(mine, "avg", world.group_name))


def test_each_functional_collective_is_recorded_with_its_partners_and_sizes():
    trace = kit.run(call_each, world_size=2).trace
    events = of_rank(trace)
    shapes = [(event.call, event.inputs, event.outputs) for event in events]
    assert shapes == [
        ("broadcast(src=1)", ((2, 2),), ()),
        ("all_reduce", ((2, 2),), ()),
        ("all_gather_single", ((2, 2),), ((4, 2),)),
        ("reduce_scatter_single", ((2, 2),), ((1, 2),)),
        ("all_to_all_single", ((2, 2),), ((2, 2),)),
        ("permute_tensor", ((2,),), ((2,),)),
        ("all_reduce_coalesced", ((2, 2), (2,)), ()),
        ("all_gather_single_coalesced", ((2, 2), (2,)), ((4, 2), (4,))),
        ("reduce_scatter_single_coalesced", ((2, 2), (2,)), ((1, 2), (1,))),
        ("all_reduce", ((2, 2),), ()),
    ]
    assert [event.nbytes for event in events] == [16, 16, 16, 16, 16, 8, 24, 24, 24, 16]
    assert {event.dtype for event in events} == {"float32"}
    ops = [event.reduce_op for event in events]
    assert ops == [None, "MAX", None, "SUM", None, None, "SUM", None, "SUM", "AVG"]
    assert [sorted(partners) for partners in trace.collectives] == [[0, 1]] * 10
    assert all(e.start <= e.waited <= e.end and line(e) for e in trace)
    assert events[4].splits == ((1, 1), (1, 1))
    assert events[5].splits == ((0, 2), (0, 2))


def test_a_functional_collective_has_the_method_of_the_plain_one():
    def worker(rank, world_size):
        mine, world = torch.arange(4.0), dist.group.WORLD
        dist.broadcast(mine, 1)
        dist.all_reduce(mine)
        dist.all_gather_into_tensor(torch.zeros(8), mine)
        dist.reduce_scatter_tensor(torch.zeros(2), mine)
        dist.all_to_all_single(torch.zeros(4), mine)
        dist.all_reduce_coalesced([mine, mine])
        functional.broadcast(mine, 1, world).sum()
        functional.all_reduce(mine, "sum", world).sum()
        functional.all_gather_single(mine, 0, world).sum()
        functional.reduce_scatter_single(mine, "sum", 0, world).sum()
        functional.all_to_all_single(mine, [2, 2], [2, 2], world).sum()
        for result in functional.all_reduce_coalesced([mine, mine], "sum", world):
            result.sum()

    methods = [event.method for event in of_rank(kit.run(worker, world_size=2).trace)]
    assert methods[:6] == methods[6:]


@pytest.mark.parametrize(
    ("before", "after", "method", "nbytes"),
    [
        (Shard(0), Replicate(), "all_gather", 16),
        (Partial(), Replicate(), "all_reduce", 32),
        (Partial(), Shard(0), "reduce_scatter", 32),
        (Replicate(), Shard(0), None, 0),
    ],
    ids=str,
)
def test_the_bytes_of_a_redistribute_are_those_of_its_collective(before, after, method, nbytes):
    def worker(rank, world_size, before, after):
        mesh = init_device_mesh("cpu", (2,))
        rows = 2 if before == Shard(0) else 4
        tensor = DTensor.from_local(torch.ones(rows, 2), mesh, [before], run_check=False)
        tensor.redistribute(mesh, [after]).to_local().sum()

    trace = kit.run(worker, before, after, world_size=2).trace
    events = [event for event in of_rank(trace) if event.method != "new_group"]
    assert [event.nbytes for event in events] == ([nbytes] if method else [])
    assert [event.op.startswith(f"redistribute {method}") for event in events] == [True] * len(
        events
    )
    assert {line(event) for event in events} <= {
        "tensor.redistribute(mesh, [after]).to_local().sum()"
    }


def test_the_collective_of_dtensor_that_changes_the_sharded_dimension_on_a_gpu_is_recorded():
    """Its operator works on the CPU, too, where DTensor gathers instead."""

    def worker(rank, world_size):
        rows = torch.arange(4.0).view(1, 4) + 10 * rank
        columns = torch.ops._dtensor.shard_dim_alltoall(rows, 0, 1, dist.group.WORLD.group_name)
        return columns.flatten().tolist()

    result = kit.run(worker, world_size=2)
    assert list(result) == [[0.0, 1.0, 10.0, 11.0], [2.0, 3.0, 12.0, 13.0]]
    (event,) = of_rank(result.trace)
    assert (event.op, event.method) == (
        "shard_dim_alltoall",
        method_of("all_to_all_single"),
    )
    assert (event.inputs, event.outputs) == (((4,),), ((4,),))
    assert [row.sent for row in result.trace.summary(rank=0).rows] == [8]


def test_what_dtensor_calls_is_named_after_what_the_learner_has_called():
    def worker(rank, world_size):
        mesh = init_device_mesh("cpu", (2,))
        tensor = distribute_tensor(torch.arange(4.0).view(2, 2), mesh, [Shard(0)])
        copies = distribute_tensor(torch.arange(4.0).view(2, 2), mesh, [Replicate()])
        DTensor.from_local(torch.ones(2), mesh, [Replicate()], run_check=True)
        tensor.full_tensor().sum()
        tensor.redistribute(placements=[Shard(1)]).to_local()
        summand = tensor.T @ copies
        summand.relu()

    events = [e for e in of_rank(kit.run(worker, world_size=2).trace) if e.method != "new_group"]
    assert [(event.call, line(event).partition("(")[0]) for event in events] == [
        ("distribute_tensor scatter(src=0)", "tensor = distribute_tensor"),
        ("distribute_tensor broadcast(src=0)", "copies = distribute_tensor"),
        *[("from_local all_gather_object", "DTensor.from_local")] * 2,
        ("from_local broadcast(src=0)", "DTensor.from_local"),
        ("full_tensor all_gather_into_tensor", "tensor.full_tensor"),
        ("redistribute all_gather_into_tensor", "tensor.redistribute"),
        ("all_reduce", "summand.relu"),  # which nobody has written
    ]


def test_collectives_of_a_backward_have_the_line_that_calls_it():
    def worker(rank, world_size):
        weight = torch.ones(3, requires_grad=True)
        total = functional.all_reduce(weight, "sum", dist.group.WORLD)
        total.sum().backward()
        return weight.grad.tolist()

    result = kit.run(worker, world_size=2)
    assert list(result) == [[2.0] * 3] * 2
    assert [(event.op, line(event)) for event in of_rank(result.trace)] == [
        ("all_reduce", 'total = functional.all_reduce(weight, "sum", dist.group.WORLD)'),
        ("all_reduce", "total.sum().backward()"),
    ]
    assert all(event.end for event in result.trace)


def test_a_result_is_waited_for_where_it_is_used_first():
    def worker(rank, world_size):
        total = functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD)
        before = read(rank)
        view = total.view(1, 1)
        viewed = read(rank)
        view.sum()
        return before, viewed, read(rank)

    def read(rank):
        from ddp_kit.trace.rank import recorder

        (event,) = Snapshot(rank, recorder.current.table.board.read()).events
        return event.waited is not None, event.end is not None

    assert list(kit.run(worker, world_size=2)) == [((False,) * 2, (False,) * 2, (True,) * 2)] * 2


def test_a_result_that_nobody_uses_is_reported(capsys):
    def worker(rank, world_size):
        functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD)
        operators().all_reduce(torch.ones(1), "sum", dist.group.WORLD.group_name)

    kit.run(worker, world_size=2)
    printed = capsys.readouterr().out
    assert printed.count("ranks 0 and 1 never waited for all_reduce") == 2
    assert 'functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD)' in printed
    assert kit.run(lambda rank, world_size: rank, world_size=2)[1] == 1


def test_a_dtensor_that_nobody_uses_is_not_reported(capsys):
    def worker(rank, world_size):
        mesh = init_device_mesh("cpu", (2,))
        tensor = DTensor.from_local(torch.ones(2), mesh, [Partial()])
        tensor.redistribute(mesh, [Replicate()], async_op=True)

    called = {event.op for event in kit.run(worker, world_size=2).trace}
    assert "redistribute all_reduce" in called
    assert capsys.readouterr().out == ""


def test_two_calls_on_one_storage_are_awaited_at_once(capsys):
    def worker(rank, world_size):
        ops, mine = operators(), torch.ones(2)
        for part in mine.split(1):
            ops.all_reduce_(part, "sum", dist.group.WORLD.group_name)
        return ops.wait_tensor(mine).tolist()

    assert list(kit.run(worker, world_size=2)) == [[2.0, 2.0]] * 2
    assert capsys.readouterr().out == ""


def test_what_is_only_traced_or_faked_is_not_recorded():
    from torch._subclasses.fake_tensor import FakeTensorMode

    def worker(rank, world_size):
        with FakeTensorMode():
            functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD).sum()
        functional.all_reduce(torch.ones(2, device="meta"), "sum", dist.group.WORLD)

    assert len(kit.run(worker, world_size=2).trace) == 0


def test_a_compiled_function_is_recorded_when_it_runs():
    def worker(rank, world_size):
        def total(tensor):
            return functional.all_reduce(tensor, "sum", dist.group.WORLD) * 2

        compiled = torch.compile(total, backend="aot_eager", fullgraph=True)
        return [compiled(torch.full((2,), 1.0 + n)).tolist() for n in range(2)]  # here

    result = kit.run(worker, world_size=2)
    assert list(result) == [[[4.0, 4.0], [8.0, 8.0]]] * 2
    assert [event.op for event in of_rank(result.trace)] == ["all_reduce"] * 2
    assert all(event.end for event in result.trace)
    assert all(line(event).endswith("# here") for event in result.trace)


def test_what_breaks_the_graph_of_a_compiled_function_is_recorded():
    def worker(rank, world_size):
        @torch.compile(backend="eager")
        def swap(tensor):
            if rank == 0:
                dist.send(tensor, 1)
            else:
                dist.recv(tensor, 0)
            dist.barrier()
            return tensor * 2

        return swap(torch.full((1,), rank + 1.0)).item()

    result = kit.run(worker, world_size=2)
    assert list(result) == [2.0, 2.0]
    calls = [(event.op, line(event)) for event in of_rank(result.trace)]
    assert calls == [("send", "dist.send(tensor, 1)"), ("barrier", "dist.barrier()")]
