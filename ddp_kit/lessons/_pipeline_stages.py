"""The stages of a pipeline: parts of a GPT, the messages between them, and what a rank records.

`Pipeline` is built by hand, as a chain of small classes. `RecordedStage` is PyTorch's, and records
the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.pipelining import PipelineStage

from ddp_kit import device
from ddp_kit.lessons._gpt import GPT
from ddp_kit.lessons._pipeline_orders import Action, Cell, cell, check_order


class GPTStage(nn.Module):
    """One of `count` equal parts of a GPT; the first also embeds, the last also predicts."""

    def __init__(self, model: GPT, index: int, count: int) -> None:
        super().__init__()
        blocks, left = divmod(len(model.blocks), count)
        if left:
            raise ValueError(f"{len(model.blocks)} blocks cannot be cut into {count} equal stages")
        self.blocks = model.blocks[index * blocks : (index + 1) * blocks]
        self.is_first, self.is_last = index == 0, index == count - 1
        if self.is_first:
            self.tokens, self.positions = model.tokens, model.positions
        if self.is_last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return activations (batch, length, width); the first gets tokens, the last logits."""
        if self.is_first:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.is_last else x


def cut(batch: torch.Tensor, micro_batches: int) -> Sequence[torch.Tensor]:
    """Return the equal micro-batches of a batch."""
    if micro_batches < 1 or len(batch) % micro_batches:
        raise ValueError(
            f"{len(batch)} sequences cannot be cut into {micro_batches} equal micro-batches"
        )
    return batch.chunk(micro_batches)


class Neighbours:
    """Sends tensors to the stages before and after this rank's, and receives from them.

    The tag of a message is the number of its micro-batch.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.is_first, self.is_last = self.rank == 0, self.rank == self.world_size - 1
        self.sending: dict[tuple[int, int], tuple[dist.Work, torch.Tensor]] = {}

    def send(self, tensor: torch.Tensor, dst: int, i: int) -> None:
        """Start to send; the tensor must live until it has arrived."""
        self.sending[dst, i] = (dist.isend(tensor, dst, tag=i), tensor)

    def receive(self, shape: torch.Size, src: int, i: int) -> torch.Tensor:
        """Wait for a tensor."""
        tensor = torch.empty(*shape, self.width, device=device())
        dist.recv(tensor, src, tag=i)
        return tensor

    def finish(self, *sent: tuple[int, int]) -> None:
        """Wait until these have arrived, or all: (dst, i) of each."""
        for key in sent or [*self.sending]:
            work, _ = self.sending.pop(key)
            work.wait()


class ForwardByHand(Neighbours):
    """Computes the forward of one micro-batch on this rank's stage.

    held: by its number, the input and the output of each micro-batch between the two.
    """

    def __init__(self, stage: GPTStage, width: int, loss_fn: Callable) -> None:
        super().__init__(width)
        self.stage, self.loss_fn = stage, loss_fn
        self.held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.cells: list[Cell] = []

    def forward(self, i: int, tokens: torch.Tensor, targets: torch.Tensor, wait: float) -> None:
        """Receive the stage's input, and send its output; the last stage keeps the loss."""
        x = tokens
        if not self.is_first:
            x = self.receive(tokens.shape, self.rank - 1, i).requires_grad_()
        with cell(self.cells, "F", i, self.rank, wait):
            y = self.stage(x)
            if self.is_last:
                y = self.loss_fn(y, targets)
        if not self.is_last:
            self.send(y.detach(), self.rank + 1, i)
        self.held[i] = (x, y)


class StageByHand(ForwardByHand):
    """Computes the backward of a micro-batch, too."""

    def backward(self, i: int, wait: float) -> torch.Tensor:
        """Receive the gradient of the stage's output, send that of its input; return the output."""
        x, y = self.held.pop(i)
        gradient = None
        if not self.is_last:
            gradient = self.receive(y.shape[:-1], self.rank + 1, i)
            self.finish((self.rank + 1, i))
        with cell(self.cells, "B", i, self.rank, wait):
            y.backward(gradient)
        if not self.is_first:
            self.send(x.grad, self.rank - 1, i)
        return y.detach()


class Pipeline(StageByHand):
    """Runs this rank's actions in their order."""

    def step(
        self,
        actions: Iterable[Action],
        tokens: torch.Tensor,
        targets: torch.Tensor,
        wait: float = 0,
    ) -> list[torch.Tensor]:
        """Run one batch through the pipeline; return the losses on the last rank.

        actions: this rank's, in their order. wait: seconds added to each forward, and twice to a
        backward. Raises ValueError unless they are an order of equal micro-batches.
        """
        actions = list(actions)
        check_order(actions)
        m = len(actions) // 2
        micro_batches = list(zip(cut(tokens, m), cut(targets, m), strict=True))
        losses = []
        for kind, i in actions:
            if kind == "F":
                self.forward(i, *micro_batches[i], wait)
            else:
                losses.append(self.backward(i, wait))
        self.finish()
        return losses if self.is_last else []


class RecordedStage(PipelineStage):
    """PyTorch's stage, which records its cells and may wait in each, as `StageByHand` does."""

    def __init__(self, *given: Any, cells: list[Cell], wait: float = 0) -> None:
        super().__init__(*given)
        self.cells, self.wait = cells, wait

    def forward_one_chunk(self, fwd_chunk_id: int, *given: Any, **named: Any) -> Any:
        """Compute the forward of one micro-batch."""
        with cell(self.cells, "F", fwd_chunk_id, self.stage_index, self.wait):
            return super().forward_one_chunk(fwd_chunk_id, *given, **named)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, **named: Any
    ) -> None:
        """Compute the backward of one micro-batch, or only the gradient of the stage's input."""
        kind = "B" if full_backward else "I"
        with cell(self.cells, kind, bwd_chunk_id, self.stage_index, self.wait):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, **named)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, **named: Any) -> None:
        """Compute the gradients of the stage's weights for one micro-batch."""
        with cell(self.cells, "W", bwd_chunk_id, self.stage_index, self.wait):
            super().backward_weight_one_chunk(bwd_chunk_id, **named)


class Activations:
    """Counts the bytes that autograd keeps for backwards, without those of parameters.

    most: the highest number of bytes at any time.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self.parameters = {p.untyped_storage().data_ptr() for p in parameters}
        self.users: Counter[int] = Counter()  # of each memory
        self.now = self.most = 0

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Count what is kept in this block."""
        with saved_tensors_hooks(lambda tensor: Kept(tensor, self), lambda kept: kept.tensor):
            yield

    def count(self, storage: torch.UntypedStorage, users: int) -> None:
        """Note that one user of a memory has come, 1, or gone, -1."""
        at = storage.data_ptr()
        if at in self.parameters:
            return
        self.users[at] += users
        if self.users[at] == max(users, 0):  # the first one, or the last
            self.now += users * storage.nbytes()
            self.most = max(self.most, self.now)


class Kept:
    """A tensor that autograd keeps."""

    def __init__(self, tensor: torch.Tensor, activations: Activations) -> None:
        self.tensor, self.activations = tensor, activations
        activations.count(tensor.untyped_storage(), 1)

    def __del__(self) -> None:
        self.activations.count(self.tensor.untyped_storage(), -1)
