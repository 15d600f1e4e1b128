"""What goes wrong with DDP: sums, replicas that drift, unused parameters, and buffers."""

from __future__ import annotations

import pytest
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import ddp_kit as kit
from ddp_kit.lessons import ddp, ddp_mistakes


def test_a_sum_is_a_mean_with_a_learning_rate_as_many_times_as_large():
    mean, summed = (
        kit.run(ddp_mistakes.pull, lr, hook)[2]
        for lr, hook in ((0.4, None), (0.1, ddp_mistakes.sum_gradients))
    )
    assert mean == pytest.approx(summed)
    assert mean[-1] == pytest.approx(15)
    assert abs(kit.run(ddp_mistakes.pull, 0.4, ddp_mistakes.sum_gradients)[0][-1]) > 100_000


def test_replicas_drift_once_ddp_is_taken_off():
    result = kit.run(ddp_mistakes.pull, 0.4, None, True, world_size=3)
    assert [held[-1] for held in result] == pytest.approx([0, 10, 20])
    assert ddp.count_calls(result.trace) == {
        "DistributedDataParallel": 1,
        "DDP broadcast(src=0)": 1,
    }


def test_a_wrapper_that_nobody_keeps_is_gone_before_backward():
    assert list(kit.run(ddp_mistakes.gradient, True, world_size=2)) == [1, 1]
    assert list(kit.run(ddp_mistakes.gradient, False, world_size=2)) == [0, 2]


def test_a_parameter_without_gradient_leaves_all_of_the_first_step_unreduced():
    result = kit.run(ddp_mistakes.use_heads, False, [0, 0], world_size=2)
    assert list(result) == [
        {"trunk": 1.0, "head 0": 1.0, "head 1": None},
        {"trunk": 10.0, "head 0": 10.0, "head 1": None},
    ]
    with pytest.raises(kit.RankError, match="did not receive grad for this rank: 2") as caught:
        kit.run(ddp_mistakes.use_heads, False, [0, 0], 2, world_size=2)
    text = str(caught.value)
    assert text.startswith("ranks 0 and 1 raised RuntimeError: Expected to have finished")
    assert "did not receive grad for this rank: heads.1.weight\n" in text
    assert text.endswith("or pass find_unused_parameters=True to DDP.")


def test_unused_parameters_count_as_zero_in_the_mean():
    result = kit.run(ddp_mistakes.use_heads, True, [0, 1], 2, world_size=2)
    assert list(result) == [{"trunk": 5.5, "head 0": 0.5, "head 1": 5.0}] * 2


@pytest.mark.parametrize(
    ("sync", "start", "after"), [(True, [4, 4, 4], [6, 10, 14]), (False, [4, 8, 12], [6, 12, 18])]
)
def test_buffers_come_from_rank_0_before_each_forward(sync, start, after):
    result = kit.run(ddp_mistakes.running_means, sync, world_size=3)
    stages = [[int(seen[stage]) for seen in result] for stage in result[0]]
    assert stages == [[4, 8, 12], start, after]


def test_main_fails_where_a_hook_divides(monkeypatch):
    monkeypatch.setattr(ddp_mistakes, "sum_gradients", allreduce_hook)
    with pytest.raises(kit.ProofError, match="a sum is a mean with a learning rate"):
        ddp_mistakes.main(["--world-size", "2"])
