"""The collectives that compute with the values of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from ddp_kit.mpi import buffers, library
from ddp_kit.mpi.base import BaseGroup
from ddp_kit.mpi.reductions import Reduction
from ddp_kit.mpi.work import MPIWork


class Sums(BaseGroup):
    """Reduce, all_reduce and reduce_scatter, in all the forms of PyTorch."""

    def reduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> MPIWork:
        """Combine the tensors of all ranks on the root; the others keep theirs."""
        opts = opts or c10d.ReduceOptions()
        (tensor,) = tensors
        root = opts.rootRank
        reduction = Reduction.of(opts.reduceOp, tensor.dtype, self._size)
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
            reduction = Reduction.of(opts.reduceOp, tensor.dtype, self._size)
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
            reduction = Reduction.of(opts.reduceOp, output.dtype, self._size)
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

    # The names that older releases of PyTorch call

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
