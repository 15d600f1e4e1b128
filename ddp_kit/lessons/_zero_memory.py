"""What a rank holds with each stage of ZeRO, by kind: measured, by formula, and drawn."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ddp_kit.error_text import count
from ddp_kit.launch import choose
from ddp_kit.lessons._gpt import Config, batches, make_gpt
from ddp_kit.lessons._zero_ways import BATCH, OPTIMIZERS, WAYS, Training, take_steps
from ddp_kit.notebook.controls import Explorer

STAGES = {"stage 1": 1, "stage 2": 2, "stage 3": 3, "ZeroRedundancyOptimizer": 1, "fully_shard": 3}
WIDTHS = (32, 64, 128, 256)


def held(training: Training) -> dict[str, int]:
    """Return the bytes of memory behind a rank's tensors, by kind.

    Several views of one memory count once, and so does memory that two kinds share.
    """
    optimizer = training.optimizer
    inner = getattr(optimizer, "inner", None) or getattr(optimizer, "optim", None) or optimizer
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    under_way = [p.reducing for p in training.sharded if p.reducing is not None]
    kinds = {
        "parameters": trained,
        "gathered parameters": [parameter.filled for parameter in training.sharded],
        "gradients": [p.grad for p in trained if p.grad is not None],
        "gradients on their way": [t for whole, mean, _ in under_way for t in (whole, mean)],
        "optimizer states": [
            value
            for state in inner.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.ndim  # step counts are tiny
        ],
    }
    seen: set[int] = set()
    return {kind: sum(memory(tensor, seen) for tensor in kinds[kind]) for kind in kinds}


def watch_memory(
    rank: int, world_size: int, start: Callable[[nn.Module], Training]
) -> dict[str, dict[str, int]]:
    """Return what this rank holds at four moments of its second training step.

    start: sets the training of a model up. In the forward and the backward, the moment is the one
    of all beginnings of a module's forward, or backward, at which the rank holds most. The result
    maps a moment to bytes by kind, as `held` does; `kit.plot.memory` draws a list of these for each
    moment.
    """
    model = make_gpt()
    training, moments = start(model), {}

    def note(moment: str, *_: Any) -> None:
        now = held(training)
        moments[moment] = max(moments.get(moment, now), now, key=lambda kinds: sum(kinds.values()))

    def note_in_backward(_: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(partial(note, "at most, in the backward"))

    data = batches(BATCH, 2)
    take_steps(training, islice(data, 1), rank, world_size)
    training.optimizer.zero_grad()
    note("before")
    for module in model.modules():
        module.register_forward_pre_hook(partial(note, "at most, in the forward"))
        module.register_forward_hook(note_in_backward)
    take_steps(training, data, rank, world_size)
    note("after the step")
    return moments


def watch_layers(
    rank: int, world_size: int, start: Callable[[nn.Module], Training]
) -> list[tuple[str, str, list[str], list[str], list[str]]]:
    """Return which layers have what when a layer begins, in the second training step of stage 3.

    start: sets the training of a model up, as stage 3. For the forward and the backward of each
    layer there are: "forward" or "backward"; its name; and the names of the layers whose weight is
    complete, whose weight is on its way, and whose gradient is.
    """
    model = make_gpt()
    training, found = start(model), []
    layers = {name: each for name, each in model.named_modules() if each in training.model.own}
    weights = {name: training.model.own[layer]["weight"] for name, layer in layers.items()}

    def note(what: str, layer: str, *_: Any) -> None:
        here = {name for name, weight in weights.items() if weight.memory.nbytes()}
        coming = {name for name in here if weights[name].gathering is not None}
        leaving = {name for name, weight in weights.items() if weight.reducing is not None}
        found.append((what, layer, *map(sorted, (here - coming, coming, leaving))))

    def note_in_backward(layer: str, _: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(partial(note, "backward", layer))

    data = batches(BATCH, 2)
    take_steps(training, islice(data, 1), rank, world_size)
    for name, layer in layers.items():
        layer.register_forward_pre_hook(partial(note, "forward", name))
        layer.register_forward_hook(partial(note_in_backward, name))
    take_steps(training, data, rank, world_size)
    return found


def memory(tensor: torch.Tensor, seen: set[int]) -> int:
    """Return the bytes of a tensor's memory, or 0 if it was seen before."""
    storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
    if storage.data_ptr() in seen:
        return 0
    seen.add(storage.data_ptr())
    return storage.nbytes()


def hold(
    rank: int, world_size: int, way: str = "stage 3", optimizer: str = "Adam", width: int = 64
) -> dict[str, int]:
    """Train a GPT of this width for a step; return the bytes that this rank holds, by kind."""
    training = choose("way", way, WAYS)(
        make_gpt(Config(width=width)), choose("optimizer", optimizer, OPTIMIZERS)[0]
    )
    take_steps(training, batches(BATCH, 1), rank, world_size)
    return held(training)


def expected_memory(way: str, optimizer: str, parameters: int, n: int) -> dict[str, int]:
    """Return the bytes that each of n ranks holds, by kind: 4, 4 and those of the states.

    A stage divides the last ones by n: first the states, then the gradients, then the parameters.
    """
    nbytes = {
        "parameters": 4,
        "gradients": 4,
        "optimizer states": choose("optimizer", optimizer, OPTIMIZERS)[1],
    }
    whole = len(nbytes) - STAGES.get(way, 0)
    return {
        kind: round(each * parameters / (1 if place < whole else n))
        for place, (kind, each) in enumerate(nbytes.items())
    }


def explore(
    way: str = "stage 3", optimizer: str = "Adam", world_size: int = 4, width: int = 64
) -> Explorer:
    """Train a GPT for a step, and draw what each rank holds, beside the formulas of way and DDP.

    way: one of WAYS. optimizer: one of OPTIMIZERS. width: of the GPT, which makes it larger. In
    JupyterLab, controls follow. Raises PoolError for an invalid choice.
    """
    from ddp_kit import plot  # ranks do not need it

    sizes = [n for n in range(1, 7) if BATCH % n == 0]
    options = {"way": tuple(WAYS), "optimizer": tuple(OPTIMIZERS)}
    options |= {"world_size": sizes, "width": WIDTHS}

    def draw(result, settings: dict):
        way, optimizer, n = (settings[name] for name in ("way", "optimizer", "world_size"))
        size = sum(p.numel() for p in make_gpt(Config(width=settings["width"])).parameters())
        bars = {f"{way}, measured": list(result)}
        for name in (way, "DDP"):
            bars[f"{name}, formula"] = [expected_memory(name, optimizer, size, n)] * n
        title = f"Memory after a step with {way} and {optimizer}: "
        title += f"{size:,} parameters, {count(n, 'rank')}"
        return plot.memory(bars, title, "rank")

    return Explorer(
        "zero",
        {"way": way, "optimizer": optimizer, "world_size": world_size, "width": width},
        choices=lambda settings: options,
        ask=lambda settings: (hold, *(settings[name] for name in ("way", "optimizer", "width"))),
        draw=draw,
    )
