"""DataParallel: eight steps in one process, all of them through the first device.

`nn.DataParallel` taken apart into scatter, replicate, parallel apply, gather, loss, backward,
reduce and update, with what each device holds after each of them. Sources: PyTorch's
`torch.nn.parallel`, and the notes "Multi GPU", section DataParallel, and "Distributed training".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from threading import Thread

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from ddp_kit import device
from ddp_kit.launch import lesson_parser, open_ranks, prove, run_as_script
from ddp_kit.lessons._holdings import Holdings, kept_for_backward
from ddp_kit.lessons.partitioned_sgd import Net, average_gradients, first_digits, flat

BATCH = 30
SEED = 1234
LOSS = F.nll_loss


def devices(count: int) -> list[torch.device]:
    """Name so many GPUs if this machine has them, else so many virtual devices."""
    if 1 < count <= torch.cuda.device_count():
        return [torch.device("cuda", index) for index in range(count)]
    return virtual(count)


def virtual(count: int) -> list[torch.device]:
    """Name this process's own device several times: each time is a virtual device."""
    return [device()] * count


def are_real(places: Sequence[torch.device]) -> bool:
    """Tell whether the devices differ, so that PyTorch's own functions can run on them."""
    return len(set(places)) > 1


def scatter(batch: torch.Tensor, places: Sequence[torch.device]) -> list[torch.Tensor]:
    """Cut the batch into chunks, the first for device 0, and copy the others away from it."""
    if are_real(places):
        return list(nn.parallel.scatter(batch, places))
    first, *others = batch.chunk(len(places))
    return [first, *(chunk.clone() for chunk in others)]


@dataclass(frozen=True)
class Replica:
    """The network as one device has it: what calls it, and its own parameters."""

    forward: Callable[[torch.Tensor], torch.Tensor]
    parameters: list[torch.Tensor]


def replicate(model: nn.Module, places: Sequence[torch.device]) -> list[Replica]:
    """Copy the network to every device but the first, whose replica is the model's own memory.

    Backward goes through the copies: it adds the gradients of all replicas up on device 0.
    """
    names = [name for name, _ in model.named_parameters()]
    if are_real(places):
        modules = nn.parallel.replicate(model, places)
        return [Replica(m, [attrgetter(name)(m) for name in names]) for m in modules]
    replicas = []
    for index in range(len(places)):
        copy = torch.clone if index else lambda tensor: tensor.view_as(tensor)
        parameters = {name: copy(p) for name, p in model.named_parameters()}
        buffers = {name: copy(b) for name, b in model.named_buffers()}
        replicas.append(Replica(_caller(model, parameters | buffers), list(parameters.values())))
    return replicas


def _caller(model: nn.Module, tensors: dict[str, torch.Tensor]) -> Callable:
    return lambda shard: functional_call(model, tensors, (shard,))


def parallel_apply(
    replicas: Sequence[Replica], shards: Sequence[torch.Tensor], places: Sequence[torch.device]
) -> list[torch.Tensor]:
    """Call each replica with its shard: in a thread for each GPU, else one after the other."""
    if are_real(places):
        used = places[: len(replicas)]
        return nn.parallel.parallel_apply([r.forward for r in replicas], shards, devices=used)
    return [replica.forward(shard) for replica, shard in zip(replicas, shards, strict=True)]


def gather(outputs: Sequence[torch.Tensor], places: Sequence[torch.device]) -> torch.Tensor:
    """Join all outputs on device 0; a single one is there already."""
    if len(outputs) == 1:
        return outputs[0]
    if are_real(places):
        return nn.parallel.gather(outputs, places[0])
    return torch.cat(list(outputs))


def eight_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    images: torch.Tensor,
    labels: torch.Tensor,
    places: Sequence[torch.device],
    loss_of: Callable = LOSS,
) -> Iterator[tuple[str, str, list[list[torch.Tensor]]]]:
    """Train one step as DataParallel does; stop after each of the eight.

    Yields (step, kind, new): the tensors that the step made, a list for each device that got
    some, from device 0 on. Model and batch lie on device 0, as DataParallel wants it.
    """
    optimizer.zero_grad()
    shards = scatter(images, places)
    yield "scatter", "shard", [[shard] for shard in shards]

    replicas = replicate(model, places[: len(shards)])
    copies = [replica.parameters for replica in replicas]
    yield "replicate", "replica", copies

    outputs = parallel_apply(replicas, shards, places)
    yield "parallel apply", "outputs", [[output] for output in outputs]

    gathered = gather(outputs, places)
    del shards, replicas, outputs  # what backward needs of them stays, like on GPUs
    yield "gather", "gathered, loss", [[gathered]]

    loss = loss_of(gathered, labels)
    yield "loss", "gathered, loss", [[loss]]

    # loss.backward() does both of the next steps; here it stops where the replicas begin.
    every_copy = [tensor for copy in copies for tensor in copy]
    gradients = torch.autograd.grad(loss, every_copy)
    width = len(copies[0])
    yield "backward", "gradients", [list(part) for part in _parts(gradients, width)]

    torch.autograd.backward(every_copy, gradients)
    del copies, every_copy, gradients
    yield "reduce", "gradients", [[parameter.grad for parameter in model.parameters()]]

    optimizer.step()
    yield "update", "parameters", [list(model.parameters())]


def _parts(values: Sequence[torch.Tensor], width: int) -> list[Sequence[torch.Tensor]]:
    return [values[start : start + width] for start in range(0, len(values), width)]


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


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference between two tensors of one shape."""
    return (one - other).abs().max().item()


if __name__ == "__main__":
    run_as_script(main)
