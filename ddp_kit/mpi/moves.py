"""The collectives that move values between ranks and compute nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from ddp_kit.mpi import buffers
from ddp_kit.mpi.base import BaseGroup, check_dtypes
from ddp_kit.mpi.work import MPIWork


class Moves(BaseGroup):
    """Broadcast, gather, scatter, all_gather and all_to_all, in all the forms of PyTorch."""

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
        check_dtypes("all_to_all_single", [output], input)
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
    alltoall_base = all_to_all_single
