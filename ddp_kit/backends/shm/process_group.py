"""The process group: its collectives, in all the forms that PyTorch calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ddp_kit.backends.group import tensors as memory
from ddp_kit.backends.group.process_group import Tensors
from ddp_kit.backends.group.work import PythonWork
from ddp_kit.backends.shm.message_group import MessageGroup, bytes_of, source_of, target_of
from ddp_kit.backends.shm.operations import Steps
from ddp_kit.backends.shm.reductions import reduction_of


class SharedMemoryProcessGroup(MessageGroup):
    """A process group whose ranks share memory, on one host.

    Every operation begins in the caller's thread. `Work.wait` moves it on and sleeps while it
    cannot go on; a thread of the group does the same for operations that nobody waits for.
    Collectives of a group run one after another, in the order of the program.

    `send` ends when the message was received, as with gloo. A message that is larger or smaller
    than the receiver's tensor raises an error there. Ranks whose collectives differ in kind, dtype
    or size get an error that names both, unless one of the two is a gather, scatter or all_to_all:
    then they wait for each other.

    After its timeout an operation raises RuntimeError, and also as soon as a process has ended
    without which it cannot go on. After a collective that failed the group cannot be used again.

    `reductions.Reduction` says in which order sums are added, and `futex` what the order of stores
    relies on. The README has a table of what this backend lacks.
    """

    # Data movement

    def barrier(self, opts: Any = None) -> PythonWork:
        """Wait until all ranks of the group call this."""
        return self._start("barrier", self._steps.barrier(), (), opts)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> PythonWork:
        """Copy the root's tensors to all ranks."""
        opts = opts or dist.BroadcastOptions()
        is_root = opts.rootRank == self._rank
        data = [source_of(tensor) if is_root else target_of(tensor) for tensor in tensors]

        def steps() -> Steps:
            for one in data:
                yield from self._steps.broadcast(one.view(-1), opts.rootRank)
            if not is_root:
                memory.copy_back(tensors, data)

        return self._start("broadcast", steps(), tensors, opts)

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
        sends = {opts.rootRank: source_of(tensor)}
        return self._exchange("gather", sends, dict(enumerate(outputs)), outputs, opts)

    def scatter(
        self, output_tensors: Tensors, input_tensors: Sequence[Tensors], opts: Any = None
    ) -> PythonWork:
        """Send entry i of the root's list to rank i; the tensors may differ in size."""
        opts = opts or dist.ScatterOptions()
        (output,) = output_tensors
        sends: dict[int, Tensor] = {}
        if opts.rootRank == self._rank:
            (inputs,) = input_tensors
            self._check_list("scatter", inputs, output, "input")
            sends = {rank: source_of(tensor) for rank, tensor in enumerate(inputs)}
        return self._exchange("scatter", sends, {opts.rootRank: output}, output_tensors, opts)

    def alltoall(
        self, output_tensors: Tensors, input_tensors: Tensors, opts: Any = None
    ) -> PythonWork:
        """Send entry i of the list to rank i, on every rank; the tensors may differ in size."""
        own = output_tensors[self._rank] if len(output_tensors) == self._size else None
        self._check_list("alltoall", input_tensors, own, "input")
        self._check_list("alltoall", output_tensors, input_tensors[self._rank], "output")
        sends = {rank: source_of(tensor) for rank, tensor in enumerate(input_tensors)}
        receives = dict(enumerate(output_tensors))
        return self._exchange("alltoall", sends, receives, output_tensors, opts)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> PythonWork:
        """Send rows of a tensor to each rank, and receive rows of each; splits may differ."""
        memory.check_dtypes("all_to_all_single", [output], input)
        to = memory.split_counts(input, input_split_sizes or (), self._size, "the input")
        of = memory.split_counts(output, output_split_sizes or (), self._size, "the output")
        if to[self._rank] != of[self._rank]:
            raise ValueError(
                f"all_to_all_single: rank {self._rank} has {to[self._rank]} elements for itself, "
                f"but expects {of[self._rank]}"
            )
        buffer = target_of(output)
        source = memory.without_overlap(source_of(input), buffer)
        sends = dict(enumerate(source.view(-1).split(to)))
        receives = dict(enumerate(buffer.view(-1).split(of)))

        def finish() -> None:
            memory.copy_back([output], [buffer])

        return self._exchange("alltoall", sends, receives, [output], opts, finish)

    def _exchange(
        self,
        name: str,
        sends: dict[int, Tensor],
        receives: dict[int, Tensor],
        outputs: Tensors,
        opts: Any,
        finish: Any = None,
    ) -> PythonWork:
        buffers = {rank: target_of(tensor) for rank, tensor in receives.items()}
        if any(buffers) and any(sends):
            for buffer in buffers.values():  # one that is sent may be received in, too
                sends = {r: memory.without_overlap(one, buffer) for r, one in sends.items()}

        def steps() -> Steps:
            yield from self._steps.exchange(
                name,
                {rank: bytes_of(one) for rank, one in sends.items()},
                {rank: bytes_of(one) for rank, one in buffers.items()},
            )
            memory.copy_back(list(receives.values()), list(buffers.values()))
            if finish is not None:
                finish()

        return self._start(name, steps(), outputs, opts)

    def allgather(
        self, output_tensors: Sequence[Tensors], input_tensors: Tensors, opts: Any = None
    ) -> PythonWork:
        """Collect a tensor of every rank in a list; they may differ in size."""
        return self._all_gather("allgather", output_tensors, input_tensors, opts)

    def allgather_coalesced(
        self, output_lists: Sequence[Tensors], input_list: Tensors, opts: Any = None
    ) -> PythonWork:
        """Do `allgather` with several tensors. Entry [rank][i] is tensor i of that rank."""
        lists = [[tensors[i] for tensors in output_lists] for i in range(len(input_list))]
        return self._all_gather("allgather_coalesced", lists, input_list, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> PythonWork:
        """Collect a tensor of every rank in one tensor; all have the same size."""
        return self._all_gather_whole("all_gather_single", [output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> PythonWork:
        """Do `all_gather_single` with several tensors, as one operation."""
        return self._all_gather_whole("all_gather_single_coalesced", outputs, inputs, opts)

    def _all_gather_whole(
        self, name: str, outputs: Tensors, inputs: Tensors, opts: Any
    ) -> PythonWork:
        buffers = []
        for output, tensor in zip(outputs, inputs, strict=True):
            self._check_whole(name, whole=output, part=tensor)
            buffers.append(target_of(output))
        lists = [list(buffer.view(-1).chunk(self._size)) for buffer in buffers]
        lists = [
            parts if len(parts) == self._size else [buffer.view(-1)] * self._size
            for parts, buffer in zip(lists, buffers, strict=True)  # an empty one has one chunk
        ]
        return self._all_gather(name, lists, inputs, opts, (outputs, buffers))

    def _all_gather(
        self,
        name: str,
        lists: Sequence[Tensors],
        inputs: Tensors,
        opts: Any,
        whole: tuple[Tensors, Tensors] | None = None,
    ) -> PythonWork:
        calls = []
        for outputs, tensor in zip(lists, inputs, strict=True):
            self._check_list(name, outputs, tensor, "output")
            calls.append((source_of(tensor).view(-1), [target_of(output) for output in outputs]))

        def steps() -> Steps:
            for (data, targets), outputs in zip(calls, lists, strict=True):
                yield from self._steps.all_gather(data, [each.view(-1) for each in targets])
                memory.copy_back(outputs, targets)
            if whole is not None:
                memory.copy_back(*whole)

        results = whole[0] if whole else [tensor for outputs in lists for tensor in outputs]
        return self._start(name, steps(), results, opts)

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
        calls = []
        for tensor in tensors:
            reduction = reduction_of(opts.reduceOp, tensor.dtype, self._size)
            data = source_of(tensor)  # in place, unless it is no plain memory
            calls.append((reduction, data, tensor))

        def steps() -> Steps:
            for reduction, data, tensor in calls:
                yield from self._steps.reduce(data.view(-1), reduction, root)
                if root in (None, self._rank):
                    memory.copy_back([tensor], [data])

        return self._start(name, steps(), tensors, opts)

    def reduce_scatter(
        self, output_tensors: Tensors, input_tensors: Sequence[Tensors], opts: Any = None
    ) -> PythonWork:
        """Reduce the lists of all ranks; rank i gets entry i. Sizes may differ."""
        (output,), (inputs,) = output_tensors, input_tensors
        self._check_list("reduce_scatter", inputs, output, "input")
        return self._reduce_scatter("reduce_scatter", [output], [inputs], opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> PythonWork:
        """Reduce the tensors of all ranks; each rank gets its part."""
        name = "reduce_scatter_single"
        return self._reduce_scatter_whole(name, [output], [input], opts)

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
            parts = source_of(tensor).view(-1).split([output.numel()] * self._size)
            lists.append(list(parts))
        return self._reduce_scatter(name, outputs, lists, opts)

    def _reduce_scatter(
        self, name: str, outputs: Tensors, lists: Sequence[Tensors], opts: Any
    ) -> PythonWork:
        opts = opts or dist.ReduceScatterOptions()
        calls = []
        for output, inputs in zip(outputs, lists, strict=True):
            reduction = reduction_of(opts.reduceOp, output.dtype, self._size)
            target = target_of(output)
            parts = [memory.without_overlap(source_of(one), target).view(-1) for one in inputs]
            calls.append((reduction, parts, target))

        def steps() -> Steps:
            for reduction, parts, target in calls:
                yield from self._steps.reduce_scatter(parts, target.view(-1), reduction)
            memory.copy_back(outputs, [target for _, _, target in calls])

        return self._start(name, steps(), outputs, opts)

    # The names that older releases of PyTorch call

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
