"""The proof of the lesson on which one when, what its cells need besides, and published trainings.

    MEGATRON   Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters
               Using Megatron-LM" (2021), https://arxiv.org/abs/2104.04473, table 1
    LLAMA_3    Grattafiori et al., "The Llama 3 Herd of Models" (2024),
               https://arxiv.org/abs/2407.21783, table 4; sizes from table 3
    HELD_OUT   benchmarks/llama3_h100_202412_torchtitan.md and docs/performance.md (A100, 2024) in
               https://github.com/pytorch/torchtitan; Korthikanti et al., "Reducing Activation
               Recomputation in Large Transformer Models" (2022), https://arxiv.org/abs/2205.05198,
               tables 3 and 5; and the GPT with autocast in tests/benchmarks/GPU.md

What the papers do not say is assumed: in Megatron's, that a micro-batch is one sequence, that
gradients have 2 bytes, and how many chunks a stage has; in Llama's, how many chunks, and that
gradients are reduced once in a step; in torchtitan's with a pipeline, 8 micro-batches.
"""

from __future__ import annotations

import re
from collections import Counter, namedtuple
from dataclasses import replace
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import init_device_mesh

from ddp_kit import compare, device, model
from ddp_kit.lessons._gpt import batches, loss_of, make_gpt, part_of
from ddp_kit.lessons._launch import Ranks, lesson_main, prove
from ddp_kit.lessons.device_mesh import pieces
from ddp_kit.lessons.pipeline_parallel import of_each_rank
from ddp_kit.lessons.zero import (
    ADAM,
    BATCH,
    SGD,
    bytes_by_kind,
    filled_bytes,
    gradients_of,
    keeping,
    states_of,
    train_alone,
)
from ddp_kit.model import DGX_A100, DGX_H100, Accelerator, Cluster, Link, Plan, Transformer
from ddp_kit.model.transformer import LLAMA_8B, LLAMA_70B, LLAMA_405B
from ddp_kit.trace.collectives import bytes_sent

# Billions of parameters, sizes, and TFLOP/s of each A100.
_Megatron = namedtuple("_Megatron", "billions heads width layers tp pp gpus batch tflops")
MEGATRON = [
    _Megatron(1.7, 24, 2304, 24, 1, 1, 32, 512, 137),
    _Megatron(3.6, 32, 3072, 30, 2, 1, 64, 512, 138),
    _Megatron(7.5, 32, 4096, 36, 4, 1, 128, 512, 142),
    _Megatron(18.4, 48, 6144, 40, 8, 1, 256, 1024, 135),
    _Megatron(39.1, 64, 8192, 48, 8, 2, 512, 1536, 138),
    _Megatron(76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140),
    _Megatron(145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148),
    _Megatron(310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155),
    _Megatron(529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163),
    _Megatron(1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163),
]
# How 405 billion parameters were trained, sequences of each dp rank, and TFLOP/s of each H100.
_Llama = namedtuple("_Llama", "gpus tp cp pp dp context batch tflops")
LLAMA_3 = [
    _Llama(8192, 8, 1, 16, 64, 8192, 32, 430),
    _Llama(16384, 8, 1, 16, 128, 8192, 16, 400),
    _Llama(16384, 8, 16, 16, 8, 131072, 16, 380),
]
FLOAT32_GRADIENTS = model.Precision(2, 4, 12, 2)  # as in Llama 3

# FSDP with float32 parameters, gathered and computed with in bfloat16.
TORCHTITAN = model.Precision(4, 4, 8, 2)
_H100_96GB = replace(DGX_H100.accelerator, memory=96e9, bandwidth=2.4e12)
GRAND_TETON = replace(DGX_H100, accelerator=_H100_96GB)


class Published(NamedTuple):
    """A run that nothing was fitted to. seconds: of a step. memory: GiB. None: not published."""

    name: str
    model: Transformer
    plan: Plan
    cluster: Cluster
    precision: model.Precision
    seconds: float | None
    memory: float | None


def _torchtitan(name, transformer, plan, cluster, tokens, memory):
    """tokens: per second and GPU; None: in 8 bits, which the model does not know."""
    seconds = tokens and plan.batch * transformer.context / plan.ranks / tokens
    return Published(name, transformer, plan, cluster, TORCHTITAN, seconds, memory)


def _korthikanti(name, layers, width, heads, pp, gpus, batch, chunks, seconds):
    transformer = Transformer(layers, width, heads, 51_200, 2_048, dropout=True)
    size = 4 if pp == 1 else 1
    plan = Plan(1, 0, 8, pp, 1, batch // size, size, chunks, "attention", flash=False)
    return Published(name, transformer, plan, DGX_A100, model.MIXED, seconds, None)


# 405 billion parameters are 128 layers here, because 126 cannot be cut into 8 stages.
_CUT_405B = replace(LLAMA_405B, layers=128)
_SELECTIVE = {"zero": 3, "recompute": "selective"}
_3D = {"dp": 8, "zero": 3, "tp": 8, "pp": 8, "micro_batches": 8, "micro_batch": 4}
_GPT = Transformer(24, 2048, 16, 50_304, 2_048, linear_bias=False)
HELD_OUT = [
    Published("1.3B", _GPT, Plan(micro_batch=4), DGX_H100, TORCHTITAN, 0.166, 36.1),
    _torchtitan("8B", LLAMA_8B, Plan(8, micro_batch=2, **_SELECTIVE), GRAND_TETON, 6667, 77.0),
    _torchtitan("8B", LLAMA_8B, Plan(64, **_SELECTIVE), DGX_A100, 2973, None),
    _torchtitan("8B", LLAMA_8B, Plan(128, micro_batch=2, **_SELECTIVE), GRAND_TETON, 6514, 62.0),
    _torchtitan("70B", LLAMA_70B, Plan(64, 3, recompute="full"), DGX_A100, 331, None),
    _torchtitan(
        "70B", LLAMA_70B, Plan(32, 3, 8, micro_batch=16, recompute="full"), GRAND_TETON, None, 71.9
    ),
    _torchtitan("405B", _CUT_405B, Plan(recompute="full", **_3D), GRAND_TETON, None, 82.5),
    _torchtitan(
        "405B", _CUT_405B, Plan(recompute="full", chunks=2, **_3D), GRAND_TETON, None, 72.7
    ),
    _korthikanti("22B", 48, 6144, 64, 1, 8, 4, 1, 1.10),
    _korthikanti("175B", 96, 12288, 96, 8, 64, 64, 3, 13.75),
    _korthikanti("530B", 105, 20480, 128, 35, 280, 280, 3, 37.83),
    _korthikanti("1T", 128, 25600, 160, 64, 512, 512, 1, 71.49),
]

SMALL = Transformer(2, 64, 4, 128, 64, linear_bias=False)  # the GPT of the lessons
# Of a block: dimension 0 of a Linear's weight is its output, so 0 means column parallel.
CUT = {"query": 0, "key": 0, "value": 0, "out": 1, "up": 0, "down": 1}
# With it, the seconds of `model.step` are bytes: nothing else takes time.
BYTES = Cluster(Accelerator(1, 1e30, 1e30), 1, Link(0, 1), Link(0, 1))


def megatron(row, chunks=1):
    """Return the model and the plan of a row. Every layer is recomputed, as in the paper."""
    transformer = Transformer(row.layers, row.width, row.heads, 51_200, 2_048, dropout=True)
    dp = row.gpus // row.tp // row.pp
    options = {"flash": False, "sequence_parallel": False, "overlap": False}
    plan = Plan(dp, 0, row.tp, row.pp, 1, row.batch // dp, 1, chunks, "full", **options)
    return transformer, plan


def llama(row, chunks=1):
    """Return the model and the plan of a row. Nothing is recomputed, as in the paper."""
    transformer = replace(LLAMA_405B, context=row.context)
    # The paper shards gradients, too, which is stage 2; stage 1 reduces them once in a step.
    return transformer, Plan(row.dp, 1, row.tp, row.pp, row.cp, row.batch, 1, chunks)


def with_efficiency(cluster, efficiency):
    """Return a cluster whose matrix products reach another share of the peak."""
    return replace(cluster, accelerator=replace(cluster.accelerator, efficiency=efficiency))


def fit_efficiency(cluster, predict, measured):
    """Return the efficiency with which `predict(cluster)` is what was measured.

    predict: more efficiency never makes it smaller. The answer is between 0.01 and 1.
    """
    low, high = 0.01, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if predict(with_efficiency(cluster, middle)) < measured:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def hold(rank, world_size, tp=2, recompute=False, dtype=None):
    """Return the bytes that this rank holds in its second step with Adam, and its parameters.

    The bytes are by moment and kind. recompute, dtype: as in `parallelize_2d`. The parameters are
    whole.
    """
    mesh = init_device_mesh(device().type, (world_size // tp, tp), mesh_dim_names=("dp", "tp"))
    gpt = lesson.parallelize_2d(make_gpt(), mesh, recompute, dtype)
    optimizer, moments = ADAM(gpt.parameters()), {}
    sharded = [parameter.to_local() for parameter in gpt.parameters()]

    def note(moment, kept=()):
        moments[moment] = bytes_by_kind(
            {
                "parameters": sharded,
                "gathered parameters": gpt.parameters(),
                "gradients": gradients_of(gpt.parameters()),
                "optimizer": states_of(optimizer),
                "activations": kept,
            }
        )

    for batch in batches(BATCH, 2):
        optimizer.zero_grad()
        note("before")
        mine = part_of(batch, mesh.get_local_rank("dp"), mesh["dp"].size())
        with keeping() as kept:
            loss = loss_of(gpt, *mine)
        # FSDP has freed the whole parameters of the blocks, which autograd kept, too: they count 0.
        note("after forward", kept)
        kept.clear()
        loss.backward()
        note("after backward")
        optimizer.step()
    return moments, {name: part.full_tensor() for name, part in gpt.state_dict().items()}


def calls_along(trace, tp, pp=1):
    """Return the bytes that rank 0 sent along "dp", "pp" and "tp" of such a mesh, by call."""
    strides = {1: "tp", tp: "pp", tp * pp: "dp"}
    found = {"dp": Counter(), "pp": Counter(), "tp": Counter()}
    for event in trace:
        if event.rank == 0 and event.op != "new_group" and len(event.group.ranks) > 1:
            first, second, *_ = event.group.ranks
            found[strides[second - first]][event.op] += round(bytes_sent(event))
    return found


def held_parameters(transformer):
    """Return the parameters of rank 0 in `train_3d`: half of the layers, each cut in two."""
    layer = transformer.layer_weights / 2 + transformer.layer_vectors
    return transformer.layers / 2 * layer + transformer.embeddings


def name_by_model(parameters, stage, blocks=2):
    """Return parameters of a stage of `blocks` blocks by their names in the whole model."""

    def whole(match):
        return f"blocks.{stage * blocks + int(match[1])}."

    return {re.sub(r"^blocks\.(\d+)\.", whole, name): p for name, p in parameters.items()}


def bytes_along(dp, tp):
    """Return the bytes that a rank sends in a step of `train_2d`, by formula, along dp and tp.

    Along tp: four all_reduces for each block. Along dp: blocks are gathered before forward and
    before backward, all else is gathered once, and the gradients of both are reduced once.
    """
    blocks, rest = [], []
    for name, parameter in make_gpt().named_parameters():
        dim = CUT.get(name.split(".")[-2])
        part = parameter if dim is None else pieces(parameter, dim, tp)[0]
        (blocks if name.startswith("blocks") else rest).append(part)
    sharded = 3 * filled_bytes(blocks, dp) + 2 * filled_bytes(rest, dp)
    plan = Plan(dp=dp, tp=tp, micro_batch=BATCH // dp, sequence_parallel=False)
    return {"dp": (dp - 1) / dp * sharded, "tp": model.step(SMALL, plan, BYTES, model.FP32)["tp"]}


@lesson_main("which_one_when")
def main(ranks: Ranks) -> str:
    """Train on a mesh, compare with one process and with the formulas, and print one line."""
    n = ranks.world_size
    tp = 2 if n % 2 == 0 else 1
    alone = train_alone(ADAM)["parameters"]
    for worker in (lesson.train_by_hand, lesson.train_2d):
        found = list(ranks(worker, ADAM, tp))
        prove(f"{worker.__name__} trains as one process does", compare(found, alone))
    traces = [ranks(lesson.train_2d, SGD, tp, steps).trace for steps in (1, 2)]
    one, two = (calls_along(trace, tp) for trace in traces)
    sent = {name: (two[name] - one[name]).total() for name in ("dp", "tp")}
    prove("a rank sends what the model says", compare(sent, bytes_along(n // tp, tp)))
    pp = 2 if n % 4 == 0 else 1
    found = list(ranks(lesson.train_3d, pp, tp, 2, 2))
    larger = train_alone(SGD, 2, 24, torch.float64, lesson.LARGER)["parameters"]
    alone = of_each_rank(larger, found)
    prove("dp x pp x tp trains as one process does", compare(found, alone))
    return "FSDP x TP sends as planned, and 3 ways train as one process does"


from ddp_kit.lessons import which_one_when as lesson
