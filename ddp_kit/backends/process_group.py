"""A process group in Python: every call of PyTorch as one of a few operations on flat tensors.

PyTorch has several calls for most collectives: with a list of tensors, with one tensor that holds
the parts of all ranks, with several tensors at once, and under an older name. `PythonProcessGroup`
checks the arguments of all of them, makes their memory flat and contiguous, and calls a method of
`Operations`. The backends `mpi` and `shm` implement those, and `engine` moves them on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from ddp_kit.backends.engine import Bells, Engine, PythonWork, Steps

Tensors = Sequence[Tensor]

REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
_OF_BOOL = {"SUM": "BOR", "PRODUCT": "BAND", "MIN": "BAND", "MAX": "BOR"}  # on bytes of 0 and 1
_NAMES = {hash(getattr(ReduceOp, name)): name for name in REDUCTIONS}


class Operations(Protocol):
    """What a backend implements, on flat, contiguous tensors on the CPU.

    op: one of REDUCTIONS. For bool it is a bitwise one.
    """

    def send(self, data: Tensor, target: int, tag: int) -> Steps:
        """Send a tensor to a rank."""

    def receive(self, work: PythonWork, data: Tensor, source: int | None, tag: int) -> Steps:
        """Receive a tensor from a rank, or from any, and set `work.source`.

        If the work is done before, because it took too long, the message is for another receive.
        """

    def barrier(self) -> Steps:
        """Wait until all ranks have called this."""

    def broadcast(self, data: Tensor, root: int) -> Steps:
        """Copy the root's tensor into those of the others."""

    def all_gather(self, data: Tensor, outputs: Tensors) -> Steps:
        """Copy the tensor of rank i into output i. They may differ in size."""

    def reduce(self, data: Tensor, op: str, root: int | None = None) -> Steps:
        """Reduce the tensors of all ranks in place, on the root; None: on every rank."""

    def reduce_scatter(self, inputs: Tensors, output: Tensor, op: str) -> Steps:
        """Reduce the tensors that the ranks have for this one. They may differ in size by rank."""

    def exchange(self, name: str, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> Steps:
        """Send tensors to ranks and receive tensors from ranks: a gather, scatter or alltoall."""


class Call:
    """One call of PyTorch: its collectives, and the memory that they read and write.

    name: for errors. opts: PyTorch's options, of which the timeout takes precedence over that of
    the group. steps: the collectives. outputs: the result of the future.
    """

    def __init__(self, group: PythonProcessGroup, name: str, opts: Any = None) -> None:
        self.group, self.name = group, name
        own = 0.0 if opts is None else opts.timeout.total_seconds()
        self.timeout = own if own > 0 else group.timeout.total_seconds()
        self.is_async = getattr(opts, "asyncOp", True)
        self.steps: list[Steps] = []
        self.outputs: list[Tensor] = []
        self._buffers: list[Tensor] = []  # of the outputs: the same memory, or a plain one

    def read(self, tensor: Tensor) -> Tensor:
        """Return a flat tensor with the values of a tensor: its own memory, or a copy."""
        self.group.check_memory(tensor)
        return source_of(tensor).view(-1)

    def write(self, tensor: Tensor) -> Tensor:
        """Return a flat tensor of which `finish` copies the values into a tensor."""
        self.group.check_memory(tensor)
        return self._output(tensor, target_of(tensor))

    def update(self, tensor: Tensor) -> Tensor:
        """Return what `write` does, with the tensor's values in it."""
        self.group.check_memory(tensor)
        return self._output(tensor, source_of(tensor))

    def _output(self, tensor: Tensor, buffer: Tensor) -> Tensor:
        self.outputs.append(tensor)
        self._buffers.append(buffer)
        return buffer.view(-1)

    def apart(self, data: Tensor) -> Tensor:
        """Return what was read, or a copy of it if it shares memory with what will be written."""
        for buffer in self._buffers:
            data = without_overlap(data, buffer)
        return data

    def finish(self) -> None:
        copy_back(self.outputs, self._buffers)


class PythonProcessGroup(dist.ProcessGroup):
    """A process group over the collectives of a backend.

    backend: PyTorch's name for it. timeout: seconds until an operation fails.
    """

    def __init__(
        self,
        backend: str,
        rank: int,
        size: int,
        timeout: float,
        operations: Operations,
        bells: Bells,
    ) -> None:
        super().__init__(rank, size)
        self._backend = backend
        self._rank, self._size = rank, size
        self._timeout = timedelta(seconds=timeout)
        self._operations, self._engine = operations, Engine(bells)
        self._name = self._description = ""

    def shutdown(self) -> None:
        """End the group; `dist.destroy_process_group` calls this. A second call does nothing."""
        self._engine.close()

    def _start(self, call: Call) -> PythonWork:
        def steps() -> Steps:
            for each in call.steps:
                yield from each
            call.finish()

        return self._engine.start(PythonWork(self._engine, call, is_collective=True), steps())

    # Names and the timeout

    def getBackendName(self) -> str:
        return self._backend

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def _get_backend(self, device: torch.device) -> PythonProcessGroup:
        """Return the group itself, for `dist.batch_isend_irecv` of PyTorch 2.15 and newer."""
        return self

    def abort(self) -> None:
        self.shutdown()

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    # Messages

    def send(self, tensors: Tensors, dstRank: int, tag: int = 0) -> PythonWork:
        (tensor,) = tensors
        self._check_rank("send", dstRank)
        call = Call(self, "send")
        steps = self._operations.send(call.read(tensor), dstRank, tag)
        return self._engine.start(PythonWork(self._engine, call), steps)

    def recv(self, tensors: Tensors, srcRank: int | None, tag: int = 0) -> PythonWork:
        (tensor,) = tensors
        if srcRank is not None:
            self._check_rank("recv", srcRank)
        call = Call(self, "recv")
        data = call.write(tensor)
        work = PythonWork(self._engine, call)

        def steps() -> Steps:
            yield from self._operations.receive(work, data, srcRank, tag)
            if not work.done:
                call.finish()

        return self._engine.start(work, steps())

    def _check_rank(self, name: str, rank: int) -> None:
        if not 0 <= rank < self._size:
            raise ValueError(f"{name}: there is no rank {rank} in a group of {self._size}")

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> PythonWork:
        """Receive one tensor from any rank; `Work._source_rank` returns which rank sent it."""
        return self.recv(tensors, None, tag)

    # Collectives that move data

    def barrier(self, opts: Any = None) -> PythonWork:
        call = Call(self, "barrier", opts)
        call.steps.append(self._operations.barrier())
        return self._start(call)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> PythonWork:
        opts = opts or dist.BroadcastOptions()
        call = Call(self, "broadcast", opts)
        for tensor in tensors:
            call.steps.append(self._operations.broadcast(call.update(tensor), opts.rootRank))
        return self._start(call)

    def gather(
        self, output_tensors: Sequence[Tensors], input_tensors: Tensors, opts: Any = None
    ) -> PythonWork:
        opts = opts or dist.GatherOptions()
        (tensor,) = input_tensors
        outputs: Tensors = ()
        if opts.rootRank == self._rank:
            (outputs,) = output_tensors
            self._check_list("gather", outputs, tensor, "output")
        return self._exchange("gather", {opts.rootRank: tensor}, dict(enumerate(outputs)), opts)

    def scatter(
        self, output_tensors: Tensors, input_tensors: Sequence[Tensors], opts: Any = None
    ) -> PythonWork:
        opts = opts or dist.ScatterOptions()
        (output,) = output_tensors
        inputs: Tensors = ()
        if opts.rootRank == self._rank:
            (inputs,) = input_tensors
            self._check_list("scatter", inputs, output, "input")
        return self._exchange("scatter", dict(enumerate(inputs)), {opts.rootRank: output}, opts)

    def alltoall(
        self, output_tensors: Tensors, input_tensors: Tensors, opts: Any = None
    ) -> PythonWork:
        self._check_length("alltoall", output_tensors, "output")
        self._check_list("alltoall", input_tensors, output_tensors[self._rank], "input")
        self._check_list("alltoall", output_tensors, input_tensors[self._rank], "output")
        receives = dict(enumerate(output_tensors))
        return self._exchange("alltoall", dict(enumerate(input_tensors)), receives, opts)

    def _exchange(
        self, name: str, sends: dict[int, Tensor], receives: dict[int, Tensor], opts: Any
    ) -> PythonWork:
        call = Call(self, name, opts)
        buffers = {rank: call.write(tensor) for rank, tensor in receives.items()}
        data = {rank: call.apart(call.read(tensor)) for rank, tensor in sends.items()}
        call.steps.append(self._operations.exchange(name, data, buffers))
        return self._start(call)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> PythonWork:
        _check_dtypes("all_to_all_single", [output], input)
        to = _split_counts(input, input_split_sizes or (), self._size, "the input")
        of = _split_counts(output, output_split_sizes or (), self._size, "the output")
        if to[self._rank] != of[self._rank]:
            raise ValueError(
                f"all_to_all_single: rank {self._rank} has {to[self._rank]} elements for itself, "
                f"but expects {of[self._rank]}"
            )
        call = Call(self, "all_to_all_single", opts)
        receives = dict(enumerate(call.write(output).split(of)))
        sends = dict(enumerate(call.apart(call.read(input)).split(to)))
        call.steps.append(self._operations.exchange("alltoall", sends, receives))
        return self._start(call)

    def allgather(
        self, output_tensors: Sequence[Tensors], input_tensors: Tensors, opts: Any = None
    ) -> PythonWork:
        return self._all_gather("allgather", output_tensors, input_tensors, opts)

    def allgather_coalesced(
        self, output_lists: Sequence[Tensors], input_list: Tensors, opts: Any = None
    ) -> PythonWork:
        """Do `allgather` with several tensors. Entry [rank][i] is tensor i of that rank."""
        lists = [[tensors[i] for tensors in output_lists] for i in range(len(input_list))]
        return self._all_gather("allgather_coalesced", lists, input_list, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> PythonWork:
        return self._all_gather("all_gather_single", [output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> PythonWork:
        return self._all_gather("all_gather_single_coalesced", outputs, inputs, opts)

    def _all_gather(
        self, name: str, outputs: Sequence[Tensor | Tensors], inputs: Tensors, opts: Any
    ) -> PythonWork:
        call = Call(self, name, opts)
        for output, tensor in zip(outputs, inputs, strict=True):
            parts = self._parts(name, output, tensor, "output", call.write)
            call.steps.append(self._operations.all_gather(call.read(tensor), parts))
        return self._start(call)

    # Reductions

    def reduce(self, tensors: Tensors, opts: Any = None) -> PythonWork:
        opts = opts or dist.ReduceOptions()
        return self._reduce("reduce", tensors, opts, opts.rootRank)

    def allreduce(self, tensors: Tensors | Tensor, opts: Any = None) -> PythonWork:
        if isinstance(tensors, Tensor):  # from `DistributedDataParallel.join`
            tensors = [tensors]
        return self._reduce("allreduce", tensors, opts or dist.AllreduceOptions())

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> PythonWork:
        opts = opts or dist.AllreduceCoalescedOptions()
        return self._reduce("allreduce_coalesced", tensors, opts)

    def _reduce(
        self, name: str, tensors: Tensors, opts: Any, root: int | None = None
    ) -> PythonWork:
        call = Call(self, name, opts)
        for tensor in tensors:
            data, op = call.update(tensor), self._reduction(opts.reduceOp, tensor.dtype)
            call.steps.append(self._operations.reduce(data, op, root))
        return self._start(call)

    def reduce_scatter(
        self, output_tensors: Tensors, input_tensors: Sequence[Tensors], opts: Any = None
    ) -> PythonWork:
        return self._reduce_scatter("reduce_scatter", output_tensors, input_tensors, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> PythonWork:
        return self._reduce_scatter("reduce_scatter_single", [output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> PythonWork:
        return self._reduce_scatter("reduce_scatter_single_coalesced", outputs, inputs, opts)

    def _reduce_scatter(
        self, name: str, outputs: Tensors, inputs: Sequence[Tensor | Tensors], opts: Any
    ) -> PythonWork:
        opts = opts or dist.ReduceScatterOptions()
        call = Call(self, name, opts)
        for output, given in zip(outputs, inputs, strict=True):
            parts = self._parts(name, given, output, "input", call.read)
            data, op = call.write(output), self._reduction(opts.reduceOp, output.dtype)
            parts = [without_overlap(part, data) for part in parts]
            call.steps.append(self._operations.reduce_scatter(parts, data, op))
        return self._start(call)

    # The names that older releases of PyTorch call

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # Checks

    def check_memory(self, tensor: Tensor) -> None:
        """Raise RuntimeError if a backend of the CPU cannot use the memory of a tensor."""
        if not tensor.is_cpu:
            raise RuntimeError(
                f'the "{self._backend}" backend supports CPU tensors only, got one on '
                f"{tensor.device}; copy it to the CPU first, or use gloo or nccl"
            )
        if tensor.layout is not torch.strided:
            raise RuntimeError(
                f'the "{self._backend}" backend supports dense tensors only, '
                f"got layout {tensor.layout}"
            )

    def _parts(
        self,
        name: str,
        given: Tensor | Tensors,
        own: Tensor,
        side: str,
        memory: Callable[[Tensor], Tensor],
    ) -> Tensors:
        """Return a flat tensor for each rank, of a list or of one tensor that holds all of them.

        own: this rank's counterpart. memory: returns a tensor's memory, as `Call.read` does.
        """
        if not isinstance(given, Tensor):
            self._check_list(name, given, own, side)
            return [memory(tensor) for tensor in given]
        _check_dtypes(name, [given], own)
        if given.numel() != own.numel() * self._size:
            raise ValueError(
                f"{name} needs a tensor of {self._size} parts of {own.numel()} elements, "
                f"got {given.numel()} elements"
            )
        return memory(given).split([own.numel()] * self._size)

    def _check_list(self, name: str, tensors: Tensors, own: Tensor, side: str) -> None:
        """Raise ValueError unless there is a tensor for each rank and this rank's one fits."""
        self._check_length(name, tensors, side)
        _check_dtypes(name, tensors, own)
        here = tensors[self._rank]
        if here.numel() != own.numel():
            raise ValueError(
                f"{name}: {side} tensor {self._rank} has {here.numel()} elements, "
                f"but its counterpart on this rank has {own.numel()}"
            )

    def _check_length(self, name: str, tensors: Tensors, side: str) -> None:
        if len(tensors) != self._size:
            raise ValueError(
                f"{name} needs one {side} tensor for each of the {self._size} ranks, "
                f"got {len(tensors)}"
            )

    def _reduction(self, op: ReduceOp, dtype: torch.dtype) -> str:
        """Return the name of a reduction. Raise ValueError if there is none for this dtype."""
        name = _NAMES.get(hash(op))
        if name is None:
            supported = ", ".join(REDUCTIONS)
            raise ValueError(f'the "{self._backend}" backend supports {supported}, got {op}')
        integral = not dtype.is_floating_point and not dtype.is_complex
        if name in ("BAND", "BOR", "BXOR") and not integral:
            raise ValueError(f"ReduceOp.{name} needs integers or bool, got {dtype}")
        if name == "AVG" and integral:
            raise ValueError(f"ReduceOp.AVG needs floating point or complex numbers, got {dtype}")
        if name in ("MIN", "MAX") and dtype.is_complex:
            raise ValueError(f"ReduceOp.{name} needs real numbers, got {dtype}")
        return _OF_BOOL.get(name, name) if dtype is torch.bool else name


def _check_dtypes(name: str, tensors: Tensors, other: Tensor) -> None:
    """Raise ValueError for tensors of several dtypes, whose bits would be misread."""
    for tensor in tensors:
        if tensor.dtype is not other.dtype:
            raise ValueError(
                f"{name} needs tensors of one dtype, got {tensor.dtype} and {other.dtype}"
            )


def _split_counts(tensor: Tensor, splits: Sequence[int], size: int, name: str) -> list[int]:
    """Return the number of elements for each rank. splits: numbers of rows; empty: equal ones."""
    length = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if length % size:
            raise ValueError(f"{name} has {length} rows, which {size} ranks cannot share equally")
        splits = [length // size] * size
    if len(splits) != size or sum(splits) != length or min(splits) < 0:
        raise ValueError(
            f"the split sizes of {name} must be {size} numbers that add up to its {length} rows, "
            f"got {list(splits)}"
        )
    row = math.prod(tensor.shape[1:])
    return [split * row for split in splits]


# Tensors as plain memory


def source_of(tensor: Tensor) -> Tensor:
    """Return memory to read from: the tensor itself, or a contiguous copy."""
    tensor = tensor.detach()
    return tensor if _is_plain(tensor) else tensor.resolve_conj().resolve_neg().contiguous()


def target_of(tensor: Tensor) -> Tensor:
    """Return memory to write in: the tensor itself, or a new one, to copy back from later."""
    tensor = tensor.detach()
    return tensor if _is_plain(tensor) else torch.empty(tensor.shape, dtype=tensor.dtype)


def copy_back(tensors: Tensors, received: Tensors) -> None:
    """Copy what was received into the tensors, unless it is there already."""
    for tensor, buffer in zip(tensors, received, strict=True):
        if tensor.data_ptr() != buffer.data_ptr() or not _is_plain(tensor):
            tensor.detach().copy_(buffer.view(tensor.shape))


def without_overlap(tensor: Tensor, other: Tensor) -> Tensor:
    """Return a tensor, or a copy of it if it shares memory with another."""
    start, other_start = tensor.data_ptr(), other.data_ptr()
    overlap = start < other_start + other.nbytes and other_start < start + tensor.nbytes
    return tensor.clone() if overlap else tensor


def _is_plain(tensor: Tensor) -> bool:
    """Return whether the memory holds the values as they are, one after another."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
