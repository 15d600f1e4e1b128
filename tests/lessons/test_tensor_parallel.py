"""Tensor parallelism by hand and PyTorch's own: values, calls, bytes, memory, and mistakes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import parallelize_module

import ddp_kit as kit
from ddp_kit.lessons import tensor_parallel as tp
from ddp_kit.lessons._gpt import make_gpt
from ddp_kit.lessons.zero import count_bytes

pytestmark = pytest.mark.usefixtures("forked_ranks")


def test_each_function_is_the_transpose_of_its_conjugate():
    """Worked out by hand: rank 0 has 1, 2, 3, 4 along dimension 1, and rank 1 ten times that."""

    def worker(rank, world_size):
        results = {}
        for function in (*tp.TENSOR, *tp.SEQUENCE):
            x = (10.0**rank * torch.arange(1.0, 5)).view(1, 4, 1).requires_grad_()
            y = function.apply(x, None)
            weights = (100.0**rank * torch.arange(1.0, y.shape[1] + 1)).view_as(y)
            y.backward(weights)
            results[function] = y.flatten().tolist(), x.grad.flatten().tolist()
        return list(results.values())

    own = [1.0, 2, 3, 4], [10.0, 20, 30, 40]
    total, gathered = [11.0, 22, 33, 44], [1.0, 2, 3, 4, 10, 20, 30, 40]
    gradients = [1.0, 2, 3, 4], [100.0, 200, 300, 400]
    added = [101.0, 202, 303, 404, 505, 606, 707, 808]
    for rank, found in enumerate(kit.run(worker, world_size=2)):
        half = slice(2 * rank, 2 * rank + 2)
        assert found == [
            (own[rank], [101.0, 202, 303, 404]),
            (total, gradients[rank]),
            (gathered, added[4 * rank : 4 * rank + 4]),
            (total[half], [1.0, 2, 100, 200]),
        ]


def test_what_the_ranks_cannot_share_evenly_is_refused_in_one_sentence():
    def worker(rank, world_size, cut):
        cut(make_gpt().blocks[0])

    heads = "3 ranks cannot share 4 attention heads evenly: use a number of ranks that divides 4"
    with pytest.raises(kit.RankError, match=f"ranks 0, 1 and 2 raised ValueError: {heads}"):
        kit.run(worker, tp.cut_block, world_size=3)


def collectives(trace):
    """Return what rank 0 called, in order, but not the distribution of parameters."""
    setup = ("new_group", "distribute_tensor scatter", "distribute_tensor broadcast")
    return [event.op for event in trace if event.rank == 0 and event.op not in setup]


def sent(trace, rank=0):
    """Return the bytes that a rank sent, but not those that distribute parameters."""
    counted = count_bytes(trace, rank)
    return sum(nbytes for call, nbytes in counted.items() if "distribute_tensor" not in call)


def block_with_a_plan(rank, world_size, sequence):
    def cut(block):
        mesh = init_device_mesh("cpu", (world_size,))
        parallelize_module(block, mesh, tp.block_plan(sequence))

    return tp.run_block(rank, world_size, cut, sequence)


def test_a_block_calls_two_collectives_per_direction_and_sends_what_the_formula_says():
    pair = ["all_gather", "reduce_scatter"] * 2
    theirs = [f"{name}_tensor" for name in ("all_gather_into", "reduce_scatter")] * 2
    cases = [
        ((tp.run_block, tp.cut_block), ["all_reduce"] * 4),
        ((tp.run_block, partial(tp.cut_block, regions=tp.SEQUENCE), True), pair * 2),
        ((block_with_a_plan, False), ["redistribute all_reduce"] * 2 + ["all_reduce"] * 2),
        (
            (block_with_a_plan, True),
            [f"redistribute {name}" for name in theirs] + theirs,
        ),
    ]
    expected = tp.run_block(0, 1, lambda block: None)
    for worker, called in cases:
        result = kit.run(*worker, world_size=4)
        assert collectives(result.trace) == called
        assert sent(result.trace) == 4 * 2 * 3 / 4 * 4 * 4 * 64 * 64
        wholes = list(result)
        if "all_reduce" not in called[0]:
            wholes = [{k: torch.cat([part[k] for part in result], 1) for k in expected}]
        kit.compare(wholes, expected if len(wholes) > 1 else [expected]).check()


def test_the_plan_needs_inputs_that_divide_only_with_sequence_parallelism():
    def worker(rank, world_size):
        mesh = init_device_mesh("cpu", (world_size,))
        model = tp.parallelize(make_gpt(), mesh)
        return model(tokens).redistribute(placements=[Replicate()]).to_local().detach()

    tokens = torch.arange(5).view(1, 5)
    kit.compare(list(kit.run(worker, world_size=2)), make_gpt()(tokens).detach()).check()
