"""The model: its formulas against hand-computed values.

The proof of lesson 12 compares them with the messages of real ranks.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_kit as kit
from ddp_kit import model
from ddp_kit.errors import ModelError
from ddp_kit.model import Link

pytestmark = pytest.mark.usefixtures("forked_ranks")
ALL_REDUCES = [model.naive_ring, model.chunked_ring, model.tree, model.halving_doubling]
NAMES = [cost.__name__ for cost in ALL_REDUCES]
LINK = Link(0.3, 0.01)
MIB = 2**20
RANKS = [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 31]
every_cost = pytest.mark.parametrize("cost", ALL_REDUCES, ids=NAMES)

# ---- messages one by one: a round is a list of (src, dst, pieces of the tensor, added or copied)


@pytest.mark.parametrize("n", RANKS)
@every_cost
def test_rounds_with_a_core_for_each_rank_cost_what_the_formula_says(cost, n):
    alone = model.on_cores(cost, n, 840, 0.3, 0.01, cores=n)
    assert alone == pytest.approx(cost(n, 840, 0.3, 0.01))


def test_ranks_that_share_cores_take_turns():
    on_two = partial(model.on_cores, alpha=1, beta=0, cores=2)
    assert on_two(model.chunked_ring, 2, 0) == 2
    assert on_two(model.chunked_ring, 8, 0) == 14 * 8 / 2
    assert on_two(model.naive_ring, 5, 0) == 4 * 5 / 2
    assert on_two(model.tree, 8, 0) == 2 * (4 / 2 + 2 / 2 + 1)  # one message never takes turns
    assert on_two(model.halving_doubling, 6, 0) == 2 * (2 / 2) + 4 * 4 / 2


# ---- all_reduce by hand, and at its limits


@pytest.mark.parametrize(
    ("cost", "n", "seconds"),
    [
        (model.naive_ring, 5, 40 + 4 * 800),
        (model.chunked_ring, 2, 20 + 800),
        (model.chunked_ring, 5, 80 + 8 / 5 * 800),
        (model.tree, 8, 60 + 6 * 800),
        (model.halving_doubling, 2, 20 + 800),
        (model.halving_doubling, 8, 60 + 7 / 4 * 800),
        (model.halving_doubling, 5, 60 + 3 / 2 * 800 + 2 * 800),
    ],
)
def test_formulas_are_worked_out_by_hand(cost, n, seconds):
    assert cost(n, 400, alpha=10, beta=2) == pytest.approx(seconds)


def test_two_levels_are_worked_out_by_hand():
    fast, slow = Link(1, 0.1), Link(10, 1)
    inside, between = 2 * 1 + 400 * 0.1, 2 * 10 + 400 * 1  # each host's ranks share its link
    assert model.two_level(4, 400, 2, fast, slow) == pytest.approx(inside + between)
    inside, between = 2 * 1 + 400 * 0.1, 4 * 10 + 2 * 2 / 3 * 400
    assert model.two_level(6, 400, 2, fast, slow) == pytest.approx(inside + between)


@pytest.mark.parametrize(
    ("n", "per_host", "near_first", "seconds"),
    [
        (4, 2, False, 2 * (10 + 2 * 200 * 1) + 2 * (1 + 100 * 0.1)),  # both ranks send a half away
        (4, 2, True, 2 * (1 + 200 * 0.1) + 2 * (10 + 2 * 100 * 1)),  # and here a quarter
        (8, 4, False, 2 * (10 + 4 * 200) + 2 * (1 + 10) + 2 * (1 + 5)),
        (4, 1, False, 2 * (10 + 200) + 2 * (10 + 100)),  # nobody shares a link
        (4, 4, False, 2 * (1 + 20) + 2 * (1 + 10)),  # one host
    ],
)
def test_halving_and_doubling_pays_for_links_that_it_shares(n, per_host, near_first, seconds):
    found = model.halving_doubling_on_hosts(n, 400, per_host, Link(1, 0.1), Link(10, 1), near_first)
    assert found == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: model.tree(2.0, 1, 1, 1), "n must be a whole number of at least 1, got 2.0"),
        (lambda: Link(1, float("inf")), "beta must be a number of at least 0, got inf"),
        (
            lambda: model.two_level(6, 1, 4, LINK, LINK),
            "n must be a multiple of per_host=4, got 6",
        ),
        (
            lambda: model.halving_doubling_on_hosts(6, 1, 2, LINK, LINK),
            "n and per_host must be powers of two, got 6 and 2",
        ),
        (
            lambda: model.rounds("ring", 2, 1),
            "all_reduce must be one of naive_ring, chunked_ring, tree, halving_doubling, "
            "got 'ring'",
        ),
        (lambda: model.buckets(8, 0), "bucket_cap_mb must be more than 0"),
        (
            lambda: model.ddp_step(2, [1, 2], 1, 1, lambda n, size: 0, [1.0]),
            "ready must hold 2 shares from 0 to 1, got [1.0]",
        ),
        (lambda: model.fit([(4, 1), (4, 2)]), "a line needs at least two sizes, got [4]"),
        (
            lambda: model.fit_link([(2, 4, 1)], model.tree),
            "a link needs at least two sizes or numbers of ranks, got [(2, 4)]",
        ),
        (lambda: model.fit([(4, 1), (8, 0)]), "a measured time must be more than 0, got 0"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(call, message):
    with pytest.raises(ModelError) as caught:
        call()
    assert str(caught.value) == message


# ---- a step of DDP


def per_byte(n, nbytes):
    return nbytes


@pytest.mark.parametrize(
    ("nbytes", "bucket_cap_mb", "sizes"),
    [
        (60 * MIB, None, [MIB, 25 * MIB, 25 * MIB, 9 * MIB]),
        (3 * MIB, 0.5, [MIB / 2] * 6),
        (100, None, [100]),
        (0, None, []),
        ([2 * MIB, MIB, MIB], None, [2 * MIB, 2 * MIB]),  # parameters are not cut
        ([MIB / 2, MIB, MIB], 1, [1.5 * MIB, MIB]),  # closed once the limit is reached
    ],
)
def test_buckets_are_worked_out_by_hand(nbytes, bucket_cap_mb, sizes):
    assert model.buckets(nbytes, bucket_cap_mb) == sizes


@pytest.mark.parametrize("bucket_cap_mb", [None, 0.5])
def test_buckets_are_those_of_ddp(bucket_cap_mb):
    def of_ddp(rank, world_size):
        layers = [nn.Linear(300, 300) for _ in range(9)]
        module = nn.Sequential(*layers, nn.Linear(300, 3_000))
        ready = []
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: ready.append(p.grad.nbytes))
        ddp = DistributedDataParallel(module, bucket_cap_mb=bucket_cap_mb)
        ddp(torch.ones(1, 300)).sum().backward()  # after it the buckets are formed
        ready.clear()
        sent = []

        def note_size(_, bucket):
            sent.append(bucket.buffer().nbytes)
            done = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        ddp.register_comm_hook(None, note_size)
        ddp(torch.ones(1, 300)).sum().backward()
        ddp(torch.ones(1, 300))  # a forward logs what the one before has formed
        logged = ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"]
        return ready, sent, [int(size) for size in logged.split(", ")]

    for ready, sent, logged in kit.run(of_ddp, world_size=2, backend="gloo"):
        assert len(ready) == 20
        assert model.buckets(ready, bucket_cap_mb) == logged == sent


@pytest.mark.parametrize(
    ("buckets", "backward", "ready", "seconds"),
    [
        ([], 8, None, 2 + 8),
        ([3], 8, None, 2 + 8 + 3),  # one bucket is full at the end: nothing overlaps
        ([1, 1, 1, 1], 8, None, 2 + 8 + 1),  # only the last one shows
        ([4, 4], 4, None, 2 + 2 + 8),  # the queue never empties once the first bucket is full
        ([6, 1, 1], 8, None, 2 + 6 + 6 + 1 + 1),  # they wait in the queue behind the first
        ([1, 1], 8, [0, 0.5], 2 + 8),
        ([5, 5], 8, [0, 0], 2 + 10),
        ([1, 2, 3], 8, [1, 1, 1], 2 + 8 + 6),  # no overlap
    ],
)
def test_a_step_is_worked_out_by_hand(buckets, backward, ready, seconds):
    assert model.ddp_step(4, buckets, 2, backward, per_byte, ready) == pytest.approx(seconds)


# ---- alpha and beta out of times


def test_the_fit_finds_a_line_in_points_that_lie_on_it():
    alpha, beta = model.fit([(n, 5e-5 + 2e-9 * n) for n in (4, 1_000, 256_000, 64_000_000)])
    assert alpha == pytest.approx(5e-5, rel=1e-6)
    assert beta == pytest.approx(2e-9, rel=1e-6)


def test_no_latency_and_no_time_a_byte_is_negative():
    alpha, beta = model.fit([(4, 1e-3), (4_000, 0.5e-3)])
    assert alpha > 0
    assert beta == 0
    alpha, beta = model.fit([(1_000, 1e-6), (2_000, 3e-6)])
    assert alpha == 0
    assert beta > 0


@every_cost
def test_a_link_is_found_in_times_of_its_own(cost):
    points = [(n, size, cost(n, size, 5e-5, 2e-9)) for n in (2, 4) for size in (1e3, 1e6)]
    link = model.fit_link(points, cost)
    assert link.alpha == pytest.approx(5e-5)
    assert link.beta == pytest.approx(2e-9)
    assert model.fit_link([*points, (1, 1e3, 5e-6)], cost) == link  # one rank sends nothing
