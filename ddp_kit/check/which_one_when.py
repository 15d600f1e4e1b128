"""Graders of lesson 20: gradients on a mesh, ZeRO, what goes inside a host, an MFU, pipelines.

20.a and 20.1 run on a mesh of ranks. The others are arithmetic; they run on one rank, where they
are bounded as all answers are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from numbers import Integral
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ddp_kit.check.compared import alone, as_float, asked, compared
from ddp_kit.check.grader import Grader, called_with, only
from ddp_kit.check.record import Score, Span, record
from ddp_kit.error_text import count
from ddp_kit.model import DGX_H100, FP32, MIXED, Plan, Precision, Transformer

# Seconds of computing: a backward that hides a reduce_scatter, a forward that hides a gather.
HIDES_A_REDUCTION, HIDES_A_GATHER = 0.002, 0.0036


@compared("20.1", "gradient_norm(model, mesh, cut)", sizes=(2, 4))
def _gradient_norm(rank: int, world_size: int, answer: Callable) -> float:
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    cut = {"0.weight", "0.bias", "1.weight"}  # one bias is whole
    for number, (name, parameter) in enumerate(model.named_parameters(), 1):
        part = mesh.get_local_rank("tp") if name in cut else 0
        parameter.grad = torch.full_like(parameter, number + 4.0 * part)
    return _number(answer(model, mesh, cut))


def _number(value: Any) -> Any:
    one = isinstance(value, torch.Tensor) and value.numel() == 1
    return as_float(value.item() if one else value)


asked(
    "20.2",
    "smallest_stage(parameters, ranks, memory)",
    [
        *((7.5e9, 64, memory) for memory in (130e9, 40e9, 20e9, 10e9, 1e9)),
        *((1e9, 1, 17e9), (1e9, 1, 15e9), (70e9, 16, 80e9), (1e9, 8, 16e9)),
    ],
    lambda _, ranks, memory: "on 64 ranks" if ranks == 64 else "on 1 to 16 ranks",
    where="from 1 to 64 ranks, with a memory of 1 to 130 GB",
    exact=True,
)
MESHES = {  # by name: what a rank sends, and how many ranks there are
    "tp, pp and dp": ({"tp": 90.0, "pp": 1.0, "dp": 6.0}, {"tp": 8, "pp": 4, "dp": 16}, 8),
    "dp, pp and tp": ({"dp": 6.0, "pp": 1.0, "tp": 90.0}, {"dp": 16, "pp": 4, "tp": 2}, 8),
    "a large host": ({"dp": 6.0, "cp": 9.0, "tp": 90.0}, {"dp": 2, "cp": 2, "tp": 4}, 16),
    "a small host": ({"dp": 6.0, "cp": 9.0, "tp": 90.0}, {"dp": 2, "cp": 4, "tp": 4}, 8),
    "three parts": ({"tp": 90.0, "cp": 9.0, "dp": 6.0}, {"tp": 2, "cp": 3, "dp": 2}, 8),
    "no room": ({"dp": 6.0, "tp": 90.0}, {"dp": 4, "tp": 16}, 8),
}


@compared(
    "20.3",
    "inside(sent, ranks, per_host)",
    sizes=(1,),
    where="for hosts with 8 and 16 ranks",
    cases=[(1, name) for name in MESHES],
    part=lambda case: f"hosts with {MESHES[case[1]][2]} ranks",
    call=lambda _, name: called_with("inside", MESHES[name]),
)
def _inside(rank: int, world_size: int, inside: Callable, name: str) -> Any:
    sent, ranks, per_host = MESHES[name]
    return inside(dict(sent), dict(ranks), per_host)


asked(
    "20.4",
    "step_seconds(layers, width, parameters, context, tokens, gpus, peak, mfu)",
    [
        (126, 16_384, 405e9, 8_192, 16.8e6, 8_192, 989e12, 0.43),
        (126, 16_384, 405e9, 131_072, 16.8e6, 16_384, 989e12, 0.38),
        (32, 4_096, 6.7e9, 4_096, 4e6, 1_024, 312e12, 0.45),
        (32, 4_096, 6.7e9, 0, 4e6, 1_024, 312e12, 0.45),
    ],
    lambda *given: "with attention" if given[3] else "without attention",
    where="for Llama 3 with 405 billion parameters, and for one with 6.7",
)


@compared("20.a", "train_by_hand(rank, world_size)", sizes=(4,))
def _train_by_hand(rank: int, world_size: int, train: Callable) -> Any:
    found, batches = {}, train.__globals__["batches"]
    for tp in (2, 1):
        dp, place = world_size // tp, rank // tp

        def own_sequences(size: int, steps: int, dp: int = dp, place: int = place) -> Iterator:
            own = slice(place * size // dp, (place + 1) * size // dp)
            return (only(own, batch, 0) for batch in batches(size, steps))

        with patch.dict(train.__globals__, batches=own_sequences):
            parameters = train(rank, world_size, tp=tp, steps=1)
        found |= {f"{name} with tp={tp}": value for name, value in parameters.items()}
    return found


@alone(
    "20.b", "states_by_hand(parameters, n, zero, precision)", "for all stages and two precisions"
)
def _states(states: Callable) -> dict:
    cases = [(zero, 8, MIXED, "mixed precision") for zero in range(4)] + [(2, 4, FP32, "float32")]
    found = {}
    for zero, n, precision, name in cases:
        held = states(1001, n, zero, precision)
        if isinstance(held, dict):
            held = {kind: _number(held[kind]) for kind in sorted(held)}
        found[f"states_by_hand(1001, {n}, {zero}), {name}"] = held
    return found


@alone("20.c", "dp_by_hand(model, plan, cluster, precision, compute)", "for all stages")
def _dp_seconds(seconds: Callable) -> dict:
    model, found = Transformer(8, 1024, 16, 32000, 2048), {}
    cases = {
        "nothing can be hidden": (0.0, MIXED),
        "a part can be hidden": (0.0006, MIXED),
        "all but a gather can be hidden": (HIDES_A_REDUCTION, MIXED),
        "all can be hidden": (1.0, MIXED),
        "a part of float32 gradients can be hidden": (0.0006, Precision(2, 4, 12, 2)),
        "all but float32 gradients can be hidden": (HIDES_A_GATHER, Precision(2, 4, 12, 2)),
    }
    for zero in range(4):
        for what, (compute, precision) in cases.items():
            plan = Plan(dp=16, zero=zero, micro_batches=3)
            number = seconds(model, plan, DGX_H100, precision, compute)
            found[f"the seconds in stage {zero} if {what}"] = _number(number)
    return found


# Seconds and GB of each layer, stages, and the GB of a stage.
PIPELINES = {
    "8 equal layers": ([1.0] * 8, [1.0] * 8, 4, 100),
    "a slow last layer": ([1.0] * 9 + [4.0], [1.0] * 10, 3, 100),
    "little memory": ([1.0] * 12, [1.0] * 12, 3, 10),
    "a layer that keeps much": ([2.0, 1, 1, 3, 1, 2, 1, 1], [5.0, 1, 1, 1, 1, 1, 1, 1], 3, 15),
    "one stage": ([1.0, 2.0, 3.0], [1.0, 1.0, 1.0], 1, 3),
    "too little memory": ([1.0] * 6, [1.0] * 6, 3, 2),
    "memory for less than a micro-batch": ([1.0] * 6, [1.0] * 6, 3, 1.5),
    "more stages than layers": ([1.0] * 3, [1.0] * 3, 4, 100),
    "40 layers": ([1.0 + number % 7 for number in range(40)], [1.0] * 40, 8, 34),
}


@alone(
    "20.10", "cut_into_stages(seconds, kept, stages, memory)", "for 9 pipelines", kind="function"
)
def _stages(cut: Callable) -> dict:
    found = {}
    for name, given in PIPELINES.items():
        seconds, kept, stages, memory = given
        case = f"{called_with('cut_into_stages', given)}, {name}" if len(kept) < 20 else name
        lengths = cut(list(seconds), list(kept), stages, memory)
        found[case] = _paced(seconds, kept, memory, lengths)
    return found


def _paced(seconds: list[float], kept: list[float], memory: float, lengths: Any) -> Any:
    """Return what a cut is like, which is the same for all right ones."""
    lengths = list(lengths) if isinstance(lengths, tuple) else lengths
    if not isinstance(lengths, list) or not all(isinstance(each, Integral) for each in lengths):
        return lengths
    ends = [sum(lengths[: stage + 1]) for stage in range(len(lengths))]
    parts = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    held = [(len(parts) - stage) * sum(kept[part]) for stage, part in enumerate(parts)]
    return {
        "layers": int(sum(lengths)),
        "how many stages": len(lengths),
        "empty stages": sum(bool(length < 1) for length in lengths),
        "slowest": max((float(sum(seconds[part])) for part in parts), default=0.0),
        "fits": all(bool(each <= memory) for each in held),
    }


GATHERED = (2, 3, 4, 2, 1, 1)  # GB of each layer in 20.11
FORWARD = (6, 6, 5, 2, 3, 8)  # milliseconds
LINK, NETWORK, ROOM = 2, 5, 8  # milliseconds for a GB, twice; and GB
LANES = ["compute", "NVLink", "network"]
COMPUTED = [("forward", layer) for layer in range(6)]
COMPUTED += [("backward", layer) for layer in reversed(range(6))]


@record("20.11", "nvlink_order()", "ms", (140, 131, 125), along="ms", rows=LANES)
def _nvlink_order(grader: Grader) -> Score:
    order = grader.ask()
    known = [f"{what} {layer}" for what in ("gather", "reduce") for layer in range(6)]
    if not isinstance(order, list) or not all(each in known for each in order):
        wrong = next((each for each in order if each not in known), order) if order else order
        grader.fail(f"{wrong!r} is nothing that NVLink does", hint="not an order")
    for name in known:
        most = 2 if name.startswith("gather") else 1
        if not 1 <= order.count(name) <= most:
            times = count(order.count(name), "time")
            grader.fail(f"{name!r} is there {times}", hint="missing or twice")
    return _hybrid_step(grader, [(name[:6], int(name[7:])) for name in order])


class _Step:
    """What a GPU computes as soon as it can: the ends of all computations, and their spans."""

    def __init__(self) -> None:
        self.ready: dict[tuple[str, int], float] = {}  # when a layer is there
        self.ends: dict[tuple[str, int], float] = {}
        self.spans: list[Span] = []

    def compute(self) -> None:
        now = max(self.ends.values(), default=0.0)
        for what, layer in COMPUTED[len(self.ends) :]:
            if (what, layer) not in self.ready:
                return
            start = max(now, self.ready[what, layer])
            now = start + FORWARD[layer] * (2 if what == "backward" else 1)
            self.ends[what, layer] = now
            self.spans.append(Span(0, start, now, f"{what[0]}{layer}"))

    def end(self, what: str, layer: int) -> float:
        return self.ends.get((what, layer), math.inf)


def _hybrid_step(grader: Grader, order: list[tuple[str, int]]) -> Score:
    step, link, network = _Step(), 0.0, 0.0
    copies: list[tuple[int, tuple[str, int]]] = []  # layers, and by what each is used last
    for place, (what, layer) in enumerate(order):
        again = (what, layer) in order[:place]
        if what == "reduce":
            start = max(link, step.end("backward", layer))
        else:
            start = max(link, step.end("forward", layer)) if again else link
            while start < math.inf:
                ends = [(step.end(*use), GATHERED[held]) for held, use in copies]
                ends = [pair for pair in ends if pair[0] > start]
                if sum(size for _, size in ends) + GATHERED[layer] <= ROOM:
                    break
                start = min(end for end, _ in ends)
        if start == math.inf:
            fact = f"'{what} {layer}' never begins, because something later has to be there first"
            grader.fail(fact, hint="never begins")
        link = start + LINK * GATHERED[layer]
        step.spans.append(Span(1, start, link, f"{what[0]}{layer}"))
        if what == "reduce":
            begin = max(network, link)
            network = begin + NETWORK * GATHERED[layer]
            step.spans.append(Span(2, begin, network, f"r{layer}"))
        else:
            uses = ("backward",) if again else ("forward", "backward")
            if not again and (what, layer) in order[place + 1 :]:
                uses = ("forward",)
            step.ready |= {(use, layer): link for use in uses}
            copies.append((layer, (uses[-1], layer)))
        step.compute()
    return Score(max(network, *step.ends.values()), step.spans)
