"""Of the lesson on DataParallel: virtual devices, the bytes that each holds, and the proof."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn

from ddp_kit import compare, device
from ddp_kit.lessons._digits import first_digits, flat
from ddp_kit.lessons._launch import Ranks, lesson_main, prove
from ddp_kit.lessons.partitioned_sgd import average_gradients
from ddp_kit.lessons.zero import states_of

_BATCH = 30


def devices(count: int) -> list[torch.device]:
    """Return `count` GPUs if this machine has that many, else `count` virtual devices."""
    if 1 < count <= torch.cuda.device_count():
        return [torch.device("cuda", index) for index in range(count)]
    return virtual(count)


def virtual(count: int) -> list[torch.device]:
    """Return this process's own device `count` times; each time counts as a virtual device."""
    return [device()] * count


def are_real(places: Sequence[torch.device]) -> bool:
    """Return whether the devices differ, so that they are GPUs and not virtual devices."""
    return len(set(places)) > 1


# What a device may hold. Each line: the whole of something, then a part or copy of it.
_KINDS = (
    *("parameters", "replica"),
    *("batch", "shard"),
    *("gathered, loss", "outputs"),
    *("gradients", "optimizer state"),
    "kept for backward",
)


def _kept_for_backward(output: torch.Tensor) -> list[torch.Tensor]:
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
    """Train one step; return the bytes alive after each of the eight, by device and kind.

    Memory counts once, as the kind that it was first, for as long as anything holds it.
    """
    known: WeakKeyDictionary = WeakKeyDictionary()  # storages that are alive

    def add(place: int, kind: str, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            known.setdefault(storage, (place, kind, storage.nbytes()))

    add(0, "parameters", [*model.parameters(), *model.buffers()])
    add(0, "optimizer state", states_of(optimizer))
    add(0, "batch", [images, labels])
    after = {}
    for step, kind, new in lesson.eight_steps(model, optimizer, images, labels, places):
        for place, tensors in enumerate(new):
            add(place, kind, tensors)
            if step == "parallel apply":
                add(place, "kept for backward", _kept_for_backward(tensors[0]))
        del new, tensors  # these names would keep the memory alive
        after[step] = [dict.fromkeys(_KINDS, 0) for _ in places]
        for place, held_as, nbytes in known.values():
            after[step][place][held_as] += nbytes
    return after


def held_by_net(
    places: Sequence[torch.device], count: int = _BATCH
) -> dict[str, list[dict[str, int]]]:
    """Count the bytes in the second training step of lesson 03's network, on `count` digits.

    The second step, because momentum has no memory before the first update.
    """
    model, optimizer = lesson.start(places[0])
    images, labels = (tensor.to(places[0], copy=True) for tensor in first_digits(count))
    for _ in lesson.eight_steps(model, optimizer, images, labels, places):
        pass
    return held_after_each_step(places, model, optimizer, images, labels)


def rank_gradient(rank: int, world_size: int, count: int = _BATCH) -> torch.Tensor:
    """Average the gradients of the shards that scatter would make; return the mean, flat.

    Each loss is multiplied by the size of its shard relative to an equal share.
    """
    model, _ = lesson.start()
    images, labels = first_digits(count)
    shards = torch.arange(count).chunk(world_size)
    mine = shards[rank] if rank < len(shards) else shards[0][:0]  # fewer chunks than ranks
    loss = F.nll_loss(model(images[mine]), labels[mine], reduction="sum") * world_size / count
    loss.backward()
    average_gradients(model)
    return flat(parameter.grad for parameter in model.parameters())


@lesson_main("data_parallel")
def main(ranks: Ranks) -> str:
    """Train on virtual devices, on ranks and on one device; compare, and print one line."""
    n = ranks.world_size
    plain, parallel = lesson.train(), lesson.train(virtual(n))
    for what in plain:
        claim = f"the {what} of {n} devices and of one are the same"
        prove(claim, compare(parallel[what], plain[what]))
    found = compare(ranks(rank_gradient), parallel["gradient"])
    prove("the weighted mean over ranks is DataParallel's sum", found)
    return "eight steps and a weighted mean equal one process"


from ddp_kit.lessons import data_parallel as lesson
