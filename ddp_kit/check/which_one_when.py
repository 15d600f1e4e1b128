"""Graders of lesson 20: gradients on a mesh, a stage of ZeRO, what goes inside a host, an MFU.

The first answer runs on meshes of 1 to 4 ranks. The others are arithmetic; they run on one rank,
where they are bounded as all answers are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ddp_kit.check.device_mesh import mesh_name
from ddp_kit.check.grader import UNCHANGED, Grader, close, exercise, hint_for

MESHES = ((2, 2), (1, 2), (2, 1), (1, 1))  # most mistakes show on the first
BYTES = ((16, 0), (4, 12), (2, 14), (0, 16))  # kept and shared, of a parameter, by stage of ZeRO


@exercise(
    "20.1",
    "average_gradients(model, mesh)",
    where="on meshes of 2 x 2, 1 x 2, 2 x 1 and 1 x 1 ranks",
    cases=MESHES,
    part=mesh_name,
)
def _average_gradients(grader: Grader, dp: int, tp: int) -> None:
    n, case = dp * tp, f"average_gradients(model, mesh of {dp} x {tp})"
    result = grader.run(_average, (dp, tp), world_size=n, case=case)
    before = [_gradient(rank) for rank in range(n)]
    wanted = [sum(before[rank % tp :: tp]) / dp for rank in range(n)]
    total = sum(before)
    rows = [sum(before[rank // tp * tp :][:tp]) for rank in range(n)]
    mistakes = {
        UNCHANGED: before,
        "not divided": [each * dp for each in wanted],
        "divided by all ranks": [each / tp for each in wanted],
        "over all ranks": tuple(total / divisor for divisor in (1, dp, n)),
        "along tp": tuple([row / divisor for row in rows] for divisor in (1, dp, tp)),
        "other ranks": True,
    }
    grader.compare(wanted, result, mistakes, place=" in weight.grad")


def _average(rank: int, world_size: int, answer: Callable, shape: tuple[int, int]) -> Any:
    """Return the gradient of a layer after the answer has averaged it."""
    layer = nn.Linear(3, 2, bias=False)
    layer.weight.grad = _gradient(rank)
    answer(layer, init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")))
    return layer.weight.grad


def _gradient(rank: int) -> torch.Tensor:
    """Return a gradient that no other rank has; sums and means are exact."""
    return torch.arange(1.0, 7).view(2, 3) * 8**rank * 4


@exercise(
    "20.2",
    "smallest_stage(parameters, ranks, memory)",
    where="from 1 to 64 ranks, with a memory of 1 to 130 GB",
    cases=[
        *((7.5e9, 64, memory) for memory in (130e9, 40e9, 20e9, 10e9, 1e9)),
        *((1e9, 1, 17e9), (1e9, 1, 15e9), (70e9, 16, 80e9), (1e9, 8, 16e9)),
    ],
    part=lambda call: "on 64 ranks" if call[1] == 64 else "on 1 to 16 ranks",
)
def _smallest_stage(grader: Grader, parameters: float, ranks: int, memory: float) -> None:
    found = grader.ask(parameters, ranks, memory)
    needed = [parameters * (kept + shared / ranks) for kept, shared in BYTES]
    fitting = [stage for stage, nbytes in enumerate(needed) if nbytes <= memory]
    want = fitting[0] if fitting else None
    if type(found) is type(want) and found == want:
        return
    shown = ", ".join(f"{nbytes / 1e9:.1f}" for nbytes in needed)
    mistakes = {
        "nothing fits": want is None,
        "not the smallest": found in fitting,
        "wrong bytes": True,
    }
    grader.fail(
        f"it returns {found!r} where {want!r} is right",
        f"stages 0 to 3 need {shown} GB on a rank, and it has {memory / 1e9:.0f} GB",
        hint=hint_for(found, mistakes),
    )


@exercise(
    "20.3",
    "inside(sent, ranks, per_host)",
    where="for hosts with 8 and 16 ranks",
    cases=[
        ({"tp": 90.0, "pp": 1.0, "dp": 6.0}, {"tp": 8, "pp": 4, "dp": 16}, 8),
        ({"dp": 6.0, "pp": 1.0, "tp": 90.0}, {"dp": 16, "pp": 4, "tp": 2}, 8),
        ({"dp": 6.0, "cp": 9.0, "tp": 90.0}, {"dp": 2, "cp": 2, "tp": 4}, 16),
        ({"dp": 6.0, "cp": 9.0, "tp": 90.0}, {"dp": 2, "cp": 4, "tp": 4}, 8),
        ({"dp": 6.0, "tp": 90.0}, {"dp": 4, "tp": 16}, 8),
    ],
    part=lambda call: f"hosts with {call[2]} ranks",
)
def _inside(grader: Grader, *call: Any) -> None:
    found = grader.ask(*call)
    sent, ranks, per_host = call
    want, room = [], per_host
    for name in sorted(sent, key=sent.get, reverse=True):
        if room % ranks[name]:
            break
        want.append(name)
        room //= ranks[name]
    if isinstance(found, list) and found == want:
        return
    known = isinstance(found, list) and all(name in list(ranks) for name in found)
    names = found if known else []
    together = math.prod(ranks[name] for name in names)
    mistakes = {
        "no list": not isinstance(found, list),
        "not most first": known and sorted(names) == sorted(want),
        "too many ranks": together > per_host,
        "stops early": bool(names) and names == want[: len(names)],
        "not in order": True,
    }
    grader.fail(
        f"it returns {found!r} where {want!r} is right",
        *([f"these are {together} ranks, and a host has {per_host}"] if names else []),
        hint=hint_for(found, mistakes),
    )


@exercise(
    "20.4",
    "step_seconds(layers, width, parameters, context, tokens, gpus, peak, mfu)",
    where="for Llama 3 with 405 billion parameters, and for one with 6.7",
    cases=[
        (126, 16_384, 405e9, 8_192, 16.8e6, 8_192, 989e12, 0.43),
        (126, 16_384, 405e9, 131_072, 16.8e6, 16_384, 989e12, 0.38),
        (32, 4_096, 6.7e9, 4_096, 4e6, 1_024, 312e12, 0.45),
        (32, 4_096, 6.7e9, 0, 4e6, 1_024, 312e12, 0.45),
    ],
    part=lambda call: "with attention" if call[3] else "without attention",
)
def _step_seconds(grader: Grader, *call: Any) -> None:
    found = grader.ask(*call)
    layers, width, parameters, context, tokens, gpus, peak, mfu = call
    attention = 12 * layers * width * context
    rate = gpus * peak * mfu
    want = (6 * parameters + attention) * tokens / rate
    mistakes = {
        "no attention": 6 * parameters * tokens / rate,
        "forward only": want / 3,
        "one gpu": want * gpus,
        "no mfu": want * mfu,
        "times mfu": want * mfu**2,
        "one token": want / tokens,
        "two flops": (2 * parameters + attention) * tokens / rate,
        "attention forward only": (6 * parameters + attention / 3) * tokens / rate,
        "other number": True,
    }
    if not close(want, found):
        shown = f"{found:.3g}" if isinstance(found, int | float) else repr(found)
        fact = f"it returns {shown} where {want:.3g} seconds are right"
        grader.fail(fact, hint=hint_for(found, mistakes))
