"""A process group in Python: every call of PyTorch as one of a few operations on flat tensors.

PyTorch has several calls for most collectives: with a list of tensors, with one tensor that holds
the parts of all ranks, with several tensors at once, and under an older name. `PythonProcessGroup`
checks the arguments of all of them, makes their memory flat and contiguous, and calls a method of
`Collectives`. The backends `mpi` and `shm` implement those, and messages between two ranks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from ddp_kit.backends.work import PythonWork

Tensors = Sequence[Tensor]
Steps = Iterator[Any]  # what is left of a collective: it yields whenever it has to wait

REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
_OF_BOOL = {"SUM": "BOR", "PRODUCT": "BAND", "MIN": "BAND", "MAX": "BOR"}  # on bytes of 0 and 1
_NAMES = {hash(getattr(ReduceOp, name)): name for name in REDUCTIONS}
_BITWISE = ("BAND", "BOR", "BXOR")


class Collectives(Protocol):
    """The collectives that a backend implements, on flat, contiguous tensors on the CPU.

    op: one of REDUCTIONS. For bool it is a bitwise one.
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


class PythonProcessGroup(dist.ProcessGroup):
    """A process group over the collectives of a backend.

    backend: PyTorch's name for it. timeout: seconds until an operation fails.
    """

    def __init__(
        self, backend: str, rank: int, size: int, timeout: float, collectives: Collectives
    ) -> None:
        super().__init__(rank, size)
        self._backend = backend
        self._rank, self._size = rank, size
        self._timeout = timeout
        self._collectives = collectives
        self._name = self._description = ""

    # What a backend adds

    def shutdown(self) -> None:
        """End the group; `dist.destroy_process_group` calls this. A second call does nothing."""
        raise NotImplementedError

    def _start(
        self,
        name: str,
        calls: Sequence[Steps],
        outputs: Tensors,
        opts: Any,
        finish: Callable[[], None] | None = None,
    ) -> PythonWork:
        """Start collectives as one operation.

        outputs: the result of the future. opts: PyTorch's options, for `_timeout_of`. finish:
        what to do at the end, which copies results.
        """
        raise NotImplementedError

    def _send(self, data: Tensor, target: int, tag: int, outputs: Tensors) -> PythonWork:
        raise NotImplementedError

    def _receive(
        self,
        buffer: Tensor,
        source: int | None,
        tag: int,
        outputs: Tensors,
        finish: Callable[[], None],
    ) -> PythonWork:
        raise NotImplementedError

    # Names and the timeout

    def getBackendName(self) -> str:
        """Return the name under which the backend is registered."""
        return self._backend

    def getGroupName(self) -> str:
        """Return PyTorch's name for the group."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Set PyTorch's name for the group."""
        self._name = name

    def getGroupDesc(self) -> str:
        """Return the `group_desc` of `new_group`."""
        return self._description

    def setGroupDesc(self, description: str) -> None:
        """Set the `group_desc` of `new_group`."""
        self._description = description

    def _get_backend(self, device: torch.device) -> PythonProcessGroup:
        """Return the group itself, for `dist.batch_isend_irecv` of PyTorch 2.15 and newer."""
        return self

    def abort(self) -> None:
        """Do the same as `shutdown`."""
        self.shutdown()

    @property
    def timeout(self) -> timedelta:
        """The time after which an operation fails."""
        return timedelta(seconds=self._timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of operations that start from now on."""
        self._timeout = timeout.total_seconds()

    def _timeout_of(self, opts: Any) -> float:
        """Return the seconds that an operation may take; PyTorch's options take precedence."""
        own = 0.0 if opts is None else opts.timeout.total_seconds()
        return own if own > 0 else self._timeout

    # Messages

    def send(self, tensors: Tensors, dstRank: int, tag: int = 0) -> PythonWork:
        """Send one tensor."""
        (tensor,) = tensors
        return self._send(self._source(tensor), dstRank, tag, tensors)

    def recv(self, tensors: Tensors, srcRank: int, tag: int = 0) -> PythonWork:
        """Receive one tensor."""
        return self._receive_from(tensors, srcRank, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> PythonWork:
        """Receive one tensor from any rank; `Work._source_rank` returns which rank sent it."""
        return self._receive_from(tensors, None, tag)

    def _receive_from(self, tensors: Tensors, source: int | None, tag: int) -> PythonWork:
        (tensor,) = tensors
        buffer = self._target(tensor)
        return self._receive(buffer, source, tag, tensors, _copying(tensors, [buffer]))

    # Collectives that move data

    def barrier(self, opts: Any = None) -> PythonWork:
        """Wait until all ranks of the group call this."""
        return self._start("barrier", [self._collectives.barrier()], (), opts)

    def monitored_barrier(self, *_args: Any, **_options: Any) -> None:
        """Refuse what only gloo can do; `dist.monitored_barrier` says so as well."""
        raise RuntimeError(
            f'the "{self._backend}" backend has no monitored_barrier, only gloo has; use barrier'
        )

    def broadcast(self, tensors: Tensors, opts: Any = None) -> PythonWork:
        """Copy the root's tensors to all ranks."""
        opts = opts or dist.BroadcastOptions()
        is_root = opts.rootRank == self._rank
        data = [self._source(each) if is_root else self._target(each) for each in tensors]
        calls = [self._collectives.broadcast(one.view(-1), opts.rootRank) for one in data]
        finish = None if is_root else _copying(tensors, data)
        return self._start("broadcast", calls, tensors, opts, finish)

    def gather(
        self, output_tensors: Sequence[Tensors], input_tensors: Tensors, opts: Any = None
    ) -> PythonWork:
        """Collect a tensor of every rank in the root's list; they may differ in size."""
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
        """Send entry i of the root's list to rank i; the tensors may differ in size."""
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
        """Send entry i of the list to rank i, on every rank; the tensors may differ in size."""
        own = output_tensors[self._rank] if len(output_tensors) == self._size else None
        self._check_list("alltoall", input_tensors, own, "input")
        self._check_list("alltoall", output_tensors, input_tensors[self._rank], "output")
        receives = dict(enumerate(output_tensors))
        return self._exchange("alltoall", dict(enumerate(input_tensors)), receives, opts)

    def _exchange(
        self, name: str, sends: dict[int, Tensor], receives: dict[int, Tensor], opts: Any
    ) -> PythonWork:
        data = {rank: self._source(tensor) for rank, tensor in sends.items()}
        buffers = {rank: self._target(tensor) for rank, tensor in receives.items()}
        for buffer in buffers.values():  # what is sent may be received in, too
            data = {rank: without_overlap(one, buffer) for rank, one in data.items()}
        steps = self._collectives.exchange(
            name,
            {rank: one.view(-1) for rank, one in data.items()},
            {rank: buffer.view(-1) for rank, buffer in buffers.items()},
        )
        outputs = list(receives.values())
        return self._start(name, [steps], outputs, opts, _copying(outputs, list(buffers.values())))

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> PythonWork:
        """Send rows of a tensor to each rank, and receive rows of each; splits may differ."""
        _check_dtypes("all_to_all_single", [output], input)
        to = _split_counts(input, input_split_sizes or (), self._size, "the input")
        of = _split_counts(output, output_split_sizes or (), self._size, "the output")
        if to[self._rank] != of[self._rank]:
            raise ValueError(
                f"all_to_all_single: rank {self._rank} has {to[self._rank]} elements for itself, "
                f"but expects {of[self._rank]}"
            )
        buffer = self._target(output)
        source = without_overlap(self._source(input), buffer)
        sends = dict(enumerate(source.view(-1).split(to)))
        receives = dict(enumerate(buffer.view(-1).split(of)))
        steps = self._collectives.exchange("alltoall", sends, receives)
        finish = _copying([output], [buffer])
        return self._start("all_to_all_single", [steps], [output], opts, finish)

    def allgather(
        self, output_tensors: Sequence[Tensors], input_tensors: Tensors, opts: Any = None
    ) -> PythonWork:
        """Collect a tensor of every rank in a list; they may differ in size."""
        return self._all_gather_lists("allgather", output_tensors, input_tensors, opts)

    def allgather_coalesced(
        self, output_lists: Sequence[Tensors], input_list: Tensors, opts: Any = None
    ) -> PythonWork:
        """Do `allgather` with several tensors. Entry [rank][i] is tensor i of that rank."""
        lists = [[tensors[i] for tensors in output_lists] for i in range(len(input_list))]
        return self._all_gather_lists("allgather_coalesced", lists, input_list, opts)

    def _all_gather_lists(
        self, name: str, lists: Sequence[Tensors], inputs: Tensors, opts: Any
    ) -> PythonWork:
        calls, outputs, buffers = [], [], []
        for tensors, tensor in zip(lists, inputs, strict=True):
            self._check_list(name, tensors, tensor, "output")
            targets = [self._target(each) for each in tensors]
            parts = [target.view(-1) for target in targets]
            calls.append(self._collectives.all_gather(self._source(tensor).view(-1), parts))
            outputs += tensors
            buffers += targets
        return self._start(name, calls, outputs, opts, _copying(outputs, buffers))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> PythonWork:
        """Collect a tensor of every rank in one tensor; all have the same size."""
        return self._all_gather("all_gather_single", [output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> PythonWork:
        """Do `all_gather_single` with several tensors, as one operation."""
        return self._all_gather("all_gather_single_coalesced", outputs, inputs, opts)

    def _all_gather(self, name: str, outputs: Tensors, inputs: Tensors, opts: Any) -> PythonWork:
        calls, buffers = [], []
        for output, tensor in zip(outputs, inputs, strict=True):
            self._check_whole(name, whole=output, part=tensor)
            buffers.append(self._target(output))
            parts = buffers[-1].view(-1).split([tensor.numel()] * self._size)
            calls.append(self._collectives.all_gather(self._source(tensor).view(-1), parts))
        return self._start(name, calls, outputs, opts, _copying(outputs, buffers))

    # Reductions

    def reduce(self, tensors: Tensors, opts: Any = None) -> PythonWork:
        """Reduce the tensors of all ranks on the root; the others keep theirs."""
        opts = opts or dist.ReduceOptions()
        return self._reduce("reduce", tensors, opts, opts.rootRank)

    def allreduce(self, tensors: Tensors | Tensor, opts: Any = None) -> PythonWork:
        """Reduce the tensors of all ranks; every rank gets the result."""
        if isinstance(tensors, Tensor):  # from `DistributedDataParallel.join`
            tensors = [tensors]
        return self._reduce("allreduce", tensors, opts or dist.AllreduceOptions())

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> PythonWork:
        """Do `allreduce` with several tensors, as one operation."""
        opts = opts or dist.AllreduceCoalescedOptions()
        return self._reduce("allreduce_coalesced", tensors, opts)

    def _reduce(
        self, name: str, tensors: Tensors, opts: Any, root: int | None = None
    ) -> PythonWork:
        data = [self._source(tensor) for tensor in tensors]
        calls = [
            self._collectives.reduce(one.view(-1), self._reduction(opts.reduceOp, one.dtype), root)
            for one in data
        ]
        finish = _copying(tensors, data) if root in (None, self._rank) else None
        return self._start(name, calls, tensors, opts, finish)

    def reduce_scatter(
        self, output_tensors: Tensors, input_tensors: Sequence[Tensors], opts: Any = None
    ) -> PythonWork:
        """Reduce the lists of all ranks; rank i gets entry i. Sizes may differ."""
        (output,), (inputs,) = output_tensors, input_tensors
        self._check_list("reduce_scatter", inputs, output, "input")
        parts = [self._source(tensor).view(-1) for tensor in inputs]
        return self._reduce_scatter("reduce_scatter", [output], [parts], opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> PythonWork:
        """Reduce the tensors of all ranks; each rank gets its part."""
        return self._reduce_scatter_whole("reduce_scatter_single", [output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> PythonWork:
        """Do `reduce_scatter_single` with several tensors, as one operation."""
        name = "reduce_scatter_single_coalesced"
        return self._reduce_scatter_whole(name, outputs, inputs, opts)

    def _reduce_scatter_whole(
        self, name: str, outputs: Tensors, inputs: Tensors, opts: Any
    ) -> PythonWork:
        lists = []
        for output, tensor in zip(outputs, inputs, strict=True):
            self._check_whole(name, whole=tensor, part=output)
            lists.append(self._source(tensor).view(-1).split([output.numel()] * self._size))
        return self._reduce_scatter(name, outputs, lists, opts)

    def _reduce_scatter(
        self, name: str, outputs: Tensors, lists: Sequence[Tensors], opts: Any
    ) -> PythonWork:
        opts = opts or dist.ReduceScatterOptions()
        calls, buffers = [], []
        for output, parts in zip(outputs, lists, strict=True):
            op, buffer = self._reduction(opts.reduceOp, output.dtype), self._target(output)
            parts = [without_overlap(part, buffer) for part in parts]
            calls.append(self._collectives.reduce_scatter(parts, buffer.view(-1), op))
            buffers.append(buffer)
        return self._start(name, calls, outputs, opts, _copying(outputs, buffers))

    # The names that older releases of PyTorch call

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # Checks

    def _source(self, tensor: Tensor) -> Tensor:
        """Return memory to read from. Raise RuntimeError if a backend of the CPU cannot use it."""
        self._check_memory(tensor)
        return source_of(tensor)

    def _target(self, tensor: Tensor) -> Tensor:
        """Return memory to write in. Raise RuntimeError if a backend of the CPU cannot use it."""
        self._check_memory(tensor)
        return target_of(tensor)

    def _check_memory(self, tensor: Tensor) -> None:
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

    def _check_list(self, name: str, tensors: Tensors, own: Tensor | None, side: str) -> None:
        """Raise ValueError unless there is a tensor for each rank and this rank's one fits."""
        if len(tensors) != self._size:
            raise ValueError(
                f"{name} needs one {side} tensor for each of the {self._size} ranks, "
                f"got {len(tensors)}"
            )
        assert own is not None, "only a list of another length has none"
        _check_dtypes(name, tensors, own)
        here = tensors[self._rank]
        if here.numel() != own.numel():
            raise ValueError(
                f"{name}: {side} tensor {self._rank} has {here.numel()} elements, "
                f"but its counterpart on this rank has {own.numel()}"
            )

    def _check_whole(self, name: str, whole: Tensor, part: Tensor) -> None:
        """Raise ValueError unless a tensor is as large as one part for each rank."""
        _check_dtypes(name, [whole], part)
        if whole.numel() != part.numel() * self._size:
            raise ValueError(
                f"{name} needs a tensor of {self._size} parts of {part.numel()} elements, "
                f"got {whole.numel()} elements"
            )

    def _reduction(self, op: ReduceOp, dtype: torch.dtype) -> str:
        """Return the name of a reduction. Raise ValueError if there is none for this dtype."""
        name = _NAMES.get(hash(op))
        if name is None:
            supported = ", ".join(REDUCTIONS)
            raise ValueError(f'the "{self._backend}" backend supports {supported}, got {op}')
        integral = not dtype.is_floating_point and not dtype.is_complex
        if name in _BITWISE and not integral:
            raise ValueError(f"ReduceOp.{name} needs integers or bool, got {dtype}")
        if name == "AVG" and integral:
            raise ValueError(f"ReduceOp.AVG needs floating point or complex numbers, got {dtype}")
        if name in ("MIN", "MAX") and dtype.is_complex:
            raise ValueError(f"ReduceOp.{name} needs real numbers, got {dtype}")
        return _OF_BOOL.get(name, name) if dtype is torch.bool else name


# Tensors as flat memory


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


def _copying(tensors: Tensors, received: Tensors) -> Callable[[], None]:
    return functools.partial(copy_back, tensors, received)


def without_overlap(tensor: Tensor, other: Tensor) -> Tensor:
    """Return a tensor, or a copy of it if it shares memory with another."""
    start, other_start = tensor.data_ptr(), other.data_ptr()
    overlap = start < other_start + other.nbytes and other_start < start + tensor.nbytes
    return tensor.clone() if overlap else tensor


def _is_plain(tensor: Tensor) -> bool:
    """Return whether the memory holds the values as they are, one after another."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


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
