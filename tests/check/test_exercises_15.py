"""Wrong answers to the exercises of lesson 15, and the errors that the learner gets."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from answers import error_text

import ddp_kit as kit
from ddp_kit.lessons.collectives import reduce_scatter_single

pytestmark = pytest.mark.usefixtures("forked_ranks")


def maker(
    mine=lambda owner, rank: owner == rank,
    src=lambda owner, rank: owner,
    sent=lambda owner, rank: True,
    send=dist.broadcast,
    steps=1,
    first="update",
    anew=False,
    value=lambda parameter: parameter.data,
    scale=1,
):
    """Return an answer to 15.1; each argument can make it wrong in one way.

    mine: which parameters a rank updates. src: from where they come. sent: which are sent. steps:
    of the optimizer. first: "update" or "send". anew: make the optimizer in each step.
    """

    def answer(owners, optimizer_cls):
        rank = dist.get_rank()
        own = [parameter for parameter, owner in owners.items() if mine(owner, rank)]
        optimizer = optimizer_cls(own)

        def update():
            for parameter in own:
                parameter.grad *= scale
            for _ in range(steps):
                (optimizer_cls(own) if anew else optimizer).step()

        def exchange():
            for parameter, owner in owners.items():
                if sent(owner, rank):
                    send(value(parameter), src(owner, rank))

        def step():
            for part in (update, exchange) if first == "update" else (exchange, update):
                part()

        return step

    return answer


def add(tensor, src):
    dist.all_reduce(tensor)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"steps": 0}, "Nothing has changed: call the optimizer's step()."),
        ({"send": lambda tensor, src: None}, "own parameters and lacks the others': after"),
        ({"first": "send"}, "own parameters and lacks the others': after the optimizer's step,"),
        ({"src": lambda owner, rank: 0}, "All ranks have what rank 0 has, which has updated its"),
        ({"src": lambda owner, rank: rank}, "All ranks must call the same broadcasts in the same"),
        ({"sent": lambda owner, rank: owner == rank}, "All ranks must call the same broadcasts in"),
        ({"sent": lambda owner, rank: rank == 0}, "All ranks must call the same broadcasts in the"),
        ({"send": add}, "That is the sum over the ranks. A broadcast copies what the owner has."),
        ({"scale": 2}, "with the gradients as they are: they are means already."),
        ({"anew": True}, "The second step began without the states of the first one."),
        ({"mine": lambda owner, rank: True}, "Give the optimizer only the parameters that this"),
    ],
)
def test_a_step_that_is(wrong, words):
    text = error_text(kit.check.exercise_15_1, maker(**wrong))
    assert text.startswith("exercise 15.1, make_step(owners, optimizer_cls) on 2 ranks: ")
    assert words in text


def test_a_second_step_that_is_wrong():
    taken = []

    def answer(owners, optimizer_cls):
        step = maker()(owners, optimizer_cls)

        def later():
            taken.append(1)
            for parameter in owners:
                parameter.grad *= len(taken)
            step()

        return later

    text = error_text(kit.check.exercise_15_1, answer)
    assert "in parameter 0 after step 2 but holds" in text
    assert "The first step is right. The second needs the same optimizer, with its states." in text


def test_a_step_that_does_not_wait():
    def start(tensor, src):
        dist.broadcast(tensor, src, async_op=True)

    text = error_text(kit.check.exercise_15_1, maker(send=start))
    assert "some operations were started but never waited for" in text


def averager(
    divide=lambda gradient, rows: gradient / dist.get_world_size(),
    fill=True,
    reduce="scatter",
    place=lambda rank: rank,
    cut=True,
):
    """Return an answer to 15.2; each argument can make it wrong in one way."""

    def answer(gradient):
        n, rank, length = dist.get_world_size(), dist.get_rank(), len(gradient)
        rows = -(-length // n)
        real = gradient[rank * rows : (rank + 1) * rows]
        given = divide(gradient, rows)
        if fill:
            missing = given.new_zeros(n * rows - length, *given.shape[1:])
            given = torch.cat([given, missing])
        parts = list(given.split(rows))
        mine = torch.empty_like(parts[place(rank) % len(parts)])
        if reduce == "scatter":
            dist.reduce_scatter(mine, parts)
        elif reduce == "all":
            dist.all_reduce(given)
        if reduce != "scatter":
            mine = given.split(rows)[place(rank)]
        return mine[: len(real)] if cut else mine

    return answer


def turned(gradient):
    """Deal out the parts in the other order."""
    n, rank = dist.get_world_size(), dist.get_rank()
    dist.all_reduce(gradient)
    return gradient.chunk(n)[n - 1 - rank] / n


def strided(gradient):
    n, rank = dist.get_world_size(), dist.get_rank()
    dist.all_reduce(gradient)
    return gradient[rank::n] / n


def unfilled(gradient):
    n = dist.get_world_size()
    mine = torch.empty_like(gradient[: -(-len(gradient) // n)])
    reduce_scatter_single(mine, gradient / n)
    return mine


def summed(gradient):
    dist.all_reduce(gradient)
    return gradient / dist.get_world_size()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (averager(lambda g, rows: g), "That is the sum over the ranks: divide by the number of"),
        (averager(lambda g, rows: g / 4), "That is divided by the number of ranks twice."),
        (averager(lambda g, rows: g / rows / 5), "Fill up with zeros, divide by the number of "),
        (averager(reduce=""), "Those are rows of this rank's own gradient: add up over the ranks"),
        (averager(lambda g, rows: g, reduce=""), "rows of this rank's own gradient: add up over"),
        (summed, "That is the whole mean on every rank. Each should return its own rows."),
        (averager(place=lambda rank: 0, reduce="all"), "These are rows, but not the right ones."),
        (turned, "Rank r has 2 of them, from row 2r on, and the last ranks may have fewer."),
        (strided, "Rank r has 2 of them, from row 2r on, and the last ranks may have fewer."),
        (averager(cut=False), "The rows of zeros that fill up the last parts are no rows of the"),
        (
            averager(fill=False),
            "gradient of 5 rows) on 4 ranks: it raised an error\nreduce_scatter",
        ),
        (
            unfilled,
            "gradient of 5 rows) on 2 ranks: it raised an error\nreduce_scatter needs parts",
        ),
        (averager(fill=False), "reduce_scatter needs parts of equal shape: append rows of zeros"),
        (averager(reduce="all"), "An all_reduce sends twice as much."),
        (lambda gradient: None, "Fill up with zeros, divide by the number of ranks, pass this"),
    ],
)
def test_rows_that_are(answer, words):
    text = error_text(kit.check.exercise_15_2, answer)
    assert text.startswith("exercise 15.2, own_gradient(gradient of ")
    assert words in text


def test_rows_divided_by_their_number():
    text = error_text(kit.check.exercise_15_2, averager(lambda gradient, rows: gradient / rows))
    assert "gradient of 5 rows) on 2 ranks: wrong" in text
    assert "Divide by the number of ranks, not of rows." in text


def test_rows_are_right_in_two_ways(capsys):
    def with_avg(gradient):
        n, rank = dist.get_world_size(), dist.get_rank()
        rows = -(-len(gradient) // n)
        filled = torch.zeros(n * rows, gradient.shape[1])
        filled[: len(gradient)] = gradient
        mine = torch.empty(rows, gradient.shape[1])
        dist.reduce_scatter(mine, list(filled.chunk(n)), op=dist.ReduceOp.AVG)
        return mine[: max(0, len(gradient) - rank * rows)]

    for answer in (averager(), with_avg):
        kit.check.exercise_15_2(answer)
        assert capsys.readouterr().out.startswith("Exercise 15.2: right on 1, 2, 3, 4 and 5 ranks")


def sharded_linear(x, rows, gather, average):
    y = x @ gather(rows).T

    def backward(grad_y):
        return grad_y @ gather(rows), average(grad_y.T @ x)

    return y, backward


def kept(x, rows, gather, average):
    weight = gather(rows)

    def backward(grad_y):
        return grad_y @ weight, average(grad_y.T @ x)

    return x @ weight.T, backward


def kept_afterwards(x, rows, gather, average):
    y, weights = x @ gather(rows).T, []

    def backward(grad_y):
        weights.append(gather(rows))
        return grad_y @ weights[0], average(grad_y.T @ x)

    return y, backward


def gathered_too_often(x, rows, gather, average):
    y, right = sharded_linear(x, rows, gather, average)

    def backward(grad_y):
        gather(rows)
        return right(grad_y)

    return y, backward


def with_rows_in(forward=False, backward=False):
    def answer(x, rows, gather, average):
        y = x @ (rows if forward else gather(rows)).T

        def pull(grad_y):
            return grad_y @ (rows if backward else gather(rows)), average(grad_y.T @ x)

        return y, pull

    return answer


def returning(y=lambda y: y, to_x=lambda grad: grad, to_rows=None, swap=False, one=False):
    """Return an answer to 15.3 whose tensors are changed afterwards.

    to_rows: makes of grad_y, x and average the gradient of rows.
    """

    def answer(x, rows, gather, average):
        out = y(x @ gather(rows).T)

        def backward(grad_y):
            found = to_rows or (lambda grad_y, x, average: average(grad_y.T @ x))
            pair = to_x(grad_y @ gather(rows)), found(grad_y, x, average)
            return pair[0] if one else pair[::-1] if swap else pair

        return out, backward

    return answer


def mean(tensor):
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size()


def own(tensor):
    rows = -(-len(tensor) // dist.get_world_size())
    return tensor.split(rows)[dist.get_rank()]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (with_rows_in(forward=True), "y = x @ W.T needs all rows of W: gather(rows) returns them."),
        (with_rows_in(backward=True), "This rank's rows are not the whole weight: call gather(row"),
        (returning(to_x=mean), "That is the mean over the ranks. Each rank has its own x, so the"),
        (
            returning(to_x=lambda grad: -grad),
            "The gradient of x is grad_y @ W, where W is gathered",
        ),
        (
            returning(to_rows=lambda g, x, a: g.T @ x),
            "That is the gradient of the whole weight, fr",
        ),
        (returning(to_rows=lambda g, x, a: own(g.T @ x)), "Those are rows of this rank's own grad"),
        (
            returning(to_rows=lambda g, x, a: a(g.T @ x) * dist.get_world_size()),
            "That is the sum over the ranks, and should be the mean.",
        ),
        (returning(to_rows=lambda g, x, a: a(-g.T @ x)), "The gradient of W is grad_y.T @ x; aver"),
        (returning(to_rows=lambda g, x, a: a(x.T @ g)), "The gradient of W has the shape of W: gr"),
        (returning(swap=True), "Return the gradient of x first, then that of rows."),
        (returning(one=True), "Let `backward` return two tensors: the gradient of x, and that of"),
        (lambda x, rows, gather, average: x, "Return the output and the function: `return y, back"),
        (kept, "right, but rank 0 holds the whole weight after the forward\nA function keeps the"),
        (
            kept_afterwards,
            "right, but rank 0 holds the whole weight after the backward\nA function",
        ),
        (gathered_too_often, "rank 0 has gathered 3 times after the backward where 2 would be eno"),
    ],
)
def test_a_layer_that_is(answer, words):
    text = error_text(kit.check.exercise_15_3, answer)
    assert text.startswith("exercise 15.3, sharded_linear(x, rows, gather, average) on 2 ranks: ")
    assert words in text


def test_a_layer_with_another_fault_shows_it_without_a_hint():
    text = error_text(kit.check.exercise_15_3, lambda x, rows, gather, average: x.nothing)
    assert "no attribute 'nothing'" in text
    assert "gather(rows)" not in text


def held_and_sent(stage, parameters, n, sharded=None, times=(2, 3, 2, 3)):
    kinds, sharded = (8, 4, 4), stage if sharded is None else sharded
    held = parameters * (sum(kinds[:sharded]) / n + sum(kinds[sharded:]))
    return held, times[stage] * (n - 1) / n * 4 * parameters


def changed(held=lambda nbytes, stage, n: nbytes, sent=lambda nbytes, stage, n: nbytes):
    def answer(stage, parameters, n):
        right = held_and_sent(stage, parameters, n)
        return held(right[0], stage, n), sent(right[1], stage, n)

    return answer


@pytest.mark.parametrize(
    ("answer", "call", "words"),
    [
        (lambda stage, parameters, n: 1, "(0, 1000, 8)", "Return both: `return held, sent`."),
        (changed(lambda b, s, n: b / 4), "(0, 1000, 8)", "That counts numbers, and float32 has 4"),
        (changed(lambda b, s, n: 16000), "(1, 1000, 8)", "Stage 1 shards Adam's states: divide by"),
        (
            changed(lambda b, s, n: 16000 / n),
            "(0, 1000, 8)",
            "Not everything is sharded: in stage 0, every rank keeps Adam's states, the gradient",
        ),
        (
            changed(lambda b, s, n: 16000 / n if s else b),
            "(1, 1000, 8)",
            "in stage 1, every rank keeps the gradients, the parameters.",
        ),
        (
            lambda stage, parameters, n: held_and_sent(stage, parameters, n, min(stage, 1)),
            "(2, 1000, 8)",
            "Stage 2 divides Adam's states, the gradients by n.",
        ),
        (changed(sent=lambda b, s, n: b / 4), "(0, 1000, 8)", "That counts numbers, and float32"),
        (changed(sent=lambda b, s, n: b * 8 / 7), "(0, 1000, 8)", "its own part stays where it is"),
        (changed(sent=lambda b, s, n: b * n), "(0, 1000, 8)", "not n-1 times the tensor."),
        (
            changed(sent=lambda b, s, n: b / 2 if s == 0 else b),
            "(0, 1000, 8)",
            "DDP sends an all_reduce of the gradients, which counts twice.",
        ),
        (
            changed(sent=lambda b, s, n: b * 2 / 3 if s == 1 else b),
            "(1, 1000, 8)",
            "Stage 1 sends DDP's all_reduce, which counts twice, and broadcasts",
        ),
        (
            changed(sent=lambda b, s, n: b * 1.5 if s == 2 else b),
            "(2, 1000, 8)",
            "Stage 2 sends a reduce_scatter of the gradients, and an all_gather of the parameters.",
        ),
        (
            changed(sent=lambda b, s, n: b * 2 / 3 if s == 3 else b),
            "(3, 1000, 8)",
            "Stage 3 gathers the parameters before the forward and again before the backward",
        ),
    ],
)
def test_bytes_that_are(answer, call, words):
    text = error_text(kit.check.exercise_15_4, answer)
    assert text.startswith(f"exercise 15.4, held_and_sent{call} on 1 rank: it ")
    assert words in text
