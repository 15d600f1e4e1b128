"""The proof of the lesson on context parallelism, and what its cells need besides.

Queries, keys and values have the shape (batch, heads, length, head width). `shards[rank]` lists the
chunks of the sequence that a rank holds: ranges of positions.
"""

from __future__ import annotations

from threading import Timer

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_kit import compare, device
from ddp_kit.lessons._gpt import Config, batches, make_gpt
from ddp_kit.lessons._launch import Ranks, lesson_main, prove
from ddp_kit.lessons.ring_allreduce import neighbours
from ddp_kit.lessons.zero import ADAM, SGD, train_alone
from ddp_kit.trace.bytes_sent import bytes_sent

WIDTH = 8  # of a head, and of a token that goes to an expert


def example(length, heads):
    """Return a query, key, value, and a gradient of the output, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    return list(torch.randn(4, 2, heads, length, WIDTH, generator=generator).to(device()))


def attend_alone(world_size, causal, length):
    """Return PyTorch's attention in this process, and the gradients of query, key and value."""
    *inputs, gradient = example(length, 2 * world_size)
    output = F.scaled_dot_product_attention(*(x.requires_grad_() for x in inputs), is_causal=causal)
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


def check_tokens(shards, causal):
    """Raise ValueError if a causal mask meets tokens that are not in order."""
    order = [place for shard in shards for chunk in shard for place in chunk]
    if causal and order != sorted(order):
        raise ValueError("causal attention by Ulysses needs the tokens in order: use in_order")


def pairs_of(rank, world_size, deal, attend_forward, length):
    """Return what this rank computes in a causal ring, in order.

    Each entry has a step, the positions of the queries and the keys, and how many pairs of them
    have a score.
    """
    shards, done = deal(length, world_size), []
    shard = [list(slices(each)) for each in shards]

    def note(owner, rows, columns, pairs):
        (queries,) = (chunk for where, chunk in shard[rank] if where == rows)
        (keys,) = (chunk for where, chunk in shard[owner] if where == columns)
        done.append(((rank - owner) % world_size, queries, keys, pairs))

    own = lesson.places(shards[rank]).to(device())
    query, key, value = (x[:, :, own] for x in example(length, 1)[:3])
    attend_forward(query, key, value, shards, True, note)
    return done


def ring_bytes(n, batch, length, width):
    """Return the bytes that a rank sends in a forward and a backward, on average.

    width: of all heads. Forward: n-1 of n blocks of keys and values. Backward: the same, and n
    blocks of gradients.
    """
    whole = 2 * batch * length * width * 4
    forward = (n - 1) / n * whole
    return forward, forward + (whole if n > 1 else 0)


def ulysses_bytes(n, batch, length, width):
    """Return what `ring_bytes` does for Ulysses: four all_to_alls, there and back."""
    forward = 4 * (n - 1) / n**2 * batch * length * width * 4
    return forward, forward


def sent(trace):
    """Return the bytes that a rank sent, on average."""
    return sum(map(bytes_sent, trace)) / trace.world_size


def watch_memory(rank, world_size, deal, attend, length):
    """Return the bytes that this rank keeps for the backward of one sequence, by kind."""
    model, kinds = make_gpt(Config(context=length)), {"attention": 0, "other layers": 0}
    seen = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    shards = deal(length, world_size)
    own = lesson.places(shards[rank]).to(device())

    def keeping(kind):
        def note(tensor):
            memory = tensor.untyped_storage()
            kinds[kind] += memory.nbytes() * (memory.data_ptr() not in seen)
            seen.add(memory.data_ptr())
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)

    def watched(*heads):
        with keeping("attention"):
            return attend(*heads, shards)

    lesson.spread(model, watched)
    with keeping("other layers"):
        loss = lesson.loss_of_part(model, next(batches(1, 1, length)), own)
    loss.backward()  # until here, it has kept all of them
    return kinds


def make_experts(n, skew=0.0):
    """Return a router and n experts, the same in every process.

    skew: is added to the router's scores of expert 0.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        router = nn.Linear(WIDTH, n)
        experts = [
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(n)
        ]
    router.bias.data[0] += skew
    return router.to(device()), [expert.to(device()) for expert in experts]


def some_tokens(count):
    """Return tokens of shape (count, WIDTH), and a gradient of what becomes of them."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, count, WIDTH, generator=generator).to(device())


def use_experts(rank, world_size, count, skew):
    """Send this rank's part of the tokens through the experts, forward and backward.

    Returns values and gradients, and in "received" how many tokens came from each rank.
    """
    router, experts = make_experts(world_size, skew)
    own = lesson.cut(count, world_size)[rank]
    tokens, gradient = (x[own.start : own.stop] for x in some_tokens(count))
    output = lesson.Experts(router, experts[rank])(tokens.requires_grad_())
    output.backward(gradient)
    for summand in _gradients(router):
        dist.all_reduce(summand)
    found = _values_and_gradients(output, tokens.grad, router, experts[rank])
    return found | {"received": lesson.counts_of(lesson.route(router, tokens)[1])[1]}


def use_experts_alone(n, count, skew):
    """Return what each rank should, without "received", from one process with all experts."""
    router, experts = make_experts(n, skew)
    tokens, gradient = some_tokens(count)
    weight, choice = lesson.route(router, tokens.requires_grad_())
    outputs = torch.stack([expert(tokens) for expert in experts])
    output = weight[:, None] * outputs[choice, torch.arange(count, device=choice.device)]
    output.backward(gradient)
    rows = [slice(own.start, own.stop) for own in lesson.cut(count, n)]
    return [
        _values_and_gradients(output[own], tokens.grad[own], router, expert)
        for own, expert in zip(rows, experts, strict=True)
    ]


def _values_and_gradients(output, d_tokens, router, expert):
    parameters = {"router": _gradients(router), "expert": _gradients(expert)}
    return {"output": output.detach(), "tokens": d_tokens, **parameters}


def _gradients(module):
    return [parameter.grad for parameter in module.parameters()]


@lesson_main("context_parallel")
def main(ranks: Ranks) -> str:
    """Compare everything with one process, count pairs and bytes, and print one line."""
    n = ranks.world_size
    _prove_attention(ranks)
    for skew in (0.0, 100.0):
        found = list(ranks(use_experts, 16 * n + 1, skew))
        for each in found:
            each.pop("received")
        alone = use_experts_alone(n, 16 * n + 1, skew)
        prove(f"experts equal one process, skew {skew}", compare(found, alone))
    for optimizer_cls in (SGD, ADAM):
        alone = train_alone(optimizer_cls)
        for way in lesson.DEALS:
            if way != "Ulysses" or Config().heads % n == 0:
                found = list(ranks(lesson.train, way, optimizer_cls))
                prove(f"{way} trains as one process does", compare(found, alone))
    return "ring, Ulysses and experts equal one process"


def _prove_attention(ranks: Ranks):
    """Check that all ways have the values, gradients, bytes and pairs that they should."""
    n = ranks.world_size
    length = 6 * n + 1  # uneven
    ways = {way: (deal, lesson.ring_attention, ring_bytes) for way, deal in lesson.DEALS.items()}
    ways["Ulysses"] = lesson.in_order, lesson.ulysses, ulysses_bytes
    for way, (deal, attend, formula) in ways.items():
        for causal in (True, False):
            result = ranks(lesson.rows_of, deal, attend, causal, length)
            whole = [put_together(parts, deal(length, n)) for parts in zip(*result, strict=True)]
            expected = [x.cpu() for x in attend_alone(n, causal, length)]
            prove(f"{way} attends as one process does", compare(whole, expected))
            counted = sum(formula(n, 2, length, 2 * n * WIDTH))
            prove(f"{way} sends {counted:,.0f} bytes", compare(sent(result.trace), counted))
    for way, expected in ("ring", list(range(4, 4 * n + 1, 4))), ("zig-zag", [2 * n + 1] * n):
        done = ranks(pairs_of, lesson.DEALS[way], lesson.attend_forward, 2 * n)
        found = [sum(pairs for *_, pairs in each) for each in done]
        prove(f"the ranks compute {expected} pairs", found == expected)


from ddp_kit.lessons import context_parallel as lesson
