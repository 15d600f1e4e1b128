"""The process group of `mpi`: its collectives and messages as calls of MPI, from start to end."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
import time
import zlib
from collections.abc import Callable, Collection, Sequence
from types import ModuleType
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from ddp_kit.backends.engine import Engine, PythonWork, Steps
from ddp_kit.backends.mpi import NAME, load_mpi
from ddp_kit.backends.process_group import PythonProcessGroup, copy_back
from ddp_kit.errors import BackendError

# Held around every call of MPI. The calls are nonblocking, so nobody holds it for long.
lock = threading.Lock()

engines: WeakSet[Engine] = WeakSet()  # of all groups

_MOST = 2**31 - 1  # MPI counts in a C int
_FIRST_TAG, _TAGS = 16384, 16000  # MPI guarantees tags up to 32767
_SPIN = 0.001  # seconds for which a wait only yields the core
_LONGEST_SLEEP = 0.001


class MPIProcessGroup(PythonProcessGroup):
    """A process group whose messages travel through MPI, on a communicator of its own.

    Every operation is one nonblocking call of MPI, which is asked again and again whether it is
    complete: by a thread that waits for it, or by one of the group, so that futures complete.
    Collectives of a group run one after another, in the order of the program.

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
    gradient clipping and a full state dict. docs/guide/mpi.md has what this backend lacks.

    timeout: seconds until an operation fails. frees_communicator: whether `shutdown` does.
    """

    def __init__(self, communicator: Any, timeout: float, frees_communicator: bool = True) -> None:
        rank, size = communicator.Get_rank(), communicator.Get_size()
        super().__init__(NAME, rank, size, timeout, MPIOperations(communicator), _Asking())
        self._communicator = communicator
        self._frees_communicator = frees_communicator
        engines.add(self._engine)

    def shutdown(self) -> None:
        communicator, self._communicator = self._communicator, None
        if self._engine.close() or communicator is None or not self._frees_communicator:
            return  # MPI_Finalize frees it
        with lock:
            communicator.Free()


class _Asking:
    """The bells of an engine that hears of nothing, because MPI has to be asked."""

    announced = 0

    def look(self) -> None: ...

    def sleep(self, seen: None, needs: Collection[int], seconds: float, waited: float) -> None:
        time.sleep(0 if waited < _SPIN else min(seconds, waited / 50, _LONGEST_SLEEP))


class MPIOperations:
    """The collectives and messages of one rank in a group; see `process_group`."""

    def __init__(self, communicator: Any) -> None:
        self._comm = communicator
        self._rank, self._size = communicator.Get_rank(), communicator.Get_size()

    def send(self, data: Tensor, target: int, tag: int) -> Steps:
        yield from _call(self._comm.Isend, _describe(data), target, tag)

    def receive(self, work: PythonWork, data: Tensor, source: int | None, tag: int) -> Steps:
        MPI = load_mpi()
        status, source = MPI.Status(), MPI.ANY_SOURCE if source is None else source
        arguments = _describe(data), source, tag
        yield from _call(self._comm.Irecv, *arguments, status=status, work=work)
        if work.done:
            return
        work.source, received = status.Get_source(), status.Get_count(MPI.BYTE)
        if received != data.nbytes:
            raise RuntimeError(
                f"recv got {received} bytes from rank {work.source}, "
                f"but the tensor has {data.nbytes}"
            )

    def barrier(self) -> Steps:
        return _call(self._comm.Ibarrier)

    def broadcast(self, data: Tensor, root: int) -> Steps:
        return _call(self._comm.Ibcast, _describe(data), root)

    def all_gather(self, data: Tensor, outputs: Sequence[Tensor]) -> Steps:
        counts = [len(output) for output in outputs]
        whole = data.new_empty(sum(counts))
        yield from _call(self._comm.Iallgatherv, _describe(data), _describe(whole, counts))
        copy_back(outputs, whole.split(counts))

    def exchange(self, name: str, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> Steps:
        source, whole = _join(list(sends.values())), _join(list(receives.values()))
        to, of = self._counts(sends), self._counts(receives)
        yield from _call(self._comm.Ialltoallv, _describe(source, to), _describe(whole, of))
        parts = whole.split([len(part) for part in receives.values()])
        copy_back(list(receives.values()), parts)

    def _counts(self, tensors: dict[int, Tensor]) -> list[int]:
        return [len(tensors[rank]) if rank in tensors else 0 for rank in range(self._size)]

    def reduce(self, data: Tensor, op: str, root: int | None = None) -> Steps:
        reduction, in_place = _reduction(op, data.dtype), load_mpi().IN_PLACE
        numbers = data.to(reduction.dtype)
        message = _describe(numbers, type=reduction.type)
        if root is None:
            yield from _call(self._comm.Iallreduce, in_place, message, reduction.op)
        elif root == self._rank:
            yield from _call(self._comm.Ireduce, in_place, message, reduction.op, root)
        else:
            yield from _call(self._comm.Ireduce, message, None, reduction.op, root)
            return
        self._round(numbers, data, op)

    def reduce_scatter(self, inputs: Sequence[Tensor], output: Tensor, op: str) -> Steps:
        reduction = _reduction(op, output.dtype)
        source, result = _join(inputs).to(reduction.dtype), output.to(reduction.dtype)
        yield from _call(
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


def _call(
    call: Callable[..., Any], *args: Any, status: Any = None, work: PythonWork | None = None
) -> Steps:
    """Make a nonblocking call of MPI, and go on when it is complete.

    work: of a receive, which is cancelled if the work is done before; MPI can cancel nothing else.
    """
    MPI, interruption = load_mpi(), None
    try:
        with lock:
            request = call(*args)
        while request:  # until it is complete
            try:
                with lock:
                    if request.Test(status):
                        return
                    if work is not None and work.done:
                        request.Cancel()
                        work = None
            except MPI.Exception:
                raise
            except BaseException as error:  # raised by a signal handler: the request goes on
                interruption = error
            yield () if interruption is None else interruption
            interruption = None
    except MPI.Exception as error:
        reason = " ".join(str(error).split())
        raise RuntimeError(f"{call.__name__[1:]} failed in MPI: {reason}") from None


def _join(tensors: Sequence[Tensor]) -> Tensor:
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
    try:
        numbers = torch.empty(0, dtype=torch.uint8 if dtype is torch.bool else computed).numpy()
    except TypeError:
        raise ValueError(f'the "mpi4py" backend cannot reduce tensors of {dtype}') from None
    type = load_mpi().Datatype.fromcode(numbers.dtype.char)
    name = {"AVG": "SUM", "PRODUCT": "PROD"}.get(op, op)
    return _Reduction(computed, type, getattr(load_mpi(), name))


# The process, from start to end


class _AtExit:
    communicator: Any = None  # of the first group, whose ranks finalize MPI together
    timeout: float = 0.0  # the longest of any group, in seconds


@functools.cache
def initialize() -> ModuleType:
    """Initialize MPI, finalize it when Python ends, and return mpi4py.MPI.

    MPI_THREAD_MULTIPLE is requested, so that a program may call mpi4py itself beside PyTorch.
    MPI_THREAD_SERIALIZED is enough for this package, which holds one lock around all its calls.
    Raises BackendError if MPI cannot be loaded, or was initialized for a single thread.
    """
    MPI = load_mpi()
    if MPI.Is_initialized():  # the program imported mpi4py.MPI before, which finalizes it
        atexit.register(_close)
    else:
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        atexit.register(_finalize, MPI, os.getpid())
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise BackendError(
            "this process initialized MPI for a single thread; "
            'set mpi4py.rc.thread_level = "multiple" before importing mpi4py.MPI'
        )
    return MPI


def create_group(options: Any) -> MPIProcessGroup:
    """Return the group that `init_process_group` or `new_group` asks for; all members call this.

    The store in `options` is not used, because mpiexec has connected the ranks already. PyTorch
    itself uses it only if TORCH_DIST_INIT_BARRIER=1 is set or another backend joins: then the
    ranks must share the store. Otherwise `dist.HashStore()` is enough.
    MPI waits without a limit until all members call this.

    Raises BackendError if the ranks are not those that mpiexec started.
    """
    MPI = initialize()
    size, rank = options.group_size, options.group_rank
    members = list(options.global_ranks_in_group) or list(range(size))
    world = MPI.COMM_WORLD
    if size > world.Get_size():
        raise BackendError(
            f"world_size is {size}, but mpiexec started {world.Get_size()} ranks; "
            f"start them with mpiexec -n {size}"
        )
    if members[rank] != world.Get_rank():
        raise BackendError(
            f"rank={members[rank]} was passed to PyTorch in the process that is rank "
            f"{world.Get_rank()} of MPI; take rank and world_size from "
            "ddp_kit.backends.mpi.rank_info()"
        )
    timeout = options.timeout.total_seconds()
    # Not from options.group_id: since PyTorch 2.15 the ranks name a group differently after an
    # attempt to create one that failed on only some of them.
    tag = _FIRST_TAG + zlib.crc32(str(members).encode()) % _TAGS
    with lock:
        everybody = world.Get_group()
        chosen = everybody.Incl(members)
        communicator = world.Create_group(chosen, tag)
        chosen.Free()
        everybody.Free()
        communicator.Set_errhandler(MPI.ERRORS_RETURN)
    # The first group normally has all ranks, so its communicator lives until the process ends.
    first = _AtExit.communicator is None
    if first:
        _AtExit.communicator = communicator
    _AtExit.timeout = max(_AtExit.timeout, timeout)
    return MPIProcessGroup(communicator, timeout, frees_communicator=not first)


def _close() -> None:
    for engine in list(engines):
        engine.close()


def _finalize(MPI: ModuleType, pid: int) -> None:
    """Call MPI_Finalize once the other ranks end too, because it waits for them without a limit.

    After an uncaught error this process ends without MPI_Finalize; mpiexec notices, and ends the
    others. `sys.exit` leaves no trace that can be seen here: ranks that wait for one that called
    it end after the timeout of their group.
    """
    _close()
    if os.getpid() != pid or MPI.Is_finalized():
        return
    failed = getattr(sys, "last_value", None) is not None
    if not failed and _wait_for_others():
        MPI.Finalize()


def _wait_for_others() -> bool:
    """Wait until all ranks of the first group end too; return False if some do not in time."""
    if _AtExit.communicator is None:
        return True
    deadline = time.monotonic() + _AtExit.timeout
    with lock:
        request = _AtExit.communicator.Ibarrier()
    while time.monotonic() < deadline:
        with lock:
            if request.Test():
                return True
        time.sleep(0.002)
    return False
