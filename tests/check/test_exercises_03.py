"""Wrong answers to the exercises of lesson 03, and the errors that the learner gets."""

from __future__ import annotations

import torch
import torch.distributed as dist
from answers import error_text

import ddp_kit as kit
from ddp_kit.lessons import ring_allreduce


def gradients(model):
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_a_sum_instead_of_a_mean():
    def average_gradients(model):
        for gradient in gradients(model):
            dist.all_reduce(gradient)

    text = error_text(kit.check.exercise_3_1, average_gradients)
    assert text.startswith("exercise 3.1, average_gradients(model) on 2 ranks: wrong result\n")
    assert "rank 1 should hold [90, 91, 92, 93, 94, 95] in 0.weight.grad but holds [180," in text
    assert "\nThat is the sum. Divide it by the world size in place: `a" in text


def test_a_mean_that_knows_of_four_ranks_only():
    def average_gradients(model):
        for gradient in gradients(model):
            dist.all_reduce(gradient)
            gradient /= 4

    text = error_text(kit.check.exercise_3_1, average_gradients)
    assert "on 2 ranks: wrong result\n" in text
    assert text.endswith("\nThat is the sum divided by 4, but the world size is 2.")


def test_a_mean_that_ends_at_a_frozen_layer():
    def average_gradients(model):
        for parameter in model.parameters():
            if parameter.grad is None:
                return
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    text = error_text(kit.check.exercise_3_1, average_gradients)
    assert "in 2.weight.grad but holds " in text
    assert text.endswith("Skip a parameter without a grad, then continue.")


def test_a_mean_that_does_not_know_of_frozen_layers():
    def average_gradients(model):
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    text = error_text(kit.check.exercise_3_1, average_gradients)
    assert "on 2 ranks: it raised an error\nranks 0 and 1 raised TypeError" in text
    assert " of average_gradients: dist.all_reduce(parameter.grad)" in text


def test_a_mean_of_the_parameters_too():
    def average_gradients(model):
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
                parameter.data /= 2

    text = error_text(kit.check.exercise_3_1, average_gradients)
    assert "the gradients are right, but rank 0 changed 0.weight\n" in text


def test_a_mean_by_reduce_and_broadcast():
    def average_gradients(model):
        for gradient in gradients(model):
            dist.reduce(gradient, dst=0)
            dist.broadcast(gradient, src=0)
            gradient /= dist.get_world_size()

    text = error_text(kit.check.exercise_3_1, average_gradients)
    assert "on 2 ranks: right, but reduce was called\nOne all_reduce for each" in text


def test_a_mean_that_moves_twice_the_bytes():
    def average_gradients(model):
        for gradient in gradients(model):
            wide = gradient.double()
            dist.all_reduce(wide)
            gradient.copy_(wide / dist.get_world_size())

    text = error_text(kit.check.exercise_3_1, average_gradients)
    assert (
        "right, but 104 bytes were sent in all_reduces by rank 0 where 52 would be enough" in text
    )


def test_a_mean_that_nobody_waits_for(capsys):
    def average_gradients(model):
        for gradient in gradients(model):
            dist.all_reduce(gradient, async_op=True)
            gradient /= dist.get_world_size()

    text = error_text(kit.check.exercise_3_1, average_gradients)
    assert (
        "on 2 ranks: some operations were started but never waited for\nranks 0 and 1 never" in text
    )
    assert "never waited for all_reduce, which may still be in flight; keep what it returns" in text
    assert capsys.readouterr().out == ""  # reported once


def test_a_mean_by_messages():
    def average_gradients(model):
        for gradient in gradients(model):
            ring_allreduce.chunked_ring(gradient)
            gradient /= dist.get_world_size()

    text = error_text(kit.check.exercise_3_1, average_gradients)
    assert "on 2 ranks: right, but it sends messages\nOne all_reduce for each" in text


def test_one_flat_mean_is_right_and_the_notebook_keeps_its_numbers_and_dtype(capsys):
    def average_gradients(model):
        flat = torch.cat([gradient.view(-1) for gradient in gradients(model)])
        dist.all_reduce(flat)
        pieces = flat.split([gradient.numel() for gradient in gradients(model)])
        for gradient, piece in zip(gradients(model), pieces, strict=True):
            gradient.copy_(piece.view_as(gradient) / dist.get_world_size())

    before = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        kit.check.exercise_3_1(average_gradients)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), before)
    assert capsys.readouterr().out == (
        "Exercise 3.1: right on 1, 2, 3, 4 and 5 ranks, "
        "no more than one all_reduce for each gradient.\n"
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
