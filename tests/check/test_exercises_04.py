"""Wrong answers to the exercises of lesson 04, and the errors that the learner gets."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from answers import mistake

from ddp_kit.lessons import ring_allreduce
from ddp_kit.lessons.ring_allreduce import exchange, neighbours

pytestmark = pytest.mark.usefixtures("forked_ranks")


def ring_of(chunks, replace=True):
    """Go round with chunks of one length. replace: replace, not add, in the second half."""
    (rank, n), (left, right) = (dist.get_rank(), dist.get_world_size()), neighbours()
    for step in range(2 * (n - 1)):
        going, coming = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        arriving = torch.empty_like(coming)
        exchange(going, right, arriving, left)
        coming.copy_(arriving if replace and step >= n - 1 else coming + arriving)


@mistake(
    "4.1",
    "wrong chunk",
    "exercise 4.1, chunked_ring(tensor of shape (7,)) on 2 ranks: wrong result\n",
    "rank 0 should hold [30, 32, 34, 36, 38, 40, 42] but holds [30, 32, 34, 36, 38, 40, 16]",
)
def test_a_ring_that_leaves_out_what_does_not_divide(tensor):
    flat, n = tensor.view(-1), dist.get_world_size()
    each = len(flat) // n
    ring_of([flat[i * each : (i + 1) * each] for i in range(n)])


@mistake("4.1", "wrong chunk", "(60,)) on 2 ranks: wrong", "where number 0 is 40 instead of 30\n")
def test_a_ring_that_goes_on_adding(tensor):
    ring_of(tensor.view(-1).tensor_split(dist.get_world_size()), replace=False)


@mistake("4.1", "unchanged")
def test_a_ring_of_a_copy(tensor):
    tensor = tensor.clone()
    ring_allreduce.chunked_ring(tensor)


@mistake("4.1", "too many bytes", "on 3 ranks", "480 bytes were sent by rank 0 where 320 would be")
def test_a_ring_that_moves_twice_the_bytes(tensor):
    ring_allreduce.whole_ring(tensor)


@mistake("4.1", "collective", "on 2 ranks: all_reduce was called\n")
def test_a_ring_that_calls_all_reduce(tensor):
    dist.all_reduce(tensor)


@mistake("4.1", "tuple", "'tuple' object does not support item assignment")
def test_a_ring_that_assigns_to_a_chunk(tensor):
    tensor.view(-1).tensor_split(dist.get_world_size())[0] += 1


@mistake("4.1", "lengths", "shape (7,)) on 2 ranks: the ranks' calls do not match\n")
def test_a_ring_whose_arriving_chunk_is_not_cut(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = tensor.view(-1).tensor_split(n)
    arriving = torch.empty_like(chunks[0])
    for step in range(2 * (n - 1)):
        coming = chunks[(rank - step - 1) % n]
        exchange(chunks[(rank - step) % n], (rank + 1) % n, arriving, (rank - 1) % n)
        coming.copy_(arriving + coming if step < n - 1 else arriving)


@mistake(
    "4.2",
    "waits for all",
    "pipelined_ring(tensor of shape (60,), pieces=3) on 2 ranks: right, but rank 0",
    "rank 0 waited for 3 pieces before it passed on the first\n",
)
def test_a_pipeline_that_waits_for_all_pieces_of_a_step(tensor, pieces):
    (rank, n), (left, right) = (dist.get_rank(), dist.get_world_size()), neighbours()
    chunks = [chunk.tensor_split(pieces) for chunk in tensor.view(-1).tensor_split(n)]
    for step in range(2 * (n - 1)):
        coming = chunks[(rank - step - 1) % n]
        sends = [dist.isend(piece, right) for piece in chunks[(rank - step) % n]]
        for piece in coming:
            into = torch.empty_like(piece)
            dist.recv(into, left)
            piece.copy_(into if step >= n - 1 else piece + into)
        for sending in sends:
            sending.wait()


@mistake("4.2", "unmatched", "on 2 ranks: it deadlocks\n")
def test_a_pipeline_that_goes_on_in_the_last_step(tensor, pieces):
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = [chunk.tensor_split(pieces) for chunk in tensor.view(-1).tensor_split(n)]
    sends = [dist.isend(piece, (rank + 1) % n) for piece in chunks[rank]] if n > 1 else []
    for step in range(2 * (n - 1)):
        for piece in chunks[(rank - step - 1) % n]:
            into = torch.empty_like(piece) if step < n - 1 else piece
            dist.recv(into, (rank - 1) % n)
            if step < n - 1:
                piece += into
            sends.append(dist.isend(piece, (rank + 1) % n))
    for sending in sends:
        sending.wait()


@mistake("4.2", "sent whole", "on 2 ranks: right, but rank 0 sent 2 messages instead of 6\n")
def test_a_pipeline_without_pieces(tensor, pieces):
    ring_allreduce.chunked_ring(tensor)


@mistake("4.2", "wrong chunk", "where number 0 is 40 instead of 30")
def test_a_pipeline_that_goes_on_adding(tensor, pieces):
    ring_of(tensor.view(-1).tensor_split(dist.get_world_size()), replace=False)
