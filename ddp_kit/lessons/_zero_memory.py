"""What a rank holds with each stage of ZeRO, by kind: measured, by formula, and drawn."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ddp_kit.error_text import count
from ddp_kit.lessons._gpt import Config, batches, loss_of, make_gpt, part_of
from ddp_kit.lessons._zero_ways import ADAM, BATCH, OPTIMIZERS, WAYS, Training
from ddp_kit.notebook.controls import Explorer

STAGES = {"stage 1": 1, "stage 2": 2, "stage 3": 3, "ZeroRedundancyOptimizer": 1, "fully_shard": 3}
WIDTHS = (32, 64, 128, 256)


def held(training: Training) -> dict[str, int]:
    """Return the bytes of memory behind a rank's tensors, by kind.

    Several views of one memory count once, and so does memory that two kinds share.
    """
    optimizer = training.optimizer
    inner = getattr(optimizer, "inner", None) or getattr(optimizer, "optim", None) or optimizer
    groups = inner.param_groups
    trained = [*training.model.parameters(), *(p for group in groups for p in group["params"])]
    kinds = {
        "parameters": training.kept(),
        "gathered parameters": training.gathered(),
        "gradients": [p.grad for p in trained if p.grad is not None],
        "optimizer states": [
            value
            for state in inner.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.ndim  # step counts are tiny
        ],
    }
    seen: set[int] = set()
    return {kind: sum(memory(tensor, seen) for tensor in kinds[kind]) for kind in kinds}


def watch_memory(rank: int, world_size: int, way: str) -> dict[str, dict[str, int]]:
    """Return what this rank holds at four moments of its second training step with Adam.

    In the forward and the backward, that is when it holds most. The result maps a moment to bytes
    by kind, as `held` does; `kit.plot.memory` draws a list of these for each moment.
    """
    model = make_gpt()
    training, moments = WAYS[way](model, ADAM), {}

    def note(moment: str, *_: Any) -> None:
        now = held(training)
        moments[moment] = max(moments.get(moment, now), now, key=lambda kinds: sum(kinds.values()))

    def note_in_backward(_: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(partial(note, "in the backward"))

    for step, batch in enumerate(batches(BATCH, 2)):
        training.optimizer.zero_grad()
        if step:
            note("before")
            for module in model.modules():
                module.register_forward_pre_hook(partial(note, "in the forward"))
                module.register_forward_hook(note_in_backward)
        loss_of(training.model, *part_of(batch, rank, world_size)).backward()
        training.finish()
        training.optimizer.step()
        training.after()
    note("after the step")
    return moments


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
    training = WAYS[way](make_gpt(Config(width=width)), OPTIMIZERS[optimizer][0])
    batch = next(batches(BATCH, 1))
    loss_of(training.model, *part_of(batch, rank, world_size)).backward()
    training.finish()
    training.optimizer.step()
    training.after()
    return held(training)


def expected_memory(way: str, optimizer: str, parameters: int, n: int) -> dict[str, int]:
    """Return the bytes that each of n ranks holds, by kind: 4, 4 and those of the states.

    A stage divides the last ones by n: first the states, then the gradients, then the parameters.
    """
    nbytes = {"parameters": 4, "gradients": 4, "optimizer states": OPTIMIZERS[optimizer][1]}
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
        bars = {"measured": list(result)}
        for label, name in {"formula": way, "DDP's formula": "DDP"}.items():
            bars[label] = [expected_memory(name, optimizer, size, n)] * n
        title = f"{way} with {optimizer}: {size:,} parameters on {count(n, 'rank')}"
        return plot.memory(bars, title, "rank")

    return Explorer(
        "zero",
        {"way": way, "optimizer": optimizer, "world_size": world_size, "width": width},
        choices=lambda settings: options,
        ask=lambda settings: (hold, *(settings[name] for name in ("way", "optimizer", "width"))),
        draw=draw,
    )
