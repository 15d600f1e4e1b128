"""Wrong answers to the exercises of lesson 03, and the errors that the learner gets."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from answers import error_text

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
    ("change", "words"),
    [
        (
            lambda gradient, digits, total: summed(gradient).div_(dist.get_world_size()),
            "That is the plain mean: it counts every rank alike. Weigh each gradient",
        ),
        (
            lambda gradient, digits, total: summed(gradient),
            "That is the sum: it counts every rank alike. Weigh each gradient",
        ),
        (
            lambda gradient, digits, total: summed(gradient.mul_(digits)),
            "That is 4 times the mean: divide by the number of digits of all ranks.",
        ),
        (
            lambda gradient, digits, total: summed(
                gradient.mul_(digits / total / dist.get_world_size())
            ),
            "add up to 1: do not divide by the world size as well.",
        ),
        (
            lambda gradient, digits, total: gradient.mul_(digits / total),
            "has its own part of the mean: add them up with all_reduce.",
        ),
        (lambda gradient, digits, total: None, "Each rank still has its own gradient."),
        (
            lambda gradient, digits, total: summed(gradient).mul_(digits / total),
            "is the sum of digits / total * gradient over the ranks.",
        ),
        (by_rank_0, "on 2 ranks: right, but reduce was called\nOne all_reduce for each"),
        (
            lambda gradient, digits, total: gradient.copy_(
                summed(gradient.double() * digits / total)
            ),
            "right, but 108 bytes were sent in all_reduces by rank 0 where 60 would be enough",
        ),
        (
            lambda gradient, digits, total: ring_allreduce.chunked_ring(
                gradient.mul_(digits / total)
            ),
            "on 2 ranks: right, but it sends messages\nOne all_reduce for each",
        ),
    ],
)
def test_a_weighted_mean_that_is(change, words):
    text = error_text(kit.check.exercise_3_1, each_gradient(change))
    assert text.startswith(
        "exercise 3.1, average_weighted(model, digits) with 1 and 3 digits on 2 ranks: "
    )
    assert words in text


def test_a_mean_that_ends_at_a_frozen_layer():
    def average_weighted(model, digits):
        total = digits_of_all(digits)
        for parameter in model.parameters():
            if parameter.grad is None:
                return
            parameter.grad *= digits / total
            dist.all_reduce(parameter.grad)

    text = error_text(kit.check.exercise_3_1, average_weighted)
    assert "in 2.weight.grad but holds " in text
    assert text.endswith(
        "\nThe gradients before the frozen layer are right. Skip a parameter without a grad, and "
        "continue with the next."
    )


def test_a_frozen_layer_that_gets_a_gradient():
    def average_weighted(model, digits):
        total = digits_of_all(digits)
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.requires_grad_()
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad *= digits / total
            dist.all_reduce(parameter.grad)

    text = error_text(kit.check.exercise_3_1, average_weighted)
    assert "should hold None in 1.weight.grad but holds [0, 0" in text
    assert text.endswith("Leave a parameter alone if its grad is None.")


def test_a_mean_of_the_parameters_too():
    def average_weighted(model, digits):
        total = digits_of_all(digits)
        for gradient in gradients(model):
            gradient *= digits / total
            dist.all_reduce(gradient)
        next(model.parameters()).data /= 2

    text = error_text(kit.check.exercise_3_1, average_weighted)
    assert "the gradients are right, but rank 0 changed 0.weight\n" in text


def test_digits_that_are_counted_again_for_each_gradient():
    def average_weighted(model, digits):
        for gradient in gradients(model):
            count = torch.tensor(digits, dtype=torch.uint8)
            dist.all_reduce(count)
            gradient *= digits / count
            dist.all_reduce(gradient)

    text = error_text(kit.check.exercise_3_1, average_weighted)
    assert "right, but all_reduce was called 8 times where 5 would be enough" in text


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


def test_a_bucket_that_is_not_copied_back():
    def average_in_buckets(model, most):
        for bucket in buckets_of(model, most):
            flat = torch.cat([gradient.view(-1) for gradient in bucket])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()

    text = error_text(kit.check.exercise_3_2, average_in_buckets)
    assert "average_in_buckets(model, most=100) on 2 ranks: wrong result\n" in text
    assert "Each rank still has its own gradient." in text
    assert text.endswith("or copy the result back.")


def test_buckets_of_which_only_the_first_is_averaged():
    def average_in_buckets(model, most):
        bucket = buckets_of(model, most)[0]
        flat = torch.cat([gradient.view(-1) for gradient in bucket])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for gradient, piece in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(piece.view_as(gradient))

    text = error_text(kit.check.exercise_3_2, average_in_buckets)
    assert "average_in_buckets(model, most=10) on 2 ranks: wrong result\n" in text
    assert "Each rank still has its own gradient." in text  # and no mention of frozen layers


def test_one_bucket_for_all():
    text = error_text(kit.check.exercise_3_2, buckets_as_if(1000))
    assert (
        "most=10) on 2 ranks: right, but only 1 all_reduce for 3 buckets\nA bucket holds at" in text
    )


def test_no_call_on_one_rank_is_right(capsys):
    def average_in_buckets(model, most):
        if dist.get_world_size() > 1:
            bucketed(model, most)

    kit.check.exercise_3_2(average_in_buckets)
    assert capsys.readouterr().out.startswith("Exercise 3.2: right on 1, 2, 3, 4 and 5 ranks")


def test_one_call_for_each_gradient():
    text = error_text(kit.check.exercise_3_2, buckets_as_if(1))
    assert "most=100) on 2 ranks: right, but all_reduce was called 6 times where 1 would" in text


def buckets_as_if(other):
    """Return an answer to 3.2 that does not look at `most`."""

    return lambda model, most: bucketed(model, other)


def bucketed(model, most):
    for bucket in buckets_of(model, most):
        flat = torch.cat([gradient.view(-1) for gradient in bucket])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        pieces = flat.split([gradient.numel() for gradient in bucket])
        for gradient, piece in zip(bucket, pieces, strict=True):
            gradient.copy_(piece.view_as(gradient))
