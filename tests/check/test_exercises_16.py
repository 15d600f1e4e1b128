"""The graders of lesson 16: right answers pass, and wrong ones are explained."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from answers import error_text

import ddp_kit as kit
from ddp_kit.lessons.context_parallel import exchange_rows

pytestmark = pytest.mark.usefixtures("forked_ranks")


def softmax(total=True, weighted=True, inverse=False, of_block=False, values_only=False):
    """Return an answer to 16.1; each argument can make it wrong in one way."""

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
    text = error_text(kit.check.exercise_16_1, softmax(**wrong))
    assert text.startswith("exercise 16.1, ")
    assert words in text


def test_a_softmax_is_right(capsys):
    kit.check.exercise_16_1(softmax())
    assert (
        capsys.readouterr().out == "Exercise 16.1: right with one block of keys and with three.\n"
    )


def mask(owner=lambda rank, step, n: (rank - step) % n, compare=torch.le, change=lambda m: m):
    """Return an answer to 16.2; each argument can make it wrong in one way."""

    def block_mask(rank, step, n, chunk):
        queries = rank * chunk + torch.arange(chunk)
        keys = owner(rank, step, n) * chunk + torch.arange(chunk)
        return change(compare(keys, queries[:, None]))

    return block_mask


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"owner": lambda rank, step, n: (rank + step) % n}, "on 3 ranks: wrong"),
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
    text = error_text(kit.check.exercise_16_2, mask(**wrong))
    assert text.startswith("exercise 16.2, block_mask(rank, step, n, chunk) on ")
    assert words in text


def test_a_mask_is_right(capsys):
    kit.check.exercise_16_2(mask())
    assert capsys.readouterr().out.startswith("Exercise 16.2: right on 1, 2, 3, 4 and 5 ranks")


def zig_zag(second=lambda rank, n: 2 * n - 1 - rank, parts=2, first=True):
    def zig_zag_places(rank, n, length):
        chunks = torch.arange(length).chunk(parts * n)
        if parts == 1:
            return chunks[rank]
        pair = [chunks[rank], chunks[second(rank, n)]]
        return torch.cat(pair if first else pair[::-1])

    return zig_zag_places


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (zig_zag(parts=1), "That is one chunk of n. Cut the sequence into 2n, and take two."),
        (zig_zag(lambda rank, n: n + rank), "The last rank still has most to do"),
        (zig_zag(first=False), "The chunks are right. Put the earlier one first."),
        (zig_zag(lambda rank, n: -rank), "The last chunk has the number 2n - 1"),
        (zig_zag(lambda rank, n: 2 * n - rank), "it raised an error"),
        (zig_zag(lambda rank, n: 2 * n - rank), "The last one belongs to rank 0."),
        (lambda rank, n, length: torch.arange(length)[rank::n], "That is a striped order"),
        (lambda rank, n, length: list(range(length)), "Rank r has the chunks r and 2n - 1 - r"),
    ],
)
def test_places_that_are(answer, words):
    text = error_text(kit.check.exercise_16_3, answer)
    assert text.startswith("exercise 16.3, zig_zag_places(rank, n, length) on 2 ranks: ")
    assert words in text


def test_places_are_right(capsys):
    kit.check.exercise_16_3(zig_zag())
    assert capsys.readouterr().out.startswith("Exercise 16.3: right on 1, 2, 3, 4 and 5 ranks")


def experts(counts=True, back=lambda going, coming: (coming, going), restore=torch.argsort):
    """Return an answer to 16.4; each argument can make it wrong in one way."""

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
    text = error_text(kit.check.exercise_16_4, answer)
    assert text.startswith("exercise 16.4, through_experts(tokens, choice, expert) on ")
    assert words in text


def test_tokens_are_right(capsys):
    kit.check.exercise_16_4(experts())
    assert capsys.readouterr().out.startswith("Exercise 16.4: right on 1, 2, 3, 4 and 5 ranks")
