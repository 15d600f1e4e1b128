"""The process group of `mpi`: its collectives and messages as calls of MPI, on MPI's types."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddp_kit.backends import process_group
from ddp_kit.backends.mpi import NAME, load_mpi, work
from ddp_kit.backends.mpi.work import MPIWork
from ddp_kit.backends.process_group import PythonProcessGroup, copy_back

# It yields one request of MPI, whose memory it keeps alive, and does the rest once it is complete.
Steps = Iterator[Any]

_MOST = 2**31 - 1  # MPI counts in a C int


class MPIProcessGroup(PythonProcessGroup):
    """A process group whose messages travel through MPI, on a communicator of its own.

    Every operation starts in the caller's thread, in the order of the program, with a nonblocking
    call of MPI. `Work.wait` polls until it is complete; the watcher of `work` polls what nobody
    waits for, so that futures complete. One lock is held around all calls of MPI.

    MPI uses the memory of the tensors, which must be on the CPU. It is copied if a tensor is not
    contiguous, where ranks have parts of their own, and if MPI has no type to compute in (see
    `_reduction`).

    A small message is buffered by MPI: `send` then returns before the other rank receives. A
    message that is larger or smaller than the receiver's tensor raises an error there.

    After its timeout an operation raises RuntimeError. MPI cannot cancel a collective: its
    tensors stay reserved, and the ranks should end.

    DistributedDataParallel, with and without a communication hook, and
    `torch.distributed.fsdp.fully_shard` on the CPU work with it; tests/test_mpi.py compares both
    with gloo. Also tried by hand: `fully_shard` on a mesh of two dimensions, in bfloat16, with
    gradient clipping and a full state dict. The README has a table of what this backend lacks.

    timeout: seconds until an operation fails. frees_communicator: whether `shutdown` does.
    """

    def __init__(self, communicator: Any, timeout: float, frees_communicator: bool = True) -> None:
        rank, size = communicator.Get_rank(), communicator.Get_size()
        super().__init__(NAME, rank, size, timeout, MPICollectives(communicator))
        self._communicator = communicator
        self._frees_communicator = frees_communicator

    def shutdown(self) -> None:
        communicator, self._communicator = self._communicator, None
        if communicator is None or not self._frees_communicator or work.unfinished():
            return  # MPI_Finalize frees it
        with work.lock:
            communicator.Free()

    def _send(self, call: process_group.Call, data: Tensor, target: int, tag: int) -> MPIWork:
        call.steps.append(self._collectives.send(data, target, tag))
        return self._start(call)

    def _receive(
        self, call: process_group.Call, buffer: Tensor, source: int | None, tag: int
    ) -> MPIWork:
        call.steps.append(self._collectives.receive(buffer, source, tag))
        return self._start(call, expected=buffer.nbytes)

    def _start(self, call: process_group.Call, expected: int | None = None) -> MPIWork:
        if self._communicator is None:
            raise RuntimeError(f"{call.name}: this process group was destroyed")
        try:
            return MPIWork(call.name, call.steps, call.timeout, call.outputs, call.finish, expected)
        except load_mpi().Exception as error:
            raise RuntimeError(work.format_error(call.name, error)) from None


class MPICollectives:
    """The collectives and messages of one rank in a group; see `process_group.Collectives`."""

    def __init__(self, communicator: Any) -> None:
        self._comm = communicator
        self._rank, self._size = communicator.Get_rank(), communicator.Get_size()

    def send(self, data: Tensor, target: int, tag: int) -> Steps:
        yield _begin(self._comm.Isend, _describe(data), target, tag)

    def receive(self, buffer: Tensor, source: int | None, tag: int) -> Steps:
        source = load_mpi().ANY_SOURCE if source is None else source
        yield _begin(self._comm.Irecv, _describe(buffer), source, tag)

    def barrier(self) -> Steps:
        yield _begin(self._comm.Ibarrier)

    def broadcast(self, data: Tensor, root: int) -> Steps:
        yield _begin(self._comm.Ibcast, _describe(data), root)

    def all_gather(self, data: Tensor, outputs: Sequence[Tensor]) -> Steps:
        counts = [len(output) for output in outputs]
        whole = data.new_empty(sum(counts))
        yield _begin(self._comm.Iallgatherv, _describe(data), _describe(whole, counts))
        copy_back(outputs, whole.split(counts))

    def exchange(self, name: str, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> Steps:
        source, whole = _join(list(sends.values())), _join(list(receives.values()))
        to, of = self._counts(sends), self._counts(receives)
        yield _begin(self._comm.Ialltoallv, _describe(source, to), _describe(whole, of))
        parts = whole.split([len(part) for part in receives.values()])
        copy_back(list(receives.values()), parts)

    def _counts(self, tensors: dict[int, Tensor]) -> list[int]:
        return [len(tensors[rank]) if rank in tensors else 0 for rank in range(self._size)]

    def reduce(self, data: Tensor, op: str, root: int | None = None) -> Steps:
        reduction, in_place = _reduction(op, data.dtype), load_mpi().IN_PLACE
        numbers = data.to(reduction.dtype)
        message = _describe(numbers, type=reduction.type)
        if root is None:
            yield _begin(self._comm.Iallreduce, in_place, message, reduction.op)
        elif root == self._rank:
            yield _begin(self._comm.Ireduce, in_place, message, reduction.op, root)
        else:
            yield _begin(self._comm.Ireduce, message, None, reduction.op, root)
            return
        self._round(numbers, data, op)

    def reduce_scatter(self, inputs: Sequence[Tensor], output: Tensor, op: str) -> Steps:
        reduction = _reduction(op, output.dtype)
        source, result = _join(inputs).to(reduction.dtype), output.to(reduction.dtype)
        yield _begin(
            self._comm.Ireduce_scatter,
            _describe(source, type=reduction.type),
            _describe(result, type=reduction.type),
            [len(part) for part in inputs],
            reduction.op,
        )
        self._round(result, output, op)

    def _round(self, numbers: Tensor, result: Tensor, op: str) -> None:
        """Divide for AVG, and round what MPI has computed in another dtype."""
        if op == "AVG":
            numbers.div_(self._size)
        result.copy_(numbers)


def _begin(call: Callable[..., Any], *args: Any) -> Any:
    with work.lock:
        return call(*args)


def _join(tensors: Sequence[Tensor]) -> Tensor:
    """Return a copy of flat tensors as one."""
    return torch.cat(tensors) if tensors else torch.empty(0)


def _describe(tensor: Tensor, counts: Sequence[int] | None = None, type: Any = None) -> list[Any]:
    """Return what mpi4py needs to use a tensor's memory: [memory, count or counts, type].

    counts: how many elements belong to each rank. type: MPI's type of the elements; None: integers
    of their size, which is enough to move values, and MPI has no type for float16 and bfloat16.
    """
    if len(tensor) > _MOST:
        raise ValueError(f"MPI moves at most {_MOST} elements at once, got {len(tensor)}")
    memory = load_mpi().buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
    if type is None:
        type = _integer_types()[tensor.itemsize]
    return [memory, len(tensor) if counts is None else list(counts), type]


@functools.cache
def _integer_types() -> dict[int, Any]:
    MPI = load_mpi()
    types = {1: MPI.BYTE, 2: MPI.UINT16_T, 4: MPI.UINT32_T, 8: MPI.UINT64_T}
    return {**types, 16: MPI.C_DOUBLE_COMPLEX}  # MPI has no integer of 16 bytes


class _Reduction(NamedTuple):
    dtype: torch.dtype  # in which MPI computes
    type: Any  # MPI's name for that
    op: Any  # MPI's name for the operation


def _reduction(op: str, dtype: torch.dtype) -> _Reduction:
    """Return how MPI computes a reduction. Raise ValueError if it cannot.

    MPI has no type for float16, bfloat16 and the 8-bit floats. They are reduced in float32 over
    all ranks and rounded once at the end, whereas gloo rounds after every addition, so the last
    bit may differ. bool is reduced as bytes of 0 and 1. AVG is MPI's sum, divided at the end.
    """
    small = dtype.is_floating_point and dtype.itemsize < 4
    computed = torch.float32 if small else dtype
    type = _number_types().get(computed)
    if type is None:
        raise ValueError(f'the "mpi4py" backend cannot reduce tensors of {dtype}')
    name = {"AVG": "SUM", "PRODUCT": "PROD"}.get(op, op)
    return _Reduction(computed, type, getattr(load_mpi(), name))


@functools.cache
def _number_types() -> dict[torch.dtype, Any]:
    MPI = load_mpi()
    return {
        torch.float32: MPI.FLOAT,
        torch.float64: MPI.DOUBLE,
        torch.complex64: MPI.C_FLOAT_COMPLEX,
        torch.complex128: MPI.C_DOUBLE_COMPLEX,
        torch.bool: MPI.UINT8_T,
        torch.uint8: MPI.UINT8_T,
        torch.uint16: MPI.UINT16_T,
        torch.uint32: MPI.UINT32_T,
        torch.uint64: MPI.UINT64_T,
        torch.int8: MPI.INT8_T,
        torch.int16: MPI.INT16_T,
        torch.int32: MPI.INT32_T,
        torch.int64: MPI.INT64_T,
    }
