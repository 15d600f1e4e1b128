"""Wrong answers to the exercises of lesson 15, and the errors that the learner gets."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from answers import assert_mistake, mistake

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
    ("wrong", "name", "fact"),
    [
        ({"steps": 0}, "not updated", "in parameter 0 after step 1 but holds"),
        ({"send": lambda tensor, src: None}, "not sent", "in parameter 0 after step 1 but holds"),
        ({"first": "send"}, "not sent", "in parameter 0 after step 1 but holds"),
        ({"src": lambda owner, rank: 0}, "sent by rank 0", "in parameter 0 after step 1 but holds"),
        ({"src": lambda owner, rank: rank}, "different broadcasts", "calls do not match"),
        ({"sent": lambda owner, rank: owner == rank}, "different broadcasts", "do not match"),
        ({"sent": lambda owner, rank: rank == 0}, "different broadcasts", "it deadlocks"),
        ({"send": add}, "added up", "in parameter 0 after step 1 but holds"),
        ({"scale": 2}, "wrong update", "in parameter 0 after step 1 but holds"),
        ({"anew": True}, "states lost", "in parameter 0 after step 2 but holds"),
        ({"mine": lambda owner, rank: True}, "all parameters", "right, but rank 0 keeps"),
    ],
)
def test_a_step_that_is(wrong, name, fact):
    case = "exercise 15.1, make_step(owners, optimizer_cls) on 2 ranks: "
    assert_mistake(kit.check.exercise_15_1, maker(**wrong), name, case, fact)


@mistake("15.1", "wrong second step", "in parameter 0 after step 2 but holds")
def test_a_second_step_with_other_gradients(owners, optimizer_cls):
    step, taken = maker()(owners, optimizer_cls), []

    def later():
        taken.append(1)
        for parameter in owners:
            parameter.grad *= len(taken)
        step()

    return later


def test_a_step_that_does_not_wait():
    def start(tensor, src):
        dist.broadcast(tensor, src, async_op=True)

    fact = "some operations were started but never waited for"
    assert_mistake(kit.check.exercise_15_1, maker(send=start), "", fact)


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
    ("answer", "name", "fact"),
    [
        (averager(lambda g, rows: g), "not divided", "of 4 rows) on 2 ranks: wrong result\n"),
        (averager(lambda g, rows: g / 4), "divided twice", "of 4 rows) on 2 ranks: wrong"),
        (averager(lambda g, rows: g / rows), "divided by rows", "of 5 rows) on 2 ranks: wrong"),
        (averager(lambda g, rows: g / rows / 5), "not the mean", "of 4 rows) on 2 ranks: wrong"),
        (lambda gradient: None, "not the mean", "but returns None"),
        (averager(reduce=""), "own gradient only", "of 4 rows) on 2 ranks: wrong"),
        (averager(lambda g, rows: g, reduce=""), "own gradient only", "on 2 ranks: wrong"),
        (summed, "whole mean", "of 4 rows) on 2 ranks: wrong"),
        (averager(place=lambda rank: 0, reduce="all"), "rows of others", "on 2 ranks: wrong"),
        (turned, "rows of others", "of 4 rows) on 2 ranks: wrong"),
        (strided, "rows of others", "of 4 rows) on 2 ranks: wrong"),
        (averager(cut=False), "zeros not cut off", "of 5 rows) on 2 ranks: wrong"),
        (averager(fill=False), "unequal parts", "of 5 rows) on 4 ranks: it raised an error\n"),
        (unfilled, "unequal parts", "of 5 rows) on 2 ranks: it raised an error\n"),
        (averager(reduce="all"), "too many bytes", "right, but "),
    ],
)
def test_rows_that_are(answer, name, fact):
    case = "exercise 15.2, own_gradient(gradient of "
    assert_mistake(kit.check.exercise_15_2, answer, name, case, fact)


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
    ("answer", "name", "fact"),
    [
        (with_rows_in(forward=True), "own rows in forward", " as y but returns"),
        (with_rows_in(backward=True), "own rows in backward", "it raised an error\n"),
        (returning(to_x=mean), "gradient of x averaged", " as the gradient of x but"),
        (returning(to_x=lambda grad: -grad), "wrong gradient of x", " as the gradient of x but"),
        (
            returning(to_rows=lambda g, x, a: g.T @ x),
            "not averaged",
            " as the gradient of rows but",
        ),
        (
            returning(to_rows=lambda g, x, a: own(g.T @ x)),
            "own gradient cut",
            " as the gradient of rows but",
        ),
        (
            returning(to_rows=lambda g, x, a: a(g.T @ x) * dist.get_world_size()),
            "multiplied by the ranks",
            " as the gradient of rows but",
        ),
        (
            returning(to_rows=lambda g, x, a: a(-g.T @ x)),
            "wrong gradient of rows",
            " as the gradient of rows but",
        ),
        (
            returning(to_rows=lambda g, x, a: a(x.T @ g)),
            "wrong shape averaged",
            "of shape (5, 3), got (3, 5)",
        ),
        (returning(swap=True), "other order", " as the gradient of x but"),
        (returning(one=True), "one gradient", "backward returns tensor("),
        (lambda x, rows, gather, average: x, "no function", "it returns tensor("),
        (kept, "weight kept", "right, but rank 0 holds the whole weight after the forward\n"),
        (
            kept_afterwards,
            "weight kept",
            "right, but rank 0 holds the whole weight after the backward\n",
        ),
        (
            gathered_too_often,
            "gathered too often",
            "rank 0 has gathered 3 times after the backward where 2 would be enough\n",
        ),
        (lambda x, rows, gather, average: x.nothing, "", "no attribute 'nothing'"),
    ],
)
def test_a_layer_that_is(answer, name, fact):
    case = "exercise 15.3, sharded_linear(x, rows, gather, average) on 2 ranks: "
    assert_mistake(kit.check.exercise_15_3, answer, name, case, fact)


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
    ("answer", "name", "stage", "fact"),
    [
        (lambda stage, parameters, n: 1, "one number", 0, "returns 1"),
        (changed(lambda b, s, n: b / 4), "numbers counted", 0, "bytes held"),
        (changed(lambda b, s, n: 16000), "nothing divided", 1, "bytes held"),
        (changed(lambda b, s, n: 16000 / n), "everything divided", 0, "bytes held"),
        (changed(lambda b, s, n: 16000 / n if s else b), "everything divided", 1, "bytes held"),
        (
            lambda stage, parameters, n: held_and_sent(stage, parameters, n, min(stage, 1)),
            "other bytes divided",
            2,
            "bytes held",
        ),
        (changed(sent=lambda b, s, n: b / 4), "numbers counted", 0, "bytes sent"),
        (changed(sent=lambda b, s, n: b * 8 / 7), "own part sent", 0, "bytes sent"),
        (changed(sent=lambda b, s, n: b * n), "all sent to all", 0, "bytes sent"),
        (changed(sent=lambda b, s, n: b if s else b / 2), "half the all_reduce", 0, "bytes sent"),
        (
            changed(sent=lambda b, s, n: b * 2 / 3 if s == 1 else b),
            "no broadcasts",
            1,
            "bytes sent",
        ),
        (changed(sent=lambda b, s, n: b * 1.5 if s == 2 else b), "no all_gather", 2, "bytes sent"),
        (
            changed(sent=lambda b, s, n: b * 2 / 3 if s == 3 else b),
            "second gather",
            3,
            "bytes sent",
        ),
    ],
)
def test_bytes_that_are(answer, name, stage, fact):
    case = f"exercise 15.4, held_and_sent({stage}, 1000, 8) on 1 rank: it "
    assert_mistake(kit.check.exercise_15_4, answer, name, case, fact)
