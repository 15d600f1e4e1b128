"""Tensor parallelism by hand and PyTorch's own: values, calls, bytes, memory, and mistakes."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

import ddp_kit as kit
from ddp_kit.lessons import tensor_parallel as tp
from ddp_kit.lessons._gpt import Config, batches, loss_of, make_gpt, part_of
from ddp_kit.lessons.zero import ADAM, SGD, count_bytes

pytestmark = pytest.mark.usefixtures("forked_ranks")

in_sequence = partial(tp.cut_gpt, regions=tp.SEQUENCE)
places = partial(tp.own_places, 64)


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


@pytest.mark.parametrize("regions", [tp.TENSOR, tp.SEQUENCE], ids=["tensor", "sequence"])
def test_two_layers_with_biases_equal_one_process(regions):
    def worker(rank, world_size):
        first, second, x = copy.deepcopy((one, two, given))
        model = nn.Sequential(
            tp.ColumnParallelLinear(first, regions[0]),
            nn.GELU(),
            tp.RowParallelLinear(second, regions[1]),
        )
        x = (x.chunk(world_size, 1)[rank] if regions == tp.SEQUENCE else x).requires_grad_()
        y = model(x)
        y.square().sum().backward()
        parts = {name: p.grad for name, p in model.named_parameters()}
        if regions == tp.SEQUENCE:
            tp.add_up_gradients([model[2].bias])
        for name, parameter in model.named_parameters():
            parameter.data = parts[name]
        return y.detach(), x.grad, tp.gather_parameters(model)

    torch.manual_seed(0)
    one, two, given = nn.Linear(3, 8), nn.Linear(8, 5), torch.randn(2, 4, 3)
    model, x = nn.Sequential(one, nn.GELU(), two), given.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    for n in (1, 2, 4):
        found = list(kit.run(worker, world_size=n))
        if regions == tp.SEQUENCE:
            wholes = [torch.cat([rank[i] for rank in found], 1) for i in range(2)]
            found = [(*wholes, rank[2]) for rank in found]
        kit.compare(found, (y.detach(), x.grad, gradients)).check()


def test_the_embedding_and_the_loss_equal_those_of_a_whole_vocabulary():
    def worker(rank, world_size):
        embedding = tp.VocabularyParallelEmbedding(nn.Embedding.from_pretrained(rows))
        embedding.weight.requires_grad_()
        vectors = embedding(tokens)
        vectors.square().sum().backward()
        own = logits.chunk(world_size, 1)[rank].clone().requires_grad_()
        loss = tp.vocabulary_parallel_loss(own, tokens)
        loss.backward()
        cut = vectors.detach(), embedding.weight.grad, own.grad
        return loss.item(), cut[0], *map(gathered, cut[1:], (0, 1))

    def gathered(part, dim):
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, dim)

    torch.manual_seed(0)
    tokens, rows = torch.tensor([0, 7, 3, 4, 4]), torch.randn(8, 3)
    logits = torch.randn(5, 8)
    logits[0] += 1000  # exp would overflow
    logits[1, 0] = -1000
    whole, x = rows.clone().requires_grad_(), logits.clone().requires_grad_()
    F.embedding(tokens, whole).square().sum().backward()
    loss = F.cross_entropy(x, tokens)
    loss.backward()
    expected = loss.item(), rows[tokens], whole.grad, x.grad
    for n in (1, 2, 4):
        result = kit.run(worker, world_size=n)
        kit.compare(list(result), expected).check()
        reduced = [e.nbytes for e in result.trace if e.rank == 0 and e.op == "all_reduce"]
        assert reduced == [5 * 3 * 4, *[5 * 4] * 3]  # the vectors; three numbers per position


def test_an_untied_gpt_trains_as_in_one_process_up_to_the_rounding_of_float64():
    settings = ADAM, 2, torch.float64, Config(layers=1, tied=False)
    alone = tp.train_alone(*settings)
    for worker in tp.ways(*settings).values():
        kit.compare(list(kit.run(*worker, world_size=2)), alone).check()


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


def test_parallelize_keeps_the_tie_and_fits_beside_fully_shard():
    """On a mesh of 2 x 2: batches are cut along "dp", weights along "tp"."""

    def worker(rank, world_size):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = tp.parallelize(make_gpt(), mesh["tp"])
        assert model.head.weight is model.tokens.weight
        up, down = model.blocks[0].up.weight, model.blocks[0].down.weight
        assert (up.placements, down.placements) == ((Shard(0),), (Shard(1),))
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh["dp"])
        optimizer = SGD(model.parameters())
        for batch in batches(tp.BATCH, 2):
            optimizer.zero_grad()
            with loss_parallel():
                loss_of(model, *part_of(batch, mesh.get_local_rank("dp"), 2)).backward()
            optimizer.step()
        return {name: p.full_tensor().detach() for name, p in model.named_parameters()}

    alone = tp.train_alone(SGD, 2)["parameters"]
    kit.compare(list(kit.run(worker, world_size=4)), alone).check()


def test_the_plan_needs_inputs_that_divide_only_with_sequence_parallelism():
    def worker(rank, world_size):
        mesh = init_device_mesh("cpu", (world_size,))
        model = tp.parallelize(make_gpt(), mesh)
        return model(tokens).redistribute(placements=[Replicate()]).to_local().detach()

    tokens = torch.arange(5).view(1, 5)
    kit.compare(list(kit.run(worker, world_size=2)), make_gpt()(tokens).detach()).check()
