"""DataParallel: eight steps in one process, all of them through the first device.

`nn.DataParallel` by hand, with the memory that each device holds after each of the steps scatter,
replicate, parallel apply, gather, loss, backward, reduce and update; and its time beside DDP's.
Sources: PyTorch's `torch.nn.parallel`, and the notes "Multi GPU", section DataParallel, and
"Distributed training".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from threading import Thread
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_kit import compare, device
from ddp_kit.launch import lesson_parser, open_ranks, prove, run_as_script
from ddp_kit.lessons._data_parallel_steps import (  # noqa: F401 - some are only for the notebook
    LOSS,
    ByHand,
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
from ddp_kit.lessons._digits import first_digits, flat
from ddp_kit.lessons.partitioned_sgd import SEED, Net, average_gradients

BATCH = 30
ZERO_GRAD = ("before forward", "after the loss", "after backward")  # where it may be called


def start(place: torch.device | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the network of lesson 03 and its optimizer, with the same numbers every time.

    Dropout is off: each shard would get a mask of its own.
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
    return _train(ByHand(model, places), optimizer, places[0], steps, count)


def train_plainly(steps: int = 3, count: int = BATCH) -> dict:
    """Train in the usual way on one device: the reference."""
    model, optimizer = start()
    return _train(model, optimizer, device(), steps, count)


def _train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    place: torch.device,
    steps: int,
    count: int,
) -> dict:
    gradient = None
    for images, labels in batches(steps, count):
        optimizer.zero_grad()
        LOSS(model(images.to(place)), labels.to(place)).backward()
        optimizer.step()
        gradient = _gradient(model) if gradient is None else gradient
    return {"gradient": gradient, "parameters": flat(model.parameters())}


def last_loss(
    zero: str = "before forward", use: Callable[[torch.Tensor], torch.Tensor] = lambda data: data
) -> float:
    """Train three epochs of 600 digits, perhaps with a slip; return the mean loss of the last.

    zero: where `zero_grad` is called, "before forward", "after the loss" or "after backward".
    use: returns the images to train on, given those that belong to the labels.

    Raises ValueError if `zero` is something else.
    """
    if zero not in ZERO_GRAD:
        raise ValueError(f"zero must be one of {', '.join(map(repr, ZERO_GRAD))}; got {zero!r}")
    model, _ = start()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    losses = []
    for data, target in 3 * batches(20):
        if zero == "before forward":
            optimizer.zero_grad()
        loss = LOSS(model(use(data)), target)
        if zero == "after the loss":
            optimizer.zero_grad()
        loss.backward()
        if zero == "after backward":
            optimizer.zero_grad()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-20:]) / 20


def _gradient(model: nn.Module) -> torch.Tensor:
    return flat(parameter.grad for parameter in model.parameters())


# --- what each device holds ----------------------------------------------------------------

# What a device may hold. Each line: the whole of something, then a part or copy of it.
KINDS = (
    *("parameters", "replica"),
    *("batch", "shard"),
    *("gathered, loss", "outputs"),
    *("gradients", "optimizer state"),
    "kept for backward",
)


class MemoryTracker:
    """Tracks the memory of every device: each storage once, for as long as it lives."""

    def __init__(self, count: int) -> None:
        self.count = count
        # A storage is one object for as long as anything holds its memory, even autograd alone.
        self._known: WeakKeyDictionary[torch.UntypedStorage, tuple[int, str, int]] = (
            WeakKeyDictionary()
        )

    def add(self, place: int, kind: str, tensors: Iterable[torch.Tensor]) -> None:
        """Add the memory of these tensors; a storage that is known already keeps its first kind."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._known.setdefault(storage, (place, kind, storage.nbytes()))

    def bytes(self) -> list[dict[str, int]]:
        """Return the bytes alive now, by kind, for each device."""
        held = [dict.fromkeys(KINDS, 0) for _ in range(self.count)]
        for place, kind, nbytes in self._known.values():
            held[place][kind] += nbytes
        return held


def kept_for_backward(output: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that autograd saved, in every node on the way back from `output`."""
    found, seen, waiting = [], set(), [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        saved = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        found += [value for value in saved if isinstance(value, torch.Tensor)]
        waiting += [earlier for earlier, _ in node.next_functions]
    return found


def held_after_each_step(
    places: Sequence[torch.device],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    images: torch.Tensor,
    labels: torch.Tensor,
) -> dict[str, list[dict[str, int]]]:
    """Train one step; return the bytes alive after each of the eight, by device and kind."""
    memory = MemoryTracker(len(places))
    memory.add(0, "parameters", [*model.parameters(), *model.buffers()])
    for state in optimizer.state.values():
        values = [value for value in state.values() if isinstance(value, torch.Tensor)]
        memory.add(0, "optimizer state", values)
    memory.add(0, "batch", [images, labels])
    after = {}
    for step, kind, new in eight_steps(model, optimizer, images, labels, places):
        for place, tensors in enumerate(new):
            memory.add(place, kind, tensors)
            if step == "parallel apply":
                memory.add(place, "kept for backward", kept_for_backward(tensors[0]))
        del new, tensors  # these names would keep the memory alive
        after[step] = memory.bytes()
    return after


def held_by_net(
    places: Sequence[torch.device], count: int = BATCH
) -> dict[str, list[dict[str, int]]]:
    """Count the bytes in the second training step of lesson 03's network, on `count` digits.

    The second step, because momentum has no memory before the first update.
    """
    model, optimizer = start(places[0])
    first, second = batches(2, count)
    images, labels = (tensor.to(places[0]) for tensor in first)
    for _ in eight_steps(model, optimizer, images, labels, places):
        pass
    images, labels = (tensor.to(places[0], copy=True) for tensor in second)
    return held_after_each_step(places, model, optimizer, images, labels)


# --- time ----------------------------------------------------------------------------------


def seconds_a_step(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor, rounds: int = 30
) -> list[float]:
    """Return how long each of some training steps took, after three that warm up.

    PyTorch computes on one thread meanwhile: with small shards on many threads, one would mostly
    measure threads waiting.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    seconds = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(rounds + 3):
            begin = time.perf_counter()
            optimizer.zero_grad()
            F.nll_loss(model(images), labels).backward()
            optimizer.step()
            if images.is_cuda:
                torch.cuda.synchronize(images.device)
            seconds.append(time.perf_counter() - begin)
    finally:
        torch.set_num_threads(threads)
    return seconds[3:]


def ddp_seconds(rank: int, world_size: int, count: int = 256) -> list[float]:
    """Time steps of DDP on this rank's share of `count` digits; return the seconds of each."""
    images, labels = first_digits(count)
    model = DistributedDataParallel(start()[0])
    return seconds_a_step(model, images[rank::world_size], labels[rank::world_size])


def step_seconds(
    contestants: Sequence[Sequence[torch.device]], rounds: int = 20
) -> list[dict[str, list[float]]]:
    """Time each of the eight steps on several sets of devices, in turn, so that all share noise.

    Returns the seconds by step for each set, `rounds` of them. PyTorch computes on one thread
    meanwhile: with small shards on many threads, one would mostly measure threads waiting.
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
    """Count in plain Python, one by one: work that holds the interpreter lock (GIL)."""
    number = 0
    while number < limit:
        number += 1
    return number


def count_up_in_threads(count: int) -> None:
    """Run `count_up` in `count` threads of this process at once."""
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

    weighted: multiply each loss by the size of its shard relative to an equal share.
    """
    model, _ = start()
    images, labels = first_digits(count)
    shards = torch.arange(count).chunk(world_size)
    mine = shards[rank] if rank < len(shards) else shards[0][:0]  # fewer chunks than ranks
    loss = F.nll_loss(model(images[mine]), labels[mine], reduction="sum") / max(1, len(mine))
    if weighted:
        loss = loss * len(mine) * world_size / count
    loss.backward()
    average_gradients(model)
    return flat(parameter.grad for parameter in model.parameters())


def main(argv: list[str] | None = None) -> None:
    """Train on virtual devices, on ranks and on one device; compare, and print one line."""
    options = lesson_parser("data_parallel", __doc__).parse_args(argv or [])
    with open_ranks(options.world_size, options.backend, options.trace) as ranks:
        n = ranks.world_size
        plain, parallel = train_plainly(), train(virtual(n))
        for what in plain:
            claim = f"the {what} of {n} devices and of one are the same"
            prove(claim, compare(parallel[what], plain[what]))
        found = compare(ranks(rank_gradient, True), parallel["gradient"])
        prove("the weighted mean over ranks is DataParallel's sum", found)
        found = compare(ranks(rank_gradient), parallel["gradient"])
        claim = "so is the plain mean, but only for equal shards"
        prove(claim, found.equal == (BATCH % n == 0))
        ranks.say(f"data_parallel: {ranks}, eight steps and a weighted mean equal one process")


if __name__ == "__main__":
    run_as_script(main)
