"""Wrong answers to the exercises of lesson 03, and the errors that the learner gets."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from answers import assert_mistake, error_text, mistake

import ddp_kit as kit
from ddp_kit.lessons import ring_allreduce


def gradients(model):
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def digits_of_all(digits):
    total = torch.tensor(float(digits))
    dist.all_reduce(total)
    return total


def each_gradient(change):
    """Return an answer to 3.1; change: what it does with a gradient, of digits, of total."""

    def average_weighted(model, digits):
        total = digits_of_all(digits)
        for gradient in gradients(model):
            change(gradient, digits, total)

    return average_weighted


def summed(tensor):
    dist.all_reduce(tensor)
    return tensor


def by_rank_0(gradient, digits, total):
    gradient *= digits / total
    dist.reduce(gradient, dst=0)
    dist.broadcast(gradient, src=0)


@pytest.mark.parametrize(
    ("change", "name", "fact"),
    [
        (
            lambda gradient, digits, total: summed(gradient).div_(dist.get_world_size()),
            "not weighted",
            "wrong result\nrank 0 should hold [105, 106, 107, 108, 109, 110] in 0.weight.grad "
            "but holds [90, 91, 92, 93, 94, 95]\n",
        ),
        (
            lambda gradient, digits, total: summed(gradient),
            "not weighted",
            "but holds [180, 182, 184, 186, 188, 190]\n",
        ),
        (
            lambda gradient, digits, total: summed(gradient.mul_(digits)),
            "not divided",
            "but holds [420, 424, 428, 432, 436, 440]\n",
        ),
        (
            lambda gradient, digits, total: summed(
                gradient.mul_(digits / total / dist.get_world_size())
            ),
            "divided twice",
            "but holds [52.5, 53, 53.5, 54, 54.5, 55]\n",
        ),
        (
            lambda gradient, digits, total: gradient.mul_(digits / total),
            "not added up",
            "but holds [15, 15.25, 15.5, 15.75, 16, 16.25]\n",
        ),
        (
            lambda gradient, digits, total: None,
            "gradients unchanged",
            "but holds [60, 61, 62, 63, 64, 65]\n",
        ),
        (
            lambda gradient, digits, total: summed(gradient).mul_(digits / total),
            "wrong weights",
            "but holds [45, 45.5, 46, 46.5, 47, 47.5]\n",
        ),
        (by_rank_0, "too much sent", "right, but reduce was called\n"),
        (
            lambda gradient, digits, total: gradient.copy_(
                summed(gradient.double() * digits / total)
            ),
            "too much sent",
            "right, but 108 bytes were sent in all_reduces by rank 0 where 60 would be enough\n",
        ),
        (
            lambda gradient, digits, total: ring_allreduce.chunked_ring(
                gradient.mul_(digits / total)
            ),
            "too much sent",
            "right, but it sends messages\n",
        ),
    ],
)
def test_a_weighted_mean_that_is(change, name, fact):
    case = "exercise 3.1, average_weighted(model, digits) with 1 and 3 digits on 2 ranks: "
    assert_mistake(kit.check.exercise_3_1, each_gradient(change), name, case, fact)


@mistake("3.1", "stops at frozen layer", "in 2.weight.grad but holds ")
def test_a_mean_that_ends_at_a_frozen_layer(model, digits):
    total = digits_of_all(digits)
    for parameter in model.parameters():
        if parameter.grad is None:
            return
        parameter.grad *= digits / total
        dist.all_reduce(parameter.grad)


@mistake("3.1", "frozen layer changed", "should hold None in 1.weight.grad but holds [0, 0")
def test_a_frozen_layer_that_gets_a_gradient(model, digits):
    total = digits_of_all(digits)
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.requires_grad_()
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad *= digits / total
        dist.all_reduce(parameter.grad)


@mistake("3.1", "parameters changed", "the gradients are right, but rank 0 changed 0.weight\n")
def test_a_mean_of_the_parameters_too(model, digits):
    total = digits_of_all(digits)
    for gradient in gradients(model):
        gradient *= digits / total
        dist.all_reduce(gradient)
    next(model.parameters()).data /= 2


@mistake("3.1", "too much sent", "right, but all_reduce was called 8 times where 5 would be enough")
def test_digits_that_are_counted_again_for_each_gradient(model, digits):
    for gradient in gradients(model):
        count = torch.tensor(digits, dtype=torch.uint8)
        dist.all_reduce(count)
        gradient *= digits / count
        dist.all_reduce(gradient)


def test_a_mean_that_nobody_waits_for(capsys):
    def average_weighted(model, digits):
        total = digits_of_all(digits)
        for gradient in gradients(model):
            gradient *= digits / total
            dist.all_reduce(gradient, async_op=True)

    text = error_text(kit.check.exercise_3_1, average_weighted)
    assert (
        "on 2 ranks: some operations were started but never waited for\nranks 0 and 1 never" in text
    )
    assert "never waited for all_reduce, which may still be in flight; keep what it returns" in text
    assert capsys.readouterr().out == ""  # reported once


def test_one_flat_mean_is_right_and_the_notebook_keeps_its_numbers_and_dtype(capsys):
    def average_weighted(model, digits):
        mine = [gradient.view(-1) * digits for gradient in gradients(model)]
        flat = torch.cat([*mine, torch.tensor([digits])])  # the count travels with them
        dist.all_reduce(flat)
        *pieces, total = flat.split([*(gradient.numel() for gradient in gradients(model)), 1])
        for gradient, piece in zip(gradients(model), pieces, strict=True):
            gradient.copy_(piece.view_as(gradient) / total)

    before = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        kit.check.exercise_3_1(average_weighted)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), before)
    assert capsys.readouterr().out == (
        "Exercise 3.1: right on 1, 2, 3, 4 and 5 ranks, "
        "with at most one all_reduce more than there are gradients.\n"
    )


def buckets_of(model, most):
    found, room = [], 0
    for parameter in model.parameters():
        if parameter.grad.numel() > room:
            found.append([])
            room = most
        found[-1].append(parameter.grad)
        room -= parameter.grad.numel()
    return found


def reduced(bucket, divide=1):
    """Return the mean of a bucket's gradients in one tensor. divide: how often, by the ranks."""
    flat = torch.cat([gradient.view(-1) for gradient in bucket])
    dist.all_reduce(flat)
    return flat / dist.get_world_size() ** divide


def bucketed(model, most, buckets=slice(None), divide=1):
    for bucket in buckets_of(model, most)[buckets]:
        pieces = reduced(bucket, divide).split([gradient.numel() for gradient in bucket])
        for gradient, piece in zip(bucket, pieces, strict=True):
            gradient.copy_(piece.view_as(gradient))


@mistake(
    "3.2",
    "gradients unchanged",
    "average_in_buckets(model, most=100) on 2 ranks: wrong result\n",
)
def test_a_bucket_that_is_not_copied_back(model, most):
    for bucket in buckets_of(model, most):
        reduced(bucket)


@mistake(  # and not that of frozen layers
    "3.2",
    "gradients unchanged",
    "average_in_buckets(model, most=10) on 2 ranks: wrong result\n",
)
def test_buckets_of_which_only_the_first_is_averaged(model, most):
    bucketed(model, most, slice(1))


@mistake("3.2", "gradients not divided", "but holds [180, 182, 184, 186, 188, 190]\n")
def test_buckets_that_are_only_added_up(model, most):
    bucketed(model, most, divide=0)


@mistake("3.2", "gradients divided twice", "but holds [45, 45.5, 46, 46.5, 47, 47.5]\n")
def test_buckets_that_are_divided_twice(model, most):
    bucketed(model, most, divide=2)


@mistake("3.2", "other gradients", "should hold [90, 91, 92, 93, 94, 95] in 0.weight.grad but hol")
def test_buckets_that_are_copied_back_in_reverse(model, most):
    for bucket in buckets_of(model, most):
        pieces = reduced(bucket).flip(0).split([gradient.numel() for gradient in bucket])
        for gradient, piece in zip(bucket, pieces, strict=True):
            gradient.copy_(piece.view_as(gradient))


@mistake("3.2", "parameters changed", "the gradients are right, but rank 0 changed 0.weight\n")
def test_buckets_and_parameters(model, most):
    bucketed(model, most)
    next(model.parameters()).data /= 2


@mistake(
    "3.2", "too few calls", "most=10) on 2 ranks: right, but only 1 all_reduce for 3 buckets\n"
)
def test_one_bucket_for_all(model, most):
    bucketed(model, 1000)


@mistake(
    "3.2",
    "too much sent",
    "most=100) on 2 ranks: right, but all_reduce was called 6 times where 1 would be enough\n",
)
def test_one_call_for_each_gradient(model, most):
    bucketed(model, 1)


@mistake(
    "3.2",
    "too much sent",
    "most=8) on 2 ranks: right, but all_reduce was called 5 times where 4 would be enough\n",
)
def test_buckets_that_are_never_full(model, most):
    bucketed(model, max(1, most - 1))


def test_no_call_on_one_rank_is_right(capsys):
    def average_in_buckets(model, most):
        if dist.get_world_size() > 1:
            bucketed(model, most)

    kit.check.exercise_3_2(average_in_buckets)
    assert capsys.readouterr().out.startswith("Exercise 3.2: right on 1, 2, 3, 4 and 5 ranks")


def k_means(
    alone=False,
    means=False,
    steps_left_out=0,
    keep_empty=True,
    counts_of_all=True,
    calls=1,
    in_place=False,
    skip_empty=False,
):
    """Return an answer to 3.4; each argument can make it wrong in one way."""

    def answer(points, centroids, steps):
        moved = centroids if in_place else centroids.clone()
        for _ in range(steps - steps_left_out):
            nearest = torch.cdist(points, moved).argmin(dim=1)
            groups = [points[nearest == number] for number in range(len(moved))]
            sums = torch.stack([group.sum(dim=0) for group in groups])
            counts = torch.tensor([[float(len(group))] for group in groups])
            if means:
                own = torch.where(counts > 0, sums / counts.clamp(min=1), moved)
                dist.all_reduce(own)
                moved.copy_(own / dist.get_world_size())
                continue
            if skip_empty and len(points) == 0:
                return moved
            if not alone:
                both = [sums, counts] if counts_of_all else [sums]
                flat = torch.cat(both, dim=1)
                for part in flat.chunk(calls):
                    dist.all_reduce(part.contiguous() if calls == 1 else part)
                sums, counts = flat[:, :2], flat[:, 2:] if counts_of_all else counts
            new = sums / counts
            moved.copy_(torch.where(counts > 0, new, moved) if keep_empty else new)
        return moved

    return answer


@pytest.mark.parametrize(
    ("wrong", "name", "facts"),
    [
        (
            {"alone": True},
            "each rank alone",
            ["k_means(points, centroids, steps) with 28 and 12 p"],
        ),
        (
            {"means": True},
            "mean of means",
            ["on 2 ranks: wrong result\nrank 0 should return [-0.06"],
        ),
        ({"steps_left_out": 1}, "other steps", ["on 2 ranks: wrong result"]),
        ({"keep_empty": False}, "empty cluster", ["nan, nan]"]),
        ({"counts_of_all": False}, "other centroids", ["on 2 ranks: wrong result"]),
        ({"in_place": True}, "arguments changed", ["right, but rank 0 changed its centroids"]),
        ({"calls": 2}, "too much travels", ["right, but 6 collectives were called in 3 steps"]),
        ({"skip_empty": True}, "no points", ["24, 0 and 16 points on 3 ranks: it deadlocks"]),
    ],
)
def test_a_k_means_that_is(wrong, name, facts):
    assert_mistake(kit.check.exercise_3_4, k_means(**wrong), name, *facts)


def test_another_k_means_is_right(capsys):
    assert kit.check.exercise_3_4(k_means()) == 1
    assert capsys.readouterr().out == (
        "Exercise 3.4: right on 1, 2, 3 and 4 ranks, with one all_reduce a step.\n"
    )


@mistake("3.4", "too much travels", "right, but 960 bytes were sent in collectives by rank 0 where")
def test_a_k_means_that_gathers_all_points(points, centroids, steps):
    room = torch.zeros(dist.get_world_size(), 60, 2)
    room[dist.get_rank(), : len(points)] = points
    dist.all_reduce(room)
    everything = room.flatten(0, 1)
    everything = everything[everything.abs().sum(dim=1) > 0]
    for _ in range(steps):
        nearest = torch.cdist(everything, centroids).argmin(dim=1)
        groups = [everything[nearest == number] for number in range(len(centroids))]
        moved = [g.mean(dim=0) if len(g) else c for g, c in zip(groups, centroids, strict=True)]
        centroids = torch.stack(moved)
    return centroids
