"""ZeRO: data parallelism in which no rank keeps what another one has already.

    stage 1   the optimizer's states are sharded    ShardedOptimizer
    stage 2   the gradients, too                    ShardedGradients
    stage 3   the parameters, too                   FullyShardedDataParallel

Each is built by hand and compared with one process, and so are PyTorch's ZeroRedundancyOptimizer
and fully_shard. Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models" (2020), https://arxiv.org/abs/1910.02054.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from ddp_kit import compare
from ddp_kit.launch import choose, lesson_parser, open_ranks, prove, run_as_script
from ddp_kit.lessons._fully_sharded import (  # noqa: F401 - the notebook uses them
    FreedParameter,
    FullySharded,
    FullyShardedDataParallel,
    Prefetching,
    ShardedGradient,
    ShardedModule,
    ShardedParameter,
    UnshardedOnDemand,
    WholeParameter,
    cut,
    fill_up,
    own_rows,
    with_gradients,
)
from ddp_kit.lessons._gpt import GPT, batches, check_parts, loss_of, make_gpt, part_of
from ddp_kit.lessons._sharded_optimizer import (  # noqa: F401
    Owners,
    Partition,
    ReplicatedParameter,
    ShardedGradients,
    ShardedOptimizer,
    ShardedStep,
    settings,
)
from ddp_kit.lessons._zero_memory import (  # noqa: F401
    expected_memory,
    explore,
    held,
    hold,
    memory,
    watch_layers,
    watch_memory,
)
from ddp_kit.lessons._zero_ways import (  # noqa: F401
    ADAM,
    BATCH,
    OPTIMIZERS,
    SGD,
    WAYS,
    Training,
    copies,
    start_fully_shard,
    start_zero_redundancy,
    take_steps,
)
from ddp_kit.trace import Trace
from ddp_kit.trace.bytes_sent import bytes_sent

State = dict[str, Any]


def train(
    rank: int,
    world_size: int,
    way: str = "DDP",
    optimizer_cls: Callable = SGD,
    steps: int = 3,
    **options: Any,
) -> State:
    """Train a GPT on this rank's part of each batch, in one of the `WAYS`.

    options: of the way; stage 3 has compute_dtype. Returns "losses" (of this rank's part, in each
    step), "parameters" (whole, by name), "held" (bytes, see `held`). Raises PoolError for
    another way.
    """
    training = choose("way", way, WAYS)(make_gpt(), optimizer_cls, **options)
    losses = take_steps(training, batches(BATCH, steps), rank, world_size)
    return {"losses": losses, "parameters": training.full(), "held": held(training)}


def train_alone(optimizer_cls: Callable = SGD, steps: int = 3, parts: int = 1) -> State:
    """Train the same GPT in this one process; returns "losses" and "parameters" as `train` does.

    parts: equal parts of a batch whose gradients are computed one after the other and added, as
    if each were on a rank of its own.
    """
    model = make_gpt()
    optimizer, losses = optimizer_cls(model.parameters()), []
    for batch in batches(BATCH, steps):
        optimizer.zero_grad()
        shares = [loss_of(model, *part_of(batch, i, parts)) / parts for i in range(parts)]
        for share in shares:
            share.backward()
        optimizer.step()
        losses.append(sum(share.item() for share in shares))
    return {"losses": losses, "parameters": copies(model)}


def train_and_save(rank: int, world_size: int, folder: str) -> None:
    """Train two steps with fully_shard and Adam, and write a checkpoint."""
    training = start_fully_shard(make_gpt(), ADAM)
    take_steps(training, batches(BATCH, 2), rank, world_size)
    parameters, states = get_state_dict(training.model, training.optimizer)
    dcp.save({"model": parameters, "optimizer": states}, checkpoint_id=folder)


def load_and_train(rank: int, world_size: int, folder: str) -> dict[str, torch.Tensor]:
    """Load a checkpoint of `train_and_save`, from any number of ranks, and train a third step.

    Returns the whole parameters by name.
    """
    training = start_fully_shard(make_gpt(), ADAM)
    parameters, states = get_state_dict(training.model, training.optimizer)
    loaded = {"model": parameters, "optimizer": states}
    dcp.load(loaded, checkpoint_id=folder)  # into these tensors
    set_state_dict(
        training.model,
        training.optimizer,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
    )
    take_steps(training, islice(batches(BATCH, 3), 2, None), rank, world_size)
    return training.full()


def bytes_per_step(run: Callable, worker: Callable, *args: Any) -> list[Counter[str]]:
    """Return the bytes that each rank sends in a training step, by call, as the trace counts them.

    run: calls a worker on all ranks, such as `kit.run`. worker: takes args and a number of steps.
    A step is what three send minus what two send.
    """
    fewer, more = (run(worker, *args, steps) for steps in (2, 3))
    return [
        count_bytes(more.trace, rank) - count_bytes(fewer.trace, rank) for rank in range(len(more))
    ]


def count_bytes(trace: Trace, rank: int) -> Counter[str]:
    """Return the bytes that a rank sent, by call."""
    sent: Counter[str] = Counter()
    for event in trace:
        if event.rank == rank:
            sent[event.op] += round(bytes_sent(event))
    return sent


def on_gloo(sent: Counter[str]) -> int:
    """Return how many bytes gloo sends in these calls: its reduce_scatter is an all_reduce."""
    return sum(count * (2 if "reduce_scatter" in call else 1) for call, count in sent.items())


def filled_bytes(tensors: Iterable[torch.Tensor], world_size: int) -> int:
    """Return the bytes of tensors with the rows that fill them up."""
    return sum(-(-len(t) // world_size) * world_size * (t.nbytes // len(t)) for t in tensors)


def expected_bytes(way: str, world_size: int, model: GPT, gloo: bool = False) -> float:
    """Return the bytes that a rank sends in a step, by the formula: the mean of all ranks.

    way: "DDP" or a stage. A reduce_scatter or an all_gather sends (n-1)/n of its tensors, an
    all_reduce twice that. gloo: count a reduce_scatter twice, because gloo calls all_reduce for it.
    """
    twice = [model.tokens.weight] if model.head.weight is model.tokens.weight else []
    exact = sum(parameter.nbytes for parameter in model.parameters())
    filled = filled_bytes(model.parameters(), world_size)
    sent = {
        "DDP": 2 * exact,  # all_reduce
        "stage 1": 2 * exact + exact,  # all_reduce; a broadcast of each parameter from its owner
        "stage 2": filled + filled,  # reduce_scatter, all_gather
        # reduce_scatter; all_gather before forward and backward, once more for a weight that two
        # modules use
        "stage 3": filled + 2 * filled + filled_bytes(twice, world_size),
    }
    reduced = filled if way in ("stage 2", "stage 3") else 0
    return (world_size - 1) / world_size * (sent[way] + reduced * gloo)


def main(argv: list[str] | None = None) -> None:
    """Train in each way, compare with one process, count bytes, and print one line.

    Raises PoolError for a world size that does not divide the batch.
    """
    options = lesson_parser("zero", __doc__).parse_args(argv or [])
    with open_ranks(options.world_size, options.backend, options.trace) as ranks:
        check_parts(BATCH, ranks.world_size)
        for optimizer_cls in (SGD, ADAM):
            alone = train_alone(optimizer_cls)["parameters"]
            for way in WAYS:
                mine = [each["parameters"] for each in ranks(train, way, optimizer_cls)]
                prove(f"{way} trains as one process does", compare(mine, alone))
        for way in ("DDP", "stage 1", "stage 2", "stage 3"):
            sent = [sum(each.values()) for each in bytes_per_step(ranks, train, way, SGD)]
            expected = expected_bytes(way, ranks.world_size, make_gpt())
            prove(f"{way} sends what the formula says", compare(sum(sent) / len(sent), expected))
        ranks.say(f"zero: {ranks}, 3 stages and PyTorch's own train as one process does")


if __name__ == "__main__":
    run_as_script(main)
