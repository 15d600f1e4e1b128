"""DataParallel: eight steps in one process, all of them through the first device.

`nn.DataParallel` taken apart into scatter, replicate, parallel apply, gather, loss, backward,
reduce and update, with what each device holds after each of them. Sources: PyTorch's
`torch.nn.parallel`, and the notes "Multi GPU", section DataParallel, and "Distributed training".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from threading import Thread

import torch
from torch import nn

from ddp_kit import device
from ddp_kit.launch import lesson_parser, open_ranks, prove, run_as_script
from ddp_kit.lessons._eight_steps import (  # noqa: F401 - the notebook shows them one by one
    LOSS,
    Replica,
    are_real,
    devices,
    eight_steps,
    gather,
    parallel_apply,
    replicate,
    scatter,
    virtual,
)
from ddp_kit.lessons._holdings import Holdings, kept_for_backward
from ddp_kit.lessons.partitioned_sgd import (
    SEED,
    Net,
    average_gradients,
    distance,
    first_digits,
    flat,
)

BATCH = 30


def start(place: torch.device | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Make the network of lesson 03 and its optimiser, with the same numbers every time.

    Dropout is off: it would draw other masks for other shards.
    """
    torch.manual_seed(SEED)
    model = Net().to(place or device()).eval()
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)


def batches(steps: int, count: int = BATCH) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return `steps` batches of `count` training digits each."""
    images, labels = first_digits(steps * count)
    return list(zip(images.split(count), labels.split(count), strict=True))


def train(places: Sequence[torch.device], steps: int = 3, count: int = BATCH) -> dict:
    """Train some steps as DataParallel does, on `count` digits each.

    Returns "gradient" (of the first step) and "parameters" (after the last one), both flat.
    """
    model, optimizer = start(places[0])
    gradient = None
    for images, labels in batches(steps, count):
        images, labels = images.to(places[0]), labels.to(places[0])
        for _ in eight_steps(model, optimizer, images, labels, places):
            pass
        gradient = _gradient(model) if gradient is None else gradient
    return {"gradient": gradient, "parameters": flat(model.parameters())}


def train_plainly(steps: int = 3, count: int = BATCH) -> dict:
    """Train the same as everybody does on one device: the reference."""
    model, optimizer = start()
    gradient = None
    for images, labels in batches(steps, count):
        optimizer.zero_grad()
        LOSS(model(images), labels).backward()
        optimizer.step()
        gradient = _gradient(model) if gradient is None else gradient
    return {"gradient": gradient, "parameters": flat(model.parameters())}


def _gradient(model: nn.Module) -> torch.Tensor:
    return flat(parameter.grad for parameter in model.parameters())


# --- what each device holds ----------------------------------------------------------------


def held_after_each_step(
    places: Sequence[torch.device],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    images: torch.Tensor,
    labels: torch.Tensor,
    loss_of: Callable = LOSS,
) -> dict[str, list[dict[str, int]]]:
    """Train one step; return the bytes that live after each of the eight, by device and kind."""
    holdings = Holdings(len(places))
    holdings.add(0, "parameters", [*model.parameters(), *model.buffers()])
    for state in optimizer.state.values():
        values = [value for value in state.values() if isinstance(value, torch.Tensor)]
        holdings.add(0, "optimiser state", values)
    holdings.add(0, "batch", [images, labels])
    after = {}
    for step, kind, new in eight_steps(model, optimizer, images, labels, places, loss_of):
        for place, tensors in enumerate(new):
            holdings.add(place, kind, tensors)
            if step == "parallel apply":
                holdings.add(place, "kept for backward", kept_for_backward(tensors[0]))
        del new, tensors  # these names would keep the memory alive
        after[step] = holdings.bytes()
    return after


def held_by_net(
    places: Sequence[torch.device], count: int = BATCH
) -> dict[str, list[dict[str, int]]]:
    """Count the bytes of the second step of training with `count` digits, on lesson 03's network.

    The second, because momentum has no memory before the first update.
    """
    model, optimizer = start(places[0])
    first, second = batches(2, count)
    images, labels = (tensor.to(places[0]) for tensor in first)
    for _ in eight_steps(model, optimizer, images, labels, places):
        pass
    images, labels = (tensor.to(places[0], copy=True) for tensor in second)
    return held_after_each_step(places, model, optimizer, images, labels)


# --- time ----------------------------------------------------------------------------------


def step_seconds(
    contestants: Sequence[Sequence[torch.device]], rounds: int = 20
) -> list[dict[str, list[float]]]:
    """Time each of the eight steps on several sets of devices, in turn, so that noise meets all.

    Returns for each set the seconds by step, `rounds` of them. PyTorch computes on one thread
    meanwhile: small shards on many threads mostly measure the waiting of threads.
    """
    runs, threads = [], torch.get_num_threads()
    for places in contestants:
        images, labels = (tensor.to(places[0]) for tensor in first_digits(BATCH))
        runs.append((*start(places[0]), images, labels, places))
    seconds: list[dict[str, list[float]]] = [{} for _ in contestants]
    torch.set_num_threads(1)
    try:
        for turn in range(rounds + 3):
            for run, times in zip(runs, seconds, strict=True):
                begin = time.perf_counter()
                for step, *_ in eight_steps(*run):
                    for place in set(run[-1]) if are_real(run[-1]) else ():
                        torch.cuda.synchronize(place)
                    end = time.perf_counter()
                    if turn >= 3:  # the first rounds warm up
                        times.setdefault(step, []).append(end - begin)
                    begin = end
    finally:
        torch.set_num_threads(threads)
    return seconds


def count_up(rank: int = 0, world_size: int = 1, limit: int = 300_000) -> int:
    """Count in plain Python, one by one: work that holds the interpreter's lock."""
    number = 0
    while number < limit:
        number += 1
    return number


def count_up_in_threads(count: int) -> None:
    """Count on so many threads of this process at once, each from 0 to the limit."""
    threads = [Thread(target=count_up) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# --- the same batch on ranks ---------------------------------------------------------------


def rank_gradient(
    rank: int,
    world_size: int,
    weighted: bool = False,
    count: int = BATCH,
) -> torch.Tensor:
    """Average the gradients of the shards that scatter would make; return the mean, flat.

    weighted: multiply each loss by the shard's share of the batch, in units of an equal share.
    """
    model, _ = start()
    images, labels = first_digits(count)
    shards = torch.arange(count).chunk(world_size)
    mine = shards[rank] if rank < len(shards) else shards[0][:0]  # fewer chunks than ranks
    loss = LOSS(model(images[mine]), labels[mine], reduction="sum") / max(1, len(mine))
    if weighted:
        loss = loss * len(mine) * world_size / count
    loss.backward()
    average_gradients(model)
    return _gradient(model)


def main(argv: list[str] | None = None) -> None:
    """Train on virtual devices, on ranks and plainly; compare, print one line."""
    options = lesson_parser("data_parallel", __doc__).parse_args(argv or [])
    with open_ranks(options.world_size, options.backend, options.trace) as ranks:
        n = ranks.world_size
        plain, parallel = train_plainly(), train(virtual(n))
        for what in plain:
            claim = f"the {what} of {n} devices and of one are the same"
            prove(claim, distance(parallel[what], plain[what]) < 1e-6)
        for gradient in ranks(rank_gradient, True):
            error = distance(gradient, parallel["gradient"])
            prove("the weighted mean over ranks is DataParallel's sum", error < 1e-6)
        for gradient in ranks(rank_gradient):
            same = distance(gradient, parallel["gradient"]) < 1e-6
            prove(
                "the plain mean is, too, if and only if all shards are equal",
                same == (BATCH % n == 0),
            )
        ranks.say(f"data_parallel: {ranks}, eight steps and a weighted mean equal one process")


if __name__ == "__main__":
    run_as_script(main)
