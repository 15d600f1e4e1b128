"""Attention to one sequence on several ranks: values, gradients, work, bytes."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import ddp_kit as kit
from ddp_kit.lessons import context_parallel as cp

pytestmark = pytest.mark.usefixtures("forked_ranks")


def test_an_online_softmax_is_worked_out_by_hand():
    softmax = cp.OnlineSoftmax(torch.zeros(1, 1))
    kept = []
    for score, value in ((0.0, 1.0), (math.log(3), 5.0), (math.log(2), 0.0)):
        softmax.add(torch.tensor([[score]]), torch.tensor([[value]]))
        kept.append([t.item() for t in (softmax.maximum.exp(), softmax.total, softmax.weighted)])
    assert kept == [
        pytest.approx([1, 1, 1]),
        pytest.approx([3, 1 / 3 + 1, 1 / 3 + 5]),  # both old sums shrink to a third
        pytest.approx([3, 4 / 3 + 2 / 3, 16 / 3]),  # nothing shrinks: 2 is less than 3
    ]
    assert softmax.output().item() == pytest.approx((1 * 1 + 3 * 5 + 2 * 0) / 6)
    assert softmax.logsumexp().item() == pytest.approx(math.log(6))


def test_a_sequence_is_cut_in_order_and_in_zigzags():
    assert cp.in_order(10, 4) == [[range(0, 2)], [range(2, 5)], [range(5, 7)], [range(7, 10)]]
    assert cp.zig_zag(9, 2) == [[range(0, 2), range(6, 9)], [range(2, 4), range(4, 6)]]
    assert cp.places(cp.zig_zag(9, 2)[0]).tolist() == [0, 1, 6, 7, 8]
    for layout, most in (cp.in_order, 3), (cp.zig_zag, 6):
        with pytest.raises(ValueError, match=f"of {most - 1} tokens cannot be cut into {most}"):
            layout(most - 1, 3)


def test_a_pair_of_chunks_is_whole_masked_or_left_out():
    mine, earlier, later = ([range(a, a + 2)] for a in (2, 0, 4))
    both = slice(0, 2), slice(0, 2)
    assert list(cp.needed(mine, earlier, causal=True)) == [(*both, False)]
    assert list(cp.needed(mine, mine, causal=True)) == [(*both, True)]
    assert list(cp.needed(mine, later, causal=True)) == []
    assert list(cp.needed(mine, later, causal=False)) == [(*both, False)]
    assert list(cp.needed(mine, mine, causal=False)) == [(*both, False)]


def test_gathered_keys_give_the_attention_of_one_process():
    def worker(rank, world_size, layout, causal):
        shards = layout(24, world_size)
        own = cp.places(shards[rank])
        query, key, value, _ = (x[:, :, own] for x in cp.example(24, 2, 1))
        return cp.attend_gathered(query, key, value, shards, causal)

    for layout in (cp.in_order, cp.zig_zag):
        for causal in (True, False):
            found = kit.run(worker, layout, causal, world_size=3)
            query, key, value, _ = cp.example(24, 2, 1)
            how = {"is_causal": causal, "enable_gqa": True}
            whole = F.scaled_dot_product_attention(query, key, value, **how)
            kit.compare(cp.put_together(found, layout(24, 3)), whole).check()


def test_pairs_are_worked_out_by_hand():
    in_order, zigzag = (
        list(kit.run(cp.pairs_of, layout, cp.attend_forward, 8, world_size=2))
        for layout in (cp.in_order, cp.zig_zag)
    )
    first, second = range(0, 4), range(4, 8)
    assert in_order == [
        [(0, first, first, 16)],
        [(0, second, second, 16), (1, second, first, 16)],
    ]
    a, b, c, d = cp.cut(8, 4)
    assert zigzag == [
        [(0, a, a, 4), (0, d, a, 4), (0, d, d, 4), (1, d, b, 4), (1, d, c, 4)],
        [(0, b, b, 4), (0, c, b, 4), (0, c, c, 4), (1, b, a, 4), (1, c, a, 4)],
    ]


def test_bytes_are_worked_out_by_hand():
    whole = 2 * 3 * 8 * 5 * 4  # keys and values
    assert cp.ring_bytes(4, 3, 8, 15, 5) == (3 / 4 * whole, 7 / 4 * whole)
    assert cp.ring_bytes(1, 3, 8, 15, 5) == (0, 0)
    # Keys, values, and queries and outputs three times as wide; a rank keeps one of 16 parts.
    assert cp.ulysses_bytes(4, 3, 8, 15, 5) == (4 * whole * 3 / 16, 4 * whole * 3 / 16)


def test_a_block_is_on_its_way_while_a_rank_computes():
    def worker(rank, world_size):
        shards = cp.in_order(3 * world_size, world_size)
        for _ in cp.travel(torch.zeros(2, 1, 1, 3, 1), shards):
            dist.barrier()  # in the place of computing

    own = [event for event in kit.run(worker, world_size=3).trace if event.rank == 1]
    step = ["batch_isend_irecv", "batch_isend_irecv", "barrier"]
    assert [event.op for event in own] == [*step, *step, "barrier"]
    for first in (0, 3):
        *exchange, computing = own[first : first + 3]
        assert all(event.start < computing.start < event.waited for event in exchange)


def test_ulysses_needs_heads_for_all_ranks():
    message = "ValueError: 3 ranks cannot share 4 heads evenly"
    with pytest.raises(kit.RankError, match=message):
        kit.run(cp.train, "Ulysses", 64, 1, world_size=3)


def test_ulysses_refuses_a_causal_mask_over_tokens_that_are_not_in_order():
    def worker(rank, world_size, causal):
        shards = cp.zig_zag(8, world_size)
        query, key, value = (x[:, :, cp.places(shards[rank])] for x in cp.example(8, 2)[:3])
        return cp.ulysses(query, key, value, shards, causal)

    with pytest.raises(kit.RankError, match="by Ulysses needs the tokens in order: use in_order"):
        kit.run(worker, True, world_size=2)
    found = cp.put_together(kit.run(worker, False, world_size=2), cp.zig_zag(8, 2))
    query, key, value, _ = cp.example(8, 2)
    kit.compare(found, F.scaled_dot_product_attention(query, key, value)).check()
