"""Graders of lesson 18: an online softmax, masks and gradients on a ring, tokens for experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ddp_kit.check.grader import SIZES, Credit, Grader, same
from ddp_kit.errors import DeadlockError, MismatchError, RankDiedError, RankError, RunTimeoutError

CHUNK = 2  # tokens
Kept = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # maximum, sum, weighted sum


def exercise_18_1(add_block: Callable[..., Any]) -> Credit:
    """Grade `add_block(maximum, total, weighted, scores, values)` on 1 and 3 blocks of keys.

    Raises ExerciseError if it is not right yet, NotImplementedError for the stub.
    """
    form = "add_block(maximum, total, weighted, scores, values)"
    grader = Grader("18.1", form, add_block)
    for count in grader.each((1, 3), part=lambda n: "one block" if n == 1 else "three blocks"):
        blocks = _blocks(count)
        (found,) = grader.run(_add_blocks, blocks, world_size=1, case=f"{count} x {form}")
        wanted = _in_one_step(blocks)
        shown = list(found) if isinstance(found, (tuple, list)) else found
        hint = _hint_for_softmax(blocks, shown)
        grader.compare([list(wanted)], [shown], hint, verb="return")
    return grader.passed("right with one block of keys and with three")


def exercise_18_2(block_mask: Callable[[int, int, int, int], Any]) -> Credit:
    """Grade `block_mask(rank, step, n, chunk)` on 1 to 5 ranks.

    Raises ExerciseError if it is not right yet, NotImplementedError for the stub.
    """
    grader = Grader("18.2", "block_mask(rank, step, n, chunk)", block_mask)
    for n in grader.each(SIZES):
        found = list(grader.run(_masks, world_size=n))
        for step in range(n):
            right = [_right_mask(rank, step, n) for rank in range(n)]
            here = [masks[step] for masks in found]
            hint = _hint_for_mask(here, step, n)
            grader.compare(right, here, hint, verb="return", place=f" in step {step}")
    return grader.passed("right on 1, 2, 3, 4 and 5 ranks, in each step")


def exercise_18_3(bring_home: Callable[[list], Any]) -> Credit:
    """Grade `bring_home(parts)` on 1 to 5 ranks.

    Raises ExerciseError if it is not right yet, NotImplementedError for the stub.
    """
    hints: dict[type[Exception], Any] = dict.fromkeys(
        (DeadlockError, MismatchError, RunTimeoutError),
        "Each rank starts to send to the right and to receive from the left, and only then waits "
        "for both, as often as the others.",
    )
    grader = Grader("18.3", "bring_home(parts)", bring_home, hints=hints)
    for n in grader.each(SIZES):
        found = list(grader.run(_bring_home, world_size=n))
        wanted = [sum(_parts(rank, n)[owner] for rank in range(n)) for owner in range(n)]
        grader.compare(wanted, found, _hint_for_home(found), verb="return")
    return grader.passed("right on 1, 2, 3, 4 and 5 ranks, the gradients are home")


def exercise_18_4(through_experts: Callable[..., Any]) -> Credit:
    """Grade `through_experts(tokens, choice, expert)` on 1 to 5 ranks.

    Raises ExerciseError if it is not right yet, NotImplementedError for the stub.
    """
    failing = (RankError, DeadlockError, MismatchError, RankDiedError, RunTimeoutError)
    hint = (
        "Each rank must know how many rows come from each other one: exchange the counts first. "
        "To the experts, exchange_rows(rows, going, coming); on the way back, the rows go where "
        "they came from, so both lists change places."
    )
    grader = Grader(
        "18.4",
        "through_experts(tokens, choice, expert)",
        through_experts,
        hints=dict.fromkeys(failing, hint),
        collectives=True,
    )
    for n in grader.each(SIZES):
        found = list(grader.run(_use_experts, world_size=n))
        wanted = [_expert(choice[:, None], tokens) for tokens, choice in _tokens(n)]
        grader.compare(wanted, found, _hint_for_experts(wanted, found), verb="return")
    return grader.passed("right on 1, 2, 3, 4 and 5 ranks, with uneven counts and with none")


def _blocks(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return scores and values of blocks; the maximum grows, stays, and is different by row."""
    scores = torch.tensor([[[0.0, 1.0], [3.0, 2.0]], [[2.0, 0.5], [1.0, 0.0]], [[1.0, 4.0]] * 2])
    values = torch.arange(1.0, 13).view(3, 2, 2)
    return list(zip(scores, values, strict=True))[:count]


def _fold(add_block: Callable[..., Any], blocks: Sequence) -> Any:
    kept: Any = (torch.full((2, 1), -math.inf), torch.zeros(2, 1), torch.zeros(2, 2))
    for scores, values in blocks:
        kept = add_block(*kept, scores.clone(), values.clone())
    return kept


def _add_blocks(rank: int, world_size: int, add_block: Callable, blocks: Sequence) -> Any:
    return _fold(add_block, blocks)


def _in_one_step(blocks: Sequence) -> Kept:
    scores = torch.cat([scores for scores, _ in blocks], 1)
    values = torch.cat([values for _, values in blocks])
    maximum = scores.amax(1, keepdim=True)
    weights = torch.exp(scores - maximum)
    return maximum, weights.sum(1, keepdim=True), weights @ values


def _variant(total: bool = True, weighted: bool = True, inverse: bool = False) -> Callable:
    """Return an online softmax that shrinks only some sums, or grows them instead."""

    def add_block(maximum, old_total, old_weighted, scores, values) -> Kept:
        larger = torch.maximum(maximum, scores.amax(-1, keepdim=True))
        rescale = torch.exp(larger - maximum if inverse else maximum - larger)
        weights = torch.exp(scores - larger)
        new_total = old_total * rescale if total else old_total
        new_weighted = old_weighted * rescale if weighted else old_weighted
        return larger, new_total + weights.sum(-1, keepdim=True), new_weighted + weights @ values

    return add_block


def _of_the_block(maximum, total, weighted, scores, values) -> Kept:
    own = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - own)
    return own, total + weights.sum(-1, keepdim=True), weighted + weights @ values


def _hint_for_softmax(blocks: Sequence, found: Any) -> str:
    grown = "When the maximum grows, the weights so far are too large: multiply"
    variants = [
        (
            _variant(total=False),
            f"{grown} the old sum of the weights, total, by exp(maximum - larger), too.",
        ),
        (
            _variant(weighted=False),
            f"{grown} the old weighted sum of the values by exp(maximum - larger), too.",
        ),
        (
            _variant(total=False, weighted=False),
            f"{grown} both old sums by exp(maximum - larger).",
        ),
        (
            _variant(inverse=True),
            "The factor of the old sums is upside down: it is exp(maximum - larger), at most 1.",
        ),
        (_of_the_block, "That is relative to the maximum of the last block, not of all so far."),
    ]
    for variant, hint in variants:
        wrong = list(_fold(variant, blocks))
        if isinstance(found, list) and len(found) == 3 and all(map(_alike, wrong, found)):
            return hint
    return (
        "Return three tensors: larger; the old total times exp(maximum - larger), plus the sum of "
        "exp(scores - larger) over the keys; and the same with the values, by a matrix product."
    )


def _alike(want: torch.Tensor, have: Any) -> bool:
    """Compare, counting NaN and infinity as equal to themselves."""
    return (
        isinstance(have, torch.Tensor)
        and have.shape == want.shape
        and torch.allclose(have, want, rtol=1e-5, equal_nan=True)
    )


def _mask(rank: int, owner: int) -> torch.Tensor:
    own = torch.arange(CHUNK)
    return owner * CHUNK + own <= (rank * CHUNK + own)[:, None]


def _right_mask(rank: int, step: int, n: int) -> torch.Tensor:
    return _mask(rank, (rank - step) % n)


def _masks(rank: int, world_size: int, block_mask: Callable) -> list[Any]:
    return [block_mask(rank, step, world_size, CHUNK) for step in range(world_size)]


def _hint_for_mask(found: list, step: int, n: int) -> str:
    own = torch.arange(CHUNK)
    wrong = [
        (
            lambda rank: _mask(rank, (rank + step) % n),
            "Blocks go to the right, so in step s a rank has the block of rank - s, not rank + s.",
        ),
        (
            lambda rank: _mask(rank, rank - step),
            "Ranks count modulo n: to the left of rank 0 is the last rank, whose keys come later.",
        ),
        (
            lambda rank: _mask(rank, rank),
            "That is the mask of the own chunk. Whose keys has the rank in this step?",
        ),
        (
            lambda rank: _right_mask(rank, step, n).T,
            "Rows are queries, and columns are keys: compare keys <= queries[:, None].",
        ),
        (
            lambda rank: ((rank - step) % n) * CHUNK + own < (rank * CHUNK + own)[:, None],
            "A query sees the key at its own position, too.",
        ),
        (
            lambda rank: ~_right_mask(rank, step, n),
            "True is where the query sees the key, not where it is masked.",
        ),
    ]
    for mask, hint in wrong:
        if all(same(mask(rank), have) for rank, have in enumerate(found)):
            return hint
    return (
        "Find the owner of the keys first. Queries have the positions rank * chunk and on, keys "
        "owner * chunk and on. Return a tensor of bools of shape (chunk, chunk)."
    )


def _parts(rank: int, n: int) -> list[torch.Tensor]:
    """Return a rank's parts of the gradients of all blocks: its digit in a sum names the rank."""
    return [torch.tensor([10.0**rank, 10.0**rank * (owner + 1)]) for owner in range(n)]


def _bring_home(rank: int, world_size: int, bring_home: Callable) -> Any:
    return bring_home(_parts(rank, world_size))


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


def _hint_for_home(found: list) -> str:
    n = len(found)
    wrong = [
        (
            [_parts(rank, n)[rank] for rank in range(n)],
            "That is the rank's own part. The parts of the other ranks have to come to it.",
        ),
        (
            _gone_round(n, n - 1, lambda rank, step: rank - step),
            "That is the gradient of the right neighbour's block: one more step, and it is home.",
        ),
        (
            _gone_round(n, n, lambda rank, step: rank - step),
            "The rank's own part is in the sum twice: it began the sum, so add nothing when the "
            "sum is home.",
        ),
        (
            _gone_round(n, n, lambda rank, step: rank + step if step < n else None),
            "Sums go to the right, so in step s the block's owner is rank - s, not rank + s.",
        ),
        (
            _gone_round(n, n, lambda rank, step: rank if step < n else None),
            "Those are parts of the ranks' own blocks. Add the part of the block whose sum has "
            "just arrived.",
        ),
    ]
    for tensors, hint in wrong:
        if all(map(same, tensors, found)):
            return hint
    return (
        "Begin with the part of the own block. Then, n times: send the sum to the right, receive "
        "another one from the left, and add the own part of its block, if it is not home."
    )


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


def _hint_for_experts(wanted: list, found: list) -> str:
    orders = [choice.argsort(stable=True) for _, choice in _tokens(len(found))]
    sorted_ = [want[order] for want, order in zip(wanted, orders, strict=True)]
    if all(map(same, sorted_, found)):
        return (
            "The results are right, but in the order in which the tokens were sent. Put them back "
            "with order.argsort()."
        )
    twice = [want[order] for want, order in zip(sorted_, orders, strict=True)]
    if all(map(same, twice, found)):
        return "back[order] sorts once more. order.argsort() undoes the sorting."
    return (
        "Sort the tokens by their expert, with tokens[order], before they leave. Each rank applies "
        "its own expert to what arrives, and sends it back; back[order.argsort()] restores the "
        "order."
    )
