# Made from notebooks/17_pipeline_parallel.ipynb by `make editions`: edit that, not this.
"""Pipeline parallelism: each rank has some of the layers."""

import time
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage

import ddp_kit as kit
from ddp_kit.lessons._launch import run_as_script
from ddp_kit.lessons._pipeline_parallel import (
    BY_HAND,
    PYTORCH,
    SIZE,
    Cell,
    boundary_bytes,
    config_for,
    ideal_bubble,
    main,
    next_rank,
    of_each_rank,
    step_length,
    steps_of,
    train,
    train_alone,
)


class GPTStage(nn.Module):
    def __init__(self, model, index, count):
        super().__init__()
        blocks = len(model.blocks) // count
        self.blocks = model.blocks[index * blocks : (index + 1) * blocks]
        self.is_first, self.is_last = index == 0, index == count - 1
        if self.is_first:
            self.tokens, self.positions = model.tokens, model.positions
        if self.is_last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x):
        if self.is_first:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.is_last else x


def cut(batch, m):
    if len(batch) % m:
        raise ValueError(f"{len(batch)} sequences cannot be cut into {m} equal micro-batches")
    return batch.chunk(m)


def mean_loss(m, logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / m


LASTS = {"F": 1, "B": 2, "I": 1, "W": 1}


@contextmanager
def cell(cells, kind, i, stage, wait):
    start = time.monotonic()
    time.sleep(LASTS[kind] * wait)
    yield
    cells.append(Cell(kind, i, start, time.monotonic(), stage))


class Neighbours:
    def __init__(self, width):
        self.width = width
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.is_first, self.is_last = self.rank == 0, self.rank == self.world_size - 1
        self.sending = {}

    def send(self, tensor, dst, i):
        self.sending[dst, i] = dist.isend(tensor, dst), tensor

    def receive(self, shape, src):
        tensor = torch.empty(*shape, self.width, device=kit.device())
        dist.recv(tensor, src)
        return tensor

    def finish(self, *sent):
        for key in sent or [*self.sending]:
            work, _ = self.sending.pop(key)
            work.wait()


class ForwardByHand(Neighbours):
    def __init__(self, stage, width, loss_fn):
        super().__init__(width)
        self.stage, self.loss_fn = stage, loss_fn
        self.held = {}
        self.cells = []

    def forward(self, i, tokens, targets, wait):
        x = tokens
        if not self.is_first:
            x = self.receive(tokens.shape, self.rank - 1).requires_grad_()
        with cell(self.cells, "F", i, self.rank, wait):
            y = self.stage(x)
            if self.is_last:
                y = self.loss_fn(y, targets)
        if not self.is_last:
            self.send(y.detach(), self.rank + 1, i)
        self.held[i] = x, y


class StageByHand(ForwardByHand):
    def backward(self, i, wait):
        x, y = self.held.pop(i)
        gradient = None
        if not self.is_last:
            gradient = self.receive(y.shape[:-1], self.rank + 1)
            self.finish((self.rank + 1, i))
        with cell(self.cells, "B", i, self.rank, wait):
            y.backward(gradient)
        if not self.is_first:
            self.send(x.grad, self.rank - 1, i)
        return y.detach()


class Pipeline(StageByHand):
    def step(self, actions, tokens, targets, wait=0):
        m = len(actions) // 2
        micro_batches = list(zip(cut(tokens, m), cut(targets, m)))
        losses = []
        for kind, i in actions:
            if kind == "F":
                self.forward(i, *micro_batches[i], wait)
            else:
                losses.append(self.backward(i, wait))
        self.finish()
        return losses if self.is_last else []


def bubble(ranks):
    cells = [cell for rank in ranks for cell in rank]
    whole = max(cell.end for cell in cells) - min(cell.start for cell in cells)
    busy = sum(cell.end - cell.start for cell in cells)
    return 1 - busy / (len(ranks) * whole)


def order(most, m):
    actions, forwards, backwards = [], 0, 0
    while backwards < m:
        if forwards < m and forwards - backwards < most:
            actions.append(("F", forwards))
            forwards += 1
        else:
            actions.append(("B", backwards))
            backwards += 1
    return actions


def needs(step, last):
    kind, i, stage = step
    if kind == "F":
        return {("F", i, stage - 1)} if stage else set()
    if kind == "W":
        return {("I", i, stage)}
    return {("F", i, stage)} | ({("I", i, stage + 1)} if stage < last else set())


def simulate(ranks):
    last = max(stage for steps in ranks for _, _, stage in steps)
    share = len(ranks) / (last + 1)
    ends = {}
    cells = [[] for _ in ranks]
    left = [list(steps) for steps in ranks]
    while any(left):
        rank = next_rank(left, ends, last)
        kind, i, stage = step = left[rank].pop(0)
        free = cells[rank][-1].end if cells[rank] else 0.0
        start = max([free, *(ends[need] for need in needs(step, last))])
        cells[rank].append(Cell(kind, i, start, start + LASTS[kind] * share, stage))
        ends["I" if kind == "B" else kind, i, stage] = cells[rank][-1].end
    return cells


class RecordedStage(PipelineStage):
    def __init__(self, *given, cells):
        super().__init__(*given)
        self.cells = cells

    def forward_one_chunk(self, fwd_chunk_id, *given, **named):
        with cell(self.cells, "F", fwd_chunk_id, self.stage_index, 0):
            return super().forward_one_chunk(fwd_chunk_id, *given, **named)

    def backward_one_chunk(self, bwd_chunk_id, loss=None, full_backward=True, **named):
        with cell(self.cells, "B" if full_backward else "I", bwd_chunk_id, self.stage_index, 0):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, **named)

    def backward_weight_one_chunk(self, bwd_chunk_id, **named):
        with cell(self.cells, "W", bwd_chunk_id, self.stage_index, 0):
            super().backward_weight_one_chunk(bwd_chunk_id, **named)


if __name__ == "__main__":
    run_as_script(main)
