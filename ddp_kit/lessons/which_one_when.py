# Made from notebooks/20_which_one_when.ipynb by `make editions`: edit that, not this.
"""Which one when: plan a training run for 1 to 16,384 GPUs."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

import ddp_kit as kit
from ddp_kit import model as formulas
from ddp_kit.lessons._gpt import Config, batches, loss_of, make_gpt, part_of
from ddp_kit.lessons._launch import run_as_script
from ddp_kit.lessons._which_one_when import (
    BYTES,
    CUT,
    FLOAT32_GRADIENTS,
    GRAND_TETON,
    HELD_OUT,
    LLAMA_3,
    MEGATRON,
    SMALL,
    TORCHTITAN,
    Published,
    bytes_along,
    calls_along,
    fit_efficiency,
    held_parameters,
    hold,
    llama,
    main,
    megatron,
    name_by_model,
    with_efficiency,
)
from ddp_kit.lessons.pipeline_parallel import GPTStage
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
    for index, block in enumerate(model.blocks):
        parallelize_module(block, mesh["tp"], plan)
        if recompute:
            block = model.blocks[index] = checkpoint_wrapper(block)
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


LARGER = Config(layers=4, tied=False)


def make_stage(mesh, micro_batches):
    model, index, count = make_gpt(LARGER).double(), mesh.get_local_rank("pp"), mesh["pp"].size()
    for block in model.blocks:
        cut_block(block, group=mesh.get_group("tp"))
    module = GPTStage(model, index, count)
    group = mesh.get_group("pp")
    stage = PipelineStage(module, index, count, kit.device(), group=group)
    return module, Schedule1F1B(stage, micro_batches, loss_fn=mean_loss)


def mean_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train_3d(rank, world_size, pp=2, tp=2, steps=2, micro_batches=4):
    shape = world_size // (pp * tp), pp, tp
    mesh = init_device_mesh(kit.device().type, shape, mesh_dim_names=("dp", "pp", "tp"))
    module, schedule = make_stage(mesh, micro_batches)
    stage, place, places = mesh.get_local_rank("pp"), mesh.get_local_rank("dp"), mesh["dp"].size()
    optimizer = SGD(module.parameters())
    for batch in batches(24, steps):
        optimizer.zero_grad()
        inputs, targets = part_of(batch, place, places)
        schedule.step(*[inputs.contiguous()][stage:], target=targets)
        for parameter in module.parameters():
            parameter.grad /= places
            dist.all_reduce(parameter.grad, group=mesh.get_group("dp"))
        optimizer.step()
    return name_by_model(gather_parameters(module, mesh.get_group("tp")), stage)


def states_by_hand(parameters, n, zero, precision=formulas.MIXED):
    kinds = ("optimizer", "gradients", "parameters")  # in the order of the stages that shard them
    held = {}
    for stage, kind in enumerate(kinds, 1):
        nbytes = parameters * getattr(precision, kind)
        held[kind] = nbytes / n if zero >= stage else nbytes
    return held


def dp_by_hand(model, plan, cluster, precision, compute):
    parameters = model.layers * (model.layer_weights / plan.tp + model.layer_vectors)
    parameters += model.embeddings - model.head + model.head / plan.tp
    n, stride = plan.dp * plan.cp, plan.tp
    reduce = cluster.all_reduce(n, parameters * precision.gradients, stride) / 2
    gather = cluster.all_reduce(n, parameters * precision.activations, stride) / 2
    forward, backward = plan.overlap * compute / 3, plan.overlap * 2 * compute / 3
    if plan.zero == 0:  # an all_reduce takes as long as two reduce_scatters
        return max(0, 2 * reduce - backward)
    if plan.zero == 3:  # parameters are gathered twice in each micro-batch
        each = max(0, gather - forward) + max(0, gather + reduce - backward)
        return plan.micro_batches * each
    reductions = 1 if plan.zero == 1 else plan.micro_batches
    return reductions * max(0, reduce - backward) + max(0, gather - forward)


def tflops(model, plan, cluster, precision=formulas.MIXED):
    flops = model.flops_per_token
    if plan.recompute == "full":
        flops += model.layers * (2 * model.layer_weights + model.scores_flops)
    flops *= plan.batch * model.context / plan.ranks
    return flops / sum(formulas.step(model, plan, cluster, precision).values()) / 1e12


H100 = formulas.DGX_H100


if __name__ == "__main__":
    run_as_script(main)
