"""Tensor parallelism: each weight is cut over the ranks, and so is the computing of each layer.

    by hand                 ColumnParallelLinear, RowParallelLinear, VocabularyParallelEmbedding,
                            vocabulary_parallel_loss; with sequence parallelism, if wanted
    parallelize_module      PyTorch's own, with a plan for the same GPT: `parallelize`

Each is compared with one process. Sources: Shoeybi et al., "Megatron-LM: Training Multi-Billion
Parameter Language Models Using Model Parallelism" (2019), https://arxiv.org/abs/1909.08053;
Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022),
https://arxiv.org/abs/2205.05198.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from ddp_kit import compare, device
from ddp_kit.launch import choose, lesson_parser, open_ranks, prove, run_as_script
from ddp_kit.lessons._gpt import GPT, Config, batches, loss_of, make_gpt
from ddp_kit.lessons._tensor_parallel_layers import (  # noqa: F401 - the notebook uses them
    SEQUENCE,
    TENSOR,
    ColumnParallelLinear,
    CopyToRegion,
    GatherFromSequence,
    ReduceFromRegion,
    ReduceScatterToSequence,
    RowParallelLinear,
    VocabularyParallelEmbedding,
    add_up_gradients,
    check_shares,
    check_vocabulary,
    cut_block,
    cut_gpt,
    gather_parameters,
    own_part,
    own_places,
    uncut,
    vocabulary_parallel_loss,
)
from ddp_kit.lessons._zero_ways import copies
from ddp_kit.lessons.device_mesh import pieces
from ddp_kit.lessons.zero import ADAM, SGD, count_bytes, memory
from ddp_kit.trace import Trace

CONFIG = Config()
BATCH = 4  # sequences; every rank has all of them
State = dict[str, Any]


@dataclass
class Training:
    """A model that is trained in one of the `WAYS`.

    loss: takes inputs and targets. finish: called after backward. full: returns all parameters by
    name. context: what forward and backward are in.
    """

    loss: Callable[..., torch.Tensor]
    full: Callable[[], dict[str, torch.Tensor]]
    finish: Callable[[], None] = lambda: None
    context: Callable[[], AbstractContextManager] = nullcontext


def start_alone(model: GPT) -> Training:
    """Train the whole model, as one process does."""
    return Training(partial(loss_of, model), partial(copies, model))


def start_by_hand(model: GPT, regions: tuple[Any, Any] = TENSOR, finish: bool = True) -> Training:
    """Cut the model by hand. finish: add up the gradients that are summands after a backward."""
    cut_gpt(model, regions)
    sequence = regions == SEQUENCE
    places = own_places(model.positions.num_embeddings) if sequence else None

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = model(inputs, places)
        return vocabulary_parallel_loss(logits.flatten(0, 1), targets.flatten())

    training = Training(loss, partial(gather_parameters, model))
    if sequence and finish:
        training.finish = partial(add_up_gradients, uncut(model))
    return training


def start_parallelize(model: GPT, sequence: bool = False) -> Training:
    """Let PyTorch cut the model."""
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    parallelize(model, mesh, sequence)

    def full() -> dict[str, torch.Tensor]:
        return {name: whole(p).detach().clone() for name, p in model.named_parameters()}

    return Training(partial(loss_of, model), full, context=loss_parallel)


class ForgottenCopy(CopyToRegion):
    """What f must not be: a backward without the all_reduce."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return this rank's summand."""
        return gradient, None


WAYS: dict[str, Callable[..., Training]] = {
    "by hand": start_by_hand,
    "by hand, sequence": partial(start_by_hand, regions=SEQUENCE),
    "parallelize_module": start_parallelize,
    "parallelize_module, sequence": partial(start_parallelize, sequence=True),
}
WRONG: dict[str, Callable[..., Training]] = {
    "no all_reduce in f": partial(start_by_hand, regions=(ForgottenCopy, ReduceFromRegion)),
    "gradients not added up": partial(start_by_hand, regions=SEQUENCE, finish=False),
}
STARTS = {"one process": start_alone} | WAYS | WRONG


def block_plan(sequence: bool = False) -> dict[str, ParallelStyle]:
    """Return PyTorch's styles for the modules of a block, by name.

    sequence: between the layers that are cut, each rank has a part of the positions.
    """
    outside = Shard(1) if sequence else Replicate()
    plan = {
        "attention": PrepareModuleInput(input_layouts=outside, desired_input_layouts=Replicate()),
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=outside),
        "up": ColwiseParallel(input_layouts=outside),
        "down": RowwiseParallel(output_layouts=outside),
    }
    norms = {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
    return plan | norms if sequence else plan


def gpt_plan(sequence: bool = False) -> dict[str, ParallelStyle]:
    """Return PyTorch's styles for the modules of a GPT, by name."""
    outside = Shard(1) if sequence else Replicate()
    plan = {f"blocks.*.{name}": style for name, style in block_plan(sequence).items()}
    plan["tokens"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=outside)
    plan["head"] = ColwiseParallel(
        input_layouts=outside, output_layouts=Shard(-1), use_local_output=False
    )
    if sequence:
        plan["norm"] = SequenceParallel()
        plan["positions"] = PrepareModuleOutput(
            output_layouts=Replicate(), desired_output_layouts=Shard(0)
        )
    return plan


def parallelize(model: GPT, mesh: DeviceMesh, sequence: bool = False) -> GPT:
    """Cut a GPT over the ranks of a mesh, in place, with `parallelize_module`; return it.

    mesh: of one dimension. sequence: with sequence parallelism; the length of the inputs must be a
    multiple of the number of ranks. The logits are a DTensor of which each rank has its part of the
    vocabulary: compute the loss and its backward inside `loss_parallel()`.

    Raises ValueError if the ranks cannot share the heads evenly.
    """
    check_shares(model, mesh.size())
    tied = model.head.weight is model.tokens.weight
    parallelize_module(model, mesh, gpt_plan(sequence))
    if tied:
        model.head.weight = model.tokens.weight
    return model


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor, also if it is a DTensor; then all ranks must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(
    rank: int,
    world_size: int,
    way: str = "by hand",
    optimizer_cls: Callable = SGD,
    steps: int = 3,
    dtype: torch.dtype = torch.float32,
    config: Config = CONFIG,
) -> State:
    """Train a GPT on whole batches; `train(0, 1, "one process")` does so without ranks.

    way: "one process", one of the `WAYS`, or one that is `WRONG`. Returns "losses" (of each step)
    and "parameters" (whole, by name). Raises ValueError if the ranks cannot share the heads evenly,
    PoolError for another way.
    """
    model = make_gpt(config).to(dtype)
    training = choose("way", way, STARTS)(model)
    optimizer, losses = optimizer_cls(model.parameters()), []
    # On a GPU, foreach would put DTensors and plain tensors into one call, which PyTorch refuses.
    optimizer.param_groups[0]["foreach"] = False
    for batch in batches(BATCH, steps, config.context):
        optimizer.zero_grad()
        with training.context():
            loss = training.loss(*batch)
            loss.backward()
        training.finish()
        optimizer.step()
        losses.append(whole(loss).item())
    return {"losses": losses, "parameters": training.full()}


def one_block(
    rank: int,
    world_size: int,
    way: str = "by hand",
    size: int = BATCH,
    config: Config = CONFIG,
) -> dict[str, torch.Tensor]:
    """Run the first block of the GPT forward and backward, in "one process" or one of the `WAYS`.

    size: sequences in the batch. The loss is the sum of the squares of the output. Returns the
    output and the gradient of the input, with sequence parallelism of this rank's positions.
    """
    choose("way", way, STARTS)
    block, sequence = make_gpt(config).blocks[0], way.endswith("sequence")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, config.context, config.width, generator=generator).to(device())
    if way.startswith("by hand"):
        cut_block(block, SEQUENCE if sequence else TENSOR)
    elif way.startswith("parallelize_module"):
        check_shares(block, world_size)
        mesh = init_device_mesh(device().type, (world_size,))
        parallelize_module(block, mesh, block_plan(sequence))
    x = (pieces(x, 1, world_size)[rank] if sequence else x).requires_grad_()
    y = block(x)
    y.square().sum().backward()
    return {"output": y.detach(), "gradient": x.grad}


def all_reduce_bytes(n: int, nbytes: float) -> float:
    """Return the bytes that each of n ranks sends in an all_reduce of so many bytes."""
    return 2 * (n - 1) / n * nbytes


def block_bytes(n: int, size: int, config: Config = CONFIG, itemsize: int = 4) -> float:
    """Return the bytes that a rank sends for a block: two all_reduces forward, two backward.

    size: sequences in the batch. Sequence parallelism sends as many, in other calls.
    """
    return 4 * all_reduce_bytes(n, size * config.context * config.width * itemsize)


def step_bytes(n: int, size: int, config: Config = CONFIG, itemsize: int = 4) -> float:
    """Return the bytes that a rank sends in a training step by hand, without sequence parallelism.

    That is, for the blocks, for the output of the embedding, for the gradient of the head's input,
    and three numbers per position for the loss.
    """
    positions = size * config.context * itemsize
    ends = 2 * all_reduce_bytes(n, positions * config.width) + 3 * all_reduce_bytes(n, positions)
    return config.layers * block_bytes(n, size, config, itemsize) + ends


def held(rank: int, world_size: int, way: str, size: int = BATCH) -> dict[str, int]:
    """Return the bytes that a rank holds for a training step with Adam, by kind.

    way: "one process" or one of the `WAYS`. size: sequences in the batch. Activations are what the
    forward keeps for the backward; the other kinds are counted after the step.
    """
    model = make_gpt()
    training = choose("way", way, STARTS)(model)
    optimizer = ADAM(model.parameters())
    seen: set[int] = set()
    parameters = sum(memory(parameter, seen) for parameter in model.parameters())
    kept = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            kept.append(memory(tensor, seen))
        return tensor

    ((inputs, targets),) = batches(size, 1)
    with training.context():
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = training.loss(inputs, targets)
        loss.backward()
    training.finish()
    optimizer.step()
    return {
        "parameters": parameters,
        "gradients": sum(memory(p.grad, set()) for p in model.parameters()),
        "optimizer states": sum(
            memory(value, set())
            for state in optimizer.state.values()
            for value in state.values()
            if value.ndim  # step counts are tiny
        ),
        "activations": sum(kept),
    }


def collectives(trace: Trace) -> list[str]:
    """Return what rank 0 called, in order, but not the distribution of parameters."""
    setup = ("new_group", "distribute_tensor scatter", "distribute_tensor broadcast")
    return [event.op for event in trace if event.rank == 0 and event.op not in setup]


def config_for(n: int) -> Config:
    """Return the lesson's sizes if n ranks can share them, or else the next ones that they can."""
    if CONFIG.heads % n == 0:
        return CONFIG
    context, vocabulary = (-(-size // n) * n for size in (CONFIG.context, CONFIG.vocabulary))
    return Config(heads=n, width=16 * n, context=context, vocabulary=vocabulary)


def main(argv: list[str] | None = None) -> None:
    """Train in each way, compare with one process, count bytes, and print one line."""
    options = lesson_parser("tensor_parallel", __doc__).parse_args(argv or [])
    with open_ranks(options.world_size, options.backend, options.trace) as ranks:
        n, steps, config = ranks.world_size, 3, config_for(ranks.world_size)
        for optimizer_cls in (SGD, ADAM):
            settings = optimizer_cls, steps, torch.float32, config
            alone = train(0, 1, "one process", *settings)
            for way in WAYS:
                result = ranks(train, way, *settings)
                prove(f"{way} trains as one process does", compare(result, alone))
                if way == "by hand":
                    sent = count_bytes(result.trace, 0)["all_reduce"]
                    expected = steps * step_bytes(n, BATCH, config)
                    prove(f"{way} sends what the formula says", compare(sent, round(expected)))
        called = collectives(ranks(one_block, "by hand", BATCH, config).trace)
        prove("a block has two all_reduces per direction", called == ["all_reduce"] * 4)
        ranks.say(f"tensor_parallel: {ranks}, by hand and PyTorch's own train as one process does")


if __name__ == "__main__":
    run_as_script(main)
