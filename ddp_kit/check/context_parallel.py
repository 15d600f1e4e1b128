"""Graders of lesson 18: softmaxes, rings, heads that travel, tokens for experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ddp_kit.check.compared import compared, hunt
from ddp_kit.check.grader import Grader, exercise
from ddp_kit.check.record import Score, Span, record
from ddp_kit.errors import DeadlockError, MismatchError, RunTimeoutError
from ddp_kit.lessons import context_parallel as lesson

CHUNK = 2  # tokens


@compared(
    "18.1",
    "merge(output, logsumexp, block_output, block_logsumexp)",
    sizes=(1,),
    where="for all three pairs",
)
def _merge(rank: int, n: int, merge: Callable) -> dict:
    one, two = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, -2.0], [0.0, 8.0]])
    low, high = torch.tensor([[0.5], [2.0]]), torch.tensor([[1.5], [-1.0]])
    nothing = torch.full((2, 1), -math.inf)
    given = {
        "two results": (one, low, two, high),
        "with large numbers": (one, low + 1000, two, high + 1000),
        "without keys in the block": (one, low, torch.zeros(2, 2), nothing),
    }
    return {name: list(merge(*(each.double() for each in of))) for name, of in given.items()}


@exercise("18.2", "block_mask(rank, step, n, chunk)", "in each step")
def _block_mask(grader: Grader, n: int) -> None:
    found, ranks = list(grader.run(_masks, world_size=n)), range(n)
    for step in ranks:
        owners = [(rank - step) % n for rank in ranks]
        wanted = _masks_of(owners)
        mistakes = {
            "other way round": _masks_of((rank + step) % n for rank in ranks),
            "no modulo": _masks_of(rank - step for rank in ranks),
            "own chunk": _masks_of(ranks),
            "transposed": [mask.T for mask in wanted],
            "own position masked": _masks_of(owners, torch.lt),
            "inverted": [~mask for mask in wanted],
            "other mask": True,
        }
        here = [masks[step] for masks in found]
        grader.compare(wanted, here, mistakes, verb="return", place=f" in step {step}")


def _masks_of(owners: Iterable[int], sees: Callable = torch.le) -> list[torch.Tensor]:
    """Return the masks of all ranks, given the owner of the keys that each has."""
    own = torch.arange(CHUNK)
    return [
        sees(owner * CHUNK + own, (rank * CHUNK + own)[:, None])
        for rank, owner in enumerate(owners)
    ]


def _masks(rank: int, world_size: int, block_mask: Callable) -> list[Any]:
    return [block_mask(rank, step, world_size, CHUNK) for step in range(world_size)]


@exercise(
    "18.3",
    "bring_home(parts)",
    "the gradients are home",
    on_failure=dict.fromkeys((DeadlockError, MismatchError, RunTimeoutError), "unmatched"),
    collectives=False,
)
def _bring_home(grader: Grader, n: int) -> None:
    def round_trip(block: Callable, steps: int = n, last: bool = False) -> list:
        return _gone_round(n, steps, lambda r, s: block(r, s) if s < n or last else None)

    mistakes = {
        "nothing exchanged": [_parts(rank, n)[rank] for rank in range(n)],
        "one step missing": round_trip(lambda rank, step: rank - step, n - 1),
        "own part twice": round_trip(lambda rank, step: rank - step, last=True),
        "other way round": round_trip(lambda rank, step: rank + step),
        "own block": round_trip(lambda rank, step: rank),
        "other sum": True,
    }
    wanted = [sum(_parts(rank, n)[owner] for rank in range(n)) for owner in range(n)]
    found = grader.call([(_parts(rank, n),) for rank in range(n)])
    grader.compare(wanted, found, mistakes, verb="return")


def _parts(rank: int, n: int) -> list[torch.Tensor]:
    """Return a rank's parts of the gradients of all blocks: its digit in a sum names the rank."""
    return [torch.tensor([10.0**rank, 10.0**rank * (owner + 1)]) for owner in range(n)]


def _gone_round(n: int, steps: int, block: Callable[[int, int], int | None]) -> list[torch.Tensor]:
    """Return the sums after some steps, if a rank adds its part of block(rank, step), if any."""
    sums = [_parts(rank, n)[rank] for rank in range(n)]
    for step in range(1, steps + 1):
        sums = [sums[rank - 1] for rank in range(n)]
        for rank in range(n):
            which = block(rank, step)
            if which is not None:
                sums[rank] = sums[rank] + _parts(rank, n)[which % n]
    return sums


@exercise(
    "18.4",
    "through_experts(tokens, choice, expert)",
    "with uneven counts and with none",
    on_failure="wrong counts",
)
def _through_experts(grader: Grader, n: int) -> None:
    found = grader.run(_use_experts, world_size=n)
    wanted = [_expert(choice[:, None], tokens) for tokens, choice in _tokens(n)]
    orders = [choice.argsort(stable=True) for _, choice in _tokens(n)]
    as_sent = [want[order] for want, order in zip(wanted, orders, strict=True)]
    mistakes = {
        "not put back": as_sent,
        "sorted twice": [back[order] for back, order in zip(as_sent, orders, strict=True)],
        "other experts": True,
    }
    grader.compare(wanted, found, mistakes, verb="return")


def _tokens(n: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each rank's tokens and the expert of each.

    If there are several experts, no token goes to the last one.
    """
    given = []
    for rank in range(n):
        count = torch.arange(4.0 + rank)
        tokens = torch.stack([100 * (rank + 1) + count, count], 1)
        choice = (3 * torch.arange(len(count)) + rank + 1) % 4 % max(1, n - 1)
        given.append((tokens, choice))
    return given


def _expert(number: Any, tokens: torch.Tensor) -> torch.Tensor:
    return 2 * tokens + 1000 * (number + 1)


def _use_experts(rank: int, world_size: int, through_experts: Callable) -> Any:
    tokens, choice = _tokens(world_size)[rank]
    return through_experts(tokens, choice, lambda rows: _expert(rank, rows))


hunt("18.10")


@compared("18.a", "OnlineSoftmax(query)", sizes=(1,), where="with three blocks")
def _online_softmax(rank: int, n: int, online_softmax: Callable) -> dict:
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


DEALT = ([range(2), range(6, 7)], [range(2, 3), range(4, 6)], [range(3, 4)])


@compared("18.b", "needed(queries, keys, causal)", sizes=(1,), where="for all pairs of shards")
def _needed(rank: int, n: int, needed: Callable) -> dict:
    def text(found: Iterable) -> str:
        ranges = [
            f"{rows.start}-{rows.stop} sees {columns.start}-{columns.stop}{' masked' * masked}"
            for rows, columns, masked in found
        ]
        return "; ".join(sorted(ranges))

    return {
        f"queries {queries}, keys {keys}, causal {causal}": text(needed(queries, keys, causal))
        for causal in (True, False)
        for queries in DEALT
        for keys in DEALT
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
        found[f"the notes, {name}"] = sorted(
            f"owner {owner}: rows from {rows.start}, columns from {columns.start}, {pairs} pairs"
            for owner, rows, columns, pairs in notes
        )
    return found


@compared("18.d", "zig_zag(length, n)", sizes=(1,), where="for 2, 3 and 4 ranks")
def _zig_zag(rank: int, n: int, zig_zag: Callable) -> dict:
    cases = ((8, 2), (13, 3), (64, 4))
    return {f"zig_zag({s}, {p})": [list(shard) for shard in zig_zag(s, p)] for s, p in cases}


@compared("18.11", "ulysses_gqa(query, key, value)", kind="function", sizes=(2, 4), spare=1.25)
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


@record("18.12", "deal()", "units of time", (54, 44, 40), along="time")
def _deal(grader: Grader) -> Score:
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
    """Return the rank of each chunk, or fail if an answer does not deal out all of them."""
    try:
        shards = [[int(chunk) for chunk in shard] for shard in found]
    except (TypeError, ValueError):
        shards = []
    if len(shards) != RANKS:
        fact = f"it should return a list of {RANKS} lists of numbers of chunks"
        grader.fail(fact, hint="other lists")
    dealt = sorted(chunk for shard in shards for chunk in shard)
    wrong = sorted({c for c in [*dealt, *range(CHUNKS)] if dealt.count(c) != (0 <= c < CHUNKS)})
    if wrong:
        fact = f"not exactly once: {', '.join(map(str, wrong[:8]))}"
        grader.fail("each chunk belongs to one rank", fact, hint="not each once")
    for rank, shard in enumerate(shards):
        if len(shard) != CHUNKS // RANKS:
            fact = f"rank {rank} has {len(shard)}"
            grader.fail(f"each rank holds {CHUNKS // RANKS} chunks", fact, hint="too many chunks")
    return [next(r for r, shard in enumerate(shards) if chunk in shard) for chunk in range(CHUNKS)]
