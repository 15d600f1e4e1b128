"""Runs a traced program in a PyTorch in which names were renamed, as a new release might do.

A program for tests/test_torch_internals.py: it reads a list of cases, each a list of names, and
prints the outcome of each. A case is a fork of this process, which has imported PyTorch but not the
kit, so the kit looks for its names in a PyTorch that really lacks them.
"""

from __future__ import annotations

import gc
import inspect
import json
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from types import CodeType, FunctionType
from typing import Any

import torch
import torch._dynamo  # DistributedDataParallel imports it, which takes a second: once is enough
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

gc.unfreeze()  # `gc.get_objects` leaves out what quick_imports has frozen
SUFFIX = "_renamed"
CALLERS = {  # the modules of Python code that use the names
    "torch.autograd",
    "torch.autograd.graph",
    "torch.distributed.algorithms.join",
    "torch.distributed.distributed_c10d",
    "torch.distributed.utils",
    "torch.nn.parallel.distributed",
}


class Missing:
    """An attribute that its class does not have."""

    def __get__(self, instance: Any, owner: type) -> Any:
        raise AttributeError


def rename(path: str) -> None:
    """Rename something in PyTorch, if this release has it, and its uses in PyTorch's own code."""
    module, _, names = path.partition(":")
    *owners, name = names.split(".")
    owner = import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    if not hasattr(owner, name):
        return
    if name in vars(type(owner)):  # a property
        owner = type(owner)
    setattr(owner, name + SUFFIX, inspect.getattr_static(owner, name))
    if name in vars(owner):
        delattr(owner, name)
    if isinstance(owner, type) and hasattr(owner, name):  # a class in C has it, too
        setattr(owner, name, Missing())
    if isinstance(owner, torch._ops._OpNamespace):  # which would look an operator up again
        find, lost = torch._ops._get_packet, f"{owner.name}::{name}"
        torch._ops._get_packet = lambda path, at: (None, []) if path == lost else find(path, at)
        return
    for caller in CALLERS:  # a function of the same name, such as dist.broadcast, keeps its own
        others = vars(import_module(caller))
        if name in others:
            others[name + SUFFIX] = others[name]
    for function in gc.get_objects():
        if isinstance(function, FunctionType) and function.__module__ in CALLERS:
            function.__code__ = _renamed(function.__code__, name)


def _renamed(code: CodeType, name: str) -> CodeType:
    names = tuple(n + SUFFIX if n == name else n for n in code.co_names)
    inner = (_renamed(c, name) if isinstance(c, CodeType) else c for c in code.co_consts)
    return code.replace(co_names=names, co_consts=tuple(inner))


def method(owner: Any, name: str) -> Callable:
    """Return a method of PyTorch, whatever its name is now."""
    return getattr(owner, name + SUFFIX, None) or getattr(owner, name)


def run_program(rank: int, store: str) -> dict[str, Any]:
    """Communicate in every way that the kit traces; return the results and the trace."""
    from ddp_kit import torch_internals
    from ddp_kit.trace import Board, InternTable, Snapshot, recording

    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    board, found = Board(), {}
    with recording(InternTable(board)):
        found["values"] = [collectives(rank), messages(rank), ddp(rank)]
        before = torch_internals.count_groups()
        pair = dist.new_group([0, 1], timeout=timedelta(seconds=60))
        dist.barrier(pair)
        found["a changed group is equal"] = before == torch_internals.count_groups()
        again = torch_internals.count_groups()
        found["an unchanged group is equal"] = again == torch_internals.count_groups()
    found["calls"] = [event.call for event in Snapshot(rank, board.read()).events]
    with recording(InternTable(board)):
        found["values"].append(functional(rank))
    found["calls"] += [f"functional {event.call}" for event in Snapshot(rank, board.read()).events]
    timeout = torch_internals.group_timeout(pair)
    found["timeout"] = None if timeout == timedelta.max else timeout.total_seconds()
    dist.destroy_process_group()
    torch_internals.restart_group_names()
    found["any group made"] = torch_internals.any_group_made()
    found["unawaited in a batch"] = batch(rank, board)
    board.close()
    found["notices"] = torch_internals.notices()
    return found


def collectives(rank: int) -> list:
    one, two = torch.tensor([rank + 1.0]), torch.arange(2.0) + rank
    ones, row, part = [torch.zeros(1), torch.zeros(1)], torch.zeros(2), torch.zeros(1)
    dist.broadcast(two, src=1)
    dist.all_reduce(one)
    dist.reduce(one, dst=0)
    dist.all_gather(ones, one)
    dist.all_gather_coalesced([[tensor] for tensor in ones], [one])  # one list for each rank
    dist.all_gather_into_tensor(row, one)
    dist.gather(one, ones if rank == 0 else None, dst=0)
    dist.scatter(one, ones if rank == 1 else None, src=1)
    dist.reduce_scatter(part, ones)
    dist.reduce_scatter_tensor(part, two)
    dist.all_to_all_single(row, two)
    dist.all_reduce_coalesced([one, two])
    dist.barrier()
    dist.monitored_barrier()
    world = dist.group.WORLD
    for name in ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"):
        if hasattr(world, name) or hasattr(world, name + SUFFIX):
            method(world, name)([row], [one]).wait()
    for name in ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"):
        if hasattr(world, name) or hasattr(world, name + SUFFIX):
            method(world, name)([part], [two]).wait()
    return [tensor.tolist() for tensor in (one, two, *ones, row, part)]


def functional(rank: int) -> list:
    one, two, name = (
        torch.tensor([rank + 1.0]),
        torch.arange(2.0) + rank,
        dist.group.WORLD.group_name,
    )

    def call(operator: str, *args: Any, **kwargs: Any) -> list:
        found = method(torch.ops._c10d_functional, operator)(*args, name, **kwargs)
        wait = method(torch.ops._c10d_functional, "wait_tensor")
        return [wait(t).tolist() for t in ([found] if isinstance(found, torch.Tensor) else found)]

    return [
        call("broadcast", two, 1),
        call("broadcast_", two.clone(), 1),
        call("all_reduce", one, "sum"),
        call("all_reduce_", one.clone(), "sum"),
        call("all_reduce_coalesced", [one, two], "max"),
        call("all_reduce_coalesced_", [one.clone(), two.clone()], "max"),
        call("all_gather_into_tensor", one, 2),
        call("all_gather_into_tensor_out", one, 2, out=torch.zeros(2)),
        call("all_gather_into_tensor_coalesced", [one, two], 2),
        call("reduce_scatter_tensor", two, "sum", 2),
        call("reduce_scatter_tensor_out", two, "sum", 2, out=torch.zeros(1)),
        call("reduce_scatter_tensor_coalesced", [two, two], "sum", 2),
        call("all_to_all_single", two, [1, 1], [1, 1]),
        method(torch.ops._dtensor, "shard_dim_alltoall")(two.view(1, 2), 0, 1, name).tolist(),
    ]


def messages(rank: int) -> list:
    number, taken = torch.tensor([rank + 5.0]), torch.zeros(1)
    if rank == 0:
        dist.send(number, 1, tag=3)
        dist.send(number, 1, tag=4)
    else:
        dist.recv(taken, 0, tag=3)
        dist.recv(taken, tag=4)
    both = [dist.P2POp(dist.isend, number, 1 - rank), dist.P2POp(dist.irecv, taken, 1 - rank)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    return taken.tolist()


def ddp(rank: int) -> list:
    """Step with and without hooks, and with a rank that runs out of data."""
    torch.manual_seed(0)
    found = []
    for hook in ("none", "learner's", "built in"):
        inner = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        model = DistributedDataParallel(inner, bucket_cap_mb=1e-5)
        if hook == "learner's":
            model.register_comm_hook(None, allreduce_hook)
        if hook == "built in":
            method(model, "_register_builtin_comm_hook")(dist.BuiltinCommHookType.ALLREDUCE)
        for _ in range(2):
            model(torch.randn(4, 2) * (rank + 1)).pow(3).sum().backward()
        found += [parameter.grad.tolist() for parameter in model.parameters()]
    model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    with model.join(divide_by_initial_world_size=False):
        for step in range(1 + rank):
            model.zero_grad()
            model(torch.tensor([[1.0 + step]])).sum().backward()
            found.append(model.module.weight.grad.item())
    model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False), find_unused_parameters=True)
    model(torch.ones(1, 1)).sum().backward()
    found.append(model.module.weight.grad.item())
    return found


def batch(rank: int, board: Any) -> int:
    """Return how many operations of a batch look as if nobody had waited for them."""
    from ddp_kit.trace import InternTable, Snapshot, recording

    dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
    with recording(InternTable(board)):
        with dist._coalescing_manager(None, torch.device("cpu"), async_ops=True) as work:
            dist.isend(torch.ones(1), 1 - rank)
            dist.irecv(torch.ones(1), 1 - rank)
        work.wait()
    return len(Snapshot(rank, board.read()).unawaited)


def fork(run: Callable[[], Any]) -> Callable[[], Any]:
    """Run a function in a fork of this process; return a function that waits for its result."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            try:
                found = run()
            except BaseException:
                found = traceback.format_exc()
            with open(writing, "w") as file:
                json.dump(found, file)
        finally:
            os._exit(0)
    os.close(writing)

    def result() -> Any:
        with open(reading) as file:
            text = file.read()
        os.waitpid(child, 0)
        return json.loads(text) if text else "died"

    return result


def run_case(names: list[str]) -> list:
    """Return what two ranks found in a PyTorch without these names."""
    for name in names:
        rename(name)
    import ddp_kit.trace  # noqa: F401 - once for both ranks

    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        return [result() for result in [fork(lambda r=r: run_program(r, store)) for r in (0, 1)]]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    json.dump([fork(lambda c=case: run_case(c))() for case in json.load(sys.stdin)], sys.stdout)
