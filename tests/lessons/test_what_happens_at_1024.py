"""What happens at 1024: exact sums, the replay of a trace, and what is measured."""

from __future__ import annotations

import pytest
import torch

import ddp_kit as kit
from ddp_kit import model
from ddp_kit.lessons import ring_allreduce
from ddp_kit.lessons import what_happens_at_1024 as lesson


def test_a_replay_lasts_as_long_as_the_longest_chain_of_messages():
    def chain(rank, world_size):
        tensor = torch.zeros(25)
        if rank:
            torch.distributed.recv(tensor, rank - 1)
        if rank + 1 < world_size:
            torch.distributed.send(tensor, rank + 1)

    trace = kit.run(chain, world_size=3).trace
    assert lesson.replay(trace, 10, 0.01) == pytest.approx(2 * (10 + 1))


def test_messages_that_cross_are_replayed_at_the_same_time():
    trace = kit.run(ring_allreduce.count, ring_allreduce.whole_ring, 25, world_size=2).trace
    assert lesson.replay(trace, 10, 0.01) == pytest.approx(10 + 1)


def test_vgg_16_has_the_parameters_of_its_paper_and_most_of_them_in_the_last_three_layers():
    layers = lesson.vgg_16()
    assert sum(parameters for parameters, _ in layers) == 138_357_544
    assert sum(parameters for parameters, _ in layers[-3:]) == 123_642_856
    assert sum(work for _, work in layers[-3:]) < 0.01 * sum(work for _, work in layers)


def test_buckets_are_full_in_the_order_of_gradients():
    layers = [(2, 60), (3, 30), (4, 10)]  # the last layer's gradient is the first
    assert lesson.in_order(layers, 16 / model.MIB) == ([16, 20], [0.1, 1.0])
    assert lesson.in_order(layers, 1) == ([36], [1.0])
    buckets, ready = lesson.in_order(lesson.vgg_16(), 64)
    assert [round(nbytes / 1e6) for nbytes in buckets] == [84, 411, 59]
    assert ready == pytest.approx([0.0013, 0.0080, 1.0], abs=1e-4)


@pytest.mark.parametrize(
    ("ranks", "per_host", "steady", "in_order", "published"),
    [(128, 4, 68, 73, 79), (512, 4, 64, 71, 68), (4, 8, 99, 98, 95), (8, 8, 98, 98, 88)],
)
def test_the_order_of_gradients_brings_vgg_16_nearer_to_what_was_published(
    ranks, per_host, steady, in_order, published
):
    setup = "VGG-16", per_host, 25, 64, 1, ranks
    ordered = lesson.in_order(lesson.vgg_16(), 64)
    found = [100 * lesson.expect(*setup), 100 * lesson.expect(*setup, ordered)]
    assert [round(share) for share in found] == [steady, in_order]
    assert abs(in_order - published) <= abs(steady - published)


@pytest.mark.parametrize(
    ("network", "per_host", "gbits", "cap", "alone", "ranks", "percent"),
    [
        ("ResNet-50", 8, 50, None, 8, 256, 96),
        ("ResNet-50", 8, 50, None, 8, 352, 95),
        ("Inception V3", 4, 25, 64, 1, 128, 95),
        ("Inception V3", 4, 25, 64, 1, 512, 94),
    ],
)
def test_predictions_beside_published_figures_are_those_of_the_lesson(
    network, per_host, gbits, cap, alone, ranks, percent
):
    assert round(100 * lesson.expect(network, per_host, gbits, cap, alone, ranks)) == percent
