"""The collectives of the process group, in all the forms that PyTorch calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ddp_kit.backends.group import tensors as dense
from ddp_kit.backends.group.process_group import Tensors
from ddp_kit.backends.group.work import PythonWork
from ddp_kit.backends.mpi import buffers
from ddp_kit.backends.mpi.buffers import reduction_of
from ddp_kit.backends.mpi.launcher import load_mpi
from ddp_kit.backends.mpi.process_group import BaseProcessGroup


class MPIProcessGroup(BaseProcessGroup):
    """A process group whose messages travel through MPI, on a communicator of its own.

    Every operation starts in the caller's thread, in the order of the program, with a nonblocking
    call of MPI. `Work.wait` polls until it is complete; the watcher of `work` polls what nobody
    waits for, so that futures complete. One lock is held around all calls of MPI.

    MPI uses the memory of the tensors, which must be on the CPU. It is copied only if a tensor is
    not contiguous, for lists of tensors, and if MPI has no type to compute in (see `Reduction`).

    A small message is buffered by MPI: `send` then returns before the other rank receives. A
    message that is larger or smaller than the receiver's tensor raises an error there.

    After its timeout an operation raises RuntimeError. MPI cannot cancel a collective: its
    tensors stay reserved, and the ranks should end.

    DistributedDataParallel, with and without a communication hook, and
    `torch.distributed.fsdp.fully_shard` on the CPU work with it; tests/test_mpi.py compares both
    with gloo. Also tried by hand: `fully_shard` on a mesh of two dimensions, in bfloat16, with
    gradient clipping and a full state dict. The README has a table of what this backend lacks.
    """

    # Data movement

    def broadcast(self, tensors: Tensors, opts: Any = None) -> PythonWork:
        """Copy the root's tensors to all ranks."""
        opts = opts or dist.BroadcastOptions()
        root = opts.rootRank
        allocate = buffers.send_buffer if root == self._rank else buffers.receive_buffer
        memory = [allocate(tensor) for tensor in tensors]
        messages = [buffers.describe(buffer) for buffer in memory]
        return self._start(
            "broadcast",
            lambda comm: [comm.Ibcast(message, root) for message in messages],
            lambda: None if root == self._rank else dense.copy_back(tensors, memory),
            tensors,
            opts=opts,
            memory=memory,
        )

    def gather(
        self, output_tensors: Sequence[Tensors], input_tensors: Tensors, opts: Any = None
    ) -> PythonWork:
        """Collect a tensor of every rank in the root's list; they may differ in size."""
        opts = opts or dist.GatherOptions()
        root = opts.rootRank
        source = buffers.flatten(input_tensors)
        message = buffers.describe(source)
        flat = receive = None
        outputs: Tensors = ()
        if root == self._rank:
            (outputs,) = output_tensors
            self._check_list("gather", outputs, input_tensors[0], "output")
            flat = buffers.empty_flat(outputs)
            receive = buffers.describe(flat, dense.numels(outputs))
        return self._start(
            "gather",
            lambda comm: [comm.Igatherv(message, receive, root)],
            lambda: None if flat is None else buffers.unflatten(flat, outputs),
            outputs,
            opts=opts,
            memory=source,
        )

    def scatter(
        self, output_tensors: Tensors, input_tensors: Sequence[Tensors], opts: Any = None
    ) -> PythonWork:
        """Send entry i of the root's list to rank i; the tensors may differ in size."""
        opts = opts or dist.ScatterOptions()
        root = opts.rootRank
        (output,) = output_tensors
        buffer = buffers.receive_buffer(output)
        receive = buffers.describe(buffer)
        flat = message = None
        if root == self._rank:
            (inputs,) = input_tensors
            self._check_list("scatter", inputs, output, "input")
            flat = dense.without_overlap(buffers.flatten(inputs), buffer)
            message = buffers.describe(flat, dense.numels(inputs))
        return self._start(
            "scatter",
            lambda comm: [comm.Iscatterv(message, receive, root)],
            lambda: dense.copy_back([output], [buffer]),
            output_tensors,
            opts=opts,
            memory=flat,
        )

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
        calls = []
        for outputs, tensor in zip(lists, inputs, strict=True):
            self._check_list(name, outputs, tensor, "output")
            source, flat = buffers.send_buffer(tensor), buffers.empty_flat(outputs)
            receive = buffers.describe(flat, dense.numels(outputs))
            calls.append((buffers.describe(source), receive, source, flat))

        def finish() -> None:
            for (_, _, _, flat), outputs in zip(calls, lists, strict=True):
                buffers.unflatten(flat, outputs)

        return self._start(
            name,
            lambda comm: [comm.Iallgatherv(message, receive) for message, receive, *_ in calls],
            finish,
            [tensor for outputs in lists for tensor in outputs],
            opts=opts,
            memory=calls,
        )

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> PythonWork:
        """Collect a tensor of every rank in one tensor; all have the same size."""
        return self._all_gather("all_gather_single", [output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> PythonWork:
        """Do `all_gather_single` with several tensors, as one operation."""
        return self._all_gather("all_gather_single_coalesced", outputs, inputs, opts)

    def _all_gather(self, name: str, outputs: Tensors, inputs: Tensors, opts: Any) -> PythonWork:
        received, calls = [], []
        for output, tensor in zip(outputs, inputs, strict=True):
            self._check_whole(name, whole=output, part=tensor)
            buffer = buffers.receive_buffer(output)
            source = dense.without_overlap(buffers.send_buffer(tensor), buffer)
            received.append(buffer)
            room, _, type = buffers.describe(buffer)
            receive = [room, source.numel(), type]  # the count of each rank
            calls.append((buffers.describe(source), receive, source))
        return self._start(
            name,
            lambda comm: [comm.Iallgather(message, receive) for message, receive, _ in calls],
            lambda: dense.copy_back(outputs, received),
            outputs,
            opts=opts,
            memory=calls,
        )

    def alltoall(
        self, output_tensors: Tensors, input_tensors: Tensors, opts: Any = None
    ) -> PythonWork:
        """Send entry i of the list to rank i, on every rank; the tensors may differ in size."""
        own = output_tensors[self._rank] if len(output_tensors) == self._size else None
        self._check_list("alltoall", input_tensors, own, "input")
        self._check_list("alltoall", output_tensors, input_tensors[self._rank], "output")
        source, flat = buffers.flatten(input_tensors), buffers.empty_flat(output_tensors)
        message = buffers.describe(source, dense.numels(input_tensors))
        receive = buffers.describe(flat, dense.numels(output_tensors))
        return self._start(
            "alltoall",
            lambda comm: [comm.Ialltoallv(message, receive)],
            lambda: buffers.unflatten(flat, output_tensors),
            output_tensors,
            opts=opts,
            memory=source,
        )

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> PythonWork:
        """Send rows of a tensor to each rank, and receive rows of each; splits may differ."""
        dense.check_dtypes("all_to_all_single", [output], input)
        sends = dense.split_counts(input, input_split_sizes or (), self._size, "the input")
        receives = dense.split_counts(output, output_split_sizes or (), self._size, "the output")
        buffer = buffers.receive_buffer(output)
        source = dense.without_overlap(buffers.send_buffer(input), buffer)
        message, receive = buffers.describe(source, sends), buffers.describe(buffer, receives)
        return self._start(
            "all_to_all_single",
            lambda comm: [comm.Ialltoallv(message, receive)],
            lambda: dense.copy_back([output], [buffer]),
            [output],
            opts=opts,
            memory=source,
        )

    # Reductions

    def reduce(self, tensors: Tensors, opts: Any = None) -> PythonWork:
        """Reduce the tensors of all ranks on the root; the others keep theirs."""
        opts = opts or dist.ReduceOptions()
        (tensor,) = tensors
        root = opts.rootRank
        reduction = reduction_of(opts.reduceOp, tensor.dtype, self._size)
        flat = reduction.flatten(tensors)
        message, receive = reduction.describe(flat), None
        if root == self._rank:
            message, receive = load_mpi().IN_PLACE, message
        return self._start(
            "reduce",
            lambda comm: [comm.Ireduce(message, receive, reduction.op, root)],
            lambda: reduction.copy_back(flat, tensor) if root == self._rank else None,
            tensors,
            opts=opts,
            memory=flat,
        )

    def allreduce(self, tensors: Tensors | Tensor, opts: Any = None) -> PythonWork:
        """Reduce the tensors of all ranks; every rank gets the result."""
        if isinstance(tensors, Tensor):  # from `DistributedDataParallel.join`
            tensors = [tensors]
        return self._all_reduce("allreduce", tensors, opts or dist.AllreduceOptions())

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> PythonWork:
        """Do `allreduce` with several tensors, as one operation."""
        opts = opts or dist.AllreduceCoalescedOptions()
        return self._all_reduce("allreduce_coalesced", tensors, opts)

    def _all_reduce(self, name: str, tensors: Tensors, opts: Any) -> PythonWork:
        calls = []
        for tensor in tensors:
            reduction = reduction_of(opts.reduceOp, tensor.dtype, self._size)
            flat = reduction.flatten([tensor])
            calls.append((reduction, flat, tensor, reduction.describe(flat)))
        in_place = load_mpi().IN_PLACE

        def finish() -> None:
            for reduction, flat, tensor, _ in calls:
                reduction.copy_back(flat, tensor)

        return self._start(
            name,
            lambda comm: [comm.Iallreduce(in_place, both, one.op) for one, _, _, both in calls],
            finish,
            tensors,
            opts=opts,
        )

    def reduce_scatter(
        self, output_tensors: Tensors, input_tensors: Sequence[Tensors], opts: Any = None
    ) -> PythonWork:
        """Reduce the lists of all ranks; rank i gets entry i. Sizes may differ."""
        (output,), (inputs,) = output_tensors, input_tensors
        self._check_list("reduce_scatter", inputs, output, "input")
        return self._reduce_scatter("reduce_scatter", [output], [inputs], opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> PythonWork:
        """Reduce the tensors of all ranks; each rank gets its part."""
        self._check_whole("reduce_scatter_single", whole=input, part=output)
        return self._reduce_scatter("reduce_scatter_single", [output], [[input]], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> PythonWork:
        """Do `reduce_scatter_single` with several tensors, as one operation."""
        name = "reduce_scatter_single_coalesced"
        for output, tensor in zip(outputs, inputs, strict=True):
            self._check_whole(name, whole=tensor, part=output)
        return self._reduce_scatter(name, outputs, [[tensor] for tensor in inputs], opts)

    def _reduce_scatter(
        self, name: str, outputs: Tensors, lists: Sequence[Tensors], opts: Any
    ) -> PythonWork:
        """Reduce each list, which has a tensor for each rank or one tensor of equal parts."""
        opts = opts or dist.ReduceScatterOptions()
        calls = []
        for output, inputs in zip(outputs, lists, strict=True):
            reduction = reduction_of(opts.reduceOp, output.dtype, self._size)
            result = reduction.receive_buffer(output)
            flat = dense.without_overlap(reduction.flatten(inputs), result)
            equal = [flat.numel() // self._size] * self._size
            counts = equal if len(inputs) == 1 else dense.numels(inputs)
            calls.append((reduction, flat, result, counts))

        def begin(comm: Any) -> list[Any]:
            return [
                comm.Ireduce_scatter(one.describe(flat), one.describe(result), counts, one.op)
                for one, flat, result, counts in calls
            ]

        def finish() -> None:
            for (reduction, _, result, _), output in zip(calls, outputs, strict=True):
                reduction.copy_back(result, output)

        return self._start(name, begin, finish, outputs, opts=opts, memory=calls)

    # The names that older releases of PyTorch call

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
