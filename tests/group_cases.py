"""The cases of `group_program.py`: collectives compared with gloo, and what gloo has not.

A function in COMPARED runs twice, once in a group of the backend and once in one of gloo, with the
same random tensors, and returns tensors that must be equal. One in OWN checks itself.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import signal
import weakref
from collections.abc import Callable
from datetime import timedelta
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from ddp_kit.backends import process_group

Group = dist.ProcessGroup
COMPARED: dict[str, Callable] = {}
OWN: dict[str, Callable] = {}
ONLY_MPI = ("memory_stays_reserved_after_a_timeout",)  # it cannot take a receive back

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)
MOVED = (*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.complex128)
REDUCED = {
    "SUM": (*FLOATS, *INTEGERS, torch.bool),
    "AVG": FLOATS,
    "PRODUCT": (*FLOATS, *INTEGERS, torch.bool),
    "MIN": (*FLOATS, *INTEGERS, torch.bool),
    "MAX": (*FLOATS, *INTEGERS, torch.bool),
    "BAND": (*INTEGERS, torch.bool),
    "BOR": (*INTEGERS, torch.bool),
    "BXOR": (*INTEGERS, torch.bool),
}


def compared(function: Callable) -> Callable:
    COMPARED[function.__name__] = function
    return function


def between_ranks(function: Callable) -> Callable:
    """Register a case for at least two ranks: a gloo rank cannot send to itself."""
    COMPARED[function.__name__] = lambda group: function(group) if group.size() > 1 else []
    return function


def own(function: Callable) -> Callable:
    OWN[function.__name__] = function
    return function


def of_each_op(function: Callable) -> Callable:
    """Register a case for each ReduceOp."""
    for name in REDUCED:
        COMPARED[f"{function.__name__}_{name}"] = lambda group, name=name: function(
            group, getattr(dist.ReduceOp, name), REDUCED[name]
        )
    return function


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return small random numbers, which no dtype rounds much."""
    if dtype is torch.bool:
        return torch.rand(shape) < 0.5
    if dtype.is_floating_point or dtype.is_complex:
        return (torch.randn(shape) * 2).to(dtype) + (
            torch.rand(shape).to(dtype) * 1j if dtype.is_complex else 0
        )
    return torch.randint(0, 4, shape).to(dtype)


def as_truth_values(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return bool as numbers: gloo's sum of True and True is a bool with a 2 in its byte."""
    return [t.view(torch.uint8) != 0 if t.dtype is torch.bool else t for t in tensors]


# Reductions


@of_each_op
def all_reduce(group, op, dtypes):
    tensors = [random(7, dtype=dtype) for dtype in dtypes]
    for tensor in tensors:
        dist.all_reduce(tensor, op, group=group)
    return as_truth_values(tensors)


@of_each_op
def reduce(group, op, dtypes):
    results = []
    for dtype in dtypes:
        for root in {0, group.size() - 1}:
            tensor = random(5, dtype=dtype)
            dist.reduce(tensor, group_dst=root, op=op, group=group)
            results += [tensor] if group.rank() == root else []
    return as_truth_values(results)


@of_each_op
def reduce_scatter(group, op, dtypes):
    results = []
    for dtype in dtypes:
        pieces = [random(2, 3, dtype=dtype) for _ in range(group.size())]
        output = torch.empty(2, 3, dtype=dtype)
        dist.reduce_scatter(output, pieces, op, group=group)
        results.append(output)
    return as_truth_values(results)


@of_each_op
def reduce_scatter_single(group, op, dtypes):
    results = []
    for dtype in dtypes:
        output = torch.empty(2, 3, dtype=dtype)
        group_input = random(2 * group.size(), 3, dtype=dtype)
        dist.reduce_scatter_tensor(output, group_input, op, group=group)
        results.append(output)
    return as_truth_values(results)


@compared
def all_reduce_of_complex_numbers(group):
    tensors = [random(4, dtype=torch.complex64), random(4, dtype=torch.complex128)]
    for tensor in tensors:
        dist.all_reduce(tensor, group=group)
        dist.all_reduce(tensor, dist.ReduceOp.AVG, group=group)
    return tensors


@compared
def all_reduce_coalesced(group):
    tensors = [random(3), random(2, 2), random(0)]
    dist.all_reduce_coalesced(tensors, group=group)
    return tensors


@compared
def coalescing_manager(group):
    tensors = [random(3), random(4)]
    with dist._coalescing_manager(group=group):
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    gathered = [torch.empty(2 * group.size()) for _ in range(2)]
    sources = [random(2), random(2)]
    with dist._coalescing_manager(group=group, async_ops=True) as manager:
        for output, source in zip(gathered, sources, strict=True):
            dist.all_gather_into_tensor(output, source, group=group)
    manager.wait()
    parts = [torch.empty(2) for _ in range(2)]
    sources = [random(2 * group.size()), random(2 * group.size())]
    with dist._coalescing_manager(group=group):
        for output, source in zip(parts, sources, strict=True):
            dist.reduce_scatter_tensor(output, source, group=group)
    return tensors + gathered + parts


# Moving


@compared
def broadcast(group):
    tensors = [random(3, 2, dtype=dtype) for dtype in MOVED for _ in range(group.size())]
    for i, tensor in enumerate(tensors):
        dist.broadcast(tensor, group_src=i % group.size(), group=group)
    return tensors


@compared
def all_gather(group):
    results = []
    for dtype in MOVED:
        outputs = [torch.empty(3, dtype=dtype) for _ in range(group.size())]
        dist.all_gather(outputs, random(3, dtype=dtype), group=group)
        results += outputs
    return results


@compared
def all_gather_single(group):
    results = []
    for dtype in MOVED:
        flat = torch.empty(3 * group.size(), dtype=dtype)
        dist.all_gather_into_tensor(flat, random(3, dtype=dtype), group=group)
        results.append(flat)
    return results


@compared
def all_gather_coalesced(group):
    outputs = [[torch.empty(3), torch.empty(2, 2)] for _ in range(group.size())]
    dist.all_gather_coalesced(outputs, [random(3), random(2, 2)], group=group)
    return [tensor for tensors in outputs for tensor in tensors]


@compared
def gather(group):
    results = []
    for dtype in (*FLOATS, *INTEGERS, torch.bool):
        for root in range(group.size()):
            here = group.rank() == root
            outputs = [torch.empty(3, dtype=dtype) for _ in range(group.size())] if here else None
            dist.gather(random(3, dtype=dtype), outputs, group_dst=root, group=group)
            results += outputs or []
    return results


@compared
def scatter(group):
    results = []
    for dtype in MOVED:
        for root in range(group.size()):
            here = group.rank() == root
            pieces = [random(3, dtype=dtype) for _ in range(group.size())] if here else None
            output = torch.empty(3, dtype=dtype)
            dist.scatter(output, pieces, group_src=root, group=group)
            results.append(output)
    return results


@compared
def all_to_all(group):
    results = []
    for dtype in MOVED:
        outputs = [torch.empty(2, dtype=dtype) for _ in range(group.size())]
        pieces = [random(2, dtype=dtype) for _ in range(group.size())]
        dist.all_to_all(outputs, pieces, group=group)
        results += outputs
    return results


@compared
def all_to_all_single(group):
    results = []
    for dtype in MOVED:
        output = torch.empty(2 * group.size(), 3, dtype=dtype)
        source = random(2 * group.size(), 3, dtype=dtype)
        dist.all_to_all_single(output, source, group=group)
        results.append(output)
    return results


@compared
def all_to_all_single_with_uneven_splits(group):
    rank, size = group.rank(), group.size()
    to = [(rank + peer) % 3 for peer in range(size)]
    of = [(peer + rank) % 3 for peer in range(size)]
    output = torch.empty(sum(of), 2)
    dist.all_to_all_single(output, random(sum(to), 2), of, to, group=group)
    return [output]


@compared
def empty_tensors(group):
    tensor, flat = random(0), torch.empty(0)
    dist.all_reduce(tensor, group=group)
    dist.broadcast(tensor, group_src=0, group=group)
    dist.all_gather_into_tensor(flat, tensor, group=group)
    return [tensor, flat]


@compared
def zero_dimensional_tensors(group):
    number = torch.tensor(float(group.rank() + 1))
    outputs = [torch.empty(()) for _ in range(group.size())]
    dist.all_gather(outputs, number, group=group)
    dist.all_reduce(number, group=group)
    last = torch.tensor(group.rank())
    dist.broadcast(last, group_src=group.size() - 1, group=group)
    return [number, last, *outputs]


@compared
def barrier_and_its_async_form(group):
    dist.barrier(group)
    assert dist.barrier(group, async_op=True).wait()
    dist.barrier(group, timeout=timedelta(seconds=20))
    return []


@compared
def async_forms(group):
    size, here = group.size(), group.rank() == 0
    one, several = random(4), [random(4) for _ in range(size)]
    outputs = [[torch.empty(4) for _ in range(size)] for _ in range(3)]
    singles = [torch.empty(4) for _ in range(3)]
    flats = [torch.empty(4 * size) for _ in range(2)]
    row = random(4 * size)
    reduced, sent = random(4), random(4)
    works = [
        dist.all_reduce(reduced, group=group, async_op=True),
        dist.broadcast(sent, group_src=0, group=group, async_op=True),
        dist.all_gather(outputs[0], one, group=group, async_op=True),
        dist.all_to_all(outputs[1], several, group=group, async_op=True),
        dist.gather(one, outputs[2] if here else None, group_dst=0, group=group, async_op=True),
        dist.scatter(
            singles[0], several if here else None, group_src=0, group=group, async_op=True
        ),
        dist.reduce_scatter(singles[1], several, group=group, async_op=True),
        dist.reduce_scatter_tensor(singles[2], row, group=group, async_op=True),
        dist.all_gather_into_tensor(flats[0], one, group=group, async_op=True),
        dist.all_to_all_single(flats[1], row, group=group, async_op=True),
    ]
    for work in reversed(works):
        assert work.wait()
    results = [reduced, sent, *outputs[0], *outputs[1], *singles, *flats]
    return results + (outputs[2] if here else [])


@compared
def functional_collectives(group):
    results = [
        functional.all_reduce(random(3), "sum", group),
        functional.all_gather_tensor(random(2), 0, group),
        functional.reduce_scatter_tensor(random(2 * group.size()), "avg", 0, group),
        functional.all_to_all_single(random(group.size()), None, None, group),
        functional.broadcast(random(3), 0, group),
    ]
    return [functional.wait_tensor(result) for result in results]


# Messages


@between_ranks
def send_and_recv_around_a_ring(group):
    rank, size = group.rank(), group.size()
    results = []
    for dtype in MOVED:
        output = torch.empty(3, dtype=dtype)
        work = dist.isend(random(3, dtype=dtype), group_dst=(rank + 1) % size, group=group)
        source = dist.irecv(output, group_src=(rank - 1) % size, group=group)
        source.wait()
        work.wait()
        results.append(output)
    return results


@between_ranks
def messages_by_tag_in_another_order(group):
    rank, size = group.rank(), group.size()
    outputs = [torch.empty(2) for _ in range(3)]
    tensors = [random(2) for _ in range(3)]
    to, of = (rank + 1) % size, (rank - 1) % size
    works = [
        dist.isend(tensor, group_dst=to, group=group, tag=tag) for tag, tensor in enumerate(tensors)
    ]
    for tag in (2, 0, 1):
        dist.irecv(outputs[tag], group_src=of, group=group, tag=tag).wait()
    for work in works:
        work.wait()
    return outputs


@between_ranks
def batch_isend_irecv(group):
    rank, size = group.rank(), group.size()
    output = torch.empty(4)
    ops = [
        dist.P2POp(dist.irecv, output, group=group, group_peer=(rank - 1) % size),
        dist.P2POp(dist.isend, random(4), group=group, group_peer=(rank + 1) % size),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return [output]


@between_ranks
def large_messages_both_ways_at_once(group):
    rank, size = group.rank(), group.size()
    output = torch.empty(200_000)
    works = [
        dist.isend(random(200_000), group_dst=(rank + 1) % size, group=group),
        dist.irecv(output, group_src=(rank - 1) % size, group=group),
    ]
    for work in works:
        work.wait()
    return [output]


@own
def a_message_to_its_own_rank(group):
    tensor = torch.empty(2)
    work = dist.isend(torch.tensor([1.0, 2.0]), group_dst=group.rank(), group=group)
    dist.irecv(tensor, group_src=group.rank(), group=group).wait()
    work.wait()
    same([tensor], [torch.tensor([1.0, 2.0])])


@own
def any_source_of_irecv(group):
    if group.rank():
        dist.send(torch.tensor([10.0 * group.rank()]), 0, group=group)
        return
    for _ in range(group.size() - 1):
        tensor = torch.empty(1)
        work = dist.irecv(tensor, group=group)
        work.wait()
        assert tensor.item() == 10.0 * work._source_rank()


@own
def objects(group):
    rank, size = group.rank(), group.size()
    outputs = [None] * size
    dist.all_gather_object(outputs, {"rank": rank, "text": "x" * rank}, group=group)
    assert outputs == [{"rank": r, "text": "x" * r} for r in range(size)]
    shared = [("from", 0), None] if rank == 0 else [None, 1]
    dist.broadcast_object_list(shared, src=0, group=group)
    assert shared == [("from", 0), None]
    gathered = [None] * size if rank == 0 else None
    dist.gather_object("r" * rank, gathered, dst=0, group=group)
    assert rank or gathered == ["r" * r for r in range(size)]
    part = [None]
    dist.scatter_object_list(part, [f"part {r}" for r in range(size)], src=0, group=group)
    assert part == [f"part {rank}"]
    if size > 1 and rank == 0:
        dist.send_object_list([1, "two"], dst=1, group=group)
    elif rank == 1:
        received = [None, None]
        dist.recv_object_list(received, src=0, group=group)
        assert received == [1, "two"]


@own
def lists_of_uneven_sizes(group):
    rank, size = group.rank(), group.size()
    every = [torch.full((r + 1,), float(r)) for r in range(size)]
    outputs = [torch.empty(r + 1) for r in range(size)]
    dist.all_gather(outputs, every[rank], group=group)
    same(outputs, every)
    outputs = [torch.empty(r + 1) for r in range(size)]
    dist.gather(every[rank], outputs if rank == 0 else None, group=group, group_dst=0)
    same(outputs if rank == 0 else every, every)
    output = torch.empty(rank + 1)
    dist.scatter(output, every if rank == 0 else None, group=group, group_src=0)
    same([output], [every[rank]])
    dist.reduce_scatter(output, every, group=group)
    same([output], [every[rank] * size])
    outputs = [torch.empty(rank + 2 * r) for r in range(size)]
    dist.all_to_all(
        outputs, [torch.full((r + 2 * rank,), float(rank)) for r in range(size)], group=group
    )
    same(outputs, [torch.full((rank + 2 * r,), float(r)) for r in range(size)])


@own
def non_contiguous_tensors(group):
    rank, size = group.rank(), group.size()
    base = torch.arange(12.0).view(3, 4)
    tensor = base.clone().T
    dist.all_reduce(tensor, group=group)
    same([tensor], [base.T * size])
    tensor = (base + rank).clone()[:, ::2]
    dist.broadcast(tensor, group_src=size - 1, group=group)
    same([tensor], [(base + size - 1)[:, ::2]])
    outputs = [torch.zeros(4, 3).T for _ in range(size)]
    dist.all_gather(outputs, (base + rank).T.contiguous().T, group=group)
    same(outputs, [base + r for r in range(size)])
    whole = torch.zeros(4, 3 * size).T
    dist.all_gather_into_tensor(whole, base + rank, group=group)
    same([whole], [torch.cat([base + r for r in range(size)])])
    part = torch.zeros(4, 3).T
    dist.reduce_scatter_tensor(part, torch.cat([base] * size), group=group)
    same([part], [base * size])
    work = dist.isend(base.T, group_dst=(rank + 1) % size, group=group)
    tensor = torch.zeros(6, 4)[::2].T
    dist.irecv(tensor, group_src=(rank - 1) % size, group=group).wait()
    work.wait()
    same([tensor], [base.T])
    conjugate = torch.tensor([1 + 2j]).conj()
    outputs = [torch.empty(1, dtype=torch.complex64) for _ in range(size)]
    group.allgather([outputs], [conjugate]).wait()
    same(outputs, [torch.tensor([1 - 2j])] * size)


@own
def input_that_is_a_part_of_the_output(group):
    rank, size = group.rank(), group.size()
    whole = torch.zeros(2 * size)
    part = whole[2 * rank : 2 * rank + 2]
    part += rank + 1.0
    dist.all_gather_into_tensor(whole, part, group=group)
    expected = torch.arange(1.0, size + 1).repeat_interleave(2)
    same([whole], [expected])
    dist.reduce_scatter_tensor(part, whole, group=group)
    same([part], [torch.full((2,), (rank + 1.0) * size)])


@own
def dtypes_that_gloo_lacks(group):
    for dtype in (torch.int16, torch.float8_e4m3fn):
        tensor = torch.tensor([1.0, 2.0]).to(dtype)
        dist.all_reduce(tensor, group=group)
        same([tensor.float()], [torch.tensor([1.0, 2.0]) * group.size()])
        dist.broadcast(tensor, group_src=0, group=group)


@own
def small_floats_are_rounded_once(group):
    """256 and several ones: a sum in bfloat16 would stay at 256 forever."""
    for dtype, large in ((torch.bfloat16, 256.0), (torch.float16, 2048.0)):
        tensor = torch.tensor([large if group.rank() == 0 else 1.0]).to(dtype)
        dist.all_reduce(tensor, group=group)
        expected = torch.tensor([large + group.size() - 1]).to(dtype)
        same([tensor], [expected])


@own
def a_leaf_that_requires_grad(group):
    for dtype in (torch.float32, torch.bfloat16):  # the second is copied, and rounded at the end
        parameter = torch.nn.Parameter(torch.ones(2, 2, dtype=dtype))
        dist.all_reduce(parameter, group=group)
        dist.broadcast(parameter, group_src=0, group=group)
        same([parameter.detach()], [torch.full((2, 2), float(group.size()), dtype=dtype)])


@own
def a_future_completes_without_a_wait(group):
    tensor = torch.ones(2)
    future = dist.all_reduce(tensor, group=group, async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    same([doubled.wait()], [torch.full((2,), 2.0 * group.size())])


@own
def callbacks_start_operations_and_wait_for_them(group):
    def add(count, _):
        tensor = torch.ones(1)
        future = dist.all_reduce(tensor, group=group, async_op=True).get_future()
        if count:
            future = future.then(functools.partial(add, count - 1))
        future.wait()
        later.wait()  # it began before the callback
        return tensor

    first = dist.all_reduce(torch.ones(100_000), group=group, async_op=True).get_future()
    later = dist.all_reduce(torch.ones(100_000), group=group, async_op=True).get_future()
    same([first.then(functools.partial(add, 5)).wait()], [torch.full((1,), float(group.size()))])


@own
def a_hook_of_ddp_starts_collectives_in_callbacks(group):
    state = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2)
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 16), process_group=group)
    net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(4):
        net(torch.full((2, 16), group.rank() + 1.0)).sum().backward()
    sums = torch.full((16, 16), 4.0 * (group.size() + 1))  # of 4 steps, 2 rows, the mean input
    torch.testing.assert_close(net.module.weight.grad, sums)


@own
def only_gloo_has_monitored_barrier(group):
    with raises(ValueError, "monitored_barrier is only implemented for GLOO"):
        dist.monitored_barrier(group)


@own
def a_message_whose_work_was_dropped_arrives(group):
    rank, size = group.rank(), group.size()
    dist.isend(torch.full((100_000,), float(rank)), group_dst=(rank + 1) % size, group=group)
    tensor = torch.empty(100_000)
    dist.irecv(tensor, group_src=(rank - 1) % size, group=group).wait()
    same([tensor], [torch.full((100_000,), float((rank - 1) % size))])
    dist.barrier(group)


@own
def many_operations_in_flight(group):
    rank, size = group.rank(), group.size()
    outputs = [torch.empty(3) for _ in range(100)]
    works = []
    for i, output in enumerate(outputs):
        sent = torch.full((3,), float(i))
        works.append(dist.isend(sent, group_dst=(rank + 1) % size, group=group, tag=i))
        works.append(dist.irecv(output, group_src=(rank - 1) % size, group=group, tag=i))
        works.append(dist.all_reduce(torch.ones(1), group=group, async_op=True))
    for work in works:
        work.wait()
    same(outputs, [torch.full((3,), float(i)) for i in range(100)])


@own
def a_wait_times_out_and_can_be_repeated(group):
    rank, size = group.rank(), group.size()
    tensor = torch.empty(1)
    work = dist.irecv(tensor, group_src=(rank - 1) % size, group=group, tag=9)
    with raises(RuntimeError, "Timed out waiting 50ms for recv operation to complete"):
        work.wait(timedelta(milliseconds=50))
    assert not work.is_completed()
    dist.barrier(group)
    dist.isend(torch.tensor([3.0]), group_dst=(rank + 1) % size, group=group, tag=9).wait()
    work.wait()
    assert work.is_success()
    assert tensor.item() == 3.0


@own
def the_timeout_of_a_group_ends_an_operation(group):
    limited = dist.new_group(backend=dist.get_backend())
    limited.set_timeout(timedelta(milliseconds=300))  # not for connecting
    with raises(RuntimeError, "Timed out waiting 300ms for recv operation to complete"):
        dist.irecv(torch.empty(1), group_src=0, group=limited, tag=1).wait()
    work = dist.irecv(torch.empty(1), group_src=0, group=limited, tag=2)
    with raises(RuntimeError, "Timed out waiting 300ms for recv operation to complete"):
        work.get_future().wait()
    assert work.is_completed()
    assert not work.is_success()
    assert "Timed out" in str(work.exception())
    if group.rank() == 0 and group.size() > 1:
        # The space is for programs that look for gloo's words, as PyTorch's own tests do.
        with raises(RuntimeError, " Timed out waiting 40ms for barrier operation"):
            dist.barrier(limited, timeout=timedelta(milliseconds=40))


@own
def memory_stays_reserved_after_a_timeout(group):
    """MPI may still write into the contiguous copy that a strided receive needs."""
    made, make = [], process_group.target_of

    def recorded(tensor):
        buffer = make(tensor)
        made.append(weakref.ref(buffer))
        return buffer

    limited = dist.new_group(backend=dist.get_backend())
    limited.set_timeout(timedelta(milliseconds=100))
    with patch.object(process_group, "target_of", recorded):
        work = dist.irecv(torch.zeros(4)[::2], group_src=0, group=limited, tag=1)
    with raises(RuntimeError, "Timed out waiting 100ms for recv operation to complete"):
        work.wait()
    del work
    gc.collect()
    assert [ref() for ref in made] != [None]


@own
def a_signal_interrupts_a_wait(group):
    def stop(*_):
        raise InterruptedError("enough")

    before = signal.signal(signal.SIGALRM, stop)
    work = dist.irecv(torch.empty(1), group_src=group.rank(), group=group, tag=77)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with raises(InterruptedError, "enough"):
            work.wait()
    finally:
        signal.signal(signal.SIGALRM, before)
    dist.isend(torch.ones(1), group_dst=group.rank(), group=group, tag=77).wait()
    work.wait()


# Groups


@own
def sub_groups(group):
    rank, size = dist.get_rank(), dist.get_world_size()
    even = dist.new_group(list(range(0, size, 2)), backend=dist.get_backend())
    if rank % 2 == 0:
        tensor = torch.tensor([rank])
        dist.all_reduce(tensor, group=even)
        assert tensor.item() == sum(range(0, size, 2))
        dist.broadcast(tensor, src=2 * (even.size() - 1), group=even)
        output = [torch.empty(1) for _ in range(even.size())]
        dist.all_gather(output, torch.tensor([float(rank)]), group=even)
        assert [one.item() for one in output] == list(range(0, size, 2))
        assert dist.get_group_rank(even, rank) == rank // 2
        dist.destroy_process_group(even)
    else:
        assert even is dist.GroupMember.NON_GROUP_MEMBER


@own
def a_group_in_an_order_of_its_own(group):
    size = dist.get_world_size()
    turned = dist.new_group(
        list(reversed(range(size))), sort_ranks=False, backend=dist.get_backend()
    )
    assert dist.get_rank(turned) == size - 1 - dist.get_rank()
    tensor = torch.tensor([dist.get_rank()])
    dist.broadcast(tensor, group_src=0, group=turned)
    assert tensor.item() == size - 1


@own
def a_member_that_never_joins(group):
    if group.size() == 1 or dist.get_backend() == "mpi4py":  # MPI waits without a limit
        return
    limit = timedelta(milliseconds=300)
    if dist.get_rank() == 0:
        with raises(RuntimeError, "Timed out waiting 300ms for new_group"):
            dist.new_group(
                [0, 1], timeout=limit, backend=dist.get_backend(), use_local_synchronization=True
            )
    dist.barrier(group)
    if dist.get_rank() < 2:  # the same name again: the first attempt left nothing in the way
        pair = dist.new_group([0, 1], backend=dist.get_backend(), use_local_synchronization=True)
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=pair)
        assert tensor.item() == 2


@own
def a_destroyed_group(group):
    made = dist.new_group(backend=dist.get_backend())
    dist.destroy_process_group(made)
    with raises(RuntimeError, "this process group was destroyed"):
        made.allreduce([torch.ones(1)])


# Errors


@own
def what_a_backend_cannot_do_is_refused(group):
    size, one = group.size(), torch.ones(2)
    with raises(ValueError, "ReduceOp.BAND needs integers or bool, got torch.float32"):
        dist.all_reduce(one, dist.ReduceOp.BAND, group=group)
    with raises(ValueError, "ReduceOp.AVG needs floating point or complex numbers"):
        dist.all_reduce(one.int(), dist.ReduceOp.AVG, group=group)
    with raises(ValueError, "ReduceOp.MIN needs real numbers, got torch.complex64"):
        dist.reduce_scatter_tensor(
            one[:1].cfloat(), one[:1].repeat(size).cfloat(), dist.ReduceOp.MIN, group=group
        )
    with raises(RuntimeError, "copy it to the CPU first, or use gloo or nccl"):
        dist.all_reduce(torch.ones(2, device="meta"), group=group)
    with raises(RuntimeError, "supports dense tensors only, got layout torch.sparse_coo"):
        dist.all_reduce(one.to_sparse(), group=group)
    with raises(ValueError, "needs one output tensor for each of the"):
        group.allgather([[one] * (size + 1)], [one])
    with raises(ValueError, "parts of 2 elements, got 3 elements"):
        dist.all_gather_into_tensor(torch.empty(3), torch.ones(2), group=group)
    with raises(ValueError, f"numbers that add up to its {size} rows"):
        rows = torch.ones(size)
        dist.all_to_all_single(rows, rows.clone(), [2] * size, None, group=group)
    with raises(ValueError, "has 2 elements, but its counterpart on this rank has 3"):
        group.alltoall([torch.ones(3)] * size, [torch.ones(2)] * size)
    if dist.get_backend() == "mpi4py":
        words = "MPI moves at most 2147483647 elements at once, got 2147483648"
        with raises(ValueError, words):
            group.broadcast([torch.empty(2**31, dtype=torch.uint8)])
    with raises(ValueError, f"there is no rank {size + 5} in a group of {size}"):
        group.send([one], size + 5, 0)


@own
def a_message_of_another_size_is_refused(group):
    rank, size = group.rank(), group.size()
    to, of = (rank + 1) % size, (rank - 1) % size
    large = "MPI_ERR_TRUNCATE" if dist.get_backend() == "mpi4py" else f"got 20 bytes from rank {of}"
    for count, words in ((5, large), (1, f"got 4 bytes from rank {of}")):
        work = dist.isend(torch.ones(count), group_dst=to, group=group, tag=3)
        with raises(RuntimeError, words):
            dist.irecv(torch.empty(3), group_src=of, group=group, tag=3).wait()
        work.wait()
    dist.barrier(group)


# PyTorch on top


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.Linear(64, 3)
        )
        self.norm = torch.nn.BatchNorm1d(8)  # its buffers are broadcast in each forward

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(self.norm(inputs))


def trained(group: Group, hook: Callable | None = None, **options) -> list[torch.Tensor]:
    """Train three steps with DDP; return the gradients and the parameters."""
    seed = torch.initial_seed()
    torch.manual_seed(7 + group.rank())  # DDP has to make the starts equal
    net = torch.nn.parallel.DistributedDataParallel(
        Net(), process_group=group, bucket_cap_mb=0.01, **options
    )
    torch.manual_seed(seed)
    if hook is not None:
        net.register_comm_hook(group, hook)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        net(random(5, 8)).square().mean().backward()
        optimizer.step()
    state = [value.detach().clone() for value in net.state_dict().values()]
    return [parameter.grad.clone() for parameter in net.parameters()] + state


@compared
def ddp(group):
    return trained(group)


@compared
def ddp_with_static_graph_and_views(group):
    return trained(group, static_graph=True, gradient_as_bucket_view=True)


@compared
def ddp_with_a_hook_of_pytorch(group):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    return trained(group, allreduce_hook)


@compared
def ddp_with_uneven_batches_and_an_unused_parameter(group):
    torch.manual_seed(7)
    layer = torch.nn.Linear(3, 2)
    layer.unused = torch.nn.Parameter(torch.ones(2))
    net = torch.nn.parallel.DistributedDataParallel(
        layer, process_group=group, find_unused_parameters=True
    )
    with net.join():
        for _ in range(1 + group.rank()):
            net(torch.ones(1, 3)).sum().backward()
    return [torch.zeros(0) if p.grad is None else p.grad for p in net.parameters()]


@own
def ddp_raises_the_timeout_of_its_group(group):
    if group.size() == 1:
        return
    limited = dist.new_group(backend=dist.get_backend())
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), process_group=limited)
    loss = net(torch.ones(1, 2)).sum()
    limited.set_timeout(timedelta(seconds=1))
    if group.rank() == 0:
        with raises(RuntimeError, "Timed out waiting 1000ms for allreduce"):
            loss.backward()


@compared
def fully_sharded(group):
    """Train two steps with FSDP2 on the CPU; return the whole parameters."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    seed = torch.initial_seed()
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.ReLU(), torch.nn.Linear(10, 5))
    torch.manual_seed(seed)
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        net(random(4, 6)).square().sum().backward()
        optimizer.step()
    return [parameter.full_tensor().detach() for parameter in net.parameters()]


def same(results: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    torch.testing.assert_close(results, expected, rtol=0, atol=0)


@contextlib.contextmanager
def raises(kind: type[Exception], words: str):
    try:
        yield
    except kind as error:
        if words not in str(error):
            raise AssertionError(f"{words!r} is not in {str(error)!r}") from error
    else:
        raise AssertionError(f"no {kind.__name__} with {words!r}")
