"""A process group of PyTorch whose messages travel through MPI."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ddp_kit.errors import BackendError
from ddp_kit.mpi import buffers, library, watcher
from ddp_kit.mpi.operation import Operation
from ddp_kit.mpi.reductions import Reduction
from ddp_kit.mpi.work import MPIWork

_FIRST_TAG, _TAGS = 16384, 16000  # MPI promises tags up to 32767


def create_group(options: Any, _: Any = None) -> MPIProcessGroup:
    """Make the group that `init_process_group` or `new_group` asks for. Its members call this.

    The store in `options` is not used: mpiexec has brought the ranks together.
    Raises BackendError where the ranks are not those that mpiexec started.
    """
    MPI = library.load()
    size, rank = options.group_size, options.group_rank
    members = list(options.global_ranks_in_group) or list(range(size))
    world = MPI.COMM_WORLD
    if size > world.Get_size():
        raise BackendError(
            f"world_size is {size}, but mpiexec started {world.Get_size()}; "
            f"start the ranks with mpiexec -n {size}"
        )
    if members[rank] != world.Get_rank():
        raise BackendError(
            f"this process is rank {world.Get_rank()} of MPI, and PyTorch was told "
            f"rank={members[rank]}; take rank and world_size from ddp_kit.mpi.place()"
        )
    timeout = options.timeout.total_seconds()
    tag = _FIRST_TAG + zlib.crc32(str(options.group_id).encode()) % _TAGS
    _meet(members, rank, tag, timeout)
    with library.lock:
        chosen = world.Get_group().Incl(members)
        communicator = world.Create_group(chosen, tag)
        chosen.Free()
        communicator.Set_errhandler(MPI.ERRORS_RETURN)
    library.will_leave_with(communicator, timeout)
    return MPIProcessGroup(communicator, timeout)


def _meet(members: list[int], rank: int, tag: int, timeout: float) -> None:
    """Return when all members are here, or raise after `timeout`.

    MPI waits without a limit when it makes a communicator, and nothing can interrupt it.
    """
    MPI = library.load()
    world, nothing = MPI.COMM_WORLD, [None, 0, MPI.BYTE]

    def exchange(send: Sequence[int], receive: Sequence[int]) -> None:
        with library.lock:
            requests = [world.Irecv(nothing, peer, tag) for peer in receive]
            requests += [world.Isend(nothing, peer, tag) for peer in send]
        Operation("new_group", requests, timeout).wait()

    first, *others = members
    if rank == 0:
        exchange([], others)
        exchange(others, [])
    else:
        exchange([first], [first])


class MPIProcessGroup(dist.ProcessGroup):
    """A group with an MPI communicator of its own.

    Every operation starts in the caller's thread, in the order of the program, with a nonblocking
    call of MPI. `Work.wait` polls until it is complete; `ddp_kit.mpi.watcher` looks after what
    nobody waits for, so that futures complete. MPI gets the memory of the tensors, which live on
    the CPU. It is copied only where a tensor does not lie in one piece, for lists of tensors, and
    where MPI has no type to compute in (see `Reduction`).

    A small message is buffered by MPI: `send` then returns before the other rank receives.

    timeout: seconds until an operation is given up. MPI cannot take back a collective, so its
    tensors stay reserved, and the ranks should end.
    """

    def __init__(self, communicator: Any, timeout: float) -> None:
        super().__init__(communicator.Get_rank(), communicator.Get_size())
        self._communicator = communicator
        self._rank, self._size = communicator.Get_rank(), communicator.Get_size()
        self._timeout = timeout
        self._name = self._description = ""

    # PyTorch's C++ asks by these names

    def getBackendName(self) -> str:
        """Return "mpi4py"."""
        return "mpi4py"

    def getGroupName(self) -> str:
        """Return what PyTorch calls the group."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Take the name that PyTorch gives."""
        self._name = name

    def getGroupDesc(self) -> str:
        """Return `group_desc` of `new_group`."""
        return self._description

    def setGroupDesc(self, description: str) -> None:
        """Take the description that PyTorch gives."""
        self._description = description

    def set_timeout(self, timeout: timedelta) -> None:
        """Limit the operations that start from now on."""
        self._timeout = timeout.total_seconds()

    def shutdown(self) -> None:
        """Free the communicator; `dist.destroy_process_group` calls this."""
        communicator, self._communicator = self._communicator, None
        if communicator is None or library.leaves_with(communicator) or watcher.unfinished():
            return  # MPI_Finalize frees it
        with library.lock:
            communicator.Free()

    def abort(self) -> None:
        """Do as `shutdown` does: MPI cannot take back a collective."""
        self.shutdown()

    # Messages between two ranks

    def send(self, tensors: Sequence[torch.Tensor], dstRank: int, tag: int = 0) -> MPIWork:
        """Send one tensor."""
        (tensor,) = tensors
        source = buffers.sent(tensor)
        message = buffers.as_bits(source)
        return self._start(
            "send",
            lambda comm: [comm.Isend(message, dstRank, tag)],
            outputs=tensors,
            held=source,
        )

    def recv(self, tensors: Sequence[torch.Tensor], srcRank: int, tag: int = 0) -> MPIWork:
        """Receive one tensor."""
        return self._receive(tensors, srcRank, tag)

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int = 0) -> MPIWork:
        """Receive one tensor from whoever sends first; `Work._source_rank` tells who it was."""
        return self._receive(tensors, library.load().ANY_SOURCE, tag)

    def _receive(self, tensors: Sequence[torch.Tensor], source: int, tag: int) -> MPIWork:
        (tensor,) = tensors
        place = buffers.received(tensor)
        message = buffers.as_bits(place)
        return self._start(
            "recv",
            lambda comm: [comm.Irecv(message, source, tag)],
            lambda: buffers.copy([tensor], [place]),
            outputs=tensors,
            expected=place.nbytes,
        )

    # Collectives from one rank, or to one rank

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> MPIWork:
        """Copy the root's tensors to all ranks."""
        opts = opts or c10d.BroadcastOptions()
        root = opts.rootRank
        take = buffers.sent if root == self._rank else buffers.received
        places = [take(tensor) for tensor in tensors]
        messages = [buffers.as_bits(place) for place in places]
        return self._start(
            "broadcast",
            lambda comm: [comm.Ibcast(message, root) for message in messages],
            lambda: None if root == self._rank else buffers.copy(tensors, places),
            tensors,
            opts=opts,
            held=places,
        )

    def reduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> MPIWork:
        """Combine the tensors of all ranks on the root; the others keep theirs."""
        opts = opts or c10d.ReduceOptions()
        (tensor,) = tensors
        root = opts.rootRank
        reduction = Reduction(opts.reduceOp, tensor.dtype, self._size)
        held = reduction.row(tensors)
        message = reduction.described(held)
        if root != self._rank:
            return self._start(
                "reduce",
                lambda comm: [comm.Ireduce(message, None, reduction.op, root)],
                outputs=tensors,
                opts=opts,
                held=held,
            )
        in_place = library.load().IN_PLACE
        return self._start(
            "reduce",
            lambda comm: [comm.Ireduce(in_place, message, reduction.op, root)],
            lambda: reduction.land(held, tensor),
            tensors,
            opts=opts,
        )

    def gather(
        self,
        output_tensors: Sequence[Sequence[torch.Tensor]],
        input_tensors: Sequence[torch.Tensor],
        opts: Any = None,
    ) -> MPIWork:
        """Collect a tensor of every rank in the root's list; they may differ in size."""
        opts = opts or c10d.GatherOptions()
        root = opts.rootRank
        source = buffers.joined(input_tensors)
        message = buffers.as_bits(source)
        if root != self._rank:
            return self._start(
                "gather",
                lambda comm: [comm.Igatherv(message, None, root)],
                opts=opts,
                held=source,
            )
        (outputs,) = output_tensors
        self._check_list("gather", outputs, input_tensors[0], "output")
        row = buffers.room(outputs)
        room = buffers.as_bits(row, buffers.counts(outputs))
        return self._start(
            "gather",
            lambda comm: [comm.Igatherv(message, room, root)],
            buffers.deal(row, outputs),
            outputs,
            opts=opts,
            held=source,
        )

    def scatter(
        self,
        output_tensors: Sequence[torch.Tensor],
        input_tensors: Sequence[Sequence[torch.Tensor]],
        opts: Any = None,
    ) -> MPIWork:
        """Deal out the root's list; its tensors may differ in size."""
        opts = opts or c10d.ScatterOptions()
        root = opts.rootRank
        (output,) = output_tensors
        row = deal = None
        place = buffers.received(output)
        room = buffers.as_bits(place)
        if root == self._rank:
            (inputs,) = input_tensors
            self._check_list("scatter", inputs, output, "input")
            row = buffers.apart(buffers.joined(inputs), place)
            deal = buffers.as_bits(row, buffers.counts(inputs))
        return self._start(
            "scatter",
            lambda comm: [comm.Iscatterv(deal, room, root)],
            lambda: buffers.copy([output], [place]),
            output_tensors,
            opts=opts,
            held=row,
        )

    # Collectives in which all ranks get the same

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> MPIWork:
        """Combine the tensors of all ranks; every rank gets the result."""
        return self._all_reduce("allreduce", tensors, opts or c10d.AllreduceOptions())

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> MPIWork:
        """Do `allreduce` with several tensors, as one operation."""
        return self._all_reduce(
            "allreduce_coalesced", tensors, opts or c10d.AllreduceCoalescedOptions()
        )

    def _all_reduce(self, name: str, tensors: Sequence[torch.Tensor], opts: Any) -> MPIWork:
        parts = []
        for tensor in tensors:
            reduction = Reduction(opts.reduceOp, tensor.dtype, self._size)
            held = reduction.row([tensor])
            parts.append((reduction, held, tensor, reduction.described(held)))
        in_place = library.load().IN_PLACE

        def land() -> None:
            for reduction, held, tensor, _ in parts:
                reduction.land(held, tensor)

        return self._start(
            name,
            lambda comm: [comm.Iallreduce(in_place, to, one.op) for one, _, _, to in parts],
            land,
            tensors,
            opts=opts,
        )

    def allgather(
        self,
        output_tensors: Sequence[Sequence[torch.Tensor]],
        input_tensors: Sequence[torch.Tensor],
        opts: Any = None,
    ) -> MPIWork:
        """Collect a tensor of every rank in a list; they may differ in size."""
        return self._all_gather_lists("allgather", output_tensors, input_tensors, opts)

    def allgather_coalesced(
        self,
        output_lists: Sequence[Sequence[torch.Tensor]],
        input_list: Sequence[torch.Tensor],
        opts: Any = None,
    ) -> MPIWork:
        """Do `allgather` with several tensors. Entry [rank][i] is tensor i of that rank."""
        lists = [[tensors[i] for tensors in output_lists] for i in range(len(input_list))]
        return self._all_gather_lists("allgather_coalesced", lists, input_list, opts)

    def _all_gather_lists(
        self,
        name: str,
        lists: Sequence[Sequence[torch.Tensor]],
        inputs: Sequence[torch.Tensor],
        opts: Any,
    ) -> MPIWork:
        parts, deals = [], []
        for outputs, tensor in zip(lists, inputs, strict=True):
            self._check_list(name, outputs, tensor, "output")
            source, row = buffers.sent(tensor), buffers.room(outputs)
            room = buffers.as_bits(row, buffers.counts(outputs))
            parts.append((buffers.as_bits(source), room, source))
            deals.append(buffers.deal(row, outputs))
        return self._start(
            name,
            lambda comm: [comm.Iallgatherv(message, room) for message, room, _ in parts],
            lambda: [deal() for deal in deals],
            [tensor for outputs in lists for tensor in outputs],
            opts=opts,
            held=parts,
        )

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> MPIWork:
        """Collect a tensor of every rank in one tensor; all have the same size."""
        return self._all_gather("all_gather_single", [output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> MPIWork:
        """Do `all_gather_single` with several tensors, as one operation."""
        return self._all_gather("all_gather_single_coalesced", outputs, inputs, opts)

    def _all_gather(
        self,
        name: str,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        opts: Any,
    ) -> MPIWork:
        places, parts = [], []
        for output, tensor in zip(outputs, inputs, strict=True):
            self._check_whole(name, whole=output, part=tensor)
            place = buffers.received(output)
            source = buffers.apart(buffers.sent(tensor), place)
            places.append(place)
            message = buffers.as_bits(source)
            memory, _, type = buffers.as_bits(place)
            parts.append((message, [memory, source.numel(), type], source))  # of each rank
        return self._start(
            name,
            lambda comm: [comm.Iallgather(message, room) for message, room, _ in parts],
            lambda: buffers.copy(outputs, places),
            outputs,
            opts=opts,
            held=parts,
        )

    def barrier(self, opts: Any = None) -> MPIWork:
        """Wait until all ranks are here."""
        return self._start("barrier", lambda comm: [comm.Ibarrier()], opts=opts)

    # Collectives in which every rank gets a part

    def reduce_scatter(
        self,
        output_tensors: Sequence[torch.Tensor],
        input_tensors: Sequence[Sequence[torch.Tensor]],
        opts: Any = None,
    ) -> MPIWork:
        """Combine the lists of all ranks, and give each rank its entry; sizes may differ."""
        opts = opts or c10d.ReduceScatterOptions()
        (output,), (inputs,) = output_tensors, input_tensors
        self._check_list("reduce_scatter", inputs, output, "input")
        return self._reduce_scatter("reduce_scatter", [(output, inputs)], opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> MPIWork:
        """Combine the tensors of all ranks, and give each rank its part."""
        return self._reduce_scatter_whole("reduce_scatter_single", [output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> MPIWork:
        """Do `reduce_scatter_single` with several tensors, as one operation."""
        return self._reduce_scatter_whole("reduce_scatter_single_coalesced", outputs, inputs, opts)

    def _reduce_scatter_whole(
        self,
        name: str,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        opts: Any,
    ) -> MPIWork:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._check_whole(name, whole=tensor, part=output)
        pairs = [(output, [tensor]) for output, tensor in zip(outputs, inputs, strict=True)]
        return self._reduce_scatter(name, pairs, opts or c10d.ReduceScatterOptions())

    def _reduce_scatter(
        self, name: str, pairs: Sequence[tuple[torch.Tensor, Sequence[torch.Tensor]]], opts: Any
    ) -> MPIWork:
        parts = []
        for output, inputs in pairs:
            reduction = Reduction(opts.reduceOp, output.dtype, self._size)
            place = reduction.room(output)
            row = buffers.apart(reduction.row(inputs), place)
            share = row.numel() // self._size
            split = [share] * self._size if len(inputs) == 1 else buffers.counts(inputs)
            parts.append((reduction, row, place, split))

        def begin(comm: Any) -> list[Any]:
            return [
                comm.Ireduce_scatter(one.described(row), one.described(place), split, one.op)
                for one, row, place, split in parts
            ]

        def land() -> None:
            for (reduction, _, place, _), (output, _) in zip(parts, pairs, strict=True):
                reduction.land(place, output)

        outputs = [output for output, _ in pairs]
        return self._start(name, begin, land, outputs, opts=opts, held=parts)

    def alltoall(
        self,
        output_tensors: Sequence[torch.Tensor],
        input_tensors: Sequence[torch.Tensor],
        opts: Any = None,
    ) -> MPIWork:
        """Send entry i of the list to rank i, on every rank; sizes may differ."""
        own = output_tensors[self._rank] if len(output_tensors) == self._size else None
        self._check_list("alltoall", input_tensors, own, "input")
        self._check_list("alltoall", output_tensors, input_tensors[self._rank], "output")
        row, place = buffers.joined(input_tensors), buffers.room(output_tensors)
        message = buffers.as_bits(row, buffers.counts(input_tensors))
        room = buffers.as_bits(place, buffers.counts(output_tensors))
        return self._start(
            "alltoall",
            lambda comm: [comm.Ialltoallv(message, room)],
            buffers.deal(place, output_tensors),
            output_tensors,
            opts=opts,
            held=row,
        )

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> MPIWork:
        """Send the rows of a tensor to the ranks, and get rows of each; splits may differ."""
        _check_dtypes("all_to_all_single", [output], input)
        sending = buffers.rows(input, input_split_sizes or (), self._size, "the input")
        coming = buffers.rows(output, output_split_sizes or (), self._size, "the output")
        place = buffers.received(output)
        source = buffers.apart(buffers.sent(input), place)
        message, room = buffers.as_bits(source, sending), buffers.as_bits(place, coming)
        return self._start(
            "all_to_all_single",
            lambda comm: [comm.Ialltoallv(message, room)],
            lambda: buffers.copy([output], [place]),
            [output],
            opts=opts,
            held=source,
        )

    # The names that older releases of PyTorch call

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _start(
        self,
        name: str,
        begin: Callable[[Any], list[Any]],
        finish: Callable[[], None] | None = None,
        outputs: Sequence[torch.Tensor] = (),
        *,
        opts: Any = None,
        held: Any = None,
        expected: int | None = None,
    ) -> MPIWork:
        """Start what `begin` asks of the communicator. held: memory that MPI reads meanwhile."""
        if self._communicator is None:
            raise RuntimeError(f"{name}: this process group was destroyed")
        with library.lock:
            try:
                requests = begin(self._communicator)
            except library.load().Exception as error:
                raise RuntimeError(f"{name} failed in MPI: {library.say(error)}") from None
        own = None if opts is None else opts.timeout.total_seconds()
        limit = self._timeout if own is None or own <= 0 else own
        operation = Operation(name, requests, limit, finish, outputs, held, expected)
        return MPIWork(operation)

    def _check_list(
        self, name: str, tensors: Sequence[torch.Tensor], own: torch.Tensor | None, side: str
    ) -> None:
        """Refuse a list without one tensor for each rank, or whose entry here does not fit."""
        if len(tensors) != self._size:
            raise ValueError(
                f"{name} needs one {side} tensor for each of the {self._size} ranks, "
                f"got {len(tensors)}"
            )
        _check_dtypes(name, tensors, own)
        here = tensors[self._rank]
        if here.numel() != own.numel():
            raise ValueError(
                f"{name}: {side} tensor {self._rank} has {here.numel()} elements, "
                f"and its counterpart on this rank has {own.numel()}"
            )

    def _check_whole(self, name: str, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Refuse a tensor that is not as large as one part for each rank."""
        _check_dtypes(name, [whole], part)
        if whole.numel() != part.numel() * self._size:
            raise ValueError(
                f"{name}: {self._size} parts of {part.numel()} elements do not make "
                f"a tensor of {whole.numel()}"
            )


def _check_dtypes(name: str, tensors: Sequence[torch.Tensor], other: torch.Tensor) -> None:
    for tensor in tensors:
        if tensor.dtype is not other.dtype:
            raise ValueError(
                f"{name} needs tensors of one dtype, got {tensor.dtype} and {other.dtype}"
            )
