"""DDP: buckets, sums and means, buffers, and the sampler."""

from __future__ import annotations

import pytest
import torch

import ddp_kit as kit
from ddp_kit.lessons import ddp, partitioned_sgd


def test_the_first_backward_has_one_bucket_and_later_ones_send_while_they_compute():
    first, second = kit.run(ddp.watch, 1, world_size=2)[1]
    assert first[-1].startswith("-> bucket 0: layer0.weight, layer0.bias, layer1.weight")
    assert sum(note.startswith("->") for note in first) == 1
    assert second == [
        note
        for bucket, layer in enumerate(["layer3", "layer2", "layer1", "layer0"])
        for bias, weight in [(f"{layer}.bias", f"{layer}.weight")]
        for note in (bias, weight, f"-> bucket {bucket}: {bias}, {weight}")
    ]


def test_buckets_follow_the_registration_forever_where_unused_parameters_are_looked_for():
    first, second = kit.run(ddp.watch, 1, True, (2, 0, 3, 1), True, world_size=2)[0]
    assert first == second
    assert second.index("-> bucket 0: layer1.bias") > second.index("layer2.weight")


def test_a_sum_is_a_mean_with_a_learning_rate_as_many_times_as_large():
    mean, summed = (
        kit.run(ddp.pull, lr, hook)[2] for lr, hook in ((0.4, None), (0.1, ddp.sum_gradients))
    )
    assert mean == pytest.approx(summed)
    assert mean[-1] == pytest.approx(15)
    assert abs(kit.run(ddp.pull, 0.4, ddp.sum_gradients)[0][-1]) > 100_000


def test_replicas_drift_once_ddp_is_taken_off():
    result = kit.run(ddp.pull, 0.4, None, True, world_size=3)
    assert [held[-1] for held in result] == pytest.approx([0, 10, 20])
    assert ddp.count_calls(result.trace) == {
        "DistributedDataParallel": 1,
        "DDP broadcast(src=0)": 1,
    }


def test_the_typical_backward_is_not_the_first():
    result = kit.run(ddp.backwards, 1, 3, world_size=2)
    step = ddp.typical(result.trace)
    assert step in (1, 2)
    table = kit.plot.buckets(result, step=step).text_table
    assert f"Backward {step + 1} of 3" in table
    assert "bucket 3  1,050,624" in table


def test_a_wrapper_that_nobody_keeps_is_gone_before_backward():
    def gradient(rank, world_size, keep):
        model = torch.nn.Linear(1, 1, bias=False)
        wrapper = torch.nn.parallel.DistributedDataParallel(model)
        loss = wrapper(torch.full((1, 1), 2.0 * rank)).sum()
        if not keep:
            del wrapper
        loss.backward()
        return model.weight.grad.item()

    assert list(kit.run(gradient, True, world_size=2)) == [1, 1]
    assert list(kit.run(gradient, False, world_size=2)) == [0, 2]


def test_a_parameter_without_gradient_leaves_all_of_the_first_step_unreduced():
    result = kit.run(ddp.use_heads, False, [0, 0], world_size=2)
    assert list(result) == [
        {"trunk": 1.0, "head 0": 1.0, "head 1": None},
        {"trunk": 10.0, "head 0": 10.0, "head 1": None},
    ]
    with pytest.raises(kit.RankError, match="did not receive grad for rank 1: 2"):
        kit.run(ddp.use_heads, False, [0, 0], 2, world_size=2)


def test_unused_parameters_count_as_zero_in_the_mean():
    result = kit.run(ddp.use_heads, True, [0, 1], 2, world_size=2)
    assert list(result) == [{"trunk": 5.5, "head 0": 0.5, "head 1": 5.0}] * 2


@pytest.mark.parametrize(
    ("sync", "start", "after"), [(True, [4, 4, 4], [6, 10, 14]), (False, [4, 8, 12], [6, 12, 18])]
)
def test_buffers_come_from_rank_0_before_each_forward(sync, start, after):
    result = kit.run(ddp.running_means, sync, world_size=3)
    stages = [[int(seen[stage]) for seen in result] for stage in result[0]]
    assert stages == [[4, 8, 12], start, after]


def test_positions_are_dealt_as_worked_out_by_hand():
    assert ddp.deal_by_hand(10, 4) == [[0, 4, 8], [1, 5, 9], [2, 6, 0], [3, 7, 1]]
    assert ddp.deal_by_hand(10, 4, drop_last=True) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert ddp.deal_by_hand(2, 4) == [[0], [1], [0], [1]]
    assert ddp.how_often(ddp.deal_by_hand(10, 4)) == [8, 2]


@pytest.mark.parametrize("length", range(1, 10))
def test_the_sampler_deals_as_by_hand(length):
    for drop_last in (False, True):
        hands = [hand for (hand,) in kit.run(ddp.deal, length, False, drop_last, world_size=3)]
        assert hands == ddp.deal_by_hand(length, 3, drop_last)


def test_without_set_epoch_the_same_order_is_dealt_again():
    called, forgotten = (kit.run(ddp.deal, 20, True, False, n) for n in ((0, 1), (0, 0)))
    assert all(first != second for first, second in called)
    assert all(first == second for first, second in forgotten)


def test_main_fails_where_ddp_averages_nothing(monkeypatch):
    monkeypatch.setattr(ddp, "one_step", unaveraged)
    with pytest.raises(
        kit.ProofError, match=r"(?s)DDP leaves the mean.*\nThe mean of .* never reduced"
    ):
        ddp.main(["--world-size", "2"])


def unaveraged(rank, world_size):
    own = torch.tensor([float(rank)])
    return {"own": own, "average_gradients": own, "DDP": own}


def test_each_variant_is_timed_as_often_as_asked():
    for wire in (None, 1e9):
        seconds = partitioned_sgd.slowest(kit.run(ddp.step_seconds, wire, 2, world_size=2))
        assert {name: len(times) for name, times in seconds.items()} == dict.fromkeys(
            ddp.OPTIONS, 2
        )
