"""Graders of lesson 07: DataParallel by hand, uneven shards, and batches in parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_kit.check.compared import IN_MESSAGES, alone, compared
from ddp_kit.check.grader import by_size
from ddp_kit.errors import RankError

CPU, META = torch.device("cpu"), torch.device("meta")
WIDTH = 3
SHARDS = ([2, 1], [1, 2, 4], [3], [3, 3, 3, 1], [1, 5, 1, 2, 2])


@alone("7.a", "scatter(batch, places)")
def _scatter(scatter: Callable) -> dict[str, str]:
    found = {}
    for rows, count in ((6, 2), (6, 4), (5, 4)):
        batch = torch.arange(float(rows))[:, None]
        places = [META if place == min(count - 1, 2) else CPU for place in range(count)]
        chunks = scatter(batch, places)
        for place in range(count):
            chunk = chunks[place] if place < len(chunks) else None
            name = f"the chunk of device {place}, of {rows} rows on {count} devices"
            found[name] = "no chunk" if chunk is None else _described(chunk, [batch])
    return found


@alone("7.b", "replicate(model, places)")
def _replicate(replicate: Callable) -> dict[str, Any]:
    layer = nn.BatchNorm1d(2)
    own = [*layer.parameters(), *layer.buffers()]
    found: dict[str, Any] = {}
    for place, replica in enumerate(replicate(layer, [CPU, CPU, META])):
        for name, tensor in replica.items():
            found[f"{name} of replica {place}"] = _described(tensor, own)
    replicas = replicate(layer, [CPU] * 3)
    for factor, replica in enumerate(replicas, 1):
        loss = factor * replica["weight"].sum()
        if loss.requires_grad:
            loss.backward()
    found["the gradient of the model's weight"] = layer.weight.grad
    return found


def _described(tensor: torch.Tensor, own: list[torch.Tensor]) -> str:
    """Return a tensor's device, its numbers, and whether it shares them with one of these."""
    if tensor.device != CPU:
        return f"of shape {tuple(tensor.shape)} on {tensor.device}"
    storages = [one.untyped_storage().data_ptr() for one in own]
    shares = tensor.untyped_storage().data_ptr() in storages
    numbers = [round(number, 3) for number in tensor.flatten().tolist()]
    return f"{numbers} on cpu, {'shared' if shares else 'a copy'}"


@alone("7.c", "ByHand(module, places)")
def _by_hand(by_hand: Callable) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for rows in (5, 2):
        model, weights = _model(), []
        model.register_forward_hook(lambda m, *_, seen=weights: seen.append(m.weight.data_ptr()))
        outputs = by_hand(model, [CPU] * 3)(_batch(rows))
        if isinstance(outputs, torch.Tensor):
            outputs.square().mean().backward()
        found[f"the outputs of {rows} rows"] = _plain(outputs)
        found[f"the gradient of {rows} rows"] = model.weight.grad
        found[f"the number of forwards of {rows} rows"] = len(weights)
        found[f"the number of weights in these, of {rows} rows"] = len(set(weights))
    return found


@alone("7.3", "in_parts(function, batch, n)", "for nested batches", kind="function")
def _in_parts(in_parts: Callable) -> dict[str, Any]:
    labels, seen, model = torch.arange(5), [], _model()

    def rows_of(x: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        return 2 * x

    def network(batch: dict) -> dict:
        outputs = model(batch["images"])
        loss = (outputs[:, 0] - batch["labels"]).square().mean()
        named = {"name": batch["name"], "none": batch["none"], "number": 3}
        return {"outputs": outputs, "loss": loss, **named}

    def nested(batch: tuple) -> tuple:
        images, (counts, scale) = batch[0]["images"], batch[1]
        seen.append(
            f"{type(batch).__name__} of {type(batch[0]).__name__}, {type(batch[1]).__name__}"
        )
        return counts * scale, [images, (counts, {"sum": images.sum()})]

    found = {"the outputs of 6 rows in 3 parts": in_parts(rows_of, _batch(6), 3)}
    found["the outputs of 5 rows in 4 parts"] = in_parts(rows_of, _batch(5), 4)
    found["the rows of all these parts"] = seen[:]
    found["the outputs of one part"] = in_parts(rows_of, _batch(4), 1)
    batch = {"images": _batch(5), "labels": labels, "name": "train", "none": None}
    found["the outputs of a dict in one part"] = _plain(in_parts(network, batch, 1))
    outputs = in_parts(network, batch, 2)
    outputs["outputs"].sum().backward()
    found["the outputs of a dict"] = _plain(outputs)
    found["the gradient"] = model.weight.grad
    seen.clear()
    found["the outputs of a tuple"] = _plain(
        in_parts(nested, ({"images": _batch(5)}, [labels, 10]), 4)
    )
    found["the types of its parts"] = seen[:]
    return found


def _plain(value: Any) -> Any:
    """Return nested outputs with lists of numbers in the place of tensors."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return type(value)(map(_plain, value)) if isinstance(value, list | tuple) else value


ON_SHARDS: dict[str, Any] = {
    "sizes": (1, 2, 3, 4, 5),
    "cases": [(len(sizes), *sizes) for sizes in SHARDS],
    "part": lambda case: by_size([len(each) for each in SHARDS])(case[0]),
}


@compared(
    "7.1",
    "scatter_batch(batch, sizes, width)",
    "one message for each rank but the first",
    call=lambda n, *sizes: f"scatter_batch(batch, {list(sizes)}, {WIDTH})",
    **IN_MESSAGES | ON_SHARDS,
)
def _scatter_batch(rank: int, n: int, scatter_batch: Callable, *sizes: int) -> torch.Tensor:
    return scatter_batch(None if rank else _batch(sum(sizes)), list(sizes), WIDTH)


@compared(
    "7.2",
    "part_of_loss(outputs, targets, total)",
    "for shards of different sizes",
    on_failure={RankError: {"a tensor of one number": "no graph"}},
    call=lambda n, *sizes: f"part_of_loss(outputs, targets, total) for shards of {list(sizes)}",
    spare=None,
    **ON_SHARDS,
)
def _part_of_loss(rank: int, n: int, part_of_loss: Callable, *sizes: int) -> dict:
    model, shard = _model(), _batch(sum(sizes)).split(sizes)[rank]
    part = part_of_loss(model(shard), shard[:, :1], sum(sizes))
    if not isinstance(part, torch.Tensor) or not part.requires_grad or part.dim():
        raise TypeError(f"it should return a tensor of one number, with a graph, got {part!r}")
    part.backward()
    whole = part.detach()
    for each in (model.weight.grad, whole):
        dist.all_reduce(each)
    return {"the sum of all gradients": model.weight.grad, "the sum of all parts": whole}


def _batch(rows: int) -> torch.Tensor:
    """Return whole numbers, different in each row, so that sums are exact."""
    return torch.arange(float(rows * WIDTH)).view(rows, WIDTH)


def _model() -> nn.Linear:
    model = nn.Linear(WIDTH, 1, bias=False)
    nn.init.ones_(model.weight)
    return model
