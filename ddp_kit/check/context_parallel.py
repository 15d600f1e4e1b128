"""Graders of lesson 18: an online softmax, masks and gradients on a ring, tokens for experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

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

    grown = "When the maximum grows, the weights so far are too large: multiply"
    hints = {
        f"{grown} the old sum of the weights, total, by exp(maximum - larger), too.": (
            without(total=False)
        ),
        f"{grown} the old weighted sum of the values by exp(maximum - larger), too.": (
            without(weighted=False)
        ),
        f"{grown} both old sums by exp(maximum - larger).": (without(total=False, weighted=False)),
        "The factor of the old sums is upside down: it is exp(maximum - larger), at most "
        "1.": without(inverse=True),
        "That is relative to the maximum of the last block, not of all so far.": without(
            total=False, weighted=False, last=True
        ),
        "Return three tensors: larger; the old total times exp(maximum - larger), plus the sum "
        "of exp(scores - larger) over the keys; and the same with the values, by a matrix "
        "product.": True,
    }
    grader.compare(
        without(), [list(found) if isinstance(found, tuple | list) else found], hints, verb="return"
    )


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
    own = torch.arange(CHUNK)

    def masks(owner: Callable[[int], int], sees: Callable = torch.le) -> list[torch.Tensor]:
        return [sees(owner(rank) * CHUNK + own, (rank * CHUNK + own)[:, None]) for rank in range(n)]

    found = list(grader.run(_masks, world_size=n))
    for step in range(n):

        def owner(rank: int, step: int = step) -> int:
            return (rank - step) % n

        hints = {
            "Blocks go to the right, so in step s a rank has the block of rank - s, not "
            "rank + s.": masks(lambda rank, step=step: (rank + step) % n),
            "Ranks count modulo n: to the left of rank 0 is the last rank, whose keys come "
            "later.": masks(lambda rank, step=step: rank - step),
            "That is the mask of the own chunk. Whose keys has the rank in this step?": masks(
                lambda rank: rank
            ),
            "Rows are queries, and columns are keys: compare keys <= queries[:, None].": [
                mask.T for mask in masks(owner)
            ],
            "A query sees the key at its own position, too.": masks(owner, torch.lt),
            "True is where the query sees the key, not where it is masked.": [
                ~mask for mask in masks(owner)
            ],
            "Find the owner of the keys first. Queries have the positions rank * chunk and on, "
            "keys owner * chunk and on. Return a tensor of bools of shape (chunk, chunk).": True,
        }
        grader.compare(
            masks(owner),
            [each[step] for each in found],
            hints,
            verb="return",
            place=f" in step {step}",
        )


def _masks(rank: int, world_size: int, block_mask: Callable) -> list[Any]:
    return [block_mask(rank, step, world_size, CHUNK) for step in range(world_size)]


@exercise(
    "18.3",
    "bring_home(parts)",
    "the gradients are home",
    on_failure=dict.fromkeys(
        (DeadlockError, MismatchError, RunTimeoutError),
        "Each rank starts to send to the right and to receive from the left, and only then waits "
        "for both, as often as the others.",
    ),
    collectives=False,
)
def _bring_home(grader: Grader, n: int) -> None:
    def round_trip(block: Callable, steps: int = n, last: bool = False) -> list:
        return _gone_round(n, steps, lambda r, s: block(r, s) if s < n or last else None)

    hints = {
        "That is the rank's own part. The parts of the other ranks have to come to it.": [
            _parts(rank, n)[rank] for rank in range(n)
        ],
        "That is the gradient of the right neighbour's block: one more step, and it is "
        "home.": round_trip(lambda rank, step: rank - step, n - 1),
        "The rank's own part is in the sum twice: it began the sum, so add nothing when "
        "the sum is home.": round_trip(lambda rank, step: rank - step, last=True),
        "Sums go to the right, so in step s the block's owner is rank - s, not rank + "
        "s.": round_trip(lambda rank, step: rank + step),
        "Those are parts of the ranks' own blocks. Add the part of the block whose sum has "
        "just arrived.": round_trip(lambda rank, step: rank),
        "Begin with the part of the own block. Then, n times: send the sum to the right, receive "
        "another one from the left, and add the own part of its block, if it is not home.": True,
    }
    grader.compare(
        [sum(_parts(rank, n)[owner] for rank in range(n)) for owner in range(n)],
        grader.call([(_parts(rank, n),) for rank in range(n)]),
        hints,
        verb="return",
    )


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
    on_failure="Each rank must know how many rows come from each other one: exchange the counts "
    "first. To the experts, exchange_rows(rows, going, coming); on the way back, the rows go where "
    "they came from, so both lists change places.",
)
def _through_experts(grader: Grader, n: int) -> None:
    found = grader.run(_use_experts, world_size=n)
    wanted = [_expert(choice[:, None], tokens) for tokens, choice in _tokens(n)]
    orders = [choice.argsort(stable=True) for _, choice in _tokens(n)]
    as_sent = [want[order] for want, order in zip(wanted, orders, strict=True)]
    hints = {
        "The results are right, but in the order in which the tokens were sent. Put them "
        "back with order.argsort().": as_sent,
        "back[order] sorts once more. order.argsort() undoes the sorting.": [
            back[order] for back, order in zip(as_sent, orders, strict=True)
        ],
        "Sort the tokens by their expert, with tokens[order], before they leave. Each rank "
        "applies its own expert to what arrives, and sends it back; back[order.argsort()] "
        "restores the order.": True,
    }
    grader.compare(wanted, found, hints, verb="return")


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
