"""Wrong answers to the exercises of lesson 18, and the errors that the learner gets."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from answers import error_text

import ddp_kit as kit
from ddp_kit.lessons.context_parallel import exchange_rows, start_exchange, wait_for

pytestmark = pytest.mark.usefixtures("forked_ranks")


def softmax(total=True, weighted=True, inverse=False, of_block=False, values_only=False):
    """Return an answer to 18.1; each argument can make it wrong in one way."""

    def add_block(maximum, old_total, old_weighted, scores, values):
        own = scores.amax(-1, keepdim=True)
        larger = own if of_block else torch.maximum(maximum, own)
        rescale = torch.exp(larger - maximum if inverse else maximum - larger)
        weights = torch.exp(scores - larger)
        shrunk = old_total * rescale if total and not of_block else old_total
        shrunk_values = old_weighted * rescale if weighted and not of_block else old_weighted
        new = shrunk_values + weights @ values
        return new if values_only else (larger, shrunk + weights.sum(-1, keepdim=True), new)

    return add_block


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"total": False}, "multiply the old sum of the weights, total, by exp(maximum - larger)"),
        ({"weighted": False}, "multiply the old weighted sum of the values by exp(maximum"),
        ({"total": False, "weighted": False}, "multiply both old sums by exp(maximum - larger)."),
        ({"inverse": True}, "The factor of the old sums is upside down"),
        ({"of_block": True}, "relative to the maximum of the last block, not of all so far."),
        ({"values_only": True}, "Return three tensors: larger; the old total times"),
    ],
)
def test_a_softmax_that_is(wrong, words):
    text = error_text(kit.check.exercise_18_1, softmax(**wrong))
    assert text.startswith("exercise 18.1, ")
    assert words in text


def mask(owner=lambda rank, step, n: (rank - step) % n, compare=torch.le, change=lambda m: m):
    """Return an answer to 18.2; each argument can make it wrong in one way."""

    def block_mask(rank, step, n, chunk):
        queries = rank * chunk + torch.arange(chunk)
        keys = owner(rank, step, n) * chunk + torch.arange(chunk)
        return change(compare(keys, queries[:, None]))

    return block_mask


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"owner": lambda rank, step, n: (rank + step) % n}, "the block of rank - s, not rank + s"),
        ({"owner": lambda rank, step, n: rank - step}, "Ranks count modulo n: to the left of rank"),
        ({"owner": lambda rank, step, n: rank}, "That is the mask of the own chunk."),
        ({"change": lambda m: m.T}, "Rows are queries, and columns are keys"),
        ({"compare": torch.lt}, "A query sees the key at its own position, too."),
        ({"compare": torch.gt}, "True is where the query sees the key, not where it is masked."),
        ({"change": lambda m: m.float()}, "Find the owner of the keys first."),
    ],
)
def test_a_mask_that_is(wrong, words):
    text = error_text(kit.check.exercise_18_2, mask(**wrong))
    assert text.startswith("exercise 18.2, block_mask(rank, step, n, chunk) on ")
    assert words in text


def home(steps=lambda n: n, block=lambda rank, step: rank - step, last=False, exchange=True):
    """Return an answer to 18.3; each argument can make it wrong in one way."""

    def bring_home(parts):
        rank, n = dist.get_rank(), dist.get_world_size()
        total = parts[rank]
        for step in range(1, steps(n) + 1):
            arriving = torch.empty_like(total)
            if exchange:
                wait_for(start_exchange(total, arriving))
            elif n > 1:
                dist.recv(arriving, (rank - 1) % n)
                dist.send(total, (rank + 1) % n)
            total = arriving + parts[block(rank, step) % n] if step < n or last else arriving
        return total

    return bring_home


def summed_up(parts):
    total = torch.stack(parts)
    dist.all_reduce(total)
    return total[dist.get_rank()]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (home(steps=lambda n: 0), "That is the rank's own part."),
        (home(steps=lambda n: n - 1), "the gradient of the right neighbour's block: one more step"),
        (home(last=True), "The rank's own part is in the sum twice"),
        (home(block=lambda rank, step: rank + step), "rank - s, not rank + s"),
        (home(block=lambda rank, step: rank), "Add the part of the block whose sum has just"),
        (home(exchange=False), "starts to send to the right and to receive from the left"),
        (summed_up, "all_reduce was called"),
        (lambda parts: sum(parts), "Begin with the part of the own block."),
    ],
)
def test_gradients_that_are(answer, words):
    text = error_text(kit.check.exercise_18_3, answer)
    assert text.startswith("exercise 18.3, bring_home(parts) on ")
    assert words in text


def experts(counts=True, back=lambda going, coming: (coming, going), restore=torch.argsort):
    """Return an answer to 18.4; each argument can make it wrong in one way."""

    def through_experts(tokens, choice, expert):
        order = choice.argsort(stable=True)
        going = torch.bincount(choice, minlength=dist.get_world_size())
        coming = torch.zeros_like(going)
        if counts:
            dist.all_to_all_single(coming, going)
        else:
            coming = going  # a rank takes for granted that as many come as go
        going, coming = going.tolist(), coming.tolist()
        arrived = exchange_rows(tokens[order], going, coming)
        returned = exchange_rows(expert(arrived), *back(going, coming))
        return returned[restore(order)]

    return through_experts


def untouched(order):
    return torch.arange(len(order))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (experts(restore=untouched), "in the order in which the tokens were sent."),
        (experts(restore=lambda order: order), "back[order] sorts once more."),
        (experts(back=lambda going, coming: (going, coming)), "both lists change places."),
        (experts(counts=False), "exchange the counts first."),
        (lambda tokens, choice, expert: expert(tokens), "Sort the tokens by their expert"),
    ],
)
def test_tokens_that_are(answer, words):
    text = error_text(kit.check.exercise_18_4, answer)
    assert text.startswith("exercise 18.4, through_experts(tokens, choice, expert) on ")
    assert words in text
