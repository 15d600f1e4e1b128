"""The proof of the lesson on context parallelism, and what its cells need besides.

Queries, keys and values have the shape (batch, heads, length, head width). `shards[rank]` lists the
chunks of the sequence that a rank holds: ranges of positions.
"""

from __future__ import annotations

from threading import Timer

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ddp_kit import compare, device
from ddp_kit.lessons._gpt import Config, batches, make_gpt
from ddp_kit.lessons._launch import Ranks, lesson_main, prove
from ddp_kit.lessons.ring_allreduce import neighbours
from ddp_kit.lessons.zero import ADAM, bytes_by_kind, fit, keeping, train_alone
from ddp_kit.trace.collectives import bytes_sent

WIDTH = 8  # of a head


def example(length, heads, groups=None):
    """Return a query, key, value, and a gradient of the output, the same in every process.

    groups: how many heads keys and values have; None: as many as the query.
    """
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(4, 2, heads, length, WIDTH, generator=generator).to(device())
    return [whole[0], whole[1, :, :groups], whole[2, :, :groups], whole[3]]


def attend_alone(world_size, causal, length):
    """Return PyTorch's attention in this process, and the gradients of query, key and value."""
    *inputs, gradient = (x.clone() for x in example(length, 2 * world_size, world_size))
    how = {"is_causal": causal, "enable_gqa": True}
    output = F.scaled_dot_product_attention(*(x.requires_grad_() for x in inputs), **how)
    output.backward(gradient)
    return [output.detach(), *(x.grad for x in inputs)]


def all_scores(query, key, value, shards):
    """Return the causal attention by the formula, with all scores at once, on one rank."""
    return torch.softmax(lesson.scores(query, key, masked=True), -1) @ value


def put_together(parts, shards):
    """Return the whole of which each rank has the rows of its shard."""
    joined = torch.cat([part.cpu() for part in parts], 2)
    return joined[:, :, torch.cat([lesson.places(shard) for shard in shards]).argsort()]


def slices(shard):
    """Yield where each chunk is among the rank's rows, and the chunk."""
    start = 0
    for chunk in shard:
        yield slice(start, start + len(chunk)), chunk
        start += len(chunk)


def room_for(block, shard):
    """Return an empty tensor for the block of a rank that holds other chunks."""
    return block.new_empty(*block.shape[:-2], sum(map(len, shard)), block.shape[-1])


def wait_for(works):
    for work in works:
        work.wait()


class _Message(Timer):
    """A function that is called after some seconds, in a thread, for which one can wait."""

    wait = Timer.join


def slow_exchange(going, coming):
    """Do what `start_exchange` does on several ranks, with messages that travel for 40 ms."""
    left, right = neighbours()
    message = _Message(0.04, dist.send, (going, right))
    message.start()
    return [dist.irecv(coming, left), message]


def waited_for(going, coming):
    """Exchange as `slow_exchange` does, and leave nothing to wait for."""
    wait_for(slow_exchange(going, coming))
    return []


def check_ulysses(query, shards, causal):
    """Raise ValueError if the ranks cannot share the heads, or a mask meets tokens out of order."""
    order = [place for shard in shards for chunk in shard for place in chunk]
    if causal and order != sorted(order):
        raise ValueError("causal attention by Ulysses needs the tokens in order: use in_order")
    if query.shape[1] % len(shards):
        raise ValueError(f"{len(shards)} ranks cannot share {query.shape[1]} heads evenly")


def pairs_of(rank, world_size, layout, attend_forward, length):
    """Return what this rank computes in a causal ring, in order.

    Each entry has a step, the positions of the queries and the keys, and how many pairs of them
    have a score.
    """
    shards, done = layout(length, world_size), []
    shard = [list(slices(each)) for each in shards]

    def note(owner, rows, columns, pairs):
        (queries,) = (chunk for where, chunk in shard[rank] if where == rows)
        (keys,) = (chunk for where, chunk in shard[owner] if where == columns)
        done.append(((rank - owner) % world_size, queries, keys, pairs))

    own = lesson.places(shards[rank]).to(device())
    query, key, value = (x[:, :, own] for x in example(length, 1)[:3])
    attend_forward(query, key, value, shards, True, note)
    return done


def ring_bytes(n, batch, length, width, kv_width):
    """Return the bytes that a rank sends in a forward and in a backward, on average, in float32.

    Widths are of all heads. Forward: n-1 of n blocks of keys and values. Backward: the same, and n
    blocks of gradients.
    """
    whole = 2 * batch * length * kv_width * 4
    forward = (n - 1) / n * whole
    return forward, forward + (whole if n > 1 else 0)


def ulysses_bytes(n, batch, length, width, kv_width):
    """Return what `ring_bytes` does for Ulysses: four all_to_alls, there and back."""
    forward = 2 * (n - 1) / n**2 * batch * length * (width + kv_width) * 4
    return forward, forward


def sent(trace):
    """Return the bytes that a rank sent, on average."""
    return sum(map(bytes_sent, trace)) / trace.world_size


def watch_memory(rank, world_size, layout, attend, length):
    """Return the bytes that this rank keeps for the backward of one sequence, by kind."""
    model, attention = make_gpt(Config(context=length)), []
    shards = layout(length, world_size)
    own = lesson.places(shards[rank]).to(device())

    def watched(*heads):
        with keeping() as kept:
            output = attend(*heads, shards)
        attention.extend(kept)
        return output

    lesson.spread(model, watched)
    with keeping() as others:
        loss = lesson.loss_of_part(model, next(batches(1, 1, length)), own)
    kinds = {"parameters": model.parameters(), "attention": attention, "other layers": others}
    found = bytes_by_kind(kinds)
    loss.backward()  # until here, it has kept all of them
    return {kind: found[kind] for kind in ("attention", "other layers")}


def learn(model, loss_of_part, batches):
    """Train on the parts of the batches, and return "losses" and "parameters"."""

    def add_up(loss):
        for part in (loss, *(parameter.grad for parameter in model.parameters())):
            dist.all_reduce(part)

    return fit(model, ADAM, batches, lambda model, *batch: loss_of_part(model, batch), add_up)


@lesson_main("context_parallel")
def main(ranks: Ranks) -> str:
    """Compare everything with one process, and print one line."""
    n = ranks.world_size
    trains = Config().heads % n == 0  # also by Ulysses
    length = 6 * n + 1  # uneven
    alone = train_alone(ADAM, 2, 1, config=Config(context=256))
    expected = [x.cpu() for x in attend_alone(n, True, length)]
    for way, layout in lesson.LAYOUTS.items():
        by_ulysses = way == "Ulysses"
        attend = lesson.ulysses if by_ulysses else lesson.ring_attention
        result = ranks(lesson.rows_of, layout, attend, True, length)
        whole = [put_together(parts, layout(length, n)) for parts in zip(*result, strict=True)]
        prove(f"{way} attends as one process does", compare(whole, expected))
        if not by_ulysses or trains:
            found = list(ranks(lesson.train, way, 256, 2))
            prove(f"{way} trains as one process does", compare(found, alone))
    done = "attend and train" if trains else "attend, and the ring trains,"
    return f"ring and Ulysses {done} as one process does"


from ddp_kit.lessons import context_parallel as lesson
