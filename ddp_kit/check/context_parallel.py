"""Graders of lesson 18: softmaxes, rings, a gather and its backward, heads that travel."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ddp_kit.check.compared import alone, compared, hunt
from ddp_kit.check.grader import SIZES, Grader
from ddp_kit.check.record import Score, Span, record
from ddp_kit.lessons import context_parallel as lesson

CHUNK = 2  # tokens


@alone("18.1", "merge(output, logsumexp, block_output, block_logsumexp)", "for all three pairs")
def _merge(merge: Callable) -> dict:
    one, two = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, -2.0], [0.0, 8.0]])
    low, high = torch.tensor([[0.5], [2.0]]), torch.tensor([[1.5], [-1.0]])
    nothing = torch.full((2, 1), -math.inf)
    given = {
        "two results": (one, low, two, high),
        "with large numbers": (one, low + 1000, two, high + 1000),
        "without keys in the block": (one, low, torch.zeros(2, 2), nothing),
    }
    return {name: list(merge(*(each.double() for each in of))) for name, of in given.items()}


@compared("18.2", "block_mask(rank, step, n, chunk)", "in each step", sizes=SIZES, spare=None)
def _block_mask(rank: int, n: int, block_mask: Callable) -> dict:
    return {f"the mask of step {step}": block_mask(rank, step, n, CHUNK) for step in range(n)}


@compared("18.3", "gathered_backward(gradient)", sizes=SIZES)
def _gathered_backward(rank: int, n: int, gathered_backward: Callable) -> torch.Tensor:
    numbers = torch.arange(4.0 * n).view(1, 1, 2 * n, 2)
    return gathered_backward(10.0**rank * (1 + numbers % 7))


hunt("18.8")


@alone("18.a", "OnlineSoftmax(query)", "with three blocks")
def _online_softmax(online_softmax: Callable) -> dict:
    softmax = online_softmax(torch.zeros(1, 3, 2))
    scores = torch.tensor([[0.0, 1.0], [3.0, 2.0], [-1.0, 2.0]])
    softmax.add(scores[None], torch.tensor([[[1.0, 2.0], [3.0, 5.0]]]))
    softmax.add(scores[None, :, :1] + torch.tensor([[1.5], [-4.0], [1.0]]), torch.ones(1, 1, 2))
    found = {"the output after two blocks": softmax.output().clone()}
    softmax.add(torch.tensor([[[4.0, 60.0], [-1.0, 0.0]]]), torch.ones(1, 2, 2) * 9, slice(1, 3))
    return found | {
        "the output after three": softmax.output(),
        "maximum": softmax.maximum,
        "logsumexp": softmax.logsumexp(),
    }


SHARDS = ([range(2), range(6, 7)], [range(2, 3), range(4, 6)], [range(3, 4)])


@alone("18.b", "needed(queries, keys, causal)", "for all pairs of shards")
def _needed(needed: Callable) -> dict:
    def text(found: Iterable) -> str:
        ranges = [
            f"{rows.start}-{rows.stop} sees {columns.start}-{columns.stop}{' masked' * masked}"
            for rows, columns, masked in found
        ]
        return "; ".join(sorted(ranges))

    return {
        f"queries {queries}, keys {keys}, causal {causal}": text(needed(queries, keys, causal))
        for causal in (True, False)
        for queries in SHARDS
        for keys in SHARDS
    }


@compared("18.c", "attend_forward(query, key, value, shards, causal, note)")
def _attend_forward(rank: int, n: int, attend: Callable) -> dict:
    shards, found = lesson.zig_zag(7, n), {}
    own = lesson.places(shards[rank])
    query, key, value, _ = (x[:1, :, own].double() for x in lesson.example(7, 2))
    for name, causal in (("causal", True), ("not causal", False)):
        notes: list[Any] = []
        given = (query, key, value, shards, causal, lambda *note, to=notes: to.append(note))
        found[f"the output, {name}"], found[f"the logsumexp, {name}"] = attend(*given)
        for owner in range(n):
            noted = sorted([r.start, c.start, pairs] for by, r, c, pairs in notes if by == owner)
            found[f"what it noted of rank {owner}'s keys, {name} (row, column, pairs)"] = noted
    return found


@alone("18.d", "zig_zag(length, n)", "for 2, 3 and 4 ranks")
def _zig_zag(zig_zag: Callable) -> dict:
    cases = ((8, 2), (13, 3), (64, 4))
    return {f"zig_zag({s}, {p})": [list(shard) for shard in zig_zag(s, p)] for s, p in cases}


@compared("18.9", "ulysses_gqa(query, key, value)", kind="function", sizes=(2, 4), spare=1.25)
def _ulysses_gqa(rank: int, n: int, ulysses: Callable) -> dict:
    found = {}
    for groups in (2, 4):
        query, _, _, gradient = lesson.example(2 * n, 8)
        key, value = lesson.example(2 * n, groups)[1:3]
        own = slice(2 * rank, 2 * rank + 2)
        inputs = [x[:, :, own].double().requires_grad_() for x in (query, key, value)]
        output = ulysses(*inputs)
        output.backward(gradient[:, :, own].double())
        found[f"the output with {groups} groups"] = output.detach()
        for name, x in zip(("query", "key", "value"), inputs, strict=True):
            found[f"{name}.grad with {groups} groups"] = x.grad
    return found


DOCUMENTS, RANKS = (13, 9, 5, 3, 2), 8  # of the record
CHUNKS = sum(DOCUMENTS)


@record("18.10", "assign()", "units of time", (54, 44, 40), along="time")
def _assign(grader: Grader) -> Score:
    owner = _owners(grader, grader.ask())
    of = [number for number, length in enumerate(DOCUMENTS) for _ in range(length)]
    work = [[0] * RANKS for _ in range(RANKS)]  # by step and rank
    for query in range(CHUNKS):
        for key in range(query + 1):
            if of[query] == of[key]:
                step = (owner[query] - owner[key]) % RANKS
                work[step][owner[query]] += 1 if query == key else 2
    spans, start = [], 0
    for step, each in enumerate(work):
        for rank, cost in enumerate(each):
            if cost:
                spans.append(Span(rank, start, start + cost, f"{(rank - step) % RANKS}"))
        start += max(each)
    return Score(start, spans)


def _owners(grader: Grader, found: Any) -> list[int]:
    """Return the rank of each chunk, or fail if an answer does not assign all of them."""
    try:
        shards = [[int(chunk) for chunk in shard] for shard in found]
    except (TypeError, ValueError):
        shards = []
    if len(shards) != RANKS:
        fact = f"it should return a list of {RANKS} lists of numbers of chunks"
        grader.fail(fact, hint="other lists")
    assigned = sorted(chunk for shard in shards for chunk in shard)
    wrong = sorted(
        {c for c in [*assigned, *range(CHUNKS)] if assigned.count(c) != (0 <= c < CHUNKS)}
    )
    if wrong:
        fact = f"not exactly once: {', '.join(map(str, wrong[:8]))}"
        grader.fail("each chunk belongs to one rank", fact, hint="not each once")
    for rank, shard in enumerate(shards):
        if len(shard) != CHUNKS // RANKS:
            fact = f"rank {rank} has {len(shard)}"
            grader.fail(f"each rank holds {CHUNKS // RANKS} chunks", fact, hint="too many chunks")
    return [next(r for r, shard in enumerate(shards) if chunk in shard) for chunk in range(CHUNKS)]
