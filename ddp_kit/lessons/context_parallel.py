# Made from notebooks/18_context_parallel.ipynb by `make editions`: edit that, not this. 248d9aa5ebbb
"""Context parallelism, and experts."""

import math
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import ddp_kit as kit
from ddp_kit.lessons._context_parallel import (
    WIDTH,
    all_scores,
    attend_alone,
    check_tokens,
    example,
    main,
    make_experts,
    pairs_of,
    put_together,
    ring_bytes,
    room_for,
    sent,
    slices,
    slow_exchange,
    some_tokens,
    ulysses_bytes,
    use_experts,
    use_experts_alone,
    wait_for,
    watch_memory,
)
from ddp_kit.lessons._gpt import Config, batches, make_gpt
from ddp_kit.lessons._launch import run_as_script
from ddp_kit.lessons.ring_allreduce import neighbours
from ddp_kit.lessons.zero import BATCH, SGD, copies


def brief(comparison):
    small = comparison.equal and comparison.max_error < 1e-5
    return "equal up to 1e-5" if small else str(comparison)


class OnlineSoftmax:
    def __init__(self, query):
        self.maximum = query.new_full((*query.shape[:-1], 1), -math.inf)
        self.total, self.weighted = torch.zeros_like(self.maximum), torch.zeros_like(query)

    def add(self, scores, value, rows=slice(None)):
        kept = self.maximum, self.total, self.weighted
        maximum, total, weighted = (each[..., rows, :] for each in kept)
        larger = torch.maximum(maximum, scores.amax(-1, keepdim=True))
        rescale, weights = torch.exp(maximum - larger), torch.exp(scores - larger)
        total.mul_(rescale).add_(weights.sum(-1, keepdim=True))
        weighted.mul_(rescale).add_(weights @ value)
        maximum.copy_(larger)

    def output(self):
        return self.weighted / self.total

    def logsumexp(self):
        return self.maximum + self.total.log()


def scores(query, key, masked):
    products = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    if masked:
        later = torch.ones_like(products, dtype=torch.bool).triu(1)
        products = products.masked_fill(later, -math.inf)
    return products


def attend_in_blocks(query, key, value, size):
    softmax = OnlineSoftmax(query)
    for keys, values in zip(key.split(size, 2), value.split(size, 2), strict=True):
        softmax.add(scores(query, keys, masked=False), values)
    return softmax.output()


def cut(length, parts):
    if not 1 <= parts <= length:
        raise ValueError(f"a sequence of {length} tokens cannot be cut into {parts} chunks")
    ends = [length * part // parts for part in range(parts + 1)]
    return [range(start, end) for start, end in pairwise(ends)]


def in_order(length, n):
    return [[chunk] for chunk in cut(length, n)]


def places(shard):
    return torch.tensor([place for chunk in shard for place in chunk])


def start_exchange(going, coming):
    if dist.get_world_size() == 1:
        coming.copy_(going)
        return []
    left, right = neighbours()
    return [dist.isend(going, right), dist.irecv(coming, left)]


def travel(block, shards, start=start_exchange):
    rank, n = dist.get_rank(), dist.get_world_size()
    for step in range(n):
        works, coming = [], block
        if step < n - 1:
            coming = room_for(block, shards[(rank - step - 1) % n])
            works = start(block, coming)
        yield (rank - step) % n, block
        wait_for(works)
        block = coming


def needed(queries, keys, causal):
    for rows, mine in slices(queries):
        for columns, theirs in slices(keys):
            if causal and theirs.start > mine.start:
                continue
            yield rows, columns, causal and theirs == mine


def attend_forward(query, key, value, shards, causal, note=lambda *_: None):
    mine, softmax = shards[dist.get_rank()], OnlineSoftmax(query)
    for owner, (keys, values) in travel(torch.stack([key, value]), shards):
        for rows, columns, masked in needed(mine, shards[owner], causal):
            block = scores(query[..., rows, :], keys[..., columns, :], masked)
            softmax.add(block, values[..., columns, :], rows)
            note(owner, rows, columns, block.shape[-2] * block.shape[-1])
    return softmax.output(), softmax.logsumexp()


class BlockGradients:
    def __init__(self, query, output, logsumexp, gradient):
        self.query, self.logsumexp, self.gradient = query, logsumexp, gradient
        self.dot = (gradient * output).sum(-1, keepdim=True)
        self.d_query = torch.zeros_like(query)

    def add(self, block, d_block, rows, columns, masked):
        kept = self.query, self.logsumexp, self.gradient, self.dot, self.d_query
        query, logsumexp, gradient, dot, d_query = (each[..., rows, :] for each in kept)
        (key, value), (d_key, d_value) = (block[..., columns, :], d_block[..., columns, :])
        weights = torch.exp(scores(query, key, masked) - logsumexp)
        d_value += weights.transpose(-2, -1) @ gradient
        d_scores = weights * (gradient @ value.transpose(-2, -1) - dot)
        d_scores /= math.sqrt(query.shape[-1])
        d_query += d_scores @ key
        d_key += d_scores.transpose(-2, -1) @ query


def attend_backward(block, gradients, shards, causal):
    rank, n = dist.get_rank(), dist.get_world_size()
    works, arriving = [], None
    for owner, visitor in travel(block, shards):
        d_visitor = torch.zeros_like(visitor)
        for rows, columns, masked in needed(shards[rank], shards[owner], causal):
            gradients.add(visitor, d_visitor, rows, columns, masked)
        wait_for(works)
        if arriving is not None:
            d_visitor += arriving
        arriving = room_for(block, shards[(owner - 1) % n])
        d_sent = d_visitor  # must live until it has arrived
        works = start_exchange(d_sent, arriving)
    wait_for(works)
    return arriving


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, shards, causal):
        output, logsumexp = attend_forward(query, key, value, shards, causal)
        ctx.save_for_backward(query, key, value, output, logsumexp)
        ctx.shards, ctx.causal = shards, causal
        return output

    @staticmethod
    def backward(ctx, gradient):
        query, key, value, output, logsumexp = ctx.saved_tensors
        gradients = BlockGradients(query, output, logsumexp, gradient)
        block = torch.stack([key, value])
        d_key, d_value = attend_backward(block, gradients, ctx.shards, ctx.causal)
        return gradients.d_query, d_key, d_value, None, None


def ring_attention(query, key, value, shards, causal=True):
    return RingAttention.apply(query, key, value, shards, causal)


def rows_of(rank, world_size, deal, attend, causal, length, backward=True):
    shards = deal(length, world_size)
    own = places(shards[rank]).to(kit.device())
    *inputs, gradient = (x[:, :, own] for x in example(length, 2 * world_size))
    output = attend(*(x.requires_grad_() for x in inputs), shards, causal)
    if backward:
        output.backward(gradient)
    return [output.detach(), *(x.grad for x in inputs)]


def check(deal, attend, length=19):
    def both(rank, world_size):
        return [rows_of(rank, world_size, deal, attend, causal, length) for causal in (True, False)]

    for n in (3, 4):
        for causal, parts in zip((True, False), zip(*kit.run(both, world_size=n))):
            whole = [put_together(rows, deal(length, n)) for rows in zip(*parts)]
            expected = [x.cpu() for x in attend_alone(n, causal, length)]
            print(f"{n} ranks, causal {causal!s:5}:", brief(kit.compare(whole, expected)))


def zig_zag(length, n):
    chunks = cut(length, 2 * n)
    return [[chunks[rank], chunks[2 * n - 1 - rank]] for rank in range(n)]


def attend_gathered(query, key, value, shards, causal):
    block = torch.stack([key, value])
    blocks = [room_for(block, shard) for shard in shards]
    dist.all_gather(blocks, block)
    keys, values = torch.cat(blocks, -2)
    positions = [places(shard).to(query.device) for shard in shards]
    seen = torch.cat(positions) <= positions[dist.get_rank()][:, None] if causal else None
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=seen)


def exchange_rows(rows, going, coming):
    arrived = rows.new_empty(sum(coming), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), coming, going)
    return arrived


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, going, coming):
        ctx.going, ctx.coming = going, coming
        return exchange_rows(rows, going, coming)

    @staticmethod
    def backward(ctx, gradient):
        return exchange_rows(gradient, ctx.coming, ctx.going), None, None


def to_heads(x, lengths):
    n, own = dist.get_world_size(), x.shape[2]
    rows = x.unflatten(1, (n, -1)).permute(1, 3, 0, 2, 4).flatten(0, 1)
    return AllToAll.apply(rows, [own] * n, lengths).permute(1, 2, 0, 3)


def to_sequence(x, lengths):
    n, own = dist.get_world_size(), lengths[dist.get_rank()]
    rows = AllToAll.apply(x.permute(2, 0, 1, 3), lengths, [own] * n)
    return rows.unflatten(0, (n, own)).permute(2, 0, 3, 1, 4).flatten(1, 2)


def ulysses(query, key, value, shards, causal=True):
    heads, n = query.shape[1], dist.get_world_size()
    lengths = [len(places(shard)) for shard in shards]
    check_tokens(shards, causal)
    if heads % n:
        raise ValueError(f"{n} ranks cannot share {heads} heads evenly")
    whole = [to_heads(x, lengths) for x in (query, key, value)]
    return to_sequence(F.scaled_dot_product_attention(*whole, is_causal=causal), lengths)


DEALS = {"ring": in_order, "zig-zag": zig_zag, "Ulysses": in_order}


def attention(way, shards):
    return partial(ulysses if way == "Ulysses" else ring_attention, shards=shards)


def spread(model, attend):
    for block in model.blocks:
        block.attention.attend = attend


def loss_of_part(model, batch, own):
    inputs, targets = (both[:, own] for both in batch)
    logits = model(inputs, own).flatten(0, 1)
    return F.cross_entropy(logits, targets.flatten(), reduction="sum") / batch[0].numel()


def train(rank, world_size, way="zig-zag", optimizer_cls=SGD, steps=3):
    model = make_gpt()
    shards = DEALS[way](Config().context, world_size)
    own = places(shards[rank]).to(kit.device())
    spread(model, attention(way, shards))
    optimizer, losses = optimizer_cls(model.parameters()), []
    for batch in batches(BATCH, steps):
        optimizer.zero_grad()
        loss = loss_of_part(model, batch, own)
        loss.backward()
        for summand in (loss.detach(), *(p.grad for p in model.parameters())):
            dist.all_reduce(summand)
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "parameters": copies(model)}


def route(router, tokens):
    weight, choice = torch.softmax(router(tokens), -1).max(-1)
    return weight, choice


def counts_of(choice):
    going = torch.bincount(choice, minlength=dist.get_world_size())
    coming = torch.empty_like(going)
    dist.all_to_all_single(coming, going)
    return going.tolist(), coming.tolist()


class Experts(nn.Module):
    def __init__(self, router, expert):
        super().__init__()
        self.router, self.expert = router, expert

    def forward(self, tokens):
        weight, choice = route(self.router, tokens)
        order = choice.argsort(stable=True)
        going, coming = counts_of(choice)
        arrived = AllToAll.apply(tokens[order], going, coming)
        back = AllToAll.apply(self.expert(arrived), coming, going)
        return weight[:, None] * back[order.argsort()]


if __name__ == "__main__":
    run_as_script(main)
