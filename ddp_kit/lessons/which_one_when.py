# Made from notebooks/20_which_one_when.ipynb by `make editions`: edit that, not this. 296652cf8be9
"""Which one when: plan a training run for 1 to 16,384 GPUs."""

from functools import partial
from itertools import product

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import ddp_kit as kit
from ddp_kit import model as formulas
from ddp_kit.lessons._gpt import batches, loss_of, make_gpt, part_of
from ddp_kit.lessons._launch import run_as_script
from ddp_kit.lessons._which_one_when import (
    BYTES,
    CUT,
    DTYPES,
    FLOAT32_GRADIENTS,
    LLAMA_3,
    MEGATRON,
    SMALL,
    bytes_along,
    calls_along,
    explore,
    fit_efficiency,
    hold,
    llama,
    main,
    megatron,
    with_efficiency,
)
from ddp_kit.lessons.tensor_parallel import cut_block, gather_parameters
from ddp_kit.lessons.zero import BATCH, SGD


def train_by_hand(rank, world_size, optimizer_cls=SGD, tp=2, steps=3):
    mesh = init_device_mesh(kit.device().type, (world_size // tp, tp), mesh_dim_names=("dp", "tp"))
    data, tensor = (mesh.get_group("dp"), mesh.get_group("tp"))
    model = make_gpt()
    for block in model.blocks:
        cut_block(block, group=tensor)
    optimizer = optimizer_cls(model.parameters())
    for batch in batches(BATCH, steps):
        optimizer.zero_grad()
        mine = part_of(batch, mesh.get_local_rank("dp"), mesh["dp"].size())
        loss_of(model, *mine).backward()
        for parameter in model.parameters():
            parameter.grad /= mesh["dp"].size()
            dist.all_reduce(parameter.grad, group=data)
        optimizer.step()
    return gather_parameters(model, tensor)


def parallelize_2d(model, mesh, recompute=False, dtype=None):
    same = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
    plan = {"attention": same, "attention.out": RowwiseParallel(), "down": RowwiseParallel()}
    for name in ("attention.query", "attention.key", "attention.value", "up"):
        plan[name] = ColwiseParallel()
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], plan)
        if recompute:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        fully_shard(block, mesh=mesh["dp"], mp_policy=policy)
    policy = MixedPrecisionPolicy(dtype, torch.float32, output_dtype=torch.float32)
    return fully_shard(model, mesh=mesh["dp"], mp_policy=policy)


def train_2d(rank, world_size, optimizer_cls=SGD, tp=2, steps=3, recompute=False, dtype=None):
    mesh = init_device_mesh(kit.device().type, (world_size // tp, tp), mesh_dim_names=("dp", "tp"))
    model = parallelize_2d(make_gpt(), mesh, recompute, dtype)
    optimizer = optimizer_cls(model.parameters())
    for batch in batches(BATCH, steps):
        optimizer.zero_grad()
        mine = part_of(batch, mesh.get_local_rank("dp"), mesh["dp"].size())
        loss_of(model, *mine).backward()
        optimizer.step()
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


def step_of(tp=2, recompute=False):
    one, two = (kit.run(train_2d, SGD, tp, steps, recompute).trace for steps in (1, 2))
    sent = [calls_along(trace, tp) for trace in (one, two)]
    many = [
        sum(event.rank == 0 and "all_reduce" in event.op for event in trace) for trace in (one, two)
    ]
    return {name: sent[1][name] - sent[0][name] for name in ("dp", "tp")}, many[1] - many[0]


def states_by_hand(parameters, n, zero, precision=formulas.MIXED):
    kinds = ("optimizer", "gradients", "parameters")  # in the order of the stages that shard them
    held = {}
    for stage, kind in enumerate(kinds, 1):
        nbytes = parameters * getattr(precision, kind)
        held[kind] = nbytes / n if zero >= stage else nbytes
    return held


def layer_keeps(model, plan, precision=formulas.MIXED):
    size, tp = precision.activations, plan.tp
    norms = (4 * size + 2 * model.dropout) * model.width  # what goes in and out; masks
    cut = 2 * model.width + 2 * model.kv_width + (2 + model.gated) * model.mlp_width
    cut *= size  # queries, keys, values, output; and the MLP
    if not plan.flash:
        cut += (size + model.dropout * (1 + size)) * model.heads * model.context  # scores
    tokens = plan.micro_batch * model.context / plan.cp
    return tokens * (norms / (tp if plan.sequence_parallel else 1) + cut / tp)


def stage_by_hand(model, plan, stage, precision=formulas.MIXED):
    layers = formulas.stages(model.layers, plan.pp)[stage]
    first, last, ahead = stage == 0, stage == plan.pp - 1, plan.pp - stage
    layer, head = model.layer_weights / plan.tp + model.layer_vectors, model.head / plan.tp
    parameters = layers * layer + first * (model.embeddings - model.head + head)
    parameters += last * ((1 + model.norm_bias) * model.width + head * (not (first and model.tied)))
    held = states_by_hand(parameters, plan.dp * plan.cp, plan.zero, precision)
    gathered = min(layers, 2) * layer * (plan.zero == 3)  # one computes, one is on its way
    held["gathered parameters"] = gathered * precision.parameters
    tokens = plan.micro_batch * model.context / plan.cp
    inputs = tokens * model.width * precision.activations
    inputs /= plan.tp if plan.sequence_parallel else 1
    whole, again = layer_keeps(model, plan, precision), plan.recompute == "full"
    parts = ahead if plan.chunks == 1 else 2 * (ahead - 1) + (plan.chunks - 1) * plan.pp + 1
    under_way = min(plan.micro_batches, parts / plan.chunks)
    held["activations"] = under_way * layers * (inputs if again else whole)
    held["activations"] += last * (2 * inputs + 4 * tokens * model.vocabulary / plan.tp)
    return held | {"recomputed activations": whole * again}


def memory_by_hand(model, plan, precision=formulas.MIXED):
    stages = [stage_by_hand(model, plan, stage, precision) for stage in range(plan.pp)]
    return max(stages, key=lambda held: sum(held.values()))


def layer_by_hand(model, plan, cluster, precision=formulas.MIXED):
    gpu, again = cluster.accelerator, plan.recompute == "full"
    tokens = plan.micro_batch * model.context / plan.cp
    flops = (2 * model.layer_weights + model.scores_flops) * tokens / plan.tp
    forward = flops / (gpu.flops * gpu.efficiency)
    forward += 2 * layer_keeps(model, plan, precision) / gpu.bandwidth
    sent = tokens * model.width * precision.activations
    keys = 2 * tokens * model.kv_width * precision.activations / plan.tp
    messages = (3 + again) * (plan.cp - 1) + (plan.cp > 1)
    ring = cluster.link(plan.cp, plan.tp)
    return {
        "compute": (3 + again) * forward,
        "tp": (4 + 2 * again) * cluster.all_reduce(plan.tp, sent),
        "cp": messages * (ring.alpha + ring.beta * keys),
    }


def dp_by_hand(model, plan, cluster, precision, compute):
    layers = max(formulas.stages(model.layers, plan.pp))
    parameters = layers * (model.layer_weights / plan.tp + model.layer_vectors)
    parameters += model.embeddings - model.head + model.head / plan.tp
    n, stride = plan.dp * plan.cp, plan.tp * (plan.pp if plan.cp == 1 else 1)
    reduce = cluster.all_reduce(n, parameters * precision.gradients, stride) / 2
    gather = cluster.all_reduce(n, parameters * precision.parameters, stride) / 2
    forward, backward = plan.overlap * compute / 3, plan.overlap * 2 * compute / 3
    if plan.zero == 0:  # an all_reduce takes as long as two reduce_scatters
        return max(0, 2 * reduce - backward)
    if plan.zero == 3:  # parameters are gathered twice in each micro-batch
        each = max(0, gather - forward) + max(0, gather + reduce - backward)
        return plan.micro_batches * each
    reductions = 1 if plan.zero == 1 else plan.micro_batches
    return reductions * max(0, reduce - backward) + max(0, gather - forward)


def step_by_hand(model, plan, cluster, precision=formulas.MIXED):
    gpu, tokens = cluster.accelerator, plan.micro_batch * model.context / plan.cp
    layer = layer_by_hand(model, plan, cluster, precision)
    head = 6 * model.head * tokens / plan.tp / (gpu.flops * gpu.efficiency)
    *others, layers = formulas.stages(model.layers, plan.pp)
    if (max(others, default=0) - layers) * sum(layer.values()) > head:
        layers, head = max(others), 0  # the last stage has less to do, though it has the head
    one = {part: layers * seconds for part, seconds in layer.items()}  # of a micro-batch
    one["compute"] += head
    hop = cluster.link(plan.pp, plan.tp * plan.cp)
    sent = tokens * model.width * precision.activations
    sent /= plan.tp if plan.sequence_parallel else 1
    one["pp"] = 2 * plan.chunks * (hop.alpha + hop.beta * sent) * (plan.pp > 1)
    step = {part: plan.micro_batches * seconds for part, seconds in one.items()}
    step["bubble"] = (plan.pp - 1) / plan.chunks * sum(one.values())
    step["dp"] = dp_by_hand(model, plan, cluster, precision, one["compute"])
    return step


def tflops(model, plan, cluster, precision=formulas.MIXED):
    flops = model.flops_per_token
    if plan.recompute == "full":
        flops += model.layers * (2 * model.layer_weights + model.scores_flops)
    flops *= plan.batch * model.context / plan.ranks
    return flops / sum(step_by_hand(model, plan, cluster, precision).values()) / 1e12


H100 = formulas.DGX_H100


def plans_by_hand(model, cluster, gpus, batch):
    found, powers = [], [1, 2, 4, 8, 16]
    for tp, pp, size, zero, kind in product(powers, powers, (1, 2, 4), range(4), ("none", "full")):
        dp = gpus // (tp * pp)
        if dp * tp * pp != gpus or batch % (dp * size) or (zero and dp == 1):
            continue
        if tp > cluster.per_host or model.key_value_heads % tp or model.layers % pp:
            continue
        plan = formulas.Plan(dp, zero, tp, pp, 1, batch // (dp * size), size, recompute=kind)
        held = sum(memory_by_hand(model, plan).values())
        if held <= 0.9 * cluster.accelerator.memory:
            found.append((sum(step_by_hand(model, plan, cluster).values()), held, plan))
    return sorted(found, key=lambda each: each[:2])  # the fastest, then the smallest


if __name__ == "__main__":
    run_as_script(main)
