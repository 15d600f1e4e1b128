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
from ddp_kit.check.grader import Grader, close, exercise, hint_for

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
    hints = {
        "The gradients are as before. Write into parameter.grad, in place.": before,
        'That is the sum. Divide it by the number of ranks along "dp": mesh["dp"].size().': (
            [each * dp for each in wanted]
        ),
        'Divide by the ranks along "dp" only: those along "tp" have other parameters.': (
            [each / tp for each in wanted]
        ),
        'Ranks along "tp" have different parameters, so their gradients must not be added up. '
        'Pass the group along "dp": mesh.get_group("dp").': tuple(
            total / divisor for divisor in (1, dp, n)
        ),
        'Those are the ranks along "tp", which have different parameters. Those with the same '
        'parameters and other data are along "dp".': tuple(
            [row / divisor for row in rows] for divisor in (1, dp, tp)
        ),
        'Each gradient should be the mean over the ranks along "dp".': True,
    }
    grader.compare(wanted, result, hints, place=" in weight.grad")


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
    shown = ", ".join(f"{nbytes / 1e9:.1f}" for nbytes in needed)
    hint = f"Stages 0 to 3 need {shown} GB on a rank, and it has {memory / 1e9:.0f} GB. "
    if want is None:
        hint += "If not even stage 3 fits, return None."
    elif found in fitting:
        hint += "Return the smallest that fits: a higher stage may send more."
    else:
        hint += "A stage shares 0, 12, 14 or 16 of the 16 bytes, and keeps the others."
    if type(found) is not type(want) or found != want:
        grader.fail(f"it returns {found!r} where {want!r} is right", hint=hint)


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
    if not isinstance(found, list) or found != want:
        hint = _hint_for_inside(call, want, found)
        grader.fail(f"it returns {found!r} where {want!r} is right", hint=hint)


def _hint_for_inside(call: tuple, want: list[str], found: Any) -> str:
    _, ranks, per_host = call
    if not isinstance(found, list):
        return "Return a list of names, such as `['tp']`."
    if sorted(found) == sorted(want):
        return "Begin with the dimension that sends most: its ranks are the nearest."
    if all(name in ranks for name in found):
        together = math.prod(ranks[name] for name in found)
        if together > per_host:
            return f"Those are {together} ranks, and a host has {per_host}."
        if found and found == want[: len(found)]:
            return f"There is room for more: those are {together} of {per_host} ranks."
    return (
        "Take the dimensions in the order of the bytes that they send, most first, until the next "
        "one does not divide the ranks that are left in a host."
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
    hints = {
        "The attention is missing: 12 * layers * width * context FLOPs per token.": (
            6 * parameters * tokens / rate
        ),
        "That is forward only. Backward takes twice as many FLOPs.": want / 3,
        "All GPUs work at the same time: divide by their number.": want * gpus,
        "Only the share mfu of the peak is reached.": want * mfu,
        "Divide by mfu: with a smaller one, a step takes longer.": want * mfu**2,
        "That is one token. A step has `tokens` of them.": want / tokens,
        "A parameter needs 6 FLOPs per token.": (2 * parameters + attention) * tokens / rate,
        "Backward needs attention, too.": (6 * parameters + attention / 3) * tokens / rate,
        "FLOPs of all tokens, divided by gpus * peak * mfu.": True,
    }
    if not close(want, found):
        shown = f"{found:.3g}" if isinstance(found, int | float) else repr(found)
        fact = f"it returns {shown} where {want:.3g} seconds are right"
        grader.fail(fact, hint=hint_for(found, hints))
