"""Graders of lesson 18: an online softmax, masks and gradients on a ring, tokens for experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ddp_kit.check.compared import hunt
from ddp_kit.check.grader import Grader, exercise
from ddp_kit.errors import DeadlockError, MismatchError, RunTimeoutError

CHUNK = 2  # tokens
Kept = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # maximum, sum, weighted sum


@exercise(
    "18.1",
    "add_block(maximum, total, weighted, scores, values)",
    where="with one block of keys and with three",
    cases=(1, 3),
    part=lambda n: "one block" if n == 1 else "three blocks",
)
def _add_block(grader: Grader, count: int) -> None:
    blocks = _blocks(count)
    (found,) = grader.run(_fold, blocks, world_size=1, case=f"{count} x {grader.form}")

    def without(**wrong: bool) -> list:
        return [list(_fold(0, 1, _variant(**wrong), blocks))]

    mistakes = {
        "total not rescaled": without(total=False),
        "values not rescaled": without(weighted=False),
        "nothing rescaled": without(total=False, weighted=False),
        "factor inverted": without(inverse=True),
        "last maximum": without(total=False, weighted=False, last=True),
        "other sums": True,
    }
    found = [list(found) if isinstance(found, tuple | list) else found]
    grader.compare(without(), found, mistakes, verb="return")


def _blocks(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return scores and values of blocks; the maximum grows, stays, and is different by row."""
    scores = torch.tensor([[[0.0, 1.0], [3.0, 2.0]], [[2.0, 0.5], [1.0, 0.0]], [[1.0, 4.0]] * 2])
    values = torch.arange(1.0, 13).view(3, 2, 2)
    return list(zip(scores, values, strict=True))[:count]


def _fold(rank: int, world_size: int, add_block: Callable, blocks: Sequence) -> Any:
    kept: Any = (torch.full((2, 1), -math.inf), torch.zeros(2, 1), torch.zeros(2, 2))
    for scores, values in blocks:
        kept = add_block(*kept, scores.clone(), values.clone())
    return kept


def _variant(
    total: bool = True, weighted: bool = True, inverse: bool = False, last: bool = False
) -> Callable[..., Kept]:
    """Return an online softmax, which each argument makes wrong in one way.

    total, weighted: whether this sum shrinks. inverse: both grow instead. last: the maximum is that
    of the last block.
    """

    def add_block(maximum, old_total, old_weighted, scores, values) -> Kept:
        larger = scores.amax(-1, keepdim=True)
        larger = larger if last else torch.maximum(maximum, larger)
        rescale = torch.exp(larger - maximum if inverse else maximum - larger)
        weights = torch.exp(scores - larger)
        new_total = old_total * rescale if total else old_total
        new_weighted = old_weighted * rescale if weighted else old_weighted
        return larger, new_total + weights.sum(-1, keepdim=True), new_weighted + weights @ values

    return add_block


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
